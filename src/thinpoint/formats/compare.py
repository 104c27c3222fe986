"""Decodes a file that was just written and compares it with the state it was made from."""

from __future__ import annotations

import numpy as np

from thinpoint.engine.restore import Restorer
from thinpoint.engine.save import tensor_entry
from thinpoint.errors import EncodeProofError
from thinpoint.file.json_text import dump_json
from thinpoint.formats.pieces import decoded
from thinpoint.state.leaves import FlatState, Region
from thinpoint.state.tree import display


def compare_with_state(restorer: Restorer, state: FlatState) -> None:
    """Returns if the open file holds exactly this state: tree, records, and every byte that a tensor covers.

    Holds one piece of each at a time.

    Raises:
        EncodeProofError: something differs; the message names the first tensor.
        DamagedFileError, StorageError: the file cannot be read back.
    """
    reader = restorer.reader
    entries = tuple(tensor_entry(record) for record in state.tensors)
    storages = [(entry.bytes, entry.device) for entry in reader.index.storages]
    if (
        dump_json(reader.index.tree) != dump_json(state.tree)
        or reader.index.tensors != entries
        or storages != [(source.num_bytes, source.device) for source in state.storages]
    ):
        raise EncodeProofError("the index that was written is not that of the input", where=reader.name)
    ranges = (
        (storage, region.start_bytes, region.end_bytes)
        for storage, source in enumerate(state.storages)
        for region in source.regions
    )
    for targets in decoded(restorer, ranges):
        for target in targets:
            source = state.storages[target.storage]
            end = target.start + target.out.size
            if not np.array_equal(source.read(target.start, end), target.out):
                raise EncodeProofError(
                    f"the file does not decode to its input (bytes {target.start:,} to {end:,})",
                    where=reader.name,
                    tensor=_name(source.regions, target.start),
                )


def _name(regions: tuple[Region, ...], start: int) -> str:
    found = (region for region in regions if region.start_bytes <= start < region.end_bytes)
    return display(next(found).name)
