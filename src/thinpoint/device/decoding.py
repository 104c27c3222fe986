"""Decoding on the device: what an encoder left there, or parts that come from a file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from thinpoint.codec.contract import CodedPart
from thinpoint.codec.rans.spec import LANES, RansPrefix, parse_prefix
from thinpoint.codec.transforms.predict import GROUP_ELEMS
from thinpoint.device.contract import DecodeItem, item_named
from thinpoint.device.encoding import Batch
from thinpoint.device.kernels import fields as f
from thinpoint.device.launch import Launcher
from thinpoint.device.tables import PartShape, make_tables, starts
from thinpoint.device.worklists import decode_programs, upload_tables
from thinpoint.errors import MalformedFileError

MAX_ELEMS = 1 << 26
MAX_BLOCK_SEGMENTS = 1024
STEPS_AT = 4
"""Where a prefix says how many steps a segment has."""
_CODES = {
    f.BAD_COUNTS.value: "word counts do not fit its size",
    f.BAD_STATE.value: "a lane state is out of range",
    f.BAD_END.value: "lanes did not end in their start states",
}


def decode_encoded(
    launcher: Launcher, batch: Batch, wanted: np.ndarray, addresses: np.ndarray
) -> torch.Tensor:
    """Decode parts of a batch to these addresses, from the planes as they will be stored.

    Args:
        wanted: bool, which of the parts; only those that count.
        addresses: int64, where each goes; memory of parts with zero groups is zero already.

    Returns:
        int32[parts] on the device: what is wrong with each part, 0 for a wanted one if nothing is.
    """
    num_parts = len(batch.host_parts)
    columns = batch.host_parts.copy()
    columns[:, f.ADDRESS.value] = np.where(wanted, addresses, 0)
    parts = launcher.upload(columns)
    errors = launcher.zeros(num_parts, torch.int32)
    launcher.decode(
        decode_programs(batch.tables, batch.host_parts, wanted, launcher.upload),
        batch.tables.order,
        parts,
        batch.blocks,
        batch.tables.segments.clone(),
        batch.plans.means,
        batch.plans.profiles,
        launcher.decode_tables(batch.plans.freqs, num_parts),
        batch.raw,
        batch.entropy,
        errors,
    )
    if batch.patches.numel():
        for width in batch.tables.host.widths:
            launcher.apply_patches(batch.patches, parts, width)
    return errors


def describe_error(code: int) -> str:
    """What the bits that kernels set say."""
    return ", ".join(text for bit, text in _CODES.items() if code & bit) or f"code {code}"


def fits_device(part: CodedPart) -> bool:
    """Whether the kernels take a part; longer ones, and blocks of more segments than a program opens, are the host's."""
    # The rest of the prefix is checked later; what is too short here is refused there.
    steps = int.from_bytes(part.prefix[STEPS_AT : STEPS_AT + 2], "little")
    segments = -(-min(part.block_elems, part.num_elems) // (LANES * max(steps, 1)))
    return part.num_elems <= MAX_ELEMS and segments <= MAX_BLOCK_SEGMENTS


class RansItems:
    """Items of a batch that the kernels decode: prefixes taken apart and turned into tables.

    Raises:
        MalformedFileError: a prefix or the sizes of blocks are not as the specification demands; `error.item` tells where.
    """

    def __init__(self, launcher: Launcher, items: Sequence[DecodeItem], chosen: Sequence[int]) -> None:
        self._launcher = launcher
        self._items = [items[i] for i in chosen]
        self._prefixes: list[RansPrefix] = []
        for i, item in zip(chosen, self._items, strict=True):
            with item_named(i):
                self._prefixes.append(_checked_prefix(item))
        self._tables = make_tables(
            [
                PartShape(
                    num_elems=item.part.num_elems,
                    split=prefix.split,
                    kept=prefix.kept_groups,
                    steps=prefix.steps,
                    block_elems=item.part.block_elems,
                    first_block=item.first_block,
                    num_blocks=item.num_blocks,
                )
                for item, prefix in zip(self._items, self._prefixes, strict=True)
            ]
        )
        self._place_blocks(chosen)
        self._fill_parts()

    def _place_blocks(self, chosen: Sequence[int]) -> None:
        tables = self._tables
        first = starts(np.array([item.num_blocks for item in self._items], np.int64))
        # Segments are in the order of their parts.
        bounds = np.searchsorted(tables.segments[:, f.SEG_PART.value], np.arange(len(self._items) + 1))
        for p, (i, item) in enumerate(zip(chosen, self._items, strict=True)):
            own = slice(int(first[p]), int(first[p]) + item.num_blocks)
            sizes = item.part.block_sizes[:, item.first_block : item.first_block + item.num_blocks]
            single = self._prefixes[p].single_symbol >= 0
            with item_named(i):
                if (sizes[0] != tables.raw_block_bytes[own]).any() or (single and sizes[1].any()):
                    raise MalformedFileError("a block of a part has the wrong size")
            tables.blocks[own, f.BLOCK_AT.value] = item.plane_offsets[1] + starts(sizes[1])
            tables.blocks[own, f.BLOCK_BYTES.value] = sizes[1]
            at = tables.segments[bounds[p] : bounds[p + 1], f.SEG_RAW_AT.value]
            at += item.plane_offsets[0] // 4 - at[:1]

    def _fill_parts(self) -> None:
        parts = self._tables.parts
        means, profiles, patches = [], [], []
        profile_at = 0
        for p, (item, prefix) in enumerate(zip(self._items, self._prefixes, strict=True)):
            row = parts[p]
            first = item.first_block * item.part.block_elems
            row[f.ADDRESS.value] = item.out.data_ptr() - first * item.part.word_bytes
            num_groups = -(-item.part.num_elems // GROUP_ELEMS)
            grouped = prefix.means.size > 1
            row[f.MEANS_STRIDE.value] = grouped
            row[f.MEANS_AT.value] = row[f.GROUP_MEANS_AT.value]
            # One slot a group and one for the single mean.
            own = np.zeros(num_groups + 1, np.int32)
            own[: prefix.means.size] = prefix.means
            means.append(own)
            if prefix.profile is not None:
                row[f.HAS_PROFILE.value] = 1
                row[f.ROW_ELEMS.value] = prefix.profile.size
                row[f.PROFILE_AT.value] = profile_at
                profiles.append(prefix.profile)
                profile_at += prefix.profile.size
            row[f.WINDOW_BASE.value] = prefix.window_base
            row[f.SINGLE.value] = prefix.single_symbol
            end = first + item.out.numel() // item.part.word_bytes
            low, high = np.searchsorted(prefix.patch_positions, [first, end])
            positions, tops = prefix.patch_positions[low:high], prefix.patch_tops[low:high]
            patches.append(p << 42 | positions << 16 | tops.astype(np.int64))
        self._means = np.concatenate(means)
        self._profiles = np.concatenate([*profiles, np.zeros(1, np.int32)]).astype(np.int32)
        self._patches = np.concatenate(patches)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Decode from the stored bytes (flat uint8 on the device); does not wait.

        Returns:
            int32 on the device: what is wrong with each item, 0 if nothing is.
        """
        launcher, parts = self._launcher, self._tables.parts
        upload = launcher.upload
        for item, prefix in zip(self._items, self._prefixes, strict=True):
            if prefix.kept_groups is not None:
                item.out.zero_()
        tables = upload_tables(self._tables, upload)
        errors = launcher.zeros(len(parts), torch.int32)
        freqs = np.stack([prefix.freqs for prefix in self._prefixes]).astype(np.int32)
        whole = stored[: stored.numel() // 8 * 8]
        launcher.decode(
            decode_programs(tables, parts, np.ones(len(parts), bool), upload),
            tables.order,
            tables.parts,
            tables.blocks,
            tables.segments,
            upload(self._means),
            upload(self._profiles),
            launcher.decode_tables(upload(freqs), len(parts)),
            whole.view(torch.int32).view(torch.uint32),
            whole,
            errors,
        )
        if self._patches.size:
            patches = upload(self._patches)
            for width in self._tables.widths:
                launcher.apply_patches(patches, tables.parts, width)
        return errors


def _checked_prefix(item: DecodeItem) -> RansPrefix:
    part = item.part
    if part.num_planes != 2:
        raise MalformedFileError(
            "a part coded by symbols has the wrong number of planes", expected=2, actual=part.num_planes
        )
    return parse_prefix(part.prefix, part.num_elems, part.word_bytes, part.block_elems)
