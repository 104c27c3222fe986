"""The index of a `.thin` file: what it holds, as plain data. Field names are the keys in `spec/FORMAT.md`."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from operator import mul
from typing import Any, NamedTuple

from thinpoint.errors import LimitExceededError, MalformedFileError, ThinpointError, UnsupportedFeatureError
from thinpoint.file import limits
from thinpoint.file.dtypes import extent_bytes, is_known
from thinpoint.file.head import MIN_HEAD_BYTES
from thinpoint.file.json_text import dump_json, parse_json
from thinpoint.file.layout import HEADER_BYTES, hex64

KNOWN_FEATURES: frozenset[str] = frozenset()
"""Feature ids that this reader implements."""

_DIGEST = re.compile("[0-9a-f]{16}")


class StorageEntry(NamedTuple):
    """A run of bytes that tensors are views of.

    Attributes:
        bytes: its size.
        device: where it was, e.g. "cuda:0"; informative.
    """

    bytes: int
    device: str


class PartEntry(NamedTuple):
    """A coded run of words of one storage, and where it is in the file.

    Attributes:
        storage: index of the storage; start: byte offset in it.
        elems: words; word_bytes: bytes in a word.
        dtype, role, chain: informative.
        codec: wire id.
        offset: byte offset of the head in the file; the body follows the head.
        raw_digest: digest of the part's words as little-endian bytes; head_digest: of its head.
    """

    storage: int
    start: int
    elems: int
    word_bytes: int
    dtype: str
    role: str
    codec: int
    chain: str
    offset: int
    head_bytes: int
    body_bytes: int
    raw_digest: int
    head_digest: int

    @property
    def raw_bytes(self) -> int:
        """Size of the words before coding."""
        return self.elems * self.word_bytes

    @property
    def end(self) -> int:
        """One past the part's last byte in its storage."""
        return self.start + self.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Size of head and body in the file."""
        return self.head_bytes + self.body_bytes


@dataclass(kw_only=True)
class TensorEntry:
    """A strided view of a storage. Not frozen, as making one would take three times as long; not to be changed.

    Attributes:
        storage: index of the storage; None if the tensor has no bytes here (meta tensors).
        dtype: torch's name without `torch.`.
        shape, stride, offset: in elements.
        extra: further keys of the record, as they are.
    """

    storage: int | None
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Index:
    """Everything about a file besides the parts' own bytes.

    Attributes:
        writer, meta: informative.
        required, optional: feature ids.
        parts: in file order.
        tree: any JSON value, opaque to this room.
    """

    writer: dict[str, Any]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    meta: dict[str, Any]
    storages: tuple[StorageEntry, ...]
    parts: tuple[PartEntry, ...]
    tensors: tuple[TensorEntry, ...]
    tree: Any


_INDEX_KEYS = frozenset(Index.__dataclass_fields__)
_STORAGE_KEYS = frozenset(StorageEntry._fields)
_PART_KEYS = frozenset(PartEntry._fields)
_TENSOR_KEYS = ("storage", "dtype", "shape", "stride", "offset")
_OWN_TENSOR_KEYS = frozenset(_TENSOR_KEYS)

_STORAGE_INTS = {"bytes": (0, limits.MAX_STORAGE_BYTES)}
_PART_INTS = {
    "storage": (0, limits.MAX_STORAGES),
    "start": (0, limits.MAX_STORAGE_BYTES),
    "elems": (1, limits.MAX_PART_ELEMS),
    "word_bytes": (1, 8),
    "codec": (0, 0xFFFF),
    "offset": (HEADER_BYTES, limits.MAX_INT64),
    "head_bytes": (MIN_HEAD_BYTES, limits.MAX_HEAD_BYTES),
    "body_bytes": (0, limits.MAX_BODY_BYTES),
}
_META_TENSOR_INTS = {"offset": (0, limits.MAX_INT64)}
_TENSOR_INTS = {"storage": (0, limits.MAX_STORAGES), **_META_TENSOR_INTS}


def tensor_record(tensor: TensorEntry) -> dict[str, Any]:
    """The JSON object of a tensor: its own keys, then the extra ones."""
    return {
        "storage": tensor.storage,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride),
        "offset": tensor.offset,
        **tensor.extra,
    }


def dump_index(index: Index) -> bytes:
    """The index as canonical JSON.

    Raises:
        UsageError: `writer`, `meta`, `tree` or a tensor's extra keys hold something that is no JSON.
    """
    return dump_json(
        {
            "writer": index.writer,
            "required": list(index.required),
            "optional": list(index.optional),
            "meta": index.meta,
            "storages": [{"bytes": s.bytes, "device": s.device} for s in index.storages],
            "parts": [
                {**p._asdict(), "raw_digest": hex64(p.raw_digest), "head_digest": hex64(p.head_digest)}
                for p in index.parts
            ],
            "tensors": [tensor_record(t) for t in index.tensors],
            "tree": index.tree,
        }
    )


def parse_index(raw: bytes, *, index_offset: int, num_parts: int, where: object) -> Index:
    """The index in untrusted JSON, every rule of the specification checked.

    Args:
        raw: the JSON.
        index_offset: where the parts end in the file.
        num_parts: as the trailer says.
        where: the file, for messages.

    Raises:
        MalformedFileError, LimitExceededError, UnsupportedFeatureError.
    """
    return _Checker(where, index_offset).index(
        parse_json(raw, what="the index", where=where, offset=index_offset), num_parts
    )


@dataclass(frozen=True)
class _Checker:
    """Carries what every message needs: the file and where its index is."""

    where: object
    offset: int

    def error(
        self, what: str, expected: object, actual: object, cls: type[ThinpointError] = MalformedFileError
    ) -> ThinpointError:
        return cls(f"index: {what}", where=self.where, offset=self.offset, expected=expected, actual=actual)

    def an_object(self, value: Any, what: str, keys: Set[str] | None = None) -> dict[str, Any]:
        """`value` if it is an object, with exactly `keys` if given."""
        if not isinstance(value, dict):
            raise self.error(what, "an object", reprlib.repr(value))
        if keys is not None and value.keys() != keys:
            raise self.error(f"keys of {what}", sorted(keys), reprlib.repr(sorted(value)))
        return value

    def a_list(self, value: Any, what: str, most: int) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(what, "a list", reprlib.repr(value))
        if len(value) > most:
            raise self.error(f"number of {what}", f"at most {most:,}", f"{len(value):,}", LimitExceededError)
        return value

    def an_int(self, value: Any, what: str, low: int, most: int) -> int:
        if type(value) is not int or value < low:
            raise self.error(what, f"an integer of at least {low}", reprlib.repr(value))
        if value > most:
            raise self.error(what, f"at most {most:,}", f"{value:,}", LimitExceededError)
        return value

    def check_ints(self, record: dict[str, Any], what: str, bounds: Mapping[str, tuple[int, int]]) -> None:
        """Each key of `bounds` has an integer from the lower to the upper one."""
        for key, (low, most) in bounds.items():
            value = record[key]
            if type(value) is not int or not low <= value <= most:
                self.an_int(value, f"{what}.{key}", low, most)

    def check_texts(self, record: dict[str, Any], what: str, *keys: str) -> None:
        """Each of the keys has a string that is not too long."""
        for key in keys:
            value = record[key]
            if type(value) is not str or len(value) > limits.MAX_TEXT_CHARS:
                self.a_text(value, f"{what}.{key}")

    def per_dim(self, items: Any, what: str, key: str) -> tuple[int, ...]:
        """The integers, one for each dimension, that stand at `key`."""
        if type(items) is not list or len(items) > limits.MAX_DIMS:
            self.a_list(items, f"{what}.{key}", limits.MAX_DIMS)
        for item in items:
            if type(item) is not int or not 0 <= item <= limits.MAX_INT64:
                self.an_int(item, f"{what}.{key}", 0, limits.MAX_INT64)
        return tuple(items)

    def a_text(self, value: Any, what: str, most: int = limits.MAX_TEXT_CHARS) -> str:
        if not isinstance(value, str):
            raise self.error(what, "a string", reprlib.repr(value))
        if len(value) > most:
            raise self.error(f"length of {what}", f"at most {most}", len(value), LimitExceededError)
        return value

    def a_digest(self, record: dict[str, Any], what: str, key: str) -> int:
        value = record[key]
        if type(value) is not str or not _DIGEST.fullmatch(value):
            raise self.error(f"{what}.{key}", "16 lower-case hexadecimal digits", reprlib.repr(value))
        return int(value, 16)

    def features(self, value: Any, what: str) -> tuple[str, ...]:
        names = self.a_list(value, what, limits.MAX_FEATURES)
        return tuple(self.a_text(name, f"a feature in {what}", limits.MAX_FEATURE_CHARS) for name in names)

    def entries(self, value: Any, what: str, most: int, parse: Callable[[Any, str], Any]) -> tuple[Any, ...]:
        return tuple(parse(item, f"{what}[{i}]") for i, item in enumerate(self.a_list(value, what, most)))

    def index(self, value: Any, num_parts: int) -> Index:
        # First of all: a file that needs a newer reader is not malformed because its index has more in it.
        top = self.an_object(value, "the index")
        required = self.features(top.get("required"), "required")
        unknown = sorted(set(required) - KNOWN_FEATURES)
        if unknown:
            raise self.error(
                "the file requires features unknown to this version",
                sorted(KNOWN_FEATURES) or "none",
                ", ".join(map(ascii, unknown)),
                UnsupportedFeatureError,
            )
        self.an_object(top, "the index", _INDEX_KEYS)
        storages = self.entries(top["storages"], "storages", limits.MAX_STORAGES, self.storage)
        parts = self.entries(top["parts"], "parts", limits.MAX_PARTS, self.part)
        tensors = self.entries(top["tensors"], "tensors", limits.MAX_TENSORS, self.tensor)
        if len(parts) != num_parts:
            raise self.error("number of parts differs from the trailer's", num_parts, len(parts))
        self.check_parts(parts, storages)
        for i, tensor in enumerate(tensors):
            self.check_tensor(tensor, f"tensors[{i}]", storages)
        return Index(
            writer=self.an_object(top["writer"], "writer"),
            required=required,
            optional=self.features(top["optional"], "optional"),
            meta=self.an_object(top["meta"], "meta"),
            storages=storages,
            parts=parts,
            tensors=tensors,
            tree=top["tree"],
        )

    def storage(self, value: Any, what: str) -> StorageEntry:
        record = self.an_object(value, what, _STORAGE_KEYS)
        self.check_ints(record, what, _STORAGE_INTS)
        self.check_texts(record, what, "device")
        return StorageEntry(**record)

    def part(self, value: Any, what: str) -> PartEntry:
        record = self.an_object(value, what, _PART_KEYS)
        self.check_ints(record, what, _PART_INTS)
        self.check_texts(record, what, "dtype", "role", "chain")
        record["raw_digest"] = self.a_digest(record, what, "raw_digest")
        record["head_digest"] = self.a_digest(record, what, "head_digest")
        entry = PartEntry(**record)
        if entry.word_bytes not in (1, 2, 4, 8):
            raise self.error(f"{what}.word_bytes", "1, 2, 4 or 8", entry.word_bytes)
        if entry.head_bytes % 8 or entry.body_bytes % 8:
            raise self.error(f"{what}: sizes", "multiples of 8", f"{entry.head_bytes}, {entry.body_bytes}")
        return entry

    def tensor(self, value: Any, what: str) -> TensorEntry:
        record = self.an_object(value, what)
        if not record.keys() >= _OWN_TENSOR_KEYS:
            missing = [key for key in _TENSOR_KEYS if key not in record]
            raise self.error(f"keys of {what}", _TENSOR_KEYS, f"none of {missing}")
        storage, dtype = record["storage"], record["dtype"]
        self.check_ints(record, what, _META_TENSOR_INTS if storage is None else _TENSOR_INTS)
        self.check_texts(record, what, "dtype")
        if not is_known(dtype):
            raise self.error(
                f"{what}.dtype", "a dtype of this version", ascii(dtype), UnsupportedFeatureError
            )
        return TensorEntry(
            storage=record.pop("storage"),
            dtype=record.pop("dtype"),
            shape=self.per_dim(record.pop("shape"), what, "shape"),
            stride=self.per_dim(record.pop("stride"), what, "stride"),
            offset=record.pop("offset"),
            extra=record,
        )

    def check_parts(self, parts: tuple[PartEntry, ...], storages: tuple[StorageEntry, ...]) -> None:
        """The parts tile the file up to the index; those of one storage are sorted and disjoint inside it."""
        position = HEADER_BYTES
        covered_to: dict[int, int] = {}
        for i, part in enumerate(parts):
            what = f"parts[{i}]"
            if part.offset != position:
                raise self.error(f"{what}.offset does not follow what comes before", position, part.offset)
            position += part.stored_bytes
            if part.storage >= len(storages):
                raise self.error(f"{what}.storage", f"less than {len(storages)}", part.storage)
            if part.start < covered_to.get(part.storage, 0):
                raise self.error(
                    f"{what} overlaps or precedes an earlier part of its storage",
                    f"start of at least {covered_to[part.storage]}",
                    part.start,
                )
            end = part.end
            if end > storages[part.storage].bytes:
                raise self.error(
                    f"{what} goes beyond its storage", f"end <= {storages[part.storage].bytes}", end
                )
            covered_to[part.storage] = end
        if position != self.offset:
            raise self.error("the parts do not end where the index begins", self.offset, position)

    def check_tensor(self, tensor: TensorEntry, what: str, storages: tuple[StorageEntry, ...]) -> None:
        """The view is inside its storage."""
        num_elems = math.prod(tensor.shape)
        if num_elems > limits.MAX_INT64:
            raise self.error(f"elements of {what}", "less than 2^63", f"{num_elems:,}", LimitExceededError)
        if tensor.storage is None:
            return
        if tensor.storage >= len(storages):
            raise self.error(f"{what}.storage", f"less than {len(storages)}", tensor.storage)
        if len(tensor.shape) != len(tensor.stride):
            raise self.error(f"length of {what}.stride", len(tensor.shape), len(tensor.stride))
        if num_elems == 0:
            return
        last = tensor.offset + sum(map(mul, tensor.shape, tensor.stride)) - sum(tensor.stride)
        needed = extent_bytes(tensor.dtype, last + 1)
        available = storages[tensor.storage].bytes
        if needed > available:
            raise self.error(f"{what} goes beyond its storage", f"at most {available:,} bytes", f"{needed:,}")
