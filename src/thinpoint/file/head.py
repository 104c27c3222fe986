"""The head of a part: what describes it before its body. Names are those of `spec/FORMAT.md`."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from thinpoint import digest as digests
from thinpoint.errors import (
    LimitExceededError,
    MalformedFileError,
    UnsupportedFeatureError,
)
from thinpoint.file import limits
from thinpoint.file.json_text import dump_json, parse_json
from thinpoint.file.layout import WORD, check_digest, pad8, padded

PART_MAGIC = b"PART"
HEAD = struct.Struct("<4sIQIIQQQHBBIIIHHI")
HEAD_FIXED_BYTES = HEAD.size
MIN_HEAD_BYTES = HEAD_FIXED_BYTES + 8 + WORD.size


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


class PartHead(NamedTuple):
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
    tail = b"".join(
        [
            padded(label_text),
            padded(encoded.block_sizes.astype("<u4").tobytes()),
            encoded.block_digests.astype("<u8").tobytes(),
            padded(bytes(encoded.prefix)),
        ]
    )
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
    view = data.data
    (head_digest,) = WORD.unpack_from(view, data.size - WORD.size)
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
    ) = HEAD.unpack_from(view)
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
    for name, start, stop in (
        ("label", HEAD_FIXED_BYTES + label_bytes, sizes_at),
        ("block sizes", sizes_at + 4 * num_sizes, digests_at),
        ("prefix", prefix_at + prefix_bytes, end - WORD.size),
    ):
        if any(view[start:stop]):
            raise malformed(f"padding after the {name} is not zero", start, "zero bytes", "others")

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
    if np.bitwise_or.reduce(sizes) % 8:
        raise malformed("a block's size", sizes_at, "a multiple of 8", int(sizes[sizes % 8 != 0][0]))
    ends = sizes.cumsum()
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
