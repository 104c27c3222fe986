"""The primitives that a backend provides; the flow around them (`encoder.py`, `decoder.py`) is shared by all backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from thinpoint.codec.contract import Mapper
from thinpoint.codec.rans.spec import RansPrefix
from thinpoint.codec.transforms.split import Split

HISTOGRAM_BINS = 512
HISTOGRAM_ZERO = HISTOGRAM_BINS // 2
"""Bin of difference 0. Differences outside of the bins are counted as outside."""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What one look at every word of a part gives.

    Attributes:
        or_mask, and_mask: bitwise OR and AND of all words.
        kept: bool array, one for each group of 256 words: has it any bit set?
    """

    or_mask: int
    and_mask: int
    kept: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Histogram of top - prediction over some groups.

    Attributes:
        bins: int64[HISTOGRAM_BINS], values whose top is not 0.
        num_zero: values whose top is 0.
        num_outside: values whose difference is in no bin.
    """

    bins: np.ndarray
    num_zero: int
    num_outside: int


@dataclass(frozen=True, kw_only=True)
class BlockInput:
    """One block to encode: the words of whole segments, and what the part says about them.

    Attributes:
        words: the block's words.
        first_elem: index of the first word in the part.
        kept: bool array, a flag for each group of the block, or None.
        means: int32, a mean for each group of the block, or one for all.
        prefix: the part's prefix (patches not yet known).
        lowest, highest: symbols above 0 outside of this range are patched.
        zero_present: whether symbol 0 has a frequency.
        fill: the symbol coded in place of a patch.
    """

    words: Any
    first_elem: int
    kept: np.ndarray | None
    means: np.ndarray
    prefix: RansPrefix
    lowest: int
    highest: int
    zero_present: bool
    fill: int


@dataclass(frozen=True, kw_only=True)
class BlockOutput:
    """One encoded block.

    Attributes:
        raw: uint8, the raw plane's block, padded to 8 bytes.
        entropy: uint8, the entropy plane's block, padded to 8 bytes.
        raw_digest, entropy_digest: digests of the two.
        words_digest: partial digest of the block's words in the part.
        patch_positions: int64, ascending element indices in the part.
        patch_tops: int32.
        or_mask, and_mask: over the kept words, to notice values that change while they are read.
        left_out: OR of the words in groups that are not kept.
    """

    raw: np.ndarray
    entropy: np.ndarray
    raw_digest: int
    entropy_digest: int
    words_digest: int
    patch_positions: np.ndarray
    patch_tops: np.ndarray
    or_mask: int
    and_mask: int
    left_out: int


class Kernels(Protocol):
    """Primitives over one part. Every implementation gives the same numbers and bytes."""

    name: str

    def scan(self, words: Any, map: Mapper) -> Scan: ...

    def group_means(self, words: Any, groups: np.ndarray, split: Split, map: Mapper) -> np.ndarray:
        """Means (int32, NO_MEAN where every top is 0) of the groups with these indices."""
        ...

    def column_sums(
        self, words: Any, split: Split, means: np.ndarray, rows: np.ndarray, row_elems: int, map: Mapper
    ) -> tuple[np.ndarray, np.ndarray]:
        """(sum of top - group mean, count) over the non-zero tops of these rows, int64 of row_elems columns."""
        ...

    def differences(
        self,
        words: Any,
        groups: np.ndarray,
        split: Split,
        means: np.ndarray,
        profile: np.ndarray | None,
        map: Mapper,
    ) -> Differences:
        """Histogram over the groups with these indices; means is one for each of them, or a single one."""
        ...

    def encode_block(self, block: BlockInput) -> BlockOutput: ...

    def decode_block(
        self,
        prefix: RansPrefix,
        first_elem: int,
        values: np.ndarray,
        raw: np.ndarray,
        entropy: np.ndarray,
        out: Any,
    ) -> None:
        """Decode one block into `out` (its words, patches not applied).

        Args:
            first_elem: index of the block's first word in the part.
            values: int64, coded values of each of the block's segments.
            raw, entropy: the stored blocks, uint8, 8-byte aligned.
            out: flat words of the block.

        Raises:
            MalformedFileError: the block contradicts its prefix.
        """
        ...
