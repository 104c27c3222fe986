"""What a `.thin` file holds and what it costs there, from its index alone. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

from thinpoint.codec.backend import CODEC_NAMES
from thinpoint.codec.nvcomp import ANS_ID, EXTRA
from thinpoint.errors import ThinpointError
from thinpoint.file.dtypes import ITEM_BYTES, extent_bytes
from thinpoint.file.index import Index, PartEntry, TensorEntry
from thinpoint.file.layout import READ_VERSION
from thinpoint.file.reader import FileReader
from thinpoint.formats.source import source_of
from thinpoint.state.tree import Path
from thinpoint.state.tree_names import display, tensor_names

JSON_FORMAT = "thinpoint-inspect"
JSON_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor as people see it.

    Attributes:
        path: the keys that lead to it.
        dtype, shape, stride, device, role: as recorded.
        num_values: elements.
        raw_bytes: elements times their size.
        coded_raw_bytes: bytes of the parts that are charged to this tensor, before coding.
        stored_bytes: the same parts in the file. A part is charged to the first tensor that it belongs to.
        chains: how these parts are coded.
        shared_with: the first tensor whose bytes this one views, if that is another.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    role: str
    num_values: int
    raw_bytes: int
    coded_raw_bytes: int
    stored_bytes: int
    chains: tuple[str, ...]
    shared_with: Path | None

    @property
    def name(self) -> str:
        """The keys joined by dots."""
        return display(self.path)


@dataclass(frozen=True, kw_only=True)
class RoleRow:
    """All parts of one role: how many, and their bytes before and after coding."""

    role: str
    num_parts: int
    raw_bytes: int
    stored_bytes: int


def tensor_rows(index: Index) -> list[TensorRow]:
    """A row for each name that leads to a tensor, in the order of the state.

    Raises:
        MalformedFileError: the tree or a tensor's record breaks the rules.
    """
    charges = _Charges(index)
    rows = []
    for path, tensor_id in tensor_names(index.tree, len(index.tensors)).items():
        own, shared_with = charges.charge(tensor_id, path)
        entry = index.tensors[tensor_id]
        num_values = math.prod(entry.shape)
        rows.append(
            TensorRow(
                path=path,
                dtype=entry.dtype,
                shape=entry.shape,
                stride=entry.stride,
                device="" if entry.storage is None else index.storages[entry.storage].device,
                role=str(entry.extra.get("role", "other")),
                num_values=num_values,
                raw_bytes=num_values * ITEM_BYTES.get(entry.dtype, 1),
                coded_raw_bytes=sum(part.raw_bytes for part in own),
                stored_bytes=sum(part.stored_bytes for part in own),
                chains=tuple(dict.fromkeys(part.chain for part in own)),
                shared_with=shared_with,
            )
        )
    return rows


class _Charges:
    """Charges every part to the first name that leads to it.

    Visits each tensor record and each part once, however many names and views lead there: a hostile index may
    hold a million of each.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._tensor_owner: dict[int, Path] = {}
        self._part_owner: dict[int, Path] = {}
        self._parts: dict[int, list[int]] = {}
        for i, part in enumerate(index.parts):
            self._parts.setdefault(part.storage, []).append(i)
        self._starts = {s: [index.parts[i].start for i in parts] for s, parts in self._parts.items()}
        # For a charged part, by storage and place in it: where to look for the next one that is free.
        self._next: dict[tuple[int, int], int] = {}

    def charge(self, tensor_id: int, path: Path) -> tuple[list[PartEntry], Path | None]:
        """The parts charged to `path` by this tensor and those it is made of; who was charged for others."""
        own: list[PartEntry] = []
        shared_with: Path | None = None
        waiting = [tensor_id]
        while waiting:
            current = waiting.pop()
            owner = self._tensor_owner.setdefault(current, path)
            if owner is not path:
                shared_with = shared_with or owner
                continue
            parts, other = self._claim(self._index.tensors[current], path)
            own += parts
            shared_with = shared_with or other
            inner = self._index.tensors[current].extra.get("inner")
            for below in inner.values() if isinstance(inner, dict) else ():
                if type(below) is int and 0 <= below < len(self._index.tensors):
                    if self._tensor_owner.get(below) is not path:
                        waiting.append(below)
        return own, shared_with

    def _claim(self, entry: TensorEntry, path: Path) -> tuple[list[PartEntry], Path | None]:
        """The free parts that hold bytes of one record, now charged to `path`; the owner of others."""
        if entry.storage is None or entry.storage not in self._parts or 0 in entry.shape:
            return [], None
        storage, parts = entry.storage, self._parts[entry.storage]
        last = entry.offset + sum((n - 1) * step for n, step in zip(entry.shape, entry.stride, strict=True))
        start, end = extent_bytes(entry.dtype, entry.offset), extent_bytes(entry.dtype, last + 1)
        place = max(bisect_right(self._starts[storage], start) - 1, 0)
        stop = bisect_left(self._starts[storage], end)
        if place < stop and self._index.parts[parts[place]].end <= start:
            place += 1
        own: list[PartEntry] = []
        shared_with: Path | None = None
        while place < stop:
            owner = self._part_owner.get(parts[place])
            if owner is None:
                self._part_owner[parts[place]] = path
                self._next[storage, place] = place + 1
                own.append(self._index.parts[parts[place]])
                place += 1
            else:
                if owner is not path:
                    shared_with = shared_with or owner
                place = self._free_from(storage, place)
        return own, shared_with

    def _free_from(self, storage: int, place: int) -> int:
        """The first place from `place` on that is not charged yet; shortens the way for the next call."""
        seen = []
        while (storage, place) in self._next:
            seen.append(place)
            place = self._next[storage, place]
        for before in seen:
            self._next[storage, before] = place
        return place


def role_rows(index: Index) -> list[RoleRow]:
    """A row for each role that occurs, the largest first."""
    totals: dict[str, list[int]] = {}
    for part in index.parts:
        total = totals.setdefault(part.role, [0, 0, 0])
        total[0] += 1
        total[1] += part.raw_bytes
        total[2] += part.stored_bytes
    rows = [
        RoleRow(role=role, num_parts=n, raw_bytes=r, stored_bytes=s) for role, (n, r, s) in totals.items()
    ]
    return sorted(rows, key=lambda row: -row.raw_bytes)


def codec_counts(index: Index) -> dict[str, int]:
    """How many parts each codec has, by name."""
    counts: dict[str, int] = {}
    for part in index.parts:
        name = CODEC_NAMES.get(part.codec, f"unknown {part.codec}")
        counts[name] = counts.get(name, 0) + 1
    return counts


def needs(index: Index) -> list[str]:
    """What loading the file takes besides thinpoint: for each chain that not every machine can decode, a sentence."""
    chains = sorted({part.chain for part in index.parts if part.codec == ANS_ID})
    return [f"an NVIDIA GPU and nvCOMP ({EXTRA}) for {chain}" for chain in chains]


def origin(reader: FileReader) -> str:
    """What the file was made from, in words."""
    try:
        note = source_of(reader.index.meta, reader.name)
    except ThinpointError:
        return "unknown"
    if note is None:
        return "thinpoint.save"
    return "safetensors" if note["kind"] == "safetensors" else "torch" if note["zip"] else "torch, before 1.6"


def as_json(reader: FileReader) -> dict[str, Any]:
    """Everything as a JSON object, described in docs/cli.md."""
    index = reader.index
    rows = tensor_rows(index)
    raw = sum(part.raw_bytes for part in index.parts)
    stored = sum(part.stored_bytes for part in index.parts)
    charged_raw = sum(row.coded_raw_bytes for row in rows)
    charged = sum(row.stored_bytes for row in rows)
    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "path": reader.name,
        "file_bytes": reader.trailer.file_bytes,
        "file_id": f"{reader.file_id:016x}",
        "raw_bytes": raw,
        "stored_bytes": stored,
        "index_bytes": reader.trailer.index_stored_bytes,
        "ratio": _ratio(raw, reader.trailer.file_bytes),
        "origin": origin(reader),
        "reader_version": READ_VERSION,
        "writer": index.writer,
        "required": list(index.required),
        "optional": list(index.optional),
        "codecs": codec_counts(index),
        "needs": needs(index),
        "num_storages": len(index.storages),
        "num_parts": len(index.parts),
        "roles": [
            {**vars(row), "ratio": _ratio(row.raw_bytes, row.stored_bytes)} for row in role_rows(index)
        ],
        "no_tensor": {"raw_bytes": raw - charged_raw, "stored_bytes": stored - charged},
        "tensors": [_tensor_json(row) for row in rows],
    }


def _tensor_json(row: TensorRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "path": [key if isinstance(key, str | int) else str(key) for key in row.path],
        "dtype": row.dtype,
        "shape": list(row.shape),
        "stride": list(row.stride),
        "device": row.device,
        "role": row.role,
        "chains": list(row.chains),
        "num_values": row.num_values,
        "raw_bytes": row.raw_bytes,
        "stored_bytes": row.stored_bytes,
        "ratio": _ratio(row.coded_raw_bytes, row.stored_bytes),
        "bits_per_value": bits_per_value(row),
        "shared_with": None if row.shared_with is None else display(row.shared_with),
    }


def bits_per_value(row: TensorRow) -> float | None:
    """Stored bits for each value of a tensor; None if nothing is charged to it."""
    if not row.stored_bytes or not row.coded_raw_bytes:
        return None
    values = row.coded_raw_bytes / row.raw_bytes * row.num_values if row.raw_bytes else 0
    return round(8 * row.stored_bytes / values, 4) if values else None


def _ratio(raw_bytes: int, stored_bytes: int) -> float | None:
    return round(raw_bytes / stored_bytes, 6) if stored_bytes else None
