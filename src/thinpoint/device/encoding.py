"""Encoding a wave of parts on the device: plan and code all at once, look at the outcome once, run again what was misjudged."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from thinpoint.codec import zstd
from thinpoint.codec.contract import PartSpec
from thinpoint.codec.plan import MIN_CODED_ELEMS, SEGMENT_ELEMS
from thinpoint.codec.transforms.predict import GROUP_ELEMS, MIN_PROFILE_ROWS
from thinpoint.codec.transforms.split import MANTISSA_BITS, Split, choose_split
from thinpoint.device.contract import EncodeItem
from thinpoint.device.kernels import fields as f
from thinpoint.device.launch import Launcher, Plans
from thinpoint.device.tables import PartShape, make_tables
from thinpoint.device.worklists import DeviceTables, PlanTables, make_plan_tables, upload_tables
from thinpoint.errors import StateChangedError

ZSTD_GAIN_PERCENT = 95
_CACHED_WAVES = 8
MIN_PATCHES = 1 << 12
"""Room for patches at least; a wave with more is coded again with enough."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """What is taken for granted about a part while it is coded.

    Attributes:
        split: fields of its words.
        kept: the groups that are coded, or None for all.
    """

    split: Split
    kept: np.ndarray | None = None


def first_guess(spec: PartSpec, word_bytes: int) -> Split:
    """The split of a part that looks as parts of its dtype and role usually do."""
    sign = 1 << (8 * word_bytes - 1)
    always_positive = spec.role == "second_moment"
    split = choose_split(spec.dtype, word_bytes, 2 * sign - 1 - (sign if always_positive else 0), 0)
    assert split is not None
    return split


def is_coded(item: EncodeItem) -> bool:
    """Whether the device codes a part by symbols; everything else is small or no float, and the host's."""
    is_float = item.spec.dtype in MANTISSA_BITS or (
        item.word_bytes == 1 and item.spec.dtype.startswith("float8")
    )
    return is_float and item.words.numel() // item.word_bytes >= MIN_CODED_ELEMS


@dataclass(kw_only=True)
class Batch:
    """Parts of a wave that were coded together.

    Attributes:
        members: int64, their indices in the wave.
        assumptions: splits and coded groups of the parts.
        accepted: bool, whether the outcome counts; other parts are stored in another way.
        tables: the work.
        parts: int64[parts, PART_COLUMNS] on the device, as planned; host_parts: the same in host memory.
        plans: means, profiles, frequencies on the device.
        raw: the raw plane, uint32. entropy: the entropy plane, uint8.
        entropy_sizes: int64, bytes of each block of the entropy plane, one after the other.
        blocks: the table of blocks on the device, with place and size.
        patches: int64 on the device, in any order.
        prefix_bytes: int64, size of each part's prefix.
    """

    members: np.ndarray
    assumptions: list[Assumption]
    accepted: np.ndarray
    tables: DeviceTables
    parts: torch.Tensor
    host_parts: np.ndarray
    plans: Plans
    raw: torch.Tensor
    entropy: torch.Tensor
    entropy_sizes: np.ndarray
    blocks: torch.Tensor
    patches: torch.Tensor
    prefix_bytes: np.ndarray

    def stored_bytes(self) -> np.ndarray:
        """int64: prefix and planes of each part."""
        owner, num_parts = self.tables.host.block_part, self.accepted.size
        raw = np.bincount(owner, self.tables.host.raw_block_bytes, num_parts).astype(np.int64)
        return self.prefix_bytes + raw + np.bincount(owner, self.entropy_sizes, num_parts).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a run over some parts found out, in host memory."""

    parts: np.ndarray
    masks: np.ndarray
    sizes: np.ndarray

    @property
    def num_patches(self) -> int:
        return int(self.parts[:, f.NUM_PATCHES.value].sum())


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a run does, on the device. block_of_segment: int32."""

    assumptions: list[Assumption]
    tables: DeviceTables
    lists: PlanTables
    block_of_segment: torch.Tensor


def _plainly_good(facts: _Facts, stored: np.ndarray) -> np.ndarray:
    """bool: parts that are as usual and clearly smaller than raw; the others get a closer look."""
    parts, masks = facts.parts, facts.masks
    word_bits = parts[:, f.WORD_BITS.value]
    or_mask, nor_mask = masks[:, f.OR_MASK.value], masks[:, f.NOR_MASK.value]
    sign_or, sign_nor = (or_mask >> (word_bits - 1)) & 1, (nor_mask >> (word_bits - 1)) & 1
    sign_as_assumed = np.where(parts[:, f.SIGN_STORED.value] != 0, sign_or & sign_nor, 1 - sign_or)
    usual = (word_bits > 8) & (parts[:, f.TRAILING_ZEROS.value] == 0) & (parts[:, f.SIGN_VALUE.value] == 0)
    usual &= (or_mask & nor_mask & 1 == 1) & (sign_as_assumed == 1) & (masks[:, f.NUM_IDLE.value] == 0)
    raw_bits = word_bits * parts[:, f.NUM_ELEMS.value]
    estimate = parts[:, f.ESTIMATED_BITS.value]
    good: np.ndarray = usual & (2 * estimate >= raw_bits) & (estimate < raw_bits) & (8 * stored < raw_bits)
    return good


@dataclass(kw_only=True)
class Outcome:
    """How the parts of a wave are stored.

    Attributes:
        batches: parts coded by symbols.
        constants: index in the wave -> the word that all words of the part equal.
        raw: indices of parts stored as they are.
        host: indices of parts that the host's codecs serve better.
    """

    batches: list[Batch]
    constants: dict[int, int]
    raw: list[int]
    host: list[int]


class Encoder:
    """Encodes waves on one device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        # States are saved over and over: the tables for a wave are made and uploaded once.
        self._usual_work = functools.lru_cache(maxsize=_CACHED_WAVES)(self._make_usual_work)

    def encode(self, items: Sequence[EncodeItem]) -> Outcome:
        """Code all parts; waits for the device once, and once more if parts were not as they usually are.

        Raises:
            StateChangedError: words changed while they were being coded.
        """
        outcome = Outcome(batches=[], constants={}, raw=[], host=[])
        coded = np.array([is_coded(item) for item in items], bool)
        outcome.host = np.flatnonzero(~coded).tolist()
        again = self._run(items, np.flatnonzero(coded), None, outcome)
        if again and self._run(items, np.array(list(again)), list(again.values()), outcome):
            raise StateChangedError("a tensor changed while it was being saved")
        return outcome

    def _run(
        self,
        items: Sequence[EncodeItem],
        members: np.ndarray,
        assumptions: list[Assumption] | None,
        outcome: Outcome,
    ) -> dict[int, Assumption]:
        """Code parts under assumptions, by default the usual ones; returns those that were wrong, with what is true."""
        if not members.size:
            return {}
        launcher = self._launcher
        own = [items[i] for i in members]
        if assumptions is None:
            work = self._usual_work(tuple((x.words.numel(), x.word_bytes, x.spec) for x in own))
        else:
            work = self._make_work(tuple((x.words.numel(), x.word_bytes, x.spec) for x in own), assumptions)
        host = work.tables.host
        num_parts, num_blocks = len(host.parts), len(host.blocks)
        addresses = np.array([x.words.data_ptr() for x in own], np.int64)
        columns, mask_columns = f.PART_COLUMNS.value, f.MASK_COLUMNS.value
        # Pieces of whole 16 bytes, as kernels want them.
        layout = [num_parts * columns, num_parts * mask_columns, num_blocks + num_blocks % 2, 1]
        fresh = np.zeros(sum(layout), np.int64)
        own_columns = fresh[: layout[0]].reshape(num_parts, columns)
        own_columns[...] = host.parts
        own_columns[:, f.ADDRESS.value] = addresses
        # All that the host will want to know lies together: one copy up, one down.
        report = launcher.upload(fresh)
        parts, masks, sizes, num_patches = report.split(layout)
        aligned = bool((addresses % 16 == 0).all())
        plans = launcher.plan(work.tables, work.lists, parts, masks, aligned)
        raw = launcher.empty(host.num_raw_words, torch.int32).view(torch.uint32)
        scratch = launcher.empty(host.num_scratch, torch.int16).view(torch.uint16)
        counts = launcher.empty(len(host.segments), torch.int32)
        states = launcher.empty(len(host.segments) * 32, torch.int32).view(torch.uint32)
        # As large as it may get: to wait for its size would leave the device idle.
        most = len(host.segments) * 4 * 33 + 2 * host.num_scratch + 8 * num_blocks
        entropy = launcher.empty(-(-most // 8), torch.int64).view(torch.uint8)
        capacity = max(MIN_PATCHES, host.num_scratch // 256)
        while True:
            patches = launcher.empty(capacity, torch.int64)
            launcher.encode(work.tables, parts, plans, raw, scratch, counts, states, patches, num_patches)
            blocks = launcher.compact(
                work.tables, work.block_of_segment, parts, sizes, counts, states, scratch, entropy
            )
            facts = self._facts(report, num_parts, num_blocks)
            if facts.num_patches <= capacity:
                break
            capacity = facts.num_patches
            parts.view(num_parts, -1)[:, f.NUM_PATCHES.value] = 0
            num_patches.zero_()
        batch = Batch(
            members=members,
            assumptions=work.assumptions,
            accepted=np.zeros(num_parts, bool),
            tables=work.tables,
            parts=parts,
            host_parts=facts.parts,
            plans=plans,
            raw=raw,
            entropy=entropy,
            entropy_sizes=facts.sizes,
            blocks=blocks,
            patches=patches[: facts.num_patches],
            prefix_bytes=_prefix_bytes(facts.parts, facts.masks),
        )
        again = self._judge(own, work.assumptions, facts, batch, outcome)
        if batch.accepted.any():
            outcome.batches.append(batch)
        return again

    def _make_work(
        self, shapes: tuple[tuple[int, int, PartSpec], ...], assumptions: list[Assumption]
    ) -> _Work:
        """Everything about a run that does not depend on the values."""
        upload = self._launcher.upload
        tables = make_tables(
            [
                PartShape(num_elems=num_bytes // word_bytes, split=a.split, kept=a.kept)
                for (num_bytes, word_bytes, _), a in zip(shapes, assumptions, strict=True)
            ]
        )
        parts = tables.parts
        num_elems, coded = parts[:, f.NUM_ELEMS.value], parts[:, f.NUM_CODED.value]
        row_elems = np.array([spec.row_elems for _, _, spec in shapes], np.int64)
        enough = (
            (row_elems > 0) & (num_elems >= MIN_PROFILE_ROWS * row_elems) & (parts[:, f.WORD_BITS.value] > 8)
        )
        parts[:, f.ROW_ELEMS.value] = np.where(enough & (num_elems > GROUP_ELEMS), row_elems, 0)
        parts[:, f.PROFILE_ALONE.value] = [spec.role != "weight" for _, _, spec in shapes]
        elided = parts[:, f.ORDER_AT.value] >= 0
        parts[:, f.FIXED_BITS.value] = (
            coded * parts[:, f.RAW_BITS.value]
            + np.where(elided, -(-num_elems // GROUP_ELEMS), 0)
            + -(-num_elems // SEGMENT_ELEMS) * 33 * 32
        )
        lists = make_plan_tables(parts, upload)
        blocks = tables.blocks[:, f.BLOCK_SEGMENTS.value]
        return _Work(
            assumptions=assumptions,
            tables=upload_tables(tables, upload),
            lists=lists,
            block_of_segment=upload(np.repeat(np.arange(len(blocks), dtype=np.int32), blocks)),
        )

    def _make_usual_work(self, shapes: tuple[tuple[int, int, PartSpec], ...]) -> _Work:
        return self._make_work(
            shapes, [Assumption(split=first_guess(spec, word_bytes)) for _, word_bytes, spec in shapes]
        )

    def _facts(self, report: torch.Tensor, num_parts: int, num_blocks: int) -> _Facts:
        """Wait for the device and take the report apart."""
        values = report.cpu().numpy()
        columns, masks = f.PART_COLUMNS.value, f.MASK_COLUMNS.value
        parts, mask_values, sizes = np.split(values, np.cumsum([num_parts * columns, num_parts * masks]))
        return _Facts(
            parts=parts.reshape(num_parts, columns),
            masks=mask_values.reshape(num_parts, masks),
            sizes=sizes[:num_blocks],
        )

    def _judge(
        self,
        items: list[EncodeItem],
        assumptions: list[Assumption],
        facts: _Facts,
        batch: Batch,
        outcome: Outcome,
    ) -> dict[int, Assumption]:
        """Sort parts into those that count, those stored in another way, and those to be coded again."""
        again: dict[int, Assumption] = {}
        kept_flags: np.ndarray | None = None
        stored = batch.stored_bytes()
        batch.accepted[:] = _plainly_good(facts, stored)
        for p in np.flatnonzero(~batch.accepted):
            item, assumed, member = items[p], assumptions[p], int(batch.members[p])
            word_bits = 8 * item.word_bytes
            or_mask = int(facts.masks[p, f.OR_MASK.value]) & ((1 << word_bits) - 1)
            and_mask = ~int(facts.masks[p, f.NOR_MASK.value]) & ((1 << word_bits) - 1)
            if or_mask == and_mask:
                outcome.constants[member] = or_mask
                continue
            split = choose_split(item.spec.dtype, item.word_bytes, or_mask, and_mask)
            assert split is not None
            num_groups = -(-(item.words.numel() // item.word_bytes) // GROUP_ELEMS)
            num_idle = int(facts.masks[p, f.NUM_IDLE.value])
            elide = num_idle * GROUP_ELEMS * max(split.raw_bits, 1) > num_groups
            if split != assumed.split or elide != (assumed.kept is not None):
                kept = None
                if elide:
                    if kept_flags is None:
                        kept_flags = batch.plans.kept.cpu().numpy() != 0
                    at = int(facts.parts[p, f.GROUP_MEANS_AT.value])
                    kept = kept_flags[at : at + num_groups]
                again[member] = Assumption(split=split, kept=kept)
                continue
            raw_bits = 8 * item.words.numel()
            estimate = int(facts.parts[p, f.ESTIMATED_BITS.value])
            if 2 * estimate < raw_bits and self._zstd_is_better(item, min(estimate, raw_bits)):
                outcome.host.append(member)
            elif estimate >= raw_bits or stored[p] >= item.words.numel():
                outcome.raw.append(member)
            else:
                batch.accepted[p] = True
        return again

    def _zstd_is_better(self, item: EncodeItem, bits: int) -> bool:
        """Whether a sample says that zstd takes clearly fewer than `bits`; `codec.backend` decides likewise."""
        num_bytes = item.words.numel()
        pieces = [item.words[start:end].cpu().numpy() for start, end in zstd.sample_ranges(num_bytes)]
        return zstd.bits_from_sample(np.concatenate(pieces), num_bytes) * 100 < bits * ZSTD_GAIN_PERCENT


def _prefix_bytes(parts: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """int64: size of each part's prefix as `rans.spec.pack_prefix` makes it."""
    num_groups = -(-parts[:, f.NUM_ELEMS.value] // GROUP_ELEMS)
    patches = parts[:, f.NUM_PATCHES.value]
    size = 32 + 4 * patches + _padded4(2 * patches)
    size += np.where(parts[:, f.SINGLE.value] >= 0, 0, _padded4(parts[:, f.TABLE_BYTES.value]))
    columns = parts[:, f.ROW_ELEMS.value] * np.where(parts[:, f.PROFILE_RANGE.value] > 255, 2, 1)
    size += np.where(parts[:, f.HAS_PROFILE.value] != 0, _padded4(columns), 0)
    highest, lowest = masks[:, f.HIGHEST_MEAN.value], f.MEAN_BOUND.value - masks[:, f.LOWEST_MEAN.value]
    means = num_groups * np.where((highest > 0) & (highest - lowest > 255), 2, 1)
    size += np.where(parts[:, f.MEANS_STRIDE.value] != 0, _padded4(means), 0)
    return size + np.where(parts[:, f.ORDER_AT.value] >= 0, _padded4(-(-num_groups // 8)), 0)


def _padded4(size: np.ndarray) -> np.ndarray:
    return -(-size // 4) * 4
