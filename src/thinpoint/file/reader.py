"""Reads a `.thin` file: header, trailer and index at once, heads and blocks on demand; trusts nothing."""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np
import zstandard

from thinpoint.errors import DigestMismatchError, MalformedFileError, TruncatedFileError, UsageError
from thinpoint.file.head import PartHead, unpack_head
from thinpoint.file.index import Index, PartEntry, parse_index
from thinpoint.file.layout import (
    HEADER_BYTES,
    TRAILER_BYTES,
    Trailer,
    check_digest,
    check_header,
    hex64,
    pad8,
    unpack_trailer,
)


class Source(Protocol):
    """Where the bytes come from: the part of `store.contract.Source` that the reader needs."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read_at(self, offset: int, size: int) -> np.ndarray: ...
    def read_into(self, offset: int, buffer: Any) -> None: ...


class FileReader:
    """An open file whose header, trailer and index are checked. As thread-safe as its source.

    Args:
        source: stays the caller's to close.

    Attributes:
        index: what the file holds.
        trailer: sizes and the file's id.
        name: the source's name.

    Raises:
        NotThinFileError, TruncatedFileError, DigestMismatchError, MalformedFileError, LimitExceededError,
        UnsupportedVersionError, UnsupportedFeatureError: see the table in the specification.
        StorageError: the source refused.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name = source.name
        size = source.size
        check_header(source.read_at(0, min(size, HEADER_BYTES)).tobytes(), self.name)
        if size < HEADER_BYTES + TRAILER_BYTES:
            raise TruncatedFileError(
                "the file ends before its trailer",
                where=self.name,
                expected=f"at least {HEADER_BYTES + TRAILER_BYTES} bytes",
                actual=f"{size} bytes",
            )
        end = source.read_at(size - TRAILER_BYTES, TRAILER_BYTES).tobytes()
        self.trailer: Trailer = unpack_trailer(end, where=self.name, file_bytes=size)
        self.index: Index = self._read_index()

    @property
    def file_id(self) -> int:
        """Digest of the index, the file's identity."""
        return self.trailer.file_id

    def _read_index(self) -> Index:
        trailer = self.trailer
        offset = trailer.index_offset
        stored = self._source.read_at(offset, pad8(trailer.index_stored_bytes))
        check_digest(stored, trailer.index_digest, what="the index", where=self.name, offset=offset)
        if stored[trailer.index_stored_bytes :].any():
            raise MalformedFileError("padding after the index is not zero", where=self.name, offset=offset)
        raw = decompress_index(
            stored[: trailer.index_stored_bytes].tobytes(),
            trailer.index_raw_bytes,
            where=self.name,
            offset=offset,
        )
        check_digest(raw, trailer.file_id, what="the decompressed index", where=self.name, offset=offset)
        return parse_index(raw, index_offset=offset, num_parts=trailer.num_parts, where=self.name)

    def read_head(self, part: int) -> PartHead:
        """The head of a part, checked against its digest and the index. One read.

        Args:
            part: index of the part in `index.parts`.

        Raises:
            DigestMismatchError, MalformedFileError, LimitExceededError, UnsupportedFeatureError: the head is
                damaged or contradicts the index.
            UsageError: there is no such part.
            StorageError: the source refused.
        """
        entry = self._entry(part)
        return self.unpack_head(part, self._source.read_at(entry.offset, entry.head_bytes))

    def unpack_head(self, part: int, data: np.ndarray) -> PartHead:
        """As `read_head`, of bytes that were read.

        Args:
            part: index of the part in `index.parts`.
            data: uint8, flat, 8-byte aligned: the `head_bytes` from the part's offset on; only read.
        """
        entry = self._entry(part)
        head = unpack_head(data, where=self.name, offset=entry.offset)
        if head.head_digest != entry.head_digest:
            raise DigestMismatchError(
                f"the head of part {part} is not the one that the index names",
                where=self.name,
                tensor=head.name,
                offset=entry.offset,
                expected=hex64(entry.head_digest),
                actual=hex64(head.head_digest),
            )
        for name, expected, actual in (
            ("part_index", part, head.part_index),
            ("storage_index", entry.storage, head.storage_index),
            ("start_bytes", entry.start, head.start_bytes),
            ("num_elems", entry.elems, head.num_elems),
            ("word_bytes", entry.word_bytes, head.word_bytes),
            ("codec_id", entry.codec, head.codec_id),
            ("body_bytes", entry.body_bytes, head.body_bytes),
            ("raw_digest", entry.raw_digest, head.raw_digest),
        ):
            if actual != expected:
                raise MalformedFileError(
                    f"{name} of part {part} differs between index and head",
                    where=self.name,
                    tensor=head.name,
                    offset=entry.offset,
                    expected=expected,
                    actual=actual,
                )
        return head

    def read_part(self, part: int) -> tuple[PartHead, list[list[np.ndarray]]]:
        """The head of a part as `read_head` gives it, and for each plane all blocks, unchecked. One read.

        Blocks are as `read_blocks` gives them.
        """
        entry = self._entry(part)
        data = self._source.read_at(entry.offset, entry.stored_bytes)
        head = self.unpack_head(part, data[: entry.head_bytes])
        body = data[entry.head_bytes :]
        starts, sizes = head.block_starts.tolist(), head.block_sizes.tolist()
        return head, [
            [body[start : start + size] for start, size in zip(*plane, strict=True)]
            for plane in zip(starts, sizes, strict=True)
        ]

    def read_blocks(
        self, part: int, head: PartHead, plane: int, first: int, last: int, *, check: bool = True
    ) -> list[np.ndarray]:
        """The stored bytes of blocks [first, last) of one plane. One read.

        Args:
            part: index of the part.
            head: what `read_head(part)` gave.
            check: compare each block with its digest.

        Returns:
            For each block a flat uint8 array, 8-byte aligned: views of one buffer that the caller owns.

        Raises:
            DigestMismatchError: a block is damaged.
            UsageError: there is no such part, plane or block.
            StorageError: the source refused.
        """
        offset, size = self.block_range(part, head, plane, first, last)
        if first == last:
            return []
        data = self._source.read_at(offset, size)
        blocks = []
        position = 0
        for block, size in enumerate(head.block_sizes[plane, first:last].tolist(), first):
            blocks.append(data[position : position + size])
            position += size
            if check:
                self.check_block(part, head, plane, block, blocks[-1])
        return blocks

    def block_range(self, part: int, head: PartHead, plane: int, first: int, last: int) -> tuple[int, int]:
        """Offset in the file and bytes of the stored blocks [first, last) of one plane, for `read_into`.

        Args:
            part: index of the part.
            head: what `read_head(part)` gave.

        Raises:
            UsageError: there is no such part, plane or block.
        """
        entry = self._entry(part)
        if (
            head.part_index != part
            or not 0 <= plane < head.num_planes
            or not 0 <= first <= last <= head.num_blocks
        ):
            raise UsageError(
                f"part {part} has no blocks [{first}, {last}) in plane {plane}",
                where=self.name,
                expected=f"{head.num_planes} planes of {head.num_blocks} blocks",
                actual=f"part {head.part_index}",
            )
        if first == last:
            return entry.offset + entry.head_bytes, 0
        start = int(head.block_starts[plane, first])
        size = int(head.block_sizes[plane, first:last].sum())
        return entry.offset + entry.head_bytes + start, size

    def read_into(self, offset: int, buffer: Any) -> None:
        """Fill `buffer` with the stored bytes from `offset` on; nothing is checked.

        Args:
            buffer: writable, contiguous, host memory.

        Raises:
            TruncatedFileError: the range goes beyond the end of the file.
            StorageError: the source refused.
        """
        self._source.read_into(offset, buffer)

    def check_block(self, part: int, head: PartHead, plane: int, block: int, data: Any) -> None:
        """Raises DigestMismatchError unless `data` is the stored bytes of a block."""
        entry = self._entry(part)
        check_digest(
            data,
            int(head.block_digests[plane, block]),
            what=f"part {part}, plane {plane}, block {block}",
            where=self.name,
            tensor=head.name,
            offset=entry.offset + entry.head_bytes + int(head.block_starts[plane, block]),
        )

    def _entry(self, part: int) -> PartEntry:
        if not 0 <= part < len(self.index.parts):
            raise UsageError(
                "no such part", where=self.name, expected=f"0 to {len(self.index.parts) - 1}", actual=part
            )
        return self.index.parts[part]


def decompress_index(frame: bytes, raw_bytes: int, *, where: object, offset: int) -> bytes:
    """The JSON in an untrusted zstd frame. Allocates no more than `raw_bytes`, whatever the frame says.

    Args:
        frame: exactly the frame.
        raw_bytes: what the trailer says, already checked against the limits.

    Raises:
        MalformedFileError: no frame of exactly that content.
    """

    def malformed(what: str, expected: object = None, actual: object = None) -> MalformedFileError:
        return MalformedFileError(
            f"index: {what}", where=where, offset=offset, expected=expected, actual=actual
        )

    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != raw_bytes or parameters.dict_id:
            raise malformed("content size of the zstd frame", raw_bytes, parameters.content_size)
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, struct.error) as error:
        raise malformed(f"the zstd frame is damaged ({error})") from error
