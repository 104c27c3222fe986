"""Writes a `.thin` file front to back: header, parts as they come, index, trailer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import zstandard

from thinpoint import digest as digests
from thinpoint.collector import collector_paused
from thinpoint.errors import DamagedFileError, UsageError
from thinpoint.file import limits
from thinpoint.file.head import Encoded, pack_head, unpack_head
from thinpoint.file.index import Index, PartEntry, StorageEntry, TensorEntry, dump_index, parse_index
from thinpoint.file.layout import (
    HEADER_BYTES,
    TRAILER_BYTES,
    Trailer,
    pack_header,
    pack_trailer,
    padded,
)

INDEX_LEVEL = 9
_RAW_BLOCK_BYTES = 128 << 10


class Sink(Protocol):
    """Where the bytes go: what the writer needs of `store.contract.Sink`; this room imports no store."""

    def write(self, buffer: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NewPart:
    """A part to write.

    Attributes:
        encoded: what the codec gave; its blocks are only read and not kept.
        storage: index of the storage; its parts come in the order of their bytes.
        start_bytes: where the part begins in the storage.
        dtype, role: informative.
        label: informative, a JSON object: name (list of keys), dtype, shape, role. Left out if too long.
    """

    encoded: Encoded
    storage: int
    start_bytes: int
    dtype: str
    role: str
    label: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FileSummary:
    """What was written.

    Attributes:
        file_id: digest of the index, the file's identity.
        index_digest: digest of the index as stored.
        file_bytes: size of the file.
        num_parts: number of parts.
    """

    file_id: int
    index_digest: int
    file_bytes: int
    num_parts: int


class FileWriter:
    """Writes one file to a sink, in order and without seeking. The same calls give the same bytes.

    Keeps the index entries of the parts, never their bytes. Not to be shared between threads.

    Args:
        sink: gets every byte; opened and committed by the caller.
        write_all: writes buffers to the sink in order, where it has a faster way than one `write` after the other.
    """

    def __init__(self, sink: Sink, write_all: Callable[[list[Any]], None] | None = None) -> None:
        self._sink = sink
        self._write_all = write_all
        self._parts: list[PartEntry] = []
        self._covered_to: dict[int, int] = {}
        self._offset = 0
        # False while bytes are on their way and after the end: a file with half a part must not be finished.
        self._is_open = True
        self._write([pack_header()], HEADER_BYTES)

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._offset

    def add_part(
        self,
        encoded: Encoded,
        *,
        storage: int,
        start_bytes: int,
        dtype: str,
        role: str,
        label: Mapping[str, Any],
    ) -> PartEntry:
        """Writes one part and returns its entry in the index. See `NewPart` and `add_parts`."""
        part = NewPart(
            encoded=encoded, storage=storage, start_bytes=start_bytes, dtype=dtype, role=role, label=label
        )
        return self.add_parts([part])[0]

    def add_parts(self, parts: Iterable[NewPart]) -> list[PartEntry]:
        """Writes parts one behind the other, in one go, and returns their entries in the index.

        Raises:
            UsageError: a part contradicts itself or the specification; nothing was written.
            StorageError: the sink refused; the file cannot be continued.
        """
        self._check_open()
        buffers: list[Any] = []
        entries: list[PartEntry] = []
        covered_to: dict[int, int] = {}
        offset = self._offset
        for part in parts:
            head, entry = self._checked_head(part, len(self._parts) + len(entries), offset)
            covered = covered_to.get(part.storage, self._covered_to.get(part.storage, 0))
            if part.start_bytes < covered:
                raise UsageError(
                    f"the part precedes or overlaps an earlier one of storage {part.storage}",
                    expected=f"start_bytes of at least {covered}",
                    actual=part.start_bytes,
                )
            buffers += [head, *(block for plane in part.encoded.blocks for block in plane)]
            entries.append(entry)
            covered_to[part.storage] = entry.end
            offset += entry.stored_bytes
        self._write(buffers, offset)
        self._parts += entries
        self._covered_to.update(covered_to)
        return entries

    def _checked_head(self, part: NewPart, part_index: int, offset: int) -> tuple[bytes, PartEntry]:
        """The head of a part that lies at `offset`, read back by the reader's rules, and its entry."""
        encoded = part.encoded
        try:
            head = pack_head(
                encoded,
                part_index=part_index,
                storage_index=part.storage,
                start_bytes=part.start_bytes,
                label=part.label,
            )
            checked = unpack_head(digests.as_bytes(head), where="the part to be written", offset=offset)
        except (DamagedFileError, struct.error) as error:
            raise UsageError(f"the part cannot be written: {error}") from error
        if [[block.nbytes for block in plane] for plane in encoded.blocks] != checked.block_sizes.tolist():
            raise UsageError("the part cannot be written: its blocks have other sizes than it says")
        return head, PartEntry(
            storage=part.storage,
            start=part.start_bytes,
            elems=checked.num_elems,
            word_bytes=checked.word_bytes,
            dtype=part.dtype,
            role=part.role,
            codec=checked.codec_id,
            chain=encoded.chain,
            offset=offset,
            head_bytes=checked.head_bytes,
            body_bytes=checked.body_bytes,
            raw_digest=checked.raw_digest,
            head_digest=checked.head_digest,
        )

    def finish(
        self,
        *,
        storages: Iterable[StorageEntry],
        tensors: Iterable[TensorEntry],
        tree: Any,
        meta: Mapping[str, Any],
        encoder: int,
        writer_version: str,
        required: Iterable[str] = (),
        optional: Iterable[str] = (),
    ) -> FileSummary:
        """Writes index and trailer; the index is read back by the reader's rules before it is written.

        Args:
            tree: any JSON value.
            meta: a JSON object, informative.
            encoder, writer_version: versions of the encoder and of thinpoint, informative.
            required, optional: feature ids.

        Raises:
            UsageError: the index breaks a rule or limit of the specification; nothing was written.
            StorageError: the sink refused.
        """
        self._check_open()
        raw = self._checked_index(
            Index(
                writer={"thinpoint": writer_version, "encoder": encoder},
                required=tuple(required),
                optional=tuple(optional),
                meta=dict(meta),
                storages=tuple(storages),
                parts=tuple(self._parts),
                tensors=tuple(tensors),
                tree=tree,
            )
        )
        frame = compress_index(raw)
        stored = padded(frame)
        trailer = Trailer(
            index_offset=self._offset,
            index_stored_bytes=len(frame),
            index_raw_bytes=len(raw),
            index_digest=digests.digest(stored),
            file_id=digests.digest(raw),
            file_bytes=self._offset + len(stored) + TRAILER_BYTES,
            num_parts=len(self._parts),
        )
        self._write([stored, pack_trailer(trailer)], trailer.file_bytes)
        self._is_open = False
        return FileSummary(
            file_id=trailer.file_id,
            index_digest=trailer.index_digest,
            file_bytes=trailer.file_bytes,
            num_parts=trailer.num_parts,
        )

    @collector_paused()
    def _checked_index(self, index: Index) -> bytes:
        """The index as it is written, read back by the reader's rules."""
        raw = dump_index(index)
        if len(raw) > limits.MAX_INDEX_RAW_BYTES:
            raise UsageError(
                "the index would be too large: too many tensors, or too much data that is no tensor",
                expected=f"at most {limits.MAX_INDEX_RAW_BYTES:,} bytes",
                actual=f"{len(raw):,}",
                hint="Keep large lists of numbers in tensors or arrays",
            )
        try:
            parse_index(
                raw, index_offset=self._offset, num_parts=len(self._parts), where="the index to be written"
            )
        except DamagedFileError as error:
            raise UsageError(f"the index cannot be written: {error}") from error
        return raw

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError("the file is finished, or writing to it failed")

    def _write(self, buffers: list[Any], end: int) -> None:
        """Write buffers, which end at that offset."""
        self._is_open = False
        if self._write_all is not None:
            self._write_all(buffers)
        else:
            for buffer in buffers:
                self._sink.write(memoryview(buffer))
        self._offset = end
        self._is_open = True


def compress_index(raw: bytes) -> bytes:
    """One zstd frame of `raw` with its content size, compressed unless readers would take it for a bomb."""
    frame = zstandard.ZstdCompressor(
        level=INDEX_LEVEL, write_checksum=False, write_content_size=True
    ).compress(raw)
    return frame if len(raw) <= limits.max_index_raw_bytes(len(frame)) else _uncompressed_frame(raw)


def _uncompressed_frame(raw: bytes) -> bytes:
    """A zstd frame of raw blocks of 128 KiB (RFC 8878, 3.1.1): single segment, 8-byte content size."""
    pieces = [zstandard.FRAME_HEADER, bytes([0xE0]), struct.pack("<Q", len(raw))]
    for start in range(0, len(raw), _RAW_BLOCK_BYTES):
        block = raw[start : start + _RAW_BLOCK_BYTES]
        is_last = start + len(block) == len(raw)
        pieces += [(is_last | len(block) << 3).to_bytes(3, "little"), block]
    return b"".join(pieces)
