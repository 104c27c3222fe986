"""A `.safetensors` file to a flat state and back to the same bytes. Torch-free."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from thinpoint.engine.restore import Restorer
from thinpoint.engine.workers import Workers
from thinpoint.errors import MalformedFileError, TruncatedFileError
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.formats.pieces import write_ranges
from thinpoint.formats.safetensors_header import LENGTH, HeaderTensor, header_bytes, parse_header
from thinpoint.state.leaves import FlatState, StorageSource
from thinpoint.state.roles import role_of
from thinpoint.state.storages import cut_regions, strided_view
from thinpoint.state.tree_names import tensor_names
from thinpoint.store.contract import Source


def read_safetensors(source: Source) -> tuple[FlatState, str]:
    """The tensors as a dict by name, read when they are needed, and the exact text of the header.

    Every tensor is a storage of its own: its bytes may lie in the file at any alignment, and one can be
    loaded without the others.

    Args:
        source: must stay open as long as the state is read.

    Raises:
        MalformedFileError, LimitExceededError, TruncatedFileError: no valid `.safetensors` file.
        UnsupportedFeatureError: a dtype that torch does not have.
        StorageError: the source refused.
    """
    tensors, header, data_start = read_header(source)
    tree: list[Any] = []
    records: list[dict[str, Any]] = []
    storages: list[StorageSource] = []
    for i, tensor in enumerate(tensors):
        record = _record(tensor, i)
        records.append(record)
        storages.append(_storage(tensor, record, source, data_start))
        tree += [tensor.name, {"tensor": i}]
    return FlatState(tree={"dict": tree}, tensors=records, storages=storages), header


def read_header(source: Source) -> tuple[list[HeaderTensor], str, int]:
    """The tensors of a `.safetensors` file, the text of its header, and where its data begin.

    Raises: as `read_safetensors`.
    """
    first = source.read_at(0, min(LENGTH.size, source.size)).tobytes()
    size = header_bytes(first, source.size, source.name)
    raw = source.read_at(LENGTH.size, size).tobytes()
    tensors = parse_header(raw, source.name)
    data_start = LENGTH.size + size
    expected = data_start + max((tensor.end for tensor in tensors), default=0)
    if source.size != expected:
        cls = TruncatedFileError if source.size < expected else MalformedFileError
        raise cls(
            "the file has another size than its header says",
            where=source.name,
            expected=f"{expected:,} bytes",
            actual=f"{source.size:,}",
        )
    return tensors, raw.decode("utf-8"), data_start


def _record(tensor: HeaderTensor, index: int) -> dict[str, Any]:
    return {
        "storage": index,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "stride": contiguous_stride(tensor.shape),
        "offset": 0,
        "role": role_of((tensor.name,), tensor.dtype),
    }


def contiguous_stride(shape: tuple[int, ...]) -> list[int]:
    """The strides, in elements, that torch gives a contiguous tensor."""
    return [math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape))]


def _storage(tensor: HeaderTensor, record: dict[str, Any], source: Source, data_start: int) -> StorageSource:
    view = strided_view(
        shape=tensor.shape,
        stride=tuple(record["stride"]),
        offset=0,
        dtype=tensor.dtype,
        item_bytes=ITEM_BYTES[tensor.dtype],
        role=record["role"],
        name=(tensor.name,),
    )
    return StorageSource(
        num_bytes=tensor.end - tensor.start,
        device="cpu",
        regions=cut_regions([view], 0),
        read=_RangeReader(source, data_start + tensor.start),
    )


class _RangeReader:
    """Reads ranges of one tensor. Not mapped, so that a file cut meanwhile is an error and no signal."""

    def __init__(self, source: Source, offset: int) -> None:
        self._source = source
        self._offset = offset

    def __call__(self, start: int, end: int) -> np.ndarray:
        return self._source.read_at(self._offset + start, end - start)


def write_safetensors(restorer: Restorer, workers: Workers, header: str, sink: Any) -> None:
    """Write the `.safetensors` file that an open file was made from, byte for byte.

    Args:
        header: the text that `read_safetensors` gave, from the file's note: not trusted.
        sink: gets the file from front to back; memory is bounded by a few pieces.

    Raises:
        MalformedFileError: the header does not describe what the file holds.
        DigestMismatchError, UnknownCodecError, StorageError: as `Restorer.fill`, or the sink refused.
    """
    reader = restorer.reader
    try:
        raw = header.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedFileError("the header in the note is no valid text", where=reader.name) from error
    tensors = parse_header(raw, reader.name)
    ids = tensor_names(reader.index.tree, len(reader.index.tensors))
    ranges = []
    for tensor in sorted(tensors, key=lambda t: (t.start, t.end)):
        tensor_id = ids.get((tensor.name,))
        entry = None if tensor_id is None else reader.index.tensors[tensor_id]
        num_bytes = tensor.end - tensor.start
        if (
            entry is None
            or entry.storage is None
            or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape)
            or list(entry.stride) != contiguous_stride(tensor.shape)
            or entry.offset
            or reader.index.storages[entry.storage].bytes != num_bytes
        ):
            raise MalformedFileError(
                "the file does not hold the tensor that the header describes",
                where=reader.name,
                tensor=tensor.name,
            )
        if num_bytes:
            ranges.append((entry.storage, 0, num_bytes))
    sink.write(LENGTH.pack(len(raw)) + raw)
    write_ranges(restorer, workers, ranges, sink)
