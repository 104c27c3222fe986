"""The binary sections of a `.thin` file: header, part head, trailer. Names are those of `spec/FORMAT.md`."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from thinpoint import digest as digests
from thinpoint.errors import (
    DigestMismatchError,
    LimitExceededError,
    MalformedFileError,
    NotThinFileError,
    TruncatedFileError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from thinpoint.file import limits
from thinpoint.file.json_text import dump_json, parse_json

WRITE_VERSION = 0
READ_VERSION = 0

MAGIC = b"\x89THIN\r\n\x1a"
END_MAGIC = b"THINEND\n"
PART_MAGIC = b"PART"

HEADER = struct.Struct("<8sHHHHQQ")
HEAD = struct.Struct("<4sIQIIQQQHBBIIIHHI")
TRAILER = struct.Struct("<QQQQQQIIQ8s")
WORD = struct.Struct("<Q")

HEADER_BYTES = HEADER.size
HEAD_FIXED_BYTES = HEAD.size
TRAILER_BYTES = TRAILER.size
MIN_HEAD_BYTES = HEAD_FIXED_BYTES + 8 + WORD.size
TRAILER_SEALED_BYTES = 56


def pad8(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of 8."""
    return -(-num_bytes // 8) * 8


def padded(data: bytes) -> bytes:
    """`data` with zero bytes up to a multiple of 8."""
    return data + bytes(pad8(len(data)) - len(data))


def hex64(value: int) -> str:
    """A digest as the file and messages write it: 16 lower-case hexadecimal digits."""
    return f"{value:016x}"


def check_digest(
    data: Any, expected: int, *, what: str, where: object, offset: int, tensor: str | None = None
) -> None:
    """Raises DigestMismatchError unless the digest of `data` is `expected`."""
    actual = digests.digest(data)
    if actual != expected:
        raise DigestMismatchError(
            f"the bytes of {what} do not match their digest",
            where=where,
            tensor=tensor,
            offset=offset,
            expected=hex64(expected),
            actual=hex64(actual),
        )


def pack_header() -> bytes:
    """The 32 bytes that begin a file of this version."""
    body = HEADER.pack(MAGIC, WRITE_VERSION, READ_VERSION, digests.ALGORITHM_ID, 0, 0, 0)[: -WORD.size]
    return body + WORD.pack(digests.digest(body))


def check_header(data: bytes, where: object) -> None:
    """Checks the first `HEADER_BYTES` bytes of a file, or fewer if the file is shorter.

    Raises:
        NotThinFileError, TruncatedFileError, DigestMismatchError, MalformedFileError,
        UnsupportedVersionError, UnsupportedFeatureError: see the table in the specification.
    """
    start = data[: len(MAGIC)]
    if start != MAGIC[: len(start)]:
        raise NotThinFileError(
            "no .thin file", where=where, offset=0, expected=MAGIC.hex(" "), actual=start.hex(" ")
        )
    if len(data) < HEADER_BYTES:
        raise TruncatedFileError(
            "the file is empty" if not data else "the file ends inside its header",
            where=where,
            expected=f"at least {HEADER_BYTES + TRAILER_BYTES} bytes",
            actual=f"{len(data)} bytes",
        )
    _, _, read_version, algorithm, reserved_16, reserved_64, seal = HEADER.unpack(data)
    check_digest(data[: -WORD.size], seal, what="the header", where=where, offset=0)
    if read_version > READ_VERSION:
        raise UnsupportedVersionError(
            "the file needs a reader of a newer format version",
            where=where,
            offset=10,
            expected=f"at most {READ_VERSION}",
            actual=read_version,
        )
    if algorithm != digests.ALGORITHM_ID:
        raise UnsupportedFeatureError(
            "unknown digest algorithm",
            where=where,
            offset=12,
            expected=digests.ALGORITHM_ID,
            actual=algorithm,
        )
    if reserved_16 or reserved_64:
        raise MalformedFileError(
            "reserved bits of the header are set",
            where=where,
            offset=14,
            expected=0,
            actual=hex(reserved_16 or reserved_64),
        )


class Encoded(Protocol):
    """What a codec gives for one part: `codec.contract.EncodedPart`, which this room may not import."""

    @property
    def codec_id(self) -> int: ...
    @property
    def word_bytes(self) -> int: ...
    @property
    def num_elems(self) -> int: ...
    @property
    def block_elems(self) -> int: ...
    @property
    def prefix(self) -> bytes: ...
    @property
    def block_sizes(self) -> np.ndarray: ...
    @property
    def blocks(self) -> tuple[tuple[np.ndarray, ...], ...]: ...
    @property
    def block_digests(self) -> np.ndarray: ...
    @property
    def raw_digest(self) -> int: ...
    @property
    def chain(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class PartHead:
    """A part's head, checked against the specification and its own digest.

    Attributes:
        head_bytes, body_bytes: size of the head with its digest, and of all blocks.
        start_bytes: where the part begins in its storage.
        num_elems: words in the part; block_elems: words in a block.
        raw_digest: digest of the part's words as little-endian bytes.
        head_digest: digest of the head, its last 8 bytes.
        label: informative: name (list of keys), dtype, shape, role; any may be missing, none is checked.
        prefix: for the codec.
        block_sizes: int64 array, shape (num_planes, num_blocks): stored bytes.
        block_digests: uint64 array of the same shape.
        block_starts: int64 array of the same shape: offset of each block in the body.
    """

    head_bytes: int
    body_bytes: int
    part_index: int
    storage_index: int
    start_bytes: int
    num_elems: int
    raw_digest: int
    codec_id: int
    word_bytes: int
    block_elems: int
    label: dict[str, Any]
    prefix: bytes
    block_sizes: np.ndarray
    block_digests: np.ndarray
    block_starts: np.ndarray
    head_digest: int

    @property
    def num_planes(self) -> int:
        return int(self.block_sizes.shape[0])

    @property
    def num_blocks(self) -> int:
        return int(self.block_sizes.shape[1])

    @property
    def name(self) -> str | None:
        """The name in the label for messages, joined with dots and escaped; None if there is none."""
        keys = self.label.get("name")
        return ".".join(repr(str(key))[1:-1] for key in keys) if isinstance(keys, list) and keys else None


def pack_head(
    encoded: Encoded, *, part_index: int, storage_index: int, start_bytes: int, label: Mapping[str, Any]
) -> bytes:
    """The head of a part. A label of more than `MAX_LABEL_BYTES` is left out.

    Raises:
        struct.error: a number does not fit its field.
    """
    label_text = dump_json(dict(label))
    if len(label_text) > limits.MAX_LABEL_BYTES:
        label_text = b"{}"
    sizes = np.ascontiguousarray(encoded.block_sizes, "<u4")
    tail = padded(label_text) + padded(sizes.tobytes())
    tail += np.ascontiguousarray(encoded.block_digests, "<u8").tobytes() + padded(bytes(encoded.prefix))
    num_planes, num_blocks = encoded.block_sizes.shape
    if num_planes == 0:
        num_blocks = 0
    fixed = HEAD.pack(
        PART_MAGIC,
        HEAD_FIXED_BYTES + len(tail) + WORD.size,
        int(encoded.block_sizes.sum()),
        part_index,
        storage_index,
        start_bytes,
        encoded.num_elems,
        encoded.raw_digest,
        encoded.codec_id,
        encoded.word_bytes,
        num_planes,
        encoded.block_elems,
        num_blocks,
        len(encoded.prefix),
        len(label_text),
        0,
        0,
    )
    head = fixed + tail
    return head + WORD.pack(digests.digest(head))


def unpack_head(data: np.ndarray, *, where: object, offset: int) -> PartHead:
    """The head in `data`, every rule checked, without the index: enough for salvage.

    Args:
        data: uint8, flat, 8-byte aligned, exactly the head; only read.
        where: the file, for messages.
        offset: byte offset of the head in the file, for messages.

    Raises:
        DigestMismatchError, MalformedFileError, LimitExceededError, UnsupportedFeatureError.
    """

    def malformed(what: str, at: int, expected: object, actual: object) -> MalformedFileError:
        return MalformedFileError(
            f"part head: {what}", where=where, offset=offset + at, expected=expected, actual=actual
        )

    def limit(name: str, at: int, most: int, actual: int) -> None:
        if actual > most:
            raise LimitExceededError(
                f"part head: {name} is beyond its limit",
                where=where,
                offset=offset + at,
                expected=f"at most {most:,}",
                actual=f"{actual:,}",
            )

    if data.size < MIN_HEAD_BYTES or data.size % 8:
        raise malformed("impossible size", 0, f"at least {MIN_HEAD_BYTES}, a multiple of 8", data.size)
    (head_digest,) = WORD.unpack(data[-WORD.size :].tobytes())
    check_digest(data[: -WORD.size], head_digest, what="a part's head", where=where, offset=offset)
    (
        magic,
        head_bytes,
        body_bytes,
        part_index,
        storage_index,
        start_bytes,
        num_elems,
        raw_digest,
        codec_id,
        word_bytes,
        num_planes,
        block_elems,
        num_blocks,
        prefix_bytes,
        label_bytes,
        num_inputs,
        reserved,
    ) = HEAD.unpack(data[:HEAD_FIXED_BYTES].tobytes())
    if magic != PART_MAGIC:
        raise malformed("no part begins here", 0, PART_MAGIC, magic)
    if num_inputs:
        raise UnsupportedFeatureError(
            "the part is coded with the help of other tensors",
            where=where,
            offset=offset + 66,
            expected="num_inputs 0",
            actual=num_inputs,
        )
    if reserved:
        raise malformed("reserved bits are set", 68, 0, hex(reserved))
    limit("head_bytes", 4, limits.MAX_HEAD_BYTES, head_bytes)
    limit("body_bytes", 8, limits.MAX_BODY_BYTES, body_bytes)
    limit("num_elems", 32, limits.MAX_PART_ELEMS, num_elems)
    limit("num_planes", 51, limits.MAX_PLANES, num_planes)
    limit("block_elems", 52, limits.MAX_BLOCK_ELEMS, block_elems)
    limit("label_bytes", 64, limits.MAX_LABEL_BYTES, label_bytes)
    if num_elems == 0:
        raise malformed("no words", 32, "at least 1", 0)
    if word_bytes not in (1, 2, 4, 8):
        raise malformed("word_bytes", 50, "1, 2, 4 or 8", word_bytes)
    if num_planes and block_elems == 0:
        raise malformed("block_elems", 52, "at least 1", 0)
    expected_blocks = -(-num_elems // block_elems) if num_planes else 0
    if num_blocks != expected_blocks:
        raise malformed("num_blocks", 56, expected_blocks, num_blocks)

    num_sizes = num_planes * num_blocks
    sizes_at = HEAD_FIXED_BYTES + pad8(label_bytes)
    digests_at = sizes_at + pad8(4 * num_sizes)
    prefix_at = digests_at + 8 * num_sizes
    end = prefix_at + pad8(prefix_bytes) + WORD.size
    if not head_bytes == end == data.size:
        raise malformed(
            "head_bytes is not the sum of the head's fields", 4, data.size, f"{head_bytes} and {end}"
        )
    for name, start, used, stop in (
        ("label", HEAD_FIXED_BYTES, label_bytes, sizes_at),
        ("block sizes", sizes_at, 4 * num_sizes, digests_at),
        ("prefix", prefix_at, prefix_bytes, end - WORD.size),
    ):
        if data[start + used : stop].any():
            raise malformed(f"padding after the {name} is not zero", start + used, "zero bytes", "others")

    label = parse_json(
        data[HEAD_FIXED_BYTES : HEAD_FIXED_BYTES + label_bytes].tobytes(),
        what="a part's label",
        where=where,
        offset=offset + HEAD_FIXED_BYTES,
    )
    if not isinstance(label, dict):
        raise malformed("the label is no object", HEAD_FIXED_BYTES, "a JSON object", type(label).__name__)
    shape = (num_planes, num_blocks)
    sizes = data[sizes_at : sizes_at + 4 * num_sizes].view("<u4").astype(np.int64)
    if (sizes % 8).any():
        raise malformed("a block's size", sizes_at, "a multiple of 8", int(sizes[sizes % 8 != 0][0]))
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if num_sizes else 0
    if total != body_bytes:
        raise malformed("body_bytes is not the sum of the block sizes", 8, total, body_bytes)
    return PartHead(
        head_bytes=head_bytes,
        body_bytes=body_bytes,
        part_index=part_index,
        storage_index=storage_index,
        start_bytes=start_bytes,
        num_elems=num_elems,
        raw_digest=raw_digest,
        codec_id=codec_id,
        word_bytes=word_bytes,
        block_elems=block_elems,
        label=label,
        prefix=data[prefix_at : prefix_at + prefix_bytes].tobytes(),
        block_sizes=sizes.reshape(shape),
        block_digests=data[digests_at:prefix_at].view("<u8").astype(np.uint64).reshape(shape),
        block_starts=(ends - sizes).reshape(shape),
        head_digest=head_digest,
    )


@dataclass(frozen=True, kw_only=True)
class Trailer:
    """The last 72 bytes of a file without their digest and end magic."""

    index_offset: int
    index_stored_bytes: int
    index_raw_bytes: int
    index_digest: int
    file_id: int
    file_bytes: int
    num_parts: int


def pack_trailer(trailer: Trailer) -> bytes:
    """The trailer's bytes."""
    sealed = TRAILER.pack(
        trailer.index_offset,
        trailer.index_stored_bytes,
        trailer.index_raw_bytes,
        trailer.index_digest,
        trailer.file_id,
        trailer.file_bytes,
        trailer.num_parts,
        0,
        0,
        END_MAGIC,
    )[:TRAILER_SEALED_BYTES]
    return sealed + WORD.pack(digests.digest(sealed)) + END_MAGIC


def unpack_trailer(data: bytes, *, where: object, file_bytes: int) -> Trailer:
    """The trailer in the last `TRAILER_BYTES` bytes of a file, checked against the file's real size.

    Raises:
        TruncatedFileError, DigestMismatchError, MalformedFileError, LimitExceededError.
    """
    start = file_bytes - TRAILER_BYTES

    def malformed(what: str, at: int, expected: object, actual: object) -> MalformedFileError:
        return MalformedFileError(
            f"trailer: {what}", where=where, offset=start + at, expected=expected, actual=actual
        )

    if data[-len(END_MAGIC) :] != END_MAGIC:
        raise TruncatedFileError(
            "the file does not end as a .thin file does: it was cut off, or bytes were added",
            where=where,
            offset=file_bytes - len(END_MAGIC),
            expected=END_MAGIC.hex(" "),
            actual=data[-len(END_MAGIC) :].hex(" "),
        )
    *fields, num_parts, reserved, seal, _ = TRAILER.unpack(data)
    check_digest(data[:TRAILER_SEALED_BYTES], seal, what="the trailer", where=where, offset=start)
    index_offset, index_stored_bytes, index_raw_bytes, index_digest, file_id, stated_bytes = fields
    if stated_bytes > file_bytes:
        raise TruncatedFileError(
            "bytes are missing", where=where, expected=f"{stated_bytes:,} bytes", actual=f"{file_bytes:,}"
        )
    if stated_bytes != file_bytes:
        raise malformed("file_bytes is not the size of the file", 40, file_bytes, stated_bytes)
    if reserved:
        raise malformed("reserved bits are set", 52, 0, hex(reserved))
    if index_offset < HEADER_BYTES or index_offset % 8:
        raise malformed("index_offset", 0, f"a multiple of 8, at least {HEADER_BYTES}", index_offset)
    if index_stored_bytes == 0 or index_offset + pad8(index_stored_bytes) != start:
        raise malformed(
            "the index does not end where the trailer begins", 8, start - index_offset, index_stored_bytes
        )
    for name, at, actual, most in (
        ("index_raw_bytes", 16, index_raw_bytes, limits.max_index_raw_bytes(index_stored_bytes)),
        ("num_parts", 48, num_parts, limits.MAX_PARTS),
    ):
        if actual > most:
            raise LimitExceededError(
                f"trailer: {name} is beyond its limit",
                where=where,
                offset=start + at,
                expected=f"at most {most:,}",
                actual=f"{actual:,}",
            )
    return Trailer(
        index_offset=index_offset,
        index_stored_bytes=index_stored_bytes,
        index_raw_bytes=index_raw_bytes,
        index_digest=index_digest,
        file_id=file_id,
        file_bytes=stated_bytes,
        num_parts=num_parts,
    )
