"""Frames that the `zstd` chain accepts and refuses; `codec/zstd.py`, `spec/CODECS.md` codec 3."""

import resource
from pathlib import Path

import numpy as np
import pytest
import zstandard

from thinpoint.codec.raw import pad8
from thinpoint.codec.zstd import decompress_frame, frame_bytes
from thinpoint.errors import MalformedFileError

RAW = b"".join(b"layer %d " % (i * i) for i in range(40_000))


def block(frame: bytes) -> np.ndarray:
    return pad8(np.frombuffer(frame, np.uint8))


def unsized(raw: bytes, **options: int) -> bytes:
    """A frame that does not state its content size."""
    stream = zstandard.ZstdCompressor(**options).compressobj()
    return stream.compress(raw) + stream.flush()


def test_frame_with_or_without_content_size_and_checksum_is_read() -> None:
    for checksum in (False, True):
        sized = zstandard.ZstdCompressor(write_checksum=checksum).compress(RAW)
        assert zstandard.frame_content_size(sized) == len(RAW)
        assert decompress_frame(block(sized), len(RAW)) == RAW
    frame = unsized(RAW)
    assert zstandard.frame_content_size(frame) == -1
    assert decompress_frame(block(frame), len(RAW)) == RAW


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 255, 256, 65_535, 131_072, 131_073, 300_000])
@pytest.mark.parametrize("level", [1, 3, 19])
def test_frame_bytes_is_the_length_of_the_frame_whatever_follows(size: int, level: int) -> None:
    noise = np.random.default_rng(size).bytes(size)
    for raw in (RAW[:size], noise, bytes(size)):
        for frame in (
            zstandard.ZstdCompressor(level=level).compress(raw),
            zstandard.ZstdCompressor(level=level, write_checksum=True).compress(raw),
            unsized(raw, level=level),
        ):
            assert frame_bytes(np.frombuffer(frame + b"\xff" * 9, np.uint8)) == len(frame)


@pytest.mark.parametrize("make", [zstandard.ZstdCompressor().compress, unsized])
def test_frame_of_another_size_is_refused(make) -> None:
    stored = block(make(RAW))
    for wrong in (len(RAW) - 1, len(RAW) + 1, 1):
        with pytest.raises(MalformedFileError):
            decompress_frame(stored, wrong)


def test_anything_but_up_to_seven_zeros_behind_the_frame_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(RAW)
    stored = block(frame)
    for bad in (
        np.concatenate([stored, np.zeros(8, np.uint8)]),
        np.frombuffer(frame + b"\1", np.uint8),
        np.frombuffer(frame + frame, np.uint8),
    ):
        with pytest.raises(MalformedFileError, match="more than one frame"):
            decompress_frame(bad, len(RAW))


def test_truncated_frame_is_refused_at_every_length() -> None:
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(RAW[:3000])
    for length in range(len(frame)):
        with pytest.raises(MalformedFileError):
            decompress_frame(np.frombuffer(frame[:length], np.uint8), 3000)


def test_skippable_frame_and_window_beyond_the_limit_are_refused() -> None:
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + bytes(4)
    with pytest.raises(MalformedFileError, match="does not begin with a frame"):
        decompress_frame(block(skippable), 4)
    wide = zstandard.ZstdCompressionParameters(window_log=28)
    stream = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    with pytest.raises(MalformedFileError, match="memory"):
        decompress_frame(block(stream.compress(RAW) + stream.flush()), len(RAW))


def test_frame_without_size_unpacks_no_further_than_its_block() -> None:
    # 60,000 blocks of 128 KiB each, one byte repeated: 7 GiB from 240 KB.
    run = (131_072 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    end = (131_072 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    stored = block(b"\x28\xb5\x2f\xfd\x00\x58" + 59_999 * run + end)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lines = Path("/proc/self/status").read_text().splitlines()
    in_use = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (64 << 20), hard))
    try:
        with pytest.raises(MalformedFileError):
            decompress_frame(stored, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
