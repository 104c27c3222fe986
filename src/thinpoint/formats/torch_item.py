"""A tensor that `torch.save` wrote somewhere inside a file, read in parts without loading the rest."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

from thinpoint.errors import MalformedFileError, ThinpointError
from thinpoint.formats.leaves import Box, copied
from thinpoint.formats.stored_elements import StoredElements
from thinpoint.formats.torch_file import load_stream
from thinpoint.formats.torch_source import is_plain_tensor
from thinpoint.store.contract import Source

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a zip entry: signature, and the lengths of its name and extra field, which its bytes follow."""

_LOCAL_MAGIC = b"PK\x03\x04"


class Window(io.RawIOBase):
    """A range of a source as a readable, seekable stream."""

    def __init__(self, source: Source, offset: int, length: int) -> None:
        super().__init__()
        self._source = source
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(memoryview(buffer).nbytes, self._length - self._position))
        self._source.read_into(self._offset + self._position, memoryview(buffer).cast("B")[:size])
        self._position += size
        return size


class TensorItem:
    """A tensor in a range of a source.

    Its pickle is read at once, its elements when they are asked for, from where they lie in the file; what is not a plain
    strided tensor in a plain archive is loaded whole.

    Raises: as `read_torch`.
    """

    def __init__(self, source: Source, offset: int, length: int, name: str) -> None:
        self._name = name
        self._where = source.name
        stream = Window(source, offset, length)
        self._whole: Any = None
        self._layout = load_stream(stream, f"{source.name} ({name})", map_location="meta")
        place = _place(source, offset, length, self._layout)
        if place is None:
            stream.seek(0)
            self._whole = load_stream(stream, f"{source.name} ({name})", map_location="cpu")
            return
        layout = self._layout
        self._elements = StoredElements(
            source=source,
            offset_bytes=place + layout.storage_offset() * layout.element_size(),
            dtype=layout.dtype,
            shape=tuple(layout.shape),
            stride=layout.stride(),
        )

    def check(self, dtype: Any, shape: tuple[int, ...]) -> None:
        """Raises MalformedFileError unless it is a tensor of this dtype and shape."""
        import torch

        tensor = self._layout if self._whole is None else self._whole
        is_tensor = isinstance(tensor, torch.Tensor)
        if not is_tensor or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise MalformedFileError(
                "a file does not hold the tensor that the metadata describe",
                where=self._where,
                tensor=self._name,
                expected=f"{dtype}, {list(shape)}",
                actual=f"{tensor.dtype}, {list(tensor.shape)}" if is_tensor else type(tensor).__name__,
            )
        if self._whole is not None and not is_plain_tensor(self._whole):
            raise MalformedFileError(
                "a file holds a tensor of another layout than the metadata describe",
                where=self._where,
                tensor=self._name,
            )

    def read(self, box: Box) -> Any:
        """The elements of a box, as a new contiguous CPU tensor."""
        return copied(self._whole, box) if self._whole is not None else self._elements(box)


def _place(source: Source, offset: int, length: int, layout: Any) -> int | None:
    """Where in the source the storage of a tensor begins; None if that cannot be said."""
    import torch

    if (
        type(layout) is not torch.Tensor
        or layout.layout is not torch.strided
        or layout.is_quantized
        or layout.is_conj()
        or layout.is_neg()
    ):
        return None
    steps = zip(layout.shape, layout.stride(), strict=True)
    extent = sum((size - 1) * step for size, step in steps) + 1 if layout.numel() else 0
    needed = (layout.storage_offset() + extent) * layout.element_size()
    try:
        with zipfile.ZipFile(Window(source, offset, length)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            order = entries.get("byteorder")
            is_little = order is not None and order.file_size < 16 and archive.read(order) == b"little"
    except (zipfile.BadZipFile, ValueError, NotImplementedError, ThinpointError):
        return None
    data = [entry for name, entry in entries.items() if name.startswith("data/")]
    if not is_little or len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED:
        return None
    if data[0].file_size < needed or data[0].header_offset + _LOCAL_HEADER.size > length:
        return None
    begin = offset + data[0].header_offset
    magic, name_size, extra_size = _LOCAL_HEADER.unpack(source.read_at(begin, _LOCAL_HEADER.size).tobytes())
    start = data[0].header_offset + _LOCAL_HEADER.size + name_size + extra_size
    if magic != _LOCAL_MAGIC or start + data[0].file_size > length:
        return None
    return offset + int(start)
