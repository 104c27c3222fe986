"""Between prefixes in a file and tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinpoint.codec.plan import fill_missing
from thinpoint.codec.rans.encoder import describe
from thinpoint.codec.rans.spec import NUM_SYMBOLS, RansPrefix, pack_prefix
from thinpoint.codec.transforms.predict import GROUP_ELEMS, NO_MEAN
from thinpoint.device.kernels import fields as f
from thinpoint.device.runs import Assumption


@dataclass(frozen=True, kw_only=True)
class HostPlans:
    """What planning made for the parts of a batch, in host memory.

    Attributes:
        means, profiles: int32.
        freqs: int64[parts, 256].
        patch_starts: first patch of each part, and the number of all.
        patch_positions, patch_tops: int64 and int32, as in `RansPrefix`, one part after the other.
    """

    means: np.ndarray
    profiles: np.ndarray
    freqs: np.ndarray
    patch_starts: list[int]
    patch_positions: np.ndarray
    patch_tops: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray, cuts: np.ndarray, patches: np.ndarray) -> HostPlans:
        """The plans that a device sent.

        Args:
            numbers: int32: means, profiles and frequencies of all parts.
            cuts: where profiles and frequencies begin.
            patches: int64: part << 42 | position << 16 | top, in any order.
        """
        means, profiles, freqs = np.split(numbers, cuts)
        freqs = freqs.reshape(-1, NUM_SYMBOLS).astype(np.int64)
        patches = np.sort(patches)
        return cls(
            means=means,
            profiles=profiles,
            freqs=freqs,
            patch_starts=np.searchsorted(patches, np.arange(len(freqs) + 1) << 42).tolist(),
            patch_positions=(patches >> 16) & ((1 << 26) - 1),
            patch_tops=(patches & 0xFFFF).astype(np.int32),
        )


def prefix_of(row: Sequence[int], assumed: Assumption, p: int, plans: HostPlans) -> tuple[bytes, str]:
    """(prefix as stored, chain in words) of part `p` of a batch. row: its columns in the table of parts."""
    num_groups = -(-row[f.NUM_ELEMS.value] // GROUP_ELEMS)
    at = row[f.GROUP_MEANS_AT.value]
    if row[f.MEANS_STRIDE.value]:
        means = plans.means[at : at + num_groups]
        if means.min() == NO_MEAN:
            means = fill_missing(means)
    else:
        means = plans.means[at + num_groups : at + num_groups + 1]
    profile = None
    if row[f.HAS_PROFILE.value]:
        start = row[f.PROFILE_AT.value]
        profile = plans.profiles[start : start + row[f.ROW_ELEMS.value]]
    patches = slice(plans.patch_starts[p], plans.patch_starts[p + 1])
    prefix = RansPrefix(
        split=assumed.split,
        steps=row[f.STEPS.value],
        window_base=row[f.WINDOW_BASE.value],
        freqs=plans.freqs[p],
        kept_groups=assumed.kept,
        means=means,
        profile=profile,
        patch_positions=plans.patch_positions[patches],
        patch_tops=plans.patch_tops[patches],
    )
    return pack_prefix(prefix), describe(prefix)
