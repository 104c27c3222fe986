"""Between prefixes in a file and tables on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinpoint.codec.plan import fill_missing
from thinpoint.codec.rans.encoder import describe
from thinpoint.codec.rans.spec import RansPrefix, pack_prefix
from thinpoint.codec.transforms.predict import GROUP_ELEMS
from thinpoint.device.kernels import fields as f
from thinpoint.device.runs import Assumption


@dataclass(frozen=True, kw_only=True)
class HostPlans:
    """What planning made, in host memory: int32 means, profiles, freqs[parts, 256]; patches int64, ascending."""

    means: np.ndarray
    profiles: np.ndarray
    freqs: np.ndarray
    patches: np.ndarray


def prefix_of(row: np.ndarray, assumed: Assumption, p: int, plans: HostPlans) -> tuple[bytes, str]:
    """(prefix as stored, chain in words) of part `p` of a batch. row: its columns in the table of parts."""
    num_elems, row_elems = int(row[f.NUM_ELEMS.value]), int(row[f.ROW_ELEMS.value])
    num_groups = -(-num_elems // GROUP_ELEMS)
    at = int(row[f.GROUP_MEANS_AT.value])
    means = plans.means[at + num_groups : at + num_groups + 1]
    if row[f.MEANS_STRIDE.value]:
        means = fill_missing(plans.means[at : at + num_groups])
    profile = None
    if row[f.HAS_PROFILE.value]:
        start = int(row[f.PROFILE_AT.value])
        profile = plans.profiles[start : start + row_elems]
    first, last = np.searchsorted(plans.patches, [p << 42, (p + 1) << 42])
    own = plans.patches[first:last]
    prefix = RansPrefix(
        split=assumed.split,
        steps=int(row[f.STEPS.value]),
        window_base=int(row[f.WINDOW_BASE.value]),
        freqs=plans.freqs[p].astype(np.int64),
        kept_groups=assumed.kept,
        means=means,
        profile=profile,
        patch_positions=(own >> 16) & ((1 << 26) - 1),
        patch_tops=(own & 0xFFFF).astype(np.int32),
    )
    return pack_prefix(prefix), describe(prefix)
