"""What a codec is given, what it gives back, and what a backend must provide.

A *part* is a run of words of one width from one storage. Encoding makes of it a *prefix* (tables and side information, small,
needed to decode any block) and one or two *planes* (the bulk), each cut into *blocks* that hold the same element ranges: block b
covers elements [b x block_elems, (b + 1) x block_elems). Any block can be decoded with the prefix alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

WORD_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}

Mapper = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or an executor's: runs a function over items, yields results in order, raises the first error."""


def serial_map(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
    """The `Mapper` that runs everything on the calling thread."""
    return [function(item) for item in items]


class PartSpec(NamedTuple):
    """What an encoder may know about a part besides its words. Decides size, never exactness.

    Attributes:
        dtype: torch's name without `torch.`, e.g. "bfloat16"; complex tensors give the dtype of their components.
        role: "weight", "first_moment", "second_moment", "gradient" or "other".
        row_elems: words in one row in storage order, 0 if the part has no rows. The part starts at a row.
    """

    dtype: str
    role: str = "other"
    row_elems: int = 0


@dataclass(frozen=True, kw_only=True)
class CodedPart:
    """All that decoding needs besides the blocks. Untrusted when it comes from a file.

    Attributes:
        codec_id: wire id of the codec.
        word_bytes: 1, 2, 4 or 8.
        num_elems: words in the part.
        block_elems: words in a block (the last one may have fewer).
        prefix: the codec's own header and side information.
        block_sizes: int64 array, shape (num_planes, num_blocks): stored bytes, multiples of 8.
    """

    codec_id: int
    word_bytes: int
    num_elems: int
    block_elems: int
    prefix: bytes
    block_sizes: np.ndarray

    @property
    def num_planes(self) -> int:
        return int(self.block_sizes.shape[0])

    @property
    def num_blocks(self) -> int:
        return -(-self.num_elems // self.block_elems) if self.num_elems and self.num_planes else 0

    def block_range(self, block: int) -> tuple[int, int]:
        """First and one past the last element of a block."""
        start = block * self.block_elems
        return start, min(start + self.block_elems, self.num_elems)


@dataclass(frozen=True, kw_only=True)
class EncodedPart(CodedPart):
    """A `CodedPart` with its bytes.

    Attributes:
        blocks: for each plane its blocks in order, uint8 arrays in host memory, owned by the part. Separate arrays: a
            plane in one piece would cost one more copy of everything.
        block_digests: uint64 array of the shape of block_sizes: digest of each stored block.
        raw_digest: digest of the part's words as little-endian bytes, first word index 0.
        chain: the chain in words, for people ("group+column+rans").
    """

    blocks: tuple[tuple[np.ndarray, ...], ...] = ()
    block_digests: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint64))
    raw_digest: int = 0
    chain: str = "raw"

    @property
    def stored_bytes(self) -> int:
        return len(self.prefix) + int(self.block_sizes.sum())


class Backend(Protocol):
    """A way to run the codec: reference (NumPy), cpu (Numba), later triton. All give the same bytes."""

    name: str

    def encode(self, words: Any, spec: PartSpec, *, map: Mapper = serial_map) -> EncodedPart:
        """Encode one part.

        Args:
            words: flat contiguous unsigned integers of 1, 2, 4 or 8 bytes, where the backend runs; only read.
        """
        ...

    def decode(
        self,
        part: CodedPart,
        first_block: int,
        blocks: Sequence[Sequence[Any]],
        out: Any,
        *,
        map: Mapper = serial_map,
    ) -> int:
        """Decode consecutive blocks into `out`; returns the partial raw digest of what was decoded.

        The sum of these over a part, mod 2^64, must equal its raw_digest.

        Args:
            blocks: for each plane, the stored bytes of the blocks first_block, first_block + 1, ...
            out: flat contiguous words of the part's width, exactly as many as the blocks hold.

        Raises:
            MalformedFileError: the prefix or a block contradicts the specification; `out` may be partly written.
        """
        ...
