"""Decoding on the device: what an encoder left there, or parts that come from a file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from thinpoint.codec.contract import CodedPart
from thinpoint.codec.rans.spec import LANES, RansPrefix, parse_prefix
from thinpoint.device.contract import DecodeItem, item_named
from thinpoint.device.encoding import Batch
from thinpoint.device.kernels import fields as f
from thinpoint.device.launch import Launcher
from thinpoint.device.tables import PartShape, make_tables, starts, starts_within
from thinpoint.device.worklists import decode_programs, upload_tables
from thinpoint.errors import MalformedFileError

MAX_ELEMS = 1 << 26
MAX_BLOCK_SEGMENTS = 1024
STEPS_AT = 4
"""Where a prefix says how many steps a segment has."""
_NO_PROFILE = np.zeros(0, np.int32)
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


def block_sizes(item: DecodeItem) -> np.ndarray:
    """int64, shape (planes, num_blocks): stored bytes of the item's blocks."""
    return item.part.block_sizes[:, item.first_block : item.first_block + item.num_blocks]


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
        self._fill_parts()
        self._place_blocks(chosen)

    def _fill_parts(self) -> None:
        items, prefixes, parts = self._items, self._prefixes, self._tables.parts
        start = np.array([item.first_block * item.part.block_elems for item in items], np.int64)
        word_bytes = np.array([item.part.word_bytes for item in items], np.int64)
        address = np.array([item.out.data_ptr() for item in items], np.int64)
        num_words = np.array([item.out.numel() for item in items], np.int64) // word_bytes
        parts[:, f.ADDRESS.value] = address - start * word_bytes
        parts[:, f.WINDOW_BASE.value] = [prefix.window_base for prefix in prefixes]
        parts[:, f.SINGLE.value] = [prefix.single_symbol for prefix in prefixes]
        parts[:, f.MEANS_STRIDE.value] = [prefix.means.size > 1 for prefix in prefixes]
        parts[:, f.MEANS_AT.value] = parts[:, f.GROUP_MEANS_AT.value]
        self._means = np.zeros(self._tables.num_means, np.int32)
        for at, prefix in zip(parts[:, f.MEANS_AT.value].tolist(), prefixes, strict=True):
            self._means[at : at + prefix.means.size] = prefix.means
        profiles = [_NO_PROFILE if prefix.profile is None else prefix.profile for prefix in prefixes]
        columns = np.array([profile.size for profile in profiles], np.int64)
        parts[:, f.HAS_PROFILE.value] = columns > 0
        parts[:, f.ROW_ELEMS.value] = columns
        parts[:, f.PROFILE_AT.value] = starts(columns)
        self._profiles = np.concatenate([*profiles, np.zeros(1, np.int32)])
        part = np.repeat(np.arange(len(items)), [prefix.patch_positions.size for prefix in prefixes])
        position = np.concatenate([prefix.patch_positions for prefix in prefixes])
        top = np.concatenate([prefix.patch_tops for prefix in prefixes]).astype(np.int64)
        is_inside = (position >= start[part]) & (position < (start + num_words)[part])
        self._patches = (part << 42 | position << 16 | top)[is_inside]

    def _place_blocks(self, chosen: Sequence[int]) -> None:
        """To be called when parts are filled."""
        tables = self._tables
        raw, entropy = np.concatenate([block_sizes(item) for item in self._items], axis=1)
        single = (tables.parts[:, f.SINGLE.value] >= 0)[tables.block_part]
        wrong = (raw != tables.raw_block_bytes) | (single & (entropy > 0))
        if wrong.any():
            with item_named(chosen[int(tables.block_part[wrong.argmax()])]):
                raise MalformedFileError("a block of a part has the wrong size")
        at = np.array([item.plane_offsets for item in self._items], np.int64)
        num_blocks = np.array([item.num_blocks for item in self._items], np.int64)
        tables.blocks[:, f.BLOCK_AT.value] = at[tables.block_part, 1] + starts_within(entropy, num_blocks)
        tables.blocks[:, f.BLOCK_BYTES.value] = entropy
        # Segments are in the order of their parts.
        part, raw_at = tables.segments[:, f.SEG_PART.value], tables.segments[:, f.SEG_RAW_AT.value]
        first_of_part = raw_at[np.searchsorted(part, np.arange(len(self._items)))]
        raw_at += (at[:, 0] // 4 - first_of_part)[part]

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
        freqs = np.concatenate([prefix.freqs for prefix in self._prefixes]).astype(np.int32)
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
