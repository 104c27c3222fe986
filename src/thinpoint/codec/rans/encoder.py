"""Encoding a part by a plan: the flow that all backends share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from thinpoint.codec.contract import EncodedPart, Mapper
from thinpoint.codec.plan import BLOCK_ELEMS, SEGMENT_STEPS, Plan
from thinpoint.codec.rans.kernels import BlockInput, BlockOutput, Kernels, Scan
from thinpoint.codec.rans.spec import CODEC_ID, RansPrefix, pack_prefix
from thinpoint.codec.transforms.predict import GROUP_ELEMS
from thinpoint.digest import MASK
from thinpoint.errors import StateChangedError


def encode(words: Any, plan: Plan, scan: Scan, kernels: Kernels, map: Mapper) -> EncodedPart:
    """The part, coded by symbols.

    Raises:
        StateChangedError: words no longer look as they did when they were scanned.
    """
    num_elems = int(words.size)
    prefix = RansPrefix(
        split=plan.split,
        steps=SEGMENT_STEPS,
        window_base=plan.coding.window_base,
        freqs=plan.coding.freqs,
        kept_groups=plan.kept,
        means=plan.means,
        profile=plan.profile,
        patch_positions=np.zeros(0, np.int64),
        patch_tops=np.zeros(0, np.int32),
    )

    def encode_one(start: int) -> BlockOutput:
        end = min(start + BLOCK_ELEMS, num_elems)
        groups = slice(start // GROUP_ELEMS, -(-end // GROUP_ELEMS))
        output = kernels.encode_block(
            BlockInput(
                words=words[start:end],
                first_elem=start,
                kept=None if plan.kept is None else plan.kept[groups],
                means=plan.means if plan.means.size == 1 else plan.means[groups],
                prefix=prefix,
                lowest=plan.coding.lowest,
                highest=plan.coding.highest,
                zero_present=bool(plan.coding.freqs[0]),
                fill=plan.coding.fill,
            )
        )
        check_unchanged(output, scan)
        return output

    outputs = list(map(encode_one, range(0, num_elems, BLOCK_ELEMS)))
    prefix = replace(
        prefix,
        patch_positions=np.concatenate([o.patch_positions for o in outputs]),
        patch_tops=np.concatenate([o.patch_tops for o in outputs]),
    )
    return EncodedPart(
        codec_id=CODEC_ID,
        word_bytes=plan.split.word_bits // 8,
        num_elems=num_elems,
        block_elems=BLOCK_ELEMS,
        prefix=pack_prefix(prefix),
        block_sizes=np.array([[o.raw.size for o in outputs], [o.entropy.size for o in outputs]], np.int64),
        blocks=(tuple(o.raw for o in outputs), tuple(o.entropy for o in outputs)),
        block_digests=np.array(
            [[o.raw_digest for o in outputs], [o.entropy_digest for o in outputs]], np.uint64
        ),
        raw_digest=sum(o.words_digest for o in outputs) & MASK,
        chain=describe(prefix),
    )


def check_unchanged(output: BlockOutput, scan: Scan) -> None:
    """Refuse words that have bits which the scan did not see: the fields left out of the stream would lose them."""
    if output.or_mask & ~scan.or_mask or scan.and_mask & ~output.and_mask or output.left_out:
        raise StateChangedError("a tensor changed while it was being saved")


def describe(prefix: RansPrefix) -> str:
    """The chain in words: the steps that were applied, in order."""
    zeros = prefix.split.trailing_zeros
    steps = [f"tz{zeros}"] if zeros else []
    if prefix.kept_groups is not None:
        steps.append("zero")
    if prefix.means.size > 1:
        steps.append("group")
    if prefix.profile is not None:
        steps.append("column")
    steps.append("rans" if prefix.single_symbol < 0 else "single")
    return "+".join(steps)
