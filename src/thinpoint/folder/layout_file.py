"""A layout as a file: JSON in columns, in one zstd frame. Trusts nothing it reads (`spec/FOLDER.md`)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from thinpoint import digest as digests
from thinpoint.errors import (
    DigestMismatchError,
    LimitExceededError,
    MalformedFileError,
    TruncatedFileError,
    UnsupportedVersionError,
)
from thinpoint.file.json_text import dump_json
from thinpoint.file.layout import hex64
from thinpoint.file.limits import MAX_DIMS, MAX_INT64
from thinpoint.folder.layout import Keys, Layout, TensorLayout
from thinpoint.folder.manifest import LayoutRecord
from thinpoint.folder.names import MAX_RANKS
from thinpoint.folder.records import MAX_TEXT_CHARS, Fields

VERSION = 1
MAX_LAYOUT_BYTES = 64 << 20
MAX_LAYOUT_RAW_BYTES = 512 << 20
LAYOUT_RATIO = 256
LAYOUT_SLACK_BYTES = 1 << 20
MAX_NAMES = 1 << 22
MAX_COLUMNS = 1 << 22
MAX_CHUNKS = 1 << 24
MAX_CELLS = 1 << 25
"""Chunks times dimensions, all tensors together: a constant column is a few bytes in the file and eight a chunk in memory."""

_LEVEL = 6


def dump_layout(layout: Layout, *, name: str) -> tuple[bytes, LayoutRecord]:
    """The layout as stored, and what a manifest says of it; read back before it is returned.

    Args:
        name: of its file.

    Raises:
        MalformedFileError: the chunks of a tensor do not fill it exactly.
        LimitExceededError: it is larger than a reader accepts.
    """
    columns = _Columns()
    raw = dump_json(
        {
            "layout": VERSION,
            "world_size": layout.world_size,
            "tensors": {
                fqn: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "chunks": tensor.num_chunks,
                    "offsets": [columns.add(column) for column in tensor.offsets.T],
                    "sizes": [columns.add(column) for column in tensor.sizes.T],
                    "rank": columns.add(tensor.ranks),
                }
                for fqn, tensor in layout.tensors.items()
            },
            "columns": columns.table,
            "objects": layout.objects,
            "rank_states": sorted(layout.rank_states),
            "planner_data": None
            if layout.planner_data is None
            else {fqn: list(keys) for fqn, keys in layout.planner_data.items()},
        }
    )
    data = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)
    record = LayoutRecord(name=name, num_bytes=len(data), digest=hex64(digests.digest(data)))
    parse_layout(data, record, where=name)
    return data, record


def parse_layout(data: bytes, record: LayoutRecord, *, where: object) -> Layout:
    """The layout in untrusted bytes.

    Args:
        data: the whole file.
        record: what the manifest says of it.
        where: the file, for messages.

    Raises:
        TruncatedFileError, DigestMismatchError: it is not the file that the manifest names.
        MalformedFileError, LimitExceededError: it is damaged, or made to cause harm.
        UnsupportedVersionError: it was written by a newer version.
    """
    if len(data) != record.num_bytes:
        raise TruncatedFileError(
            "the layout has another size than the manifest says",
            where=where,
            expected=f"{record.num_bytes:,} bytes",
            actual=f"{len(data):,}",
        )
    actual = hex64(digests.digest(data))
    if actual != record.digest:
        raise DigestMismatchError(
            "the bytes of the layout do not match their digest",
            where=where,
            expected=record.digest,
            actual=actual,
        )
    fields = Fields.parse(_decompress(data, where), what="the layout", where=where)
    version = fields.number("layout", MAX_INT64)
    if version > VERSION:
        raise UnsupportedVersionError(
            "the layout is of a newer version", where=where, expected=f"at most {VERSION}", actual=version
        )
    world_size = fields.number("world_size", MAX_RANKS)
    layout = Layout(
        world_size=world_size,
        tensors=_tensors(fields, world_size),
        objects=_objects(fields, world_size),
        rank_states=frozenset(fields.texts("rank_states", MAX_NAMES)),
        planner_data=_planner_data(fields),
    )
    if both := layout.tensors.keys() & layout.objects.keys():
        raise fields.error("names", "either a tensor or an object", sorted(both)[0])
    if strange := layout.rank_states - layout.objects.keys():
        raise fields.error("rank_states", "names of objects", sorted(strange)[0])
    layout.check(where)
    return layout


class _Columns:
    """Columns of numbers, each stored once: the tensors of a model share few."""

    def __init__(self) -> None:
        self.table: list[list[int]] = []
        self._places: dict[bytes, int] = {}

    def add(self, column: np.ndarray) -> int | list[int]:
        """A number if all are equal, else a list of one: the place in the table."""
        if not len(column):
            return 0
        if (column == column[0]).all():
            return int(column[0])
        place = self._places.setdefault(column.tobytes(), len(self.table))
        if place == len(self.table):
            self.table.append(column.tolist())
        return [place]


def _decompress(data: bytes, where: object) -> bytes:
    """The JSON in an untrusted zstd frame; allocates no more than the limits allow, whatever the frame says."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        most = min(MAX_LAYOUT_RAW_BYTES, LAYOUT_SLACK_BYTES + LAYOUT_RATIO * len(data))
        if size > most:
            raise LimitExceededError(
                "the layout: size of its content",
                where=where,
                expected=f"at most {most:,} bytes",
                actual=f"{size:,}",
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, struct.error) as error:
        raise MalformedFileError(f"the layout: its zstd frame is damaged ({error})", where=where) from error


def _tensors(fields: Fields, world_size: int) -> dict[str, TensorLayout]:
    table = [_numbers(fields, column) for column in fields.items("columns", MAX_COLUMNS)]
    tensors: dict[str, TensorLayout] = {}
    num_cells = 0
    for fqn, entry in fields.named_objects("tensors", MAX_NAMES).items():
        num_cells += entry.number("chunks", MAX_CHUNKS) * max(1, len(entry.items("shape", MAX_DIMS)))
        if num_cells > MAX_CELLS:
            raise LimitExceededError(
                "the layout: chunks times dimensions",
                where=fields.where,
                tensor=fqn,
                expected=f"at most {MAX_CELLS:,}",
            )
        tensors[fqn] = _tensor(entry, table, world_size)
    return tensors


def _tensor(entry: Fields, table: list[np.ndarray], world_size: int) -> TensorLayout:
    shape = tuple(entry.numbers("shape", MAX_DIMS))
    count = entry.number("chunks", MAX_CHUNKS)

    def column(name: str, value: Any) -> np.ndarray:
        if type(value) is int:
            if not 0 <= value <= MAX_INT64:
                raise entry.error(name, "a number from 0 to 2^63 - 1", value)
            return np.broadcast_to(np.int64(value), count)
        if not isinstance(value, list) or len(value) != 1 or type(value[0]) is not int:
            raise entry.error(name, "a number, or the place of a column in a list", value)
        if not 0 <= value[0] < len(table) or len(table[value[0]]) != count:
            raise entry.error(name, f"the place of a column of {count} numbers", value)
        return table[value[0]]

    def box(name: str) -> np.ndarray:
        values = entry.items(name, MAX_DIMS)
        if len(values) != len(shape):
            raise entry.error(name, f"{len(shape)} columns", values)
        columns = np.empty((len(shape), count), np.int64)
        for dim, value in enumerate(values):
            columns[dim] = column(name, value)
        return columns.T

    ranks = column("rank", entry.get("rank", int, list))
    if count and int(ranks.max()) >= world_size:
        raise entry.error("rank", f"less than {world_size}", int(ranks.max()))
    return TensorLayout(
        dtype=entry.text("dtype"), shape=shape, offsets=box("offsets"), sizes=box("sizes"), ranks=ranks
    )


def _numbers(fields: Fields, column: Any) -> np.ndarray:
    if not isinstance(column, list) or len(column) > MAX_CHUNKS or not set(map(type, column)) <= {int}:
        raise fields.error("columns", "lists of numbers", column)
    if column and not (0 <= min(column) and max(column) <= MAX_INT64):
        raise fields.error("columns", "numbers from 0 to 2^63 - 1", column)
    return np.array(column, np.int64)


def _objects(fields: Fields, world_size: int) -> dict[str, int]:
    objects = fields.named_numbers("objects", MAX_NAMES, MAX_RANKS)
    for fqn, rank in objects.items():
        if rank >= world_size:
            raise fields.error(f"the rank of {fqn:.40}", f"less than {world_size}", rank)
    return objects


def _planner_data(fields: Fields) -> dict[str, Keys] | None:
    if not fields.has("planner_data"):
        return None
    data: dict[str, Keys] = {}
    for fqn, keys in fields.mapping("planner_data", MAX_NAMES).items():
        good = isinstance(keys, list) and all(
            (type(key) is str and len(key) <= MAX_TEXT_CHARS) or (type(key) is int and abs(key) <= MAX_INT64)
            for key in keys
        )
        if not good:
            raise fields.error(f"planner_data of {fqn:.40}", "a list of texts and numbers", keys)
        data[fqn] = tuple(keys)
    return data
