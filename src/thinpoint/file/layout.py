"""Header and trailer of a `.thin` file, and what all its sections share. Names are those of `spec/FORMAT.md`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

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

WRITE_VERSION = 1
READ_VERSION = 1

MAGIC = b"\x89THIN\r\n\x1a"
END_MAGIC = b"THINEND\n"

HEADER = struct.Struct("<8sHHHHQQ")
TRAILER = struct.Struct("<QQQQQQIIQ8s")
WORD = struct.Struct("<Q")

HEADER_BYTES = HEADER.size
TRAILER_BYTES = TRAILER.size
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
