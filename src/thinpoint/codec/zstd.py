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
    try:
        parameters = zstandard.get_frame_parameters(block[:18].tobytes())
        if parameters.content_size != raw_bytes:
            raise MalformedFileError(
                "a zstd frame has the wrong size", expected=raw_bytes, actual=parameters.content_size
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        content = decompressor.decompress(block.tobytes())
    except zstandard.ZstdError as error:
        raise MalformedFileError(f"a zstd frame cannot be decompressed: {error}") from error
    rest = decompressor.unused_data
    if not decompressor.eof or len(content) != raw_bytes or len(rest) > 7 or any(rest):
        raise MalformedFileError(
            "a zstd block holds more or less than one frame", expected=raw_bytes, actual=len(content)
        )
    return content


def sample_bits(words: np.ndarray) -> int:
    """Estimated size of the zstd chain in bits, from four pieces of 16 KiB."""
    data = as_bytes(words)
    piece = SAMPLE_PIECE_BYTES
    if data.size > SAMPLE_PIECES * piece:
        starts = [(data.size - piece) * i // (SAMPLE_PIECES - 1) for i in range(SAMPLE_PIECES)]
        sample = np.concatenate([data[s : s + piece] for s in starts])
    else:
        sample = data
    compressed = len(zstandard.ZstdCompressor(level=LEVEL).compress(sample.tobytes()))
    return 8 * compressed * data.size // max(sample.size, 1)
