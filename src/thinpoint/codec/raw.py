"""Chains without coding: `raw` stores the words as they are, `const` a single word for the whole part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thinpoint.codec.contract import WORD_DTYPES, CodedPart, EncodedPart, Mapper
from thinpoint.codec.plan import BLOCK_ELEMS
from thinpoint.digest import MASK, as_bytes, digest
from thinpoint.errors import MalformedFileError, StateChangedError

RAW_ID = 0
CONST_ID = 1


def pad8(data: np.ndarray) -> np.ndarray:
    """The bytes, zero-padded to a multiple of 8; the argument itself where it needs none."""
    if data.size % 8 == 0:
        return data
    padded = np.zeros(-(-data.size // 8) * 8, np.uint8)
    padded[: data.size] = data
    return padded


def encode_blocks(
    words: np.ndarray,
    store: Callable[[np.ndarray], np.ndarray],
    codec_id: int,
    chain: str,
    map: Mapper,
    *,
    is_private: bool = False,
) -> EncodedPart:
    """A part of one plane whose blocks are each made of their own words alone.

    Args:
        store: the stored bytes of a block, a multiple of 8, from its words as uint8; may keep its argument.
        is_private: nobody else writes to the words, now or later: they may be kept.
    """

    def encode_one(start: int) -> tuple[np.ndarray, int, int]:
        piece = as_bytes(words[start : start + BLOCK_ELEMS])
        if not is_private:
            # The digest is of the very bytes that are stored, should they change meanwhile.
            piece = piece.copy()
        stored = store(piece)
        return stored, digest(stored), digest(piece, start * words.itemsize // 8)

    blocks = list(map(encode_one, range(0, words.size, BLOCK_ELEMS)))
    return EncodedPart(
        codec_id=codec_id,
        word_bytes=words.itemsize,
        num_elems=int(words.size),
        block_elems=BLOCK_ELEMS,
        prefix=b"",
        block_sizes=np.array([[stored.size for stored, _, _ in blocks]], np.int64),
        blocks=(tuple(stored for stored, _, _ in blocks),),
        block_digests=np.array([[stored_digest for _, stored_digest, _ in blocks]], np.uint64),
        raw_digest=sum(raw_digest for _, _, raw_digest in blocks) & MASK,
        chain=chain,
    )


def decode_blocks(
    part: CodedPart,
    first_block: int,
    blocks: Sequence[Sequence[Any]],
    out: np.ndarray,
    restore: Callable[[np.ndarray, np.ndarray], None],
    map: Mapper,
) -> int:
    """Decode blocks that `encode_blocks` made; returns the partial raw digest.

    Args:
        restore: fills a block's words, as uint8, from its stored bytes.
    """
    check_plain(part)
    origin = first_block * part.block_elems

    def decode_one(i: int) -> int:
        start, end = part.block_range(first_block + i)
        target = as_bytes(out[start - origin : end - origin])
        restore(blocks[0][i], target)
        return digest(target, start * part.word_bytes // 8)

    return sum(map(decode_one, range(len(blocks[0])))) & MASK


def check_plain(part: CodedPart) -> None:
    """Raises MalformedFileError unless a part has the form that `encode_blocks` gives."""
    if part.num_planes != 1 or part.prefix:
        raise MalformedFileError(
            "a part of raw or zstd blocks has one plane and no prefix", expected=1, actual=part.num_planes
        )


def encode_raw(words: np.ndarray, map: Mapper, *, is_private: bool = False) -> EncodedPart:
    """The words as they are, in blocks. is_private: as for `encode_blocks`."""
    return encode_blocks(words, pad8, RAW_ID, "raw", map, is_private=is_private)


def decode_raw(
    part: CodedPart, first_block: int, blocks: Sequence[Sequence[Any]], out: np.ndarray, map: Mapper
) -> int:
    """Copy blocks into `out`; returns the partial raw digest."""
    return decode_blocks(part, first_block, blocks, out, _copy, map)


def _copy(block: np.ndarray, target: np.ndarray) -> None:
    if block.size != -(-target.size // 8) * 8 or block[target.size :].any():
        raise MalformedFileError(
            "a raw block has the wrong size or padding", expected=target.size, actual=block.size
        )
    target[...] = block[: target.size]


def encode_const(words: np.ndarray, map: Mapper) -> EncodedPart:
    """One word for the whole part.

    Raises:
        StateChangedError: the words are no longer all equal.
    """
    word = words[:1].copy()
    step = BLOCK_ELEMS

    def digest_one(start: int) -> int:
        piece = words[start : start + step].copy()
        if (piece != word).any():
            raise StateChangedError("a tensor changed while it was being saved")
        return digest(piece, start * words.itemsize // 8)

    return EncodedPart(
        codec_id=CONST_ID,
        word_bytes=words.itemsize,
        num_elems=int(words.size),
        block_elems=BLOCK_ELEMS,
        prefix=word.tobytes(),
        block_sizes=np.zeros((0, 0), np.int64),
        raw_digest=sum(map(digest_one, range(0, words.size, step))) & MASK,
        chain="const",
    )


def decode_const(part: CodedPart, out: np.ndarray, first_elem: int) -> int:
    """Fill `out`; returns the partial raw digest."""
    check_const(part)
    out[...] = np.frombuffer(part.prefix, WORD_DTYPES[part.word_bytes])[0]
    return digest(out, first_elem * part.word_bytes // 8)


def check_const(part: CodedPart) -> None:
    """Raises MalformedFileError unless a part has the form that `encode_const` gives."""
    if part.num_planes or len(part.prefix) != part.word_bytes:
        raise MalformedFileError(
            "a constant part holds more than one word", expected=part.word_bytes, actual=len(part.prefix)
        )
