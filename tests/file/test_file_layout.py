"""Every way a header, a part head or a trailer can be wrong, in bytes, with its error class."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from thin_pieces import raw_part, small_file, take_apart, two_plane_file

from thinpoint.digest import digest
from thinpoint.errors import (
    DigestMismatchError,
    LimitExceededError,
    MalformedFileError,
    NotThinFileError,
    ThinpointError,
    TruncatedFileError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from thinpoint.file import limits
from thinpoint.file.head import HEAD, pack_head, unpack_head
from thinpoint.file.layout import (
    HEADER_BYTES,
    TRAILER_BYTES,
    Trailer,
    check_header,
    pack_header,
    pack_trailer,
    unpack_trailer,
)

HEADER_TEXT = "89 54 48 49 4e 0d 0a 1a 01 00 01 00 01 00 00 00 00 00 00 00 00 00 00 00"


def sealed(data: bytes) -> bytes:
    return data + struct.pack("<Q", digest(data))


def header_bytes(text: str = HEADER_TEXT) -> bytes:
    return sealed(bytes.fromhex(text))


def test_header_is_these_bytes():
    assert pack_header() == header_bytes()
    assert len(pack_header()) == HEADER_BYTES == 32
    check_header(header_bytes(), "x")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda h: b"\x80\x02}q\x00" + h[5:], NotThinFileError),
        (lambda h: b"PK\x03\x04", NotThinFileError),
        (lambda h: h.replace(b"\r\n", b"\n") + b"\0", NotThinFileError),
        (lambda h: b"", TruncatedFileError),
        (lambda h: h[:5], TruncatedFileError),
        (lambda h: h[:31], TruncatedFileError),
        (lambda h: h[:9] + b"\x01" + h[10:], DigestMismatchError),
        (lambda h: h[:31] + bytes([h[31] ^ 1]), DigestMismatchError),
        (lambda h: sealed(h[:8] + b"\x07\0\x02\0" + h[12:24]), UnsupportedVersionError),
        (lambda h: sealed(h[:8] + b"\0\0\x02\0" + h[12:24]), UnsupportedVersionError),
        (lambda h: sealed(h[:12] + b"\x02\0" + h[14:24]), UnsupportedFeatureError),
        (lambda h: sealed(h[:14] + b"\0\x80" + h[16:24]), MalformedFileError),
        (lambda h: sealed(h[:16] + b"\x01" + h[17:24]), MalformedFileError),
        (lambda h: sealed(h[:23] + b"\x80"), MalformedFileError),
    ],
)
def test_wrong_header_is_refused(change, error):
    with pytest.raises(error) as caught:
        check_header(change(header_bytes()), "x.thin")
    assert type(caught.value) is error
    assert "x.thin" in str(caught.value)


def test_newer_writer_that_old_readers_can_read_is_accepted():
    check_header(sealed(header_bytes()[:8] + b"\x05\0\0\0" + header_bytes()[12:24]), "x")


def head_of(part: int, data: bytes) -> bytearray:
    return take_apart(data).heads[part]


def check_head(head: bytes, size: int | None = None):
    data = sealed(bytes(head))
    return unpack_head(np.frombuffer(data, np.uint8)[:size], where="x.thin", offset=1000)


def test_head_is_these_bytes():
    words = np.array([1, 2, 3], np.uint16)
    head = pack_head(raw_part(words, 4), part_index=5, storage_index=6, start_bytes=7, label={"name": ["a"]})
    fixed = HEAD.pack(
        b"PART",
        72 + 16 + 8 + 8 + 8,
        8,
        5,
        6,
        7,
        3,
        digest(words),
        0,
        2,
        1,
        4,
        1,
        0,
        len(b'{"name":["a"]}'),
        0,
        0,
    )
    block = struct.pack("<HHHH", 1, 2, 3, 0)
    rest = b'{"name":["a"]}\0\0' + struct.pack("<II", 8, 0) + struct.pack("<Q", digest(block))
    assert head == sealed(fixed + rest)
    assert len(fixed) == 72


def test_head_gives_what_was_packed():
    data = two_plane_file()
    head = check_head(head_of(0, data))
    assert (head.codec_id, head.word_bytes, head.num_elems, head.block_elems) == (0, 2, 100, 64)
    assert head.prefix == b"0123456789"
    assert head.block_sizes.tolist() == [[128, 72], [0, 8]]
    assert head.block_starts.tolist() == [[0, 128], [200, 200]]
    assert head.block_sizes.dtype == np.int64 and head.block_digests.dtype == np.uint64
    assert head.label["role"] == "gradient"
    assert head.name == "layer." + "x" * 300


def test_too_long_label_is_left_out():
    label = {"name": ["x" * limits.MAX_LABEL_BYTES]}
    packed = pack_head(
        raw_part(np.zeros(3, np.uint8), 8), part_index=0, storage_index=0, start_bytes=0, label=label
    )
    assert unpack_head(np.frombuffer(packed, np.uint8), where="x", offset=0).label == {}


def test_label_with_control_characters_is_escaped_in_messages():
    label = {"name": ["\x1b[31m", "\ud800", 3, "größe"]}
    packed = pack_head(
        raw_part(np.zeros(3, np.uint8), 8), part_index=0, storage_index=0, start_bytes=0, label=label
    )
    head = unpack_head(np.frombuffer(packed, np.uint8), where="x", offset=0)
    assert head.name == r"\x1b[31m.\ud800.3.größe"


HEAD_FIELDS = [
    ("magic", 0, 4, 0x54524151, MalformedFileError),
    ("head_bytes too small", 4, 4, 8, MalformedFileError),
    ("head_bytes too large", 4, 4, 1 << 20, MalformedFileError),
    ("head_bytes beyond limit", 4, 4, limits.MAX_HEAD_BYTES + 8, LimitExceededError),
    ("body_bytes not the sum", 8, 8, 168, MalformedFileError),
    ("body_bytes beyond limit", 8, 8, limits.MAX_BODY_BYTES + 8, LimitExceededError),
    ("num_elems zero", 32, 8, 0, MalformedFileError),
    ("num_elems beyond limit", 32, 8, limits.MAX_PART_ELEMS + 1, LimitExceededError),
    ("num_elems other than blocks", 32, 8, 49, MalformedFileError),
    ("num_elems as -1", 32, 8, 2**64 - 1, LimitExceededError),
    ("word_bytes zero", 50, 1, 0, MalformedFileError),
    ("word_bytes three", 50, 1, 3, MalformedFileError),
    ("num_planes beyond limit", 51, 1, 5, LimitExceededError),
    ("num_planes other than sizes", 51, 1, 2, MalformedFileError),
    ("num_planes zero with blocks", 51, 1, 0, MalformedFileError),
    ("block_elems zero", 52, 4, 0, MalformedFileError),
    ("block_elems beyond limit", 52, 4, limits.MAX_BLOCK_ELEMS + 1, LimitExceededError),
    ("num_blocks too many", 56, 4, 4, MalformedFileError),
    ("num_blocks huge", 56, 4, 2**32 - 1, MalformedFileError),
    ("prefix_bytes huge", 60, 4, 2**32 - 1, MalformedFileError),
    ("label_bytes zero", 64, 2, 0, MalformedFileError),
    ("label_bytes cuts the label", 64, 2, 13, MalformedFileError),
    ("label_bytes beyond limit", 64, 2, limits.MAX_LABEL_BYTES + 1, LimitExceededError),
    ("num_inputs", 66, 2, 1, UnsupportedFeatureError),
    ("reserved", 68, 4, 0x80000000, MalformedFileError),
    ("label not UTF-8", 74, 1, 0xFF, MalformedFileError),
    ("label padding", 87, 1, 1, MalformedFileError),
    ("block size no multiple of 8", 88, 4, 60, MalformedFileError),
    ("block size huge", 88, 4, 2**32 - 8, MalformedFileError),
    ("block sizes padding", 100, 4, 1, MalformedFileError),
]


@pytest.mark.parametrize(
    ("offset", "size", "value", "error"),
    [case[1:] for case in HEAD_FIELDS],
    ids=[case[0] for case in HEAD_FIELDS],
)
def test_wrong_head_is_refused(offset, size, value, error):
    head = head_of(0, small_file())
    head[offset : offset + size] = value.to_bytes(size, "little")
    with pytest.raises(ThinpointError) as caught:
        check_head(head)
    assert type(caught.value) is error
    assert "x.thin" in str(caught.value)
    assert caught.value.offset is not None and 1000 <= caught.value.offset < 1000 + len(head)


def test_head_label_that_is_no_object_is_refused():
    head = head_of(1, small_file())
    head[72:74] = b"[]"
    with pytest.raises(MalformedFileError, match="label"):
        check_head(head)


def test_head_without_words_is_refused():
    head = head_of(1, small_file())
    head[32:40] = bytes(8)
    with pytest.raises(MalformedFileError, match="no words"):
        check_head(head)


def test_head_with_block_sizes_that_only_add_up_is_refused():
    head = head_of(0, small_file())
    assert head[88:96] == struct.pack("<II", 64, 64)
    head[88:96] = struct.pack("<II", 60, 68)
    with pytest.raises(MalformedFileError, match="a block's size"):
        check_head(head)


def test_head_prefix_padding_is_checked():
    head = head_of(1, small_file())
    assert head[80:83] == b"abc"
    head[87] = 1
    with pytest.raises(MalformedFileError, match="padding after the prefix"):
        check_head(head)


@pytest.mark.parametrize("size", [0, 8, 80, 87, 89])
def test_head_of_impossible_size_is_refused(size):
    with pytest.raises((MalformedFileError, DigestMismatchError)):
        check_head(head_of(0, small_file()), size)


def test_head_with_a_bit_flipped_is_refused():
    head = bytearray(sealed(bytes(head_of(0, small_file()))))
    head[30] ^= 4
    with pytest.raises(DigestMismatchError) as caught:
        unpack_head(np.frombuffer(bytes(head), np.uint8), where="x", offset=0)
    assert caught.value.expected != caught.value.actual


TRAILER = Trailer(
    index_offset=32,
    index_stored_bytes=13,
    index_raw_bytes=9,
    index_digest=7,
    file_id=8,
    file_bytes=120,
    num_parts=0,
)


def test_trailer_is_these_bytes():
    sealed_part = struct.pack("<QQQQQQII", 32, 13, 9, 7, 8, 120, 0, 0)
    assert pack_trailer(TRAILER) == sealed(sealed_part) + b"THINEND\n"
    assert len(pack_trailer(TRAILER)) == TRAILER_BYTES == 72
    assert unpack_trailer(pack_trailer(TRAILER), where="x", file_bytes=120) == TRAILER


TRAILER_FIELDS = [
    ("index_offset before the parts", 0, 8, 24, MalformedFileError),
    ("index_offset not aligned", 0, 8, 33, MalformedFileError),
    ("index_offset beyond the file", 0, 8, 2**64 - 8, MalformedFileError),
    ("index_stored_bytes zero", 8, 8, 0, MalformedFileError),
    ("index_stored_bytes too small", 8, 8, 8, MalformedFileError),
    ("index_stored_bytes too large", 8, 8, 17, MalformedFileError),
    ("index_stored_bytes huge", 8, 8, 2**64 - 1, MalformedFileError),
    ("index_raw_bytes a bomb", 16, 8, (1 << 20) + 64 * 13 + 1, LimitExceededError),
    ("index_raw_bytes huge", 16, 8, 2**63, LimitExceededError),
    ("file_bytes too large", 40, 8, 128, TruncatedFileError),
    ("file_bytes too small", 40, 8, 112, MalformedFileError),
    ("num_parts beyond limit", 48, 4, limits.MAX_PARTS + 1, LimitExceededError),
    ("reserved", 52, 4, 1, MalformedFileError),
]


@pytest.mark.parametrize(
    ("offset", "size", "value", "error"),
    [case[1:] for case in TRAILER_FIELDS],
    ids=[case[0] for case in TRAILER_FIELDS],
)
def test_wrong_trailer_is_refused(offset, size, value, error):
    data = bytearray(pack_trailer(TRAILER))
    data[offset : offset + size] = value.to_bytes(size, "little")
    resealed = sealed(bytes(data[:56])) + bytes(data[64:])
    with pytest.raises(ThinpointError) as caught:
        unpack_trailer(resealed, where="x", file_bytes=120)
    assert type(caught.value) is error
    with pytest.raises(DigestMismatchError):
        unpack_trailer(bytes(data), where="x", file_bytes=120)


@pytest.mark.parametrize(
    ("index_offset", "stored", "file_bytes"), [(24, 24, 120), (33, 13, 121), (0, 48, 120)]
)
def test_index_in_the_header_or_not_aligned_is_refused(index_offset, stored, file_bytes):
    trailer = replace(TRAILER, index_offset=index_offset, index_stored_bytes=stored, file_bytes=file_bytes)
    with pytest.raises(MalformedFileError, match="index_offset"):
        unpack_trailer(pack_trailer(trailer), where="x", file_bytes=file_bytes)


def test_index_of_more_than_64_mib_is_refused_at_any_ratio():
    large = 1 << 30
    trailer = replace(
        TRAILER,
        index_stored_bytes=large,
        index_raw_bytes=limits.MAX_INDEX_RAW_BYTES + 1,
        file_bytes=32 + large + 72,
    )
    with pytest.raises(LimitExceededError):
        unpack_trailer(pack_trailer(trailer), where="x", file_bytes=32 + large + 72)


def test_missing_end_magic_is_a_truncation():
    with pytest.raises(TruncatedFileError):
        unpack_trailer(pack_trailer(TRAILER)[:-1] + b"\0", where="x", file_bytes=120)
