"""The `.metadata` of a PyTorch DCP folder, a pickle, read without running anything of it.

The unpickler here knows the names of PyTorch's classes and gives stand-ins for them that can do nothing; any other name ends
it. It is Python's own slow one: the fast one allocates what a pickle of a few bytes asks for.

A pickle names an object again for two bytes, so that sixty tuples of two hold 2^60 in 200 bytes. Nothing here may hash,
compare, print or copy what it says before it is known to be flat.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinpoint.errors import MalformedFileError, UnsafeObjectError, UnsupportedError
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.folder.coverage import check_coverage
from thinpoint.state.tree import MAX_NESTING, Path

MAX_METADATA_BYTES = 1 << 30
MAX_DIMS = 64
MAX_CHUNKS = 1 << 16
"""Of one tensor."""

MAX_ARGUMENTS = 1 << 12
"""Of one call in the pickle: paths are called with their parts."""

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    f"{_METADATA}.{name}"
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    )
} | {"torch.distributed.checkpoint.filesystem._StorageInfo"}
_IGNORED = {
    f"{_METADATA}._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    *(f"pathlib.{name}" for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(f"pathlib._local.{name}" for name in ("PosixPath", "WindowsPath")),
}
"""What stands in fields that nobody needs."""

_HASHED = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
"""The opcodes that hash, and where on the stack lies what they hash."""

_ERRORS = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    EOFError,
    OverflowError,
    MemoryError,
    AssertionError,
    ImportError,
    RecursionError,
    struct.error,
)
"""What Python's unpickler raises on bytes that are no pickle."""


@dataclass(frozen=True, kw_only=True)
class StoredItem:
    """Where something lies.

    Attributes:
        file: name in the folder.
        offset, length: bytes.
        transforms: what the bytes went through, as DCP names it: "stream.zstd/1".
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A rectangle of a tensor. `offsets` in the whole tensor, `sizes` of the chunk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: StoredItem


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor as the folder holds it. `dtype` is torch's name without `torch.`; the chunks cover it, without overlap."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, kw_only=True)
class DcpMetadata:
    """What a DCP folder holds, by name.

    Attributes:
        entries: tensors, and where the bytes of everything else are; in the order of the file.
        paths: for each name the keys that led to it in the state; names without one were not nested.
    """

    entries: dict[str, StoredTensor | StoredItem]
    paths: dict[str, Path]


def parse_metadata(raw: bytes, where: object) -> DcpMetadata:
    """What untrusted bytes of a `.metadata` file say.

    Raises:
        UnsafeObjectError: the pickle names something that does not belong there. Nothing of it was run.
        MalformedFileError, LimitExceededError: no pickle of that form, or its values contradict each other.
        UnsupportedError: it names something of a newer PyTorch.
    """
    try:
        root = _unpickler(raw, where).load()
    except _ERRORS as error:
        raise MalformedFileError(
            f"the metadata cannot be unpickled ({type(error).__name__}: {str(error)[:200]})", where=where
        ) from error
    return _Checked(where, len(raw)).metadata(root)


class _Record:
    """Stands for an instance of one of PyTorch's classes: its fields, and nothing else."""

    name = ""
    fields: Any = None


class _Dtype:
    def __init__(self, name: str) -> None:
        self.name = name


def _unpickler(raw: bytes, where: object) -> Any:
    # New ones for every file, which therefore leaves nothing behind in them.
    made: dict[str, Any] = {name: type("Record", (_Record,), {"name": name}) for name in _RECORDS}
    made |= {name: _ignore() for name in _IGNORED}
    made |= {"torch.Size": _size(), "collections.OrderedDict": _ordered()}
    base: Any = pickle._Unpickler  # type: ignore[attr-defined]

    class Unpickler(base):  # type: ignore[misc]
        # Of bytearrays it allocates what the pickle says, before it looks how much is there.
        dispatch = {key: load for key, load in base.dispatch.items() if key != pickle.BYTEARRAY8[0]}
        dispatch |= {code[0]: _keys_checked(base.dispatch[code[0]], at) for code, at in _HASHED.items()}
        dispatch |= {pickle.REDUCE[0]: _arguments_checked(base.load_reduce), pickle.BUILD[0]: _build}

        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            if full in made:
                return made[full]
            if module == "torch" and name in ITEM_BYTES:
                return _Dtype(name)
            if module == _METADATA or full.startswith("torch.distributed.checkpoint."):
                raise UnsupportedError(
                    f"the metadata name {full[:200]!a}, which this version does not know",
                    where=where,
                    hint="Install a newer thinpoint",
                )
            raise UnsafeObjectError(
                f"the pickle names {full[:200]!a}, which has no place in the metadata of a checkpoint",
                where=where,
                hint="Do not load this folder with torch either",
            )

        def persistent_load(self, pid: Any) -> Any:
            raise pickle.UnpicklingError("a persistent id")

    return Unpickler(io.BytesIO(raw))


def _keys_checked(load: Callable[[Any], None], at: slice) -> Callable[[Any], None]:
    """An opcode of `_HASHED` that takes nothing but keys."""

    def checked(unpickler: Any) -> None:
        if not all(map(_is_key, unpickler.stack[at])):
            raise pickle.UnpicklingError("a key that is no text, number, record or short tuple of these")
        load(unpickler)

    return checked


def _arguments_checked(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """REDUCE with a tuple: of anything else Python's complaint may hold all of what was called, as text."""

    def checked(unpickler: Any) -> None:
        arguments = unpickler.stack[-1]
        if type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
            raise pickle.UnpicklingError(f"arguments that are no tuple of at most {MAX_ARGUMENTS:,}")
        load(unpickler)

    return checked


def _build(unpickler: Any) -> None:
    """BUILD, of records only: of anything else it would set attributes."""
    state = unpickler.stack.pop()
    record = unpickler.stack[-1]
    if not isinstance(record, _Record):
        raise pickle.UnpicklingError("the state of something that has none")
    record.fields = state


def _is_key(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= MAX_NESTING and all(map(_is_flat, value))
    return _is_flat(value)


def _is_flat(value: Any) -> bool:
    return _is_step(value) or isinstance(value, _Record)


def _is_step(value: Any) -> bool:
    """Whether it may be a key in a state. An integer's hash is not kept, so that it must be short."""
    return type(value) is str or (type(value) is int and -1 << 63 <= value < 1 << 63)


def _ignore() -> Any:
    def nothing(*arguments: Any) -> None:
        return None

    return nothing


def _size() -> Any:
    def size(values: Any = ()) -> tuple[Any, ...]:
        # A list would be copied, each time that the pickle names it again.
        if type(values) is not tuple:
            raise pickle.UnpicklingError("a size of something that is no tuple")
        return values

    return size


def _ordered() -> Any:
    def ordered() -> dict[Any, Any]:
        return {}

    return ordered


class _Checked:
    """Values of an untrusted pickle as our own, each checked, and together no more than its bytes could say once."""

    def __init__(self, where: object, num_bytes: int) -> None:
        self._where = where
        self._left = num_bytes

    def metadata(self, root: Any) -> DcpMetadata:
        fields = self._fields(root, "Metadata")
        infos = self._dict(fields.get("storage_data"), "storage_data")
        items = {self._index(index): self._item(info) for index, info in infos.items()}
        entries: dict[str, StoredTensor | StoredItem] = {}
        for name, entry in self._dict(fields.get("state_dict_metadata"), "state_dict_metadata").items():
            if type(name) is not str:
                raise self._error("a name that is no text")
            if isinstance(entry, _Record) and entry.name.endswith(".BytesStorageMetadata"):
                if (name, None) not in items:
                    raise self._error("an object whose place is not known", name)
                entries[name] = items[name, None]
            else:
                entries[name] = self._tensor(name, entry, items)
        return DcpMetadata(entries=entries, paths=self._paths(fields.get("planner_data"), entries))

    def _tensor(self, name: str, entry: Any, items: dict[Any, StoredItem]) -> StoredTensor:
        fields = self._fields(entry, "TensorStorageMetadata")
        properties = fields.get("properties")
        state = properties.fields if isinstance(properties, _Record) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, _Dtype):
            raise self._error("a tensor without a dtype", name)
        shape = self._sizes(fields.get("size"), name)
        chunks = []
        found = fields.get("chunks")
        if type(found) is not list or len(found) > MAX_CHUNKS:
            raise self._error(f"a tensor without a list of at most {MAX_CHUNKS:,} chunks", name)
        self._spend(len(found))
        for chunk in found:
            part = self._fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = self._sizes(part.get("offsets"), name), self._sizes(part.get("sizes"), name)
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise self._error("a chunk with another number of dimensions than its tensor", name)
            if math.prod(sizes):
                item = items.get((name, offsets)) or items.get((name, None))
                if item is None:
                    raise self._error("a chunk whose place is not known", name)
                chunks.append(StoredChunk(offsets=offsets, sizes=sizes, item=item))
        rows = [(chunk.offsets, chunk.sizes) for chunk in chunks]
        table = np.array(rows, np.int64).reshape(len(rows), 2, len(shape))
        reason = check_coverage(shape, table[:, 0], table[:, 1])
        if reason is not None:
            raise MalformedFileError(f"the metadata: {reason}", where=self._where, tensor=name)
        return StoredTensor(dtype=dtype.name, shape=shape, chunks=tuple(chunks))

    def _paths(self, found: Any, entries: dict[str, Any]) -> dict[str, Path]:
        """The planner's keys. What is not of their form was written by another planner and is left aside."""
        paths: dict[str, Path] = {}
        for name, path in found.items() if isinstance(found, dict) else ():
            if (
                name in entries
                and type(path) is tuple
                and 0 < len(path) <= MAX_NESTING
                and all(map(_is_step, path))
            ):
                self._spend(sum(len(str(key)) + 1 for key in path))
                paths[name] = path
        return paths

    def _index(self, index: Any) -> tuple[str, tuple[int, ...] | None]:
        fields = self._fields(index, "MetadataIndex")
        name, offset = fields.get("fqn"), fields.get("offset")
        if type(name) is not str:
            raise self._error("a name that is no text")
        return name, None if offset is None else self._sizes(offset, name)

    def _item(self, info: Any) -> StoredItem:
        if isinstance(info, _Record) and info.name.endswith("._StorageInfo"):
            fields = self._fields(info, "_StorageInfo")
        else:
            raise UnsupportedError(
                "the folder was not written by PyTorch's FileSystemWriter",
                where=self._where,
                hint="Convert a folder of thinpoint by its manifest.json, others with the library that wrote them",
            )
        file, transforms = fields.get("relative_path"), fields.get("transform_descriptors", ())
        offset, length = fields.get("offset"), fields.get("length")
        if type(file) is not str or type(transforms) not in (tuple, list):
            raise self._error("a place without a file")
        if not all(type(text) is str for text in transforms):
            raise self._error("a transform that is no text")
        self._spend(sum(len(text) + 1 for text in transforms))
        if not (_is_count(offset) and _is_count(length)):
            raise self._error("a place that is no range")
        assert offset is not None and length is not None
        return StoredItem(file=file, offset=offset, length=length, transforms=tuple(transforms))

    def _sizes(self, value: Any, name: str) -> tuple[int, ...]:
        if type(value) is not tuple or len(value) > MAX_DIMS or not all(map(_is_count, value)):
            raise self._error("a shape that is none", name)
        return value

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        if not isinstance(record, _Record) or not record.name.endswith(f".{name}"):
            raise self._error(f"no {name} where one should be")
        return self._dict(record.fields, name)

    def _dict(self, value: Any, what: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise self._error(f"{what} that is no dict")
        return value

    def _spend(self, num: int) -> None:
        self._left -= num
        if self._left < 0:
            raise self._error("the same parts so often that they are more than the file")

    def _error(self, what: str, tensor: str | None = None) -> MalformedFileError:
        return MalformedFileError(f"the metadata hold {what}", where=self._where, tensor=tensor)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
