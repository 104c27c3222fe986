"""Damaged and hostile files: cut anywhere, flipped anywhere, and lies with digests that fit."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from thin_pieces import index_text, open_bytes, small_file, take_apart, two_plane_file

from thinpoint.errors import (
    DamagedFileError,
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
from thinpoint.file.verify import verify_stored
from thinpoint.file.writer import compress_index

FUZZER = Path(__file__).resolve().parents[2] / "fuzz" / "fuzz_reader.py"


def first_problem(data: bytes) -> ThinpointError | None:
    try:
        problems = verify_stored(open_bytes(data))
    except ThinpointError as error:
        return error
    return problems[0] if problems else None


@pytest.mark.parametrize("make", [small_file, two_plane_file])
def test_file_cut_anywhere_is_refused_as_truncated(make):
    data = make()
    for size in range(len(data)):
        with pytest.raises(TruncatedFileError) as caught:
            open_bytes(data[:size])
        assert type(caught.value) is TruncatedFileError


@pytest.mark.parametrize("make", [small_file, two_plane_file])
def test_every_flipped_bit_is_found(make):
    data = make()
    found = set()
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            problem = first_problem(bytes(changed))
            assert isinstance(problem, DamagedFileError), f"bit {bit} of byte {at}"
            found.add(type(problem))
    assert found == {NotThinFileError, TruncatedFileError, DigestMismatchError}


def test_bytes_added_at_the_end_are_refused():
    for extra in (b"\0", b"\0" * 8, small_file()[-72:]):
        assert isinstance(first_problem(small_file() + extra), DamagedFileError)


def test_two_files_in_one_are_refused():
    with pytest.raises(MalformedFileError, match="file_bytes"):
        open_bytes(small_file() + small_file())


def test_parts_swapped_in_the_file_are_refused():
    pieces = take_apart(two_plane_file())
    pieces.heads[1], pieces.heads[2] = pieces.heads[2], pieces.heads[1]
    pieces.bodies[1], pieces.bodies[2] = pieces.bodies[2], pieces.bodies[1]
    assert isinstance(first_problem(pieces.seal()), MalformedFileError | DigestMismatchError)


def test_head_from_another_file_is_refused():
    pieces = take_apart(small_file())
    pieces.follow_heads = False
    pieces.set_head(0, 52, 17, 4)
    assert isinstance(first_problem(pieces.seal()), DigestMismatchError)


def test_block_that_fits_its_head_is_left_to_the_codec():
    pieces = take_apart(small_file())
    pieces.bodies[0][3] ^= 1
    pieces.seal_blocks(0)
    assert first_problem(pieces.seal()) is None


HEAD_LIES = [
    ("part_index", 16, 4, 1),
    ("storage_index", 20, 4, 1),
    ("start_bytes", 24, 8, 8),
    ("num_elems", 32, 8, 39),
    ("word_bytes", 50, 1, 2),
    ("codec_id", 48, 2, 1),
    ("raw_digest", 40, 8, 1),
]


@pytest.mark.parametrize(("name", "offset", "size", "value"), HEAD_LIES)
def test_head_that_contradicts_the_index_is_refused(name, offset, size, value):
    pieces = take_apart(small_file())
    pieces.set_head(0, offset, value, size)
    problem = first_problem(pieces.seal())
    assert type(problem) is MalformedFileError
    assert name in str(problem) and problem.tensor == "w.0"


def edit(*path):
    """A change of the index: the last item replaces what the path before it leads to."""

    def change(index) -> None:
        node = index
        for key in path[:-2]:
            node = node[key]
        node[path[-2]] = path[-1]

    return change


def drop(*path):
    def change(index) -> None:
        node = index
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]

    return change


def many(key, count):
    def change(index) -> None:
        index[key] = [0] * count

    return change


def repeat_last_part(index) -> None:
    index["parts"].append(index["parts"][-1])


HUGE = 2**63
INDEX_LIES = [
    ("missing key", drop("meta"), MalformedFileError),
    ("unknown key", edit("more", 1), MalformedFileError),
    ("required unknown", edit("required", ["delta"]), UnsupportedFeatureError),
    ("required no list", edit("required", "delta"), MalformedFileError),
    ("required missing", drop("required"), MalformedFileError),
    ("required not text", edit("required", [1]), MalformedFileError),
    ("required too long", edit("required", ["x" * 65]), LimitExceededError),
    ("required too many", edit("required", ["x"] * 257), LimitExceededError),
    ("optional not text", edit("optional", [None]), MalformedFileError),
    ("writer no object", edit("writer", []), MalformedFileError),
    ("meta no object", edit("meta", "x"), MalformedFileError),
    ("storages no list", edit("storages", {}), MalformedFileError),
    ("storages empty", edit("storages", []), MalformedFileError),
    ("storages too many", many("storages", limits.MAX_STORAGES + 1), LimitExceededError),
    ("storage no object", edit("storages", 1, 7), MalformedFileError),
    ("storage with more keys", edit("storages", 1, "x", 7), MalformedFileError),
    ("storage bytes bool", edit("storages", 1, "bytes", False), MalformedFileError),
    ("storage bytes float", edit("storages", 1, "bytes", 0.0), MalformedFileError),
    ("storage bytes negative", edit("storages", 1, "bytes", -1), MalformedFileError),
    ("storage bytes huge", edit("storages", 1, "bytes", limits.MAX_STORAGE_BYTES + 1), LimitExceededError),
    ("storage smaller than part", edit("storages", 0, "bytes", 179), MalformedFileError),
    ("storage device", edit("storages", 1, "device", None), MalformedFileError),
    ("storage device long", edit("storages", 1, "device", "x" * 257), LimitExceededError),
    ("parts no list", edit("parts", None), MalformedFileError),
    ("part missing", drop("parts", 1), MalformedFileError),
    ("parts too many", many("parts", limits.MAX_PARTS + 1), LimitExceededError),
    ("part twice", repeat_last_part, MalformedFileError),
    ("part no object", edit("parts", 0, []), MalformedFileError),
    ("part key missing", drop("parts", 0, "role"), MalformedFileError),
    ("part with more keys", edit("parts", 0, "x", 1), MalformedFileError),
    ("part storage unknown", edit("parts", 0, "storage", 2), MalformedFileError),
    ("part storage negative", edit("parts", 0, "storage", -1), MalformedFileError),
    ("part storage bool", edit("parts", 0, "storage", False), MalformedFileError),
    ("part storage too small", edit("parts", 0, "storage", 1), MalformedFileError),
    ("part start negative", edit("parts", 0, "start", -8), MalformedFileError),
    ("part start huge", edit("parts", 0, "start", HUGE), LimitExceededError),
    ("part start beyond storage", edit("parts", 1, "start", 169), MalformedFileError),
    ("part overlaps", edit("parts", 1, "start", 159), MalformedFileError),
    ("part precedes", edit("parts", 0, "start", 20), MalformedFileError),
    ("part elems zero", edit("parts", 0, "elems", 0), MalformedFileError),
    ("part elems huge", edit("parts", 0, "elems", limits.MAX_PART_ELEMS + 1), LimitExceededError),
    ("part word_bytes 3", edit("parts", 0, "word_bytes", 3), MalformedFileError),
    ("part word_bytes 16", edit("parts", 0, "word_bytes", 16), LimitExceededError),
    ("part dtype", edit("parts", 0, "dtype", 1), MalformedFileError),
    ("part role", edit("parts", 0, "role", None), MalformedFileError),
    ("part codec huge", edit("parts", 0, "codec", 1 << 16), LimitExceededError),
    ("part chain", edit("parts", 0, "chain", ["raw"]), MalformedFileError),
    ("part offset zero", edit("parts", 0, "offset", 0), MalformedFileError),
    ("part offset hole", edit("parts", 1, "offset", 10_000), MalformedFileError),
    ("part offset of another", edit("parts", 1, "offset", 32), MalformedFileError),
    ("part offset huge", edit("parts", 0, "offset", HUGE), LimitExceededError),
    ("part head_bytes small", edit("parts", 0, "head_bytes", 80), MalformedFileError),
    ("part head_bytes huge", edit("parts", 0, "head_bytes", limits.MAX_HEAD_BYTES + 8), LimitExceededError),
    (
        "part head_bytes beyond file",
        edit("parts", 0, "head_bytes", limits.MAX_HEAD_BYTES),
        MalformedFileError,
    ),
    ("part head_bytes not aligned", edit("parts", 0, "head_bytes", 140), MalformedFileError),
    ("part body_bytes other", edit("parts", 0, "body_bytes", 152), MalformedFileError),
    ("part body_bytes huge", edit("parts", 0, "body_bytes", limits.MAX_BODY_BYTES + 8), LimitExceededError),
    ("part raw_digest upper case", edit("parts", 0, "raw_digest", "ABCDEF0123456789"), MalformedFileError),
    ("part raw_digest short", edit("parts", 0, "raw_digest", "0"), MalformedFileError),
    ("tensors no list", edit("tensors", "x"), MalformedFileError),
    ("tensors too many", many("tensors", limits.MAX_TENSORS + 1), LimitExceededError),
    ("tensor no object", edit("tensors", 0, 1), MalformedFileError),
    ("tensor key missing", drop("tensors", 0, "offset"), MalformedFileError),
    ("tensor storage unknown", edit("tensors", 0, "storage", 2), MalformedFileError),
    ("tensor storage bool", edit("tensors", 0, "storage", True), MalformedFileError),
    ("tensor dtype unknown", edit("tensors", 0, "dtype", "float1"), UnsupportedFeatureError),
    ("tensor dtype no text", edit("tensors", 0, "dtype", 4), MalformedFileError),
    ("tensor dtype wider", edit("tensors", 0, "dtype", "float64"), MalformedFileError),
    ("tensor shape no list", edit("tensors", 0, "shape", 40), MalformedFileError),
    ("tensor shape negative", edit("tensors", 0, "shape", [-1, 8]), MalformedFileError),
    ("tensor shape huge", edit("tensors", 0, "shape", [HUGE, 8]), LimitExceededError),
    ("tensor shape product huge", edit("tensors", 0, "shape", [1 << 32, 1 << 31]), LimitExceededError),
    ("tensor shape product huge, meta", edit("tensors", 2, "shape", [1 << 32, 1 << 31]), LimitExceededError),
    ("tensor shape larger", edit("tensors", 0, "shape", [6, 8]), MalformedFileError),
    ("tensor dims too many", edit("tensors", 0, "shape", [1] * 65), LimitExceededError),
    ("tensor stride too few", edit("tensors", 0, "stride", [1]), MalformedFileError),
    ("tensor stride negative", edit("tensors", 0, "stride", [8, -1]), MalformedFileError),
    ("tensor stride larger", edit("tensors", 0, "stride", [9, 2]), MalformedFileError),
    ("tensor offset beyond", edit("tensors", 0, "offset", 6), MalformedFileError),
    ("tensor offset huge", edit("tensors", 0, "offset", HUGE), LimitExceededError),
    ("tensor offset float", edit("tensors", 0, "offset", 0.0), MalformedFileError),
]


@pytest.mark.parametrize(
    ("change", "error"), [lie[1:] for lie in INDEX_LIES], ids=[lie[0].replace(" ", "-") for lie in INDEX_LIES]
)
def test_index_that_lies_is_refused(change, error):
    pieces = take_apart(small_file())
    change(pieces.index)
    with pytest.raises(ThinpointError, match=r"^index: ") as caught:
        open_bytes(pieces.seal())
    assert type(caught.value) is error


def test_changes_that_lie_about_nothing_are_accepted():
    pieces = take_apart(small_file())
    pieces.index["meta"] = {"a": [1.5, None]}
    pieces.index["optional"] = ["unknown-but-optional"]
    pieces.index["tensors"][0].update(shape=[7, 6, 10**9], stride=[4, 1, 0], offset=11, role="weight")
    assert first_problem(pieces.seal()) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"required":[],"required":[]}',
        b'{"required":[NaN]}',
        b'{"required":[' + b"1" * 10_000 + b"]}",
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_index_that_is_no_proper_json_is_refused(raw):
    pieces = take_apart(small_file())
    pieces.raw_index = raw
    assert type(first_problem(pieces.seal())) is MalformedFileError


def test_newer_file_with_unknown_keys_is_unsupported_not_malformed():
    pieces = take_apart(small_file())
    pieces.index["required"] = ["delta"]
    pieces.index["bases"] = []
    problem = first_problem(pieces.seal())
    assert type(problem) is UnsupportedFeatureError
    assert "delta" in str(problem) and "newer thinpoint" in str(problem)


def test_newer_version_is_unsupported():
    pieces = take_apart(small_file())
    pieces.header[8:12] = b"\x02\0\x02\0"
    assert type(first_problem(pieces.seal())) is UnsupportedVersionError


FRAMES = [
    ("empty skippable frame", lambda raw: b"\x50\x2a\x4d\x18\0\0\0\0", MalformedFileError),
    ("no frame", lambda raw: raw[:64], MalformedFileError),
    ("cut frame", lambda raw: compress_index(raw)[:-4], MalformedFileError),
    ("header alone", lambda raw: compress_index(raw)[:5], MalformedFileError),
    ("two frames", lambda raw: compress_index(raw) * 2, MalformedFileError),
    ("bytes after the frame", lambda raw: compress_index(raw) + b"12345678", MalformedFileError),
    (
        "no content size",
        lambda raw: zstandard.ZstdCompressor(write_content_size=False).compress(raw),
        MalformedFileError,
    ),
    (
        "content size smaller than content",
        lambda raw: bytes.fromhex("28b52ffde0") + b"\x10" + bytes(7) + compress_index(raw)[13:],
        MalformedFileError,
    ),
    ("other content", lambda raw: compress_index(raw[:-1] + b"\n"), DigestMismatchError),
    ("one byte more", lambda raw: compress_index(raw + b" "), MalformedFileError),
]


@pytest.mark.parametrize(("make", "error"), [case[1:] for case in FRAMES], ids=[case[0] for case in FRAMES])
def test_index_frame_that_is_wrong_is_refused(make, error):
    pieces = take_apart(small_file())
    pieces.raw_index = index_text(small_file()) + b" " * 1000
    pieces.frame = make(pieces.raw_index)
    assert type(first_problem(pieces.seal())) is error


def test_index_padding_that_is_not_zero_is_refused():
    pieces = take_apart(small_file())
    pieces.raw_index = index_text(small_file())
    while len(compress_index(pieces.raw_index)) % 8 == 0:
        pieces.raw_index += b" "
    assert first_problem(pieces.seal()) is None
    pieces.index_padding = bytes(-len(compress_index(pieces.raw_index)) % 8 - 1) + b"\x01"
    with pytest.raises(MalformedFileError, match="padding after the index"):
        open_bytes(pieces.seal())


def test_index_with_another_number_of_parts_than_the_trailer_is_refused():
    for num_parts in (0, 1, 3):
        pieces = take_apart(small_file())
        pieces.trailer["num_parts"] = num_parts
        with pytest.raises(MalformedFileError, match="number of parts"):
            open_bytes(pieces.seal())


def test_sizes_that_only_add_up_to_a_multiple_of_8_are_refused():
    pieces = take_apart(small_file())
    part = pieces.index["parts"][0]
    part["head_bytes"] += 4
    part["body_bytes"] -= 4
    with pytest.raises(MalformedFileError, match="multiples of 8"):
        open_bytes(pieces.seal())


def test_digest_in_capitals_is_refused():
    pieces = take_apart(small_file())
    part = pieces.index["parts"][0]
    assert part["raw_digest"] != part["raw_digest"].upper()
    part["raw_digest"] = part["raw_digest"].upper()
    with pytest.raises(MalformedFileError, match="lower-case"):
        open_bytes(pieces.seal())


@pytest.mark.parametrize(("key", "value"), [("raw_digest", "0" * 16), ("codec", 1), ("elems", 39)])
def test_index_that_contradicts_a_head_is_refused(key, value):
    pieces = take_apart(small_file())
    pieces.index["parts"][0][key] = value
    assert type(first_problem(pieces.seal())) is MalformedFileError


def bomb(stated_bytes: int) -> bytes:
    """A file whose index is a frame of 64 MiB of spaces in a few KiB, with what the trailer says about it."""
    pieces = take_apart(small_file())
    pieces.raw_index = b" " * (64 << 20)
    pieces.frame = zstandard.ZstdCompressor(level=19).compress(pieces.raw_index)
    assert len(pieces.frame) < 1 << 16
    pieces.trailer["index_raw_bytes"] = stated_bytes
    return pieces.seal()


@pytest.mark.parametrize(
    ("stated_bytes", "error"),
    [(64 << 20, LimitExceededError), (1 << 20, MalformedFileError), (2**63, LimitExceededError)],
)
def test_zstd_bomb_is_refused_without_unpacking_it(stated_bytes, error):
    data = bomb(stated_bytes)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lines = Path("/proc/self/status").read_text().splitlines()
    in_use = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (32 << 20), hard))
    try:
        problem = first_problem(data)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert type(problem) is error


def test_sizes_beyond_the_file_allocate_nothing():
    pieces = take_apart(small_file())
    part = pieces.index["parts"][0]
    part["head_bytes"], part["body_bytes"] = limits.MAX_HEAD_BYTES, limits.MAX_BODY_BYTES
    pieces.index["parts"][1]["offset"] = 32 + limits.MAX_HEAD_BYTES + limits.MAX_BODY_BYTES
    assert type(first_problem(pieces.seal())) is MalformedFileError


def test_largest_numbers_in_a_head_do_not_overflow():
    pieces = take_apart(small_file())
    for offset, size in ((8, 8), (24, 8), (32, 8), (52, 4), (56, 4), (60, 4)):
        pieces.set_head(0, offset, (1 << 8 * size) - 1, size)
    assert isinstance(first_problem(pieces.seal()), DamagedFileError)


def test_random_bytes_are_no_thin_file():
    rng = np.random.default_rng(0)
    for size in (1, 7, 8, 32, 104, 5000):
        assert type(first_problem(rng.bytes(size))) is NotThinFileError


def test_short_run_of_the_fuzzer_finds_nothing():
    command = [sys.executable, str(FUZZER), "--seed", "0", "--iterations", "4000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    refused, accepted = (int(word) for word in done.stdout.split() if word.isdigit())
    assert refused > 1000 and accepted > 10
