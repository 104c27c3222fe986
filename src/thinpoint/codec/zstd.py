"""The `zstd` chain: every block is one Zstandard frame (RFC 8878) of the words as they are, zero-padded to 8 bytes.

For bytes that are no floats, and for users who want a standard stream. python-zstandard is the binding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard

from thinpoint.codec.contract import CodedPart, EncodedPart, Mapper
from thinpoint.codec.raw import decode_blocks, encode_blocks, pad8
from thinpoint.digest import as_bytes
from thinpoint.errors import MalformedFileError

ZSTD_ID = 3
LEVEL = 3
SAMPLE_PIECES = 4
SAMPLE_PIECE_BYTES = 1 << 14
MAX_WINDOW_BYTES = 1 << 27

_MAGIC = b"\x28\xb5\x2f\xfd"
_RLE_BLOCK = 1
_NO_CONTENT_SIZE = -1


def encode_zstd(words: np.ndarray, map: Mapper) -> EncodedPart:
    """The words as Zstandard frames, one a block."""
    return encode_blocks(words, _compress, ZSTD_ID, "zstd", map)


def _compress(piece: np.ndarray) -> np.ndarray:
    frame = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(piece.tobytes())
    return pad8(np.frombuffer(frame, np.uint8))


def decode_zstd(
    part: CodedPart, first_block: int, blocks: Sequence[Sequence[Any]], out: np.ndarray, map: Mapper
) -> int:
    """Decompress blocks into `out`; returns the partial raw digest. Memory is bounded by the block's raw size."""
    return decode_blocks(part, first_block, blocks, out, _decompress, map)


def _decompress(block: np.ndarray, target: np.ndarray) -> None:
    target[...] = np.frombuffer(decompress_frame(block, target.size), np.uint8)


def decompress_frame(block: np.ndarray, raw_bytes: int) -> bytes:
    """The content of the one frame in a padded block.

    Raises:
        MalformedFileError: not one frame of exactly raw_bytes, or something other than zeros behind it.
    """
    end = frame_bytes(block)
    if block.size - end > 7 or block[end:].any():
        raise MalformedFileError("a zstd block holds more than one frame", expected=end, actual=block.size)
    frame = block[:end].tobytes()
    try:
        content_size = zstandard.frame_content_size(frame)
        if content_size not in (raw_bytes, _NO_CONTENT_SIZE):
            raise MalformedFileError(
                "a zstd frame has the wrong size", expected=raw_bytes, actual=content_size
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        content = decompressor.decompress(frame, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise MalformedFileError(f"a zstd frame cannot be decompressed: {error}") from error
    if len(content) != raw_bytes:
        raise MalformedFileError("a zstd frame has the wrong size", expected=raw_bytes, actual=len(content))
    return content


def frame_bytes(block: np.ndarray) -> int:
    """Bytes of the frame that a block begins with, from the headers of the frame and of its blocks (RFC 8878, 3.1.1).

    Args:
        block: uint8 array; may hold anything.

    Raises:
        MalformedFileError: it begins with no frame, or ends before the frame does.
    """
    header = block[:5].tobytes()
    if len(header) < 5 or header[:4] != _MAGIC:
        raise MalformedFileError("a zstd block does not begin with a frame")
    descriptor = header[4]
    single_segment = descriptor >> 5 & 1
    dictionary_id, content_size = (0, 1, 2, 4)[descriptor & 3], (single_segment, 2, 4, 8)[descriptor >> 6]
    end = 5 + (1 - single_segment) + dictionary_id + content_size
    last = False
    while not last:
        block_header = int.from_bytes(block[end : end + 3].tobytes(), "little")
        last, kind, size = bool(block_header & 1), block_header >> 1 & 3, block_header >> 3
        end += 3 + (1 if kind == _RLE_BLOCK else size)
        if end > block.size:
            raise MalformedFileError("a zstd frame ends too early", expected=end, actual=block.size)
    end += 4 * (descriptor >> 2 & 1)
    if end > block.size:
        raise MalformedFileError("a zstd frame ends too early", expected=end, actual=block.size)
    return end


def sample_bits(words: np.ndarray) -> int:
    """Estimated size of the zstd chain in bits, from four pieces of 16 KiB."""
    data = as_bytes(words)
    return bits_from_sample(np.concatenate([data[a:b] for a, b in sample_ranges(data.size)]), data.size)


def sample_ranges(num_bytes: int) -> list[tuple[int, int]]:
    """The byte ranges that `sample_bits` looks at."""
    piece = SAMPLE_PIECE_BYTES
    if num_bytes <= SAMPLE_PIECES * piece:
        return [(0, num_bytes)]
    starts = [(num_bytes - piece) * i // (SAMPLE_PIECES - 1) for i in range(SAMPLE_PIECES)]
    return [(start, start + piece) for start in starts]


def bits_from_sample(sample: np.ndarray, num_bytes: int) -> int:
    """Estimated size in bits of `num_bytes` bytes, from a sample of them (uint8)."""
    compressed = len(zstandard.ZstdCompressor(level=LEVEL).compress(sample.tobytes()))
    return 8 * compressed * num_bytes // max(sample.size, 1)
