"""What is left of a damaged file: its index, where a digest proves it, and every part whose head is whole.

Nothing here is believed without a digest: the index by one of the two that the trailer holds, also where the rest of the
trailer is damaged; a part by its head's own and those of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard

from thinpoint import digest as digests
from thinpoint.errors import DamagedFileError, DigestMismatchError
from thinpoint.file import limits
from thinpoint.file.head import PartHead, unpack_head
from thinpoint.file.index import Index, PartEntry, parse_index
from thinpoint.file.json_text import parse_json
from thinpoint.file.layout import HEADER_BYTES, TRAILER, TRAILER_BYTES, check_digest, hex64, pad8
from thinpoint.file.reader import FileReader, Source, decompress_index
from thinpoint.file.scan import FoundPart, Progress, Scan

_FRAME_HEADER_MAX_BYTES = 18
_MAX_INDEX_STORED_BYTES = limits.MAX_INDEX_RAW_BYTES + (1 << 20)
"""An index that does not compress is stored in raw blocks, 3 bytes more for each 128 KiB."""

_RAW_BLOCK, _RLE_BLOCK, _RESERVED_BLOCK = 0, 1, 3
_CHECKSUM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is left of a file besides the bodies of its parts, which are not read yet.

    Attributes:
        index: the index, proven by a digest; None if it is lost.
        found: without an index, the parts with whole heads, in file order; else empty.
        problems: what is wrong with header, trailer, index and, without an index, heads.
    """

    index: Index | None
    found: tuple[FoundPart, ...]
    problems: tuple[DamagedFileError, ...]


def find(source: Source, progress: Progress | None = None) -> Findings:
    """What is left of a file. Reads the whole file only if its index and the head of a part are lost.

    Memory: an index (at most 64 MiB and what its JSON takes), or 16 MiB and an entry for each part. Blocks on I/O.

    Raises:
        NotThinFileError, TruncatedFileError, DigestMismatchError: neither an index nor a part is left; the error is the first
            that reading the file gives.
        LimitExceededError: the file is made to keep a reader busy.
        UnsupportedVersionError, UnsupportedFeatureError: the file is of a newer version.
        StorageError: the source refused.
    """
    try:
        return Findings(index=FileReader(source).index, found=(), problems=())
    except DamagedFileError as error:
        problem = error
    index = _index_at(source, _stated_index_offset(source))
    if index is not None:
        return Findings(index=index, found=(), problems=(problem,))
    scan = Scan(source, progress)
    index = _index_at(source, scan.end_of_chain)
    if index is not None:
        return Findings(index=index, found=(), problems=(problem,))
    found = scan.finish()
    if not found:
        raise problem
    return Findings(index=None, found=found, problems=(problem, *scan.problems))


def read_part(source: Source, entry: PartEntry) -> tuple[PartHead, list[list[np.ndarray]]]:
    """Head and blocks of a part, every digest checked. One read of head and body.

    Args:
        entry: where the part is and what is expected of it.

    Returns:
        The head, and for each plane its blocks: flat uint8 arrays, views of one buffer that the caller owns.

    Raises:
        DigestMismatchError, TruncatedFileError, MalformedFileError, LimitExceededError: the part is not intact.
        UnsupportedFeatureError: it is of a newer version.
        StorageError: the source refused.
    """
    data = source.read_at(entry.offset, entry.stored_bytes)
    head = unpack_head(data[: entry.head_bytes], where=source.name, offset=entry.offset)
    _check_same_part(head, entry, source.name)
    body = data[entry.head_bytes :]
    planes: list[list[np.ndarray]] = []
    for plane in range(head.num_planes):
        planes.append([])
        for block in range(head.num_blocks):
            start = int(head.block_starts[plane, block])
            stored = body[start : start + int(head.block_sizes[plane, block])]
            check_digest(
                stored,
                int(head.block_digests[plane, block]),
                what=f"plane {plane}, block {block}",
                where=source.name,
                tensor=head.name,
                offset=entry.offset + entry.head_bytes + start,
            )
            planes[-1].append(stored)
    return head, planes


def _check_same_part(head: PartHead, entry: PartEntry, where: str) -> None:
    actual = (
        *(head.head_digest, head.storage_index, head.start_bytes, head.num_elems, head.word_bytes),
        *(head.codec_id, head.body_bytes, head.raw_digest),
    )
    expected = (
        *(entry.head_digest, entry.storage, entry.start, entry.elems, entry.word_bytes),
        *(entry.codec, entry.body_bytes, entry.raw_digest),
    )
    if actual != expected:
        raise DigestMismatchError(
            "the head of a part is not the one that the index names",
            where=where,
            tensor=head.name,
            offset=entry.offset,
            expected=hex64(entry.head_digest),
            actual=hex64(head.head_digest),
        )


def _stated_index_offset(source: Source) -> int:
    """Where the last bytes of the file say that its index begins, if they are a trailer; anything else if not."""
    if source.size < HEADER_BYTES + TRAILER_BYTES:
        return 0
    end = source.read_at(source.size - TRAILER_BYTES, TRAILER_BYTES).tobytes()
    offset: int = TRAILER.unpack(end)[0]
    return offset


def _index_at(source: Source, offset: int) -> Index | None:
    """The index that begins at a place, if one of the two digests behind it proves it."""
    if offset < HEADER_BYTES or offset % 8 or offset + _FRAME_HEADER_MAX_BYTES > source.size:
        return None
    start = source.read_at(offset, _FRAME_HEADER_MAX_BYTES).tobytes()
    if not start.startswith(zstandard.FRAME_HEADER):
        return None
    most = min(source.size - offset, _MAX_INDEX_STORED_BYTES + TRAILER_BYTES)
    data = source.read_at(offset, most).tobytes()
    frame_bytes = _frame_bytes(data)
    if frame_bytes is None:
        return None
    raw_bytes = zstandard.get_frame_parameters(data).content_size
    if raw_bytes > limits.max_index_raw_bytes(frame_bytes):
        return None
    try:
        raw = decompress_index(data[:frame_bytes], raw_bytes, where=source.name, offset=offset)
        stored, trailer = data[: pad8(frame_bytes)], data[pad8(frame_bytes) :]
        if digests.digest(stored) != _word(trailer, 24) and digests.digest(raw) != _word(trailer, 32):
            return None
        parts = parse_json(raw, what="the index", where=source.name, offset=offset)["parts"]
        return parse_index(raw, index_offset=offset, num_parts=len(parts), where=source.name)
    except (DamagedFileError, KeyError, TypeError):
        return None


def _word(data: bytes, at: int) -> int | None:
    piece = data[at : at + 8]
    return int.from_bytes(piece, "little") if len(piece) == 8 else None


def _frame_bytes(data: bytes) -> int | None:
    """The length of the zstd frame that `data` begins with (RFC 8878, 3.1.1); None if it does not hold a whole one."""
    try:
        position = zstandard.frame_header_size(data)
        has_checksum = zstandard.get_frame_parameters(data).has_checksum
    except zstandard.ZstdError:
        return None
    is_last = False
    while not is_last:
        block = int.from_bytes(data[position : position + 3], "little")
        is_last, kind = bool(block & 1), block >> 1 & 3
        position += 3 + (1 if kind == _RLE_BLOCK else block >> 3)
        if kind == _RESERVED_BLOCK or position > len(data):
            return None
    position += _CHECKSUM_BYTES if has_checksum else 0
    return position if position <= len(data) else None
