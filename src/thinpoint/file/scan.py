"""Finds the parts of a file whose index is lost, by their heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinpoint.errors import DamagedFileError, LimitExceededError, MalformedFileError
from thinpoint.file import limits
from thinpoint.file.head import HEAD, HEAD_FIXED_BYTES, MIN_HEAD_BYTES, PART_MAGIC, PartHead, unpack_head
from thinpoint.file.index import PartEntry
from thinpoint.file.layout import HEADER_BYTES, MAGIC, pad8
from thinpoint.file.reader import Source

_SCAN_BYTES = 16 << 20

Progress = Callable[[int], None]
"""Called with bytes of the file done so far."""


@dataclass(frozen=True, kw_only=True)
class FoundPart:
    """A part that was found by its head alone.

    Attributes:
        part_index: its number in the file as it was written.
        label: as in `PartHead`.
        entry: what the index would say of it; `dtype` and `role` are those of the label, or empty; `chain` is empty.
    """

    part_index: int
    label: dict[str, Any]
    entry: PartEntry


class Scan:
    """The parts with whole heads: first those that follow one another from the start, then any behind damage.

    Args:
        source: the file.
        progress: see `find`.

    Attributes:
        end_of_chain: where the unbroken chain of parts from the start of the file ends.
        problems: what the scan met.
    """

    def __init__(self, source: Source, progress: Progress | None) -> None:
        self._source = source
        self._progress = progress
        self._wasted_bytes = 0
        self.problems: list[DamagedFileError] = []
        self._chain = list(self._follow(HEADER_BYTES, first=0))
        self.end_of_chain = _end(self._chain, HEADER_BYTES)

    def finish(self) -> tuple[FoundPart, ...]:
        """All parts that are found, in file order."""
        islands: list[FoundPart] = []
        position = self.end_of_chain
        while (offset := self._next_head(position)) is not None:
            run = list(self._follow(offset))
            islands += run
            position = _end(run, offset)
        if not _is_in_order([*self._chain, *islands]):
            self._problem(
                "the parts behind the damage contradict each other; none is taken", self.end_of_chain
            )
            islands = []
        found = (*self._chain, *islands)
        self._report_gaps(found)
        return found

    def _report_gaps(self, found: tuple[FoundPart, ...]) -> None:
        expected, offset = 0, HEADER_BYTES
        for part in found:
            lost = part.part_index - expected
            if lost:
                what = (
                    "a part is lost with its head"
                    if lost == 1
                    else f"{lost:,} parts are lost with their heads"
                )
                self._problem(f"{what}; what was in it is not known", offset)
            expected, offset = part.part_index + 1, part.entry.offset + part.entry.stored_bytes
        if offset < self._source.size:
            self._problem("what follows holds no part that is whole", offset)

    def _follow(self, offset: int, first: int | None = None) -> Iterator[FoundPart]:
        """The parts one behind the other from a place on, as long as their numbers do not jump."""
        while (part := self._part_at(offset)) is not None:
            if first is not None and part.part_index != first:
                return
            yield part
            first = part.part_index + 1
            offset = part.entry.offset + part.entry.stored_bytes
            if self._progress:
                self._progress(min(offset, self._source.size))

    def _next_head(self, position: int) -> int | None:
        """Where the next whole head begins, at a multiple of 8; None if there is none, or another file begins before it."""
        while position < self._source.size:
            size = min(_SCAN_BYTES, self._source.size - position) // 8 * 8
            words = self._source.read_at(position, size).view("<u8")
            is_head = (words & np.uint64(0xFFFFFFFF)) == int.from_bytes(PART_MAGIC, "little")
            is_file = words == int.from_bytes(MAGIC, "little")
            for place in np.flatnonzero(is_head | is_file).tolist():
                offset = position + 8 * place
                if is_file[place]:
                    self._problem("another .thin file begins here; what follows is not taken", offset)
                    return None
                if self._part_at(offset) is not None:
                    return offset
            position += max(size, 8)
            if self._progress:
                self._progress(min(position, self._source.size))
        return None

    def _part_at(self, offset: int) -> FoundPart | None:
        """The part whose head begins at a place, if it is whole."""
        if offset + MIN_HEAD_BYTES > self._source.size:
            return None
        head_bytes = _stated_head_bytes(self._source.read_at(offset, HEAD_FIXED_BYTES).tobytes())
        if head_bytes is None or offset + head_bytes > self._source.size:
            return None
        try:
            head = unpack_head(
                self._source.read_at(offset, head_bytes), where=self._source.name, offset=offset
            )
        except DamagedFileError as error:
            self._waste(head_bytes, error)
            return None
        return FoundPart(part_index=head.part_index, label=head.label, entry=_entry(head, offset))

    def _waste(self, num_bytes: int, error: DamagedFileError) -> None:
        """Give up on a file with more false heads than bytes; damage leaves few that even look like one."""
        self._wasted_bytes += num_bytes
        if self._wasted_bytes > self._source.size + limits.MAX_HEAD_BYTES:
            raise LimitExceededError(
                "the file holds too much that looks like the head of a part", where=self._source.name
            ) from error

    def _problem(self, what: str, offset: int) -> None:
        self.problems.append(MalformedFileError(what, where=self._source.name, offset=offset))


def _stated_head_bytes(fixed: bytes) -> int | None:
    """The size of a head by its fixed fields, if they fit each other: a head is only read if they do."""
    magic, head_bytes, *_, num_planes, _, num_blocks, prefix_bytes, label_bytes, _, _ = HEAD.unpack(fixed)
    num_sizes = num_planes * num_blocks
    lists_bytes = pad8(label_bytes) + pad8(4 * num_sizes) + 8 * num_sizes + pad8(prefix_bytes)
    fits = head_bytes == HEAD_FIXED_BYTES + lists_bytes + 8
    return head_bytes if magic == PART_MAGIC and fits and head_bytes <= limits.MAX_HEAD_BYTES else None


def _entry(head: PartHead, offset: int) -> PartEntry:
    dtype, role = head.label.get("dtype"), head.label.get("role")
    return PartEntry(
        storage=head.storage_index,
        start=head.start_bytes,
        elems=head.num_elems,
        word_bytes=head.word_bytes,
        dtype=dtype if isinstance(dtype, str) else "",
        role=role if isinstance(role, str) else "",
        codec=head.codec_id,
        chain="",
        offset=offset,
        head_bytes=head.head_bytes,
        body_bytes=head.body_bytes,
        raw_digest=head.raw_digest,
        head_digest=head.head_digest,
    )


def _end(parts: list[FoundPart], otherwise: int) -> int:
    return parts[-1].entry.offset + parts[-1].entry.stored_bytes if parts else otherwise


def _is_in_order(parts: list[FoundPart]) -> bool:
    """Whether parts can be of one file: numbers ascend, and in each storage the bytes."""
    covered_to: dict[int, int] = {}
    last = -1
    for part in parts:
        entry = part.entry
        if part.part_index <= last or entry.start < covered_to.get(entry.storage, 0):
            return False
        if entry.end > limits.MAX_STORAGE_BYTES:
            return False
        last = part.part_index
        covered_to[entry.storage] = entry.end
    return True
