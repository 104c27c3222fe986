"""Encoding a wave of parts on the device: plan and code all at once, look at the outcome once, run again what was misjudged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from thinpoint.codec import zstd
from thinpoint.codec.contract import PartSpec
from thinpoint.codec.plan import MIN_CODED_ELEMS
from thinpoint.codec.transforms.predict import GROUP_ELEMS
from thinpoint.codec.transforms.split import MANTISSA_BITS, Split, choose_split
from thinpoint.device.contract import EncodeItem
from thinpoint.device.kernels import fields as f
from thinpoint.device.launch import Launcher
from thinpoint.device.plans import Plans
from thinpoint.device.runs import Assumption, Facts, Run, Runner, Shapes, Work, shapes_of
from thinpoint.device.worklists import DeviceTables
from thinpoint.errors import StateChangedError

ZSTD_GAIN_PERCENT = 95
_KNOWN_WAVES = 128
"""Waves whose tables are kept; those of 256 MiB take about 0.3 MB on the device."""


def first_guess(spec: PartSpec, word_bytes: int) -> Split:
    """The split of a part that looks as parts of its dtype and role usually do."""
    sign = 1 << (8 * word_bytes - 1)
    always_positive = spec.role == "second_moment"
    split = choose_split(spec.dtype, word_bytes, 2 * sign - 1 - (sign if always_positive else 0), 0)
    assert split is not None
    return split


def is_coded(num_bytes: int, word_bytes: int, spec: PartSpec) -> bool:
    """Whether the device codes a part by symbols; everything else is small or no float, and the host's."""
    is_float = spec.dtype in MANTISSA_BITS or (word_bytes == 1 and spec.dtype.startswith("float8"))
    return is_float and num_bytes // word_bytes >= MIN_CODED_ELEMS


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
        encoded: recorded when all of it was encoded; None where there is no CUDA device.
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
    encoded: torch.cuda.Event | None

    def stored_bytes(self) -> np.ndarray:
        """int64: prefix and planes of each part."""
        owner, num_parts = self.tables.host.block_part, self.accepted.size
        raw = np.bincount(owner, self.tables.host.raw_block_bytes, num_parts).astype(np.int64)
        return self.prefix_bytes + raw + np.bincount(owner, self.entropy_sizes, num_parts).astype(np.int64)


def _plainly_good(facts: Facts, stored: np.ndarray) -> np.ndarray:
    """bool: parts that are as usual and clearly smaller than raw; the others get a closer look."""
    parts, masks = facts.parts, facts.masks
    word_bits = parts[:, f.WORD_BITS.value]
    or_mask, nor_mask = masks[:, f.OR_MASK.value], masks[:, f.NOR_MASK.value]
    sign_or, sign_nor = (or_mask >> (word_bits - 1)) & 1, (nor_mask >> (word_bits - 1)) & 1
    sign_as_assumed = np.where(parts[:, f.SIGN_STORED.value] != 0, sign_or & sign_nor, 1 - sign_or)
    usual = (word_bits > 8) & (parts[:, f.TRAILING_ZEROS.value] == 0) & (parts[:, f.SIGN_VALUE.value] == 0)
    usual &= (or_mask & nor_mask & 1 == 1) & (sign_as_assumed == 1)
    usual &= (masks[:, f.NUM_IDLE.value] == 0) & (parts[:, f.ORDER_AT.value] < 0)
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


@dataclass(kw_only=True)
class _Known:
    """What is known of a wave by the shapes of its parts.

    Attributes:
        members: int64, indices of the parts that the device codes. host: of the others.
        assumptions: what was true of the members the last time; bytes do not depend on it.
        work: made of them when it is needed.
    """

    members: np.ndarray
    host: list[int]
    assumptions: list[Assumption]
    work: Work | None = None


@dataclass(kw_only=True)
class Flight:
    """A wave between `Encoder.begin` and `Encoder.finish`, which takes the run from it."""

    items: Sequence[EncodeItem]
    known: _Known
    run: Run | None


class Encoder:
    """Encodes waves on one device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._runner = Runner(launcher)
        # States are saved over and over: the tables for a wave are made and uploaded once, and what was true of its parts
        # the last time is taken for granted the next time.
        self._known: dict[Shapes, _Known] = {}

    def encode(self, items: Sequence[EncodeItem]) -> Outcome:
        """Code all parts; waits for the device once, and once more if parts were not as they usually are.

        Raises:
            StateChangedError: words changed while they were being coded.
        """
        return self.finish(self.begin(items))

    def begin(self, items: Sequence[EncodeItem]) -> Flight:
        """Launch the coding of all parts as if they were as usual; waits for nothing."""
        shapes = shapes_of(items)
        known = self._known.get(shapes)
        if known is None:
            known = self._learn(shapes)
        run = None
        if known.members.size:
            members = known.members.tolist()
            if known.work is None:
                known.work = self._runner.make_work([shapes[i] for i in members], known.assumptions)
            run = self._runner.launch([items[i] for i in members], known.work)
        return Flight(items=items, known=known, run=run)

    def finish(self, flight: Flight) -> Outcome:
        """What `begin` led to: waits for it, and codes again what was not as usual.

        Raises: as `encode`.
        """
        known, run, flight.run = flight.known, flight.run, None
        outcome = Outcome(batches=[], constants={}, raw=[], host=list(known.host))
        if run is None:
            return outcome
        again = self._land(run, known.members, outcome)
        if again:
            places = np.array(list(again))
            known.assumptions = [again.get(i, assumed) for i, assumed in enumerate(known.assumptions)]
            known.work = None
            own = [run.items[i] for i in again]
            second = self._runner.launch(own, self._runner.make_work(shapes_of(own), list(again.values())))
            if self._land(second, known.members[places], outcome):
                raise StateChangedError("a tensor changed while it was being saved")
        return outcome

    def _learn(self, shapes: Shapes) -> _Known:
        coded = np.array([is_coded(*shape) for shape in shapes], bool)
        members = np.flatnonzero(coded)
        guesses = [Assumption(split=first_guess(shapes[i][2], shapes[i][1])) for i in members.tolist()]
        if len(self._known) >= _KNOWN_WAVES:
            self._known.pop(next(iter(self._known)))
        known = _Known(members=members, host=np.flatnonzero(~coded).tolist(), assumptions=guesses)
        self._known[shapes] = known
        return known

    def _land(self, run: Run, members: np.ndarray, outcome: Outcome) -> dict[int, Assumption]:
        """Wait for a run over members of a wave and judge it.

        Returns:
            What is true of the run's parts about which the assumptions were wrong, by their place in the run.
        """
        facts = self._runner.facts(run)
        if facts.num_patches > run.patches.numel():
            run.patches = self._launcher.empty(facts.num_patches, torch.int64)
            run.parts.view(len(facts.parts), -1)[:, f.NUM_PATCHES.value] = 0
            run.counters[:1].zero_()
            self._runner.code(run)
            facts = self._runner.facts(run)
        assert run.blocks is not None and run.found is not None
        batch = Batch(
            members=members,
            assumptions=run.work.assumptions,
            accepted=np.zeros(len(facts.parts), bool),
            tables=run.work.tables,
            parts=run.parts,
            host_parts=facts.parts,
            plans=run.plans,
            raw=run.raw,
            entropy=run.entropy,
            entropy_sizes=facts.sizes,
            blocks=run.blocks,
            patches=run.patches[: facts.num_patches],
            prefix_bytes=_prefix_bytes(facts.parts, facts.masks),
            encoded=run.found.done,
        )
        again = self._judge(run.items, run.work.assumptions, facts, batch, outcome)
        if batch.accepted.any():
            outcome.batches.append(batch)
        return again

    def _judge(
        self,
        items: list[EncodeItem],
        assumptions: list[Assumption],
        facts: Facts,
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
            changed = facts.kept_changed and elide
            if split != assumed.split or elide != (assumed.kept is not None) or changed:
                kept = None
                if elide:
                    if kept_flags is None:
                        kept_flags = batch.plans.kept.cpu().numpy() != 0
                    at = int(facts.parts[p, f.GROUP_MEANS_AT.value])
                    kept = kept_flags[at : at + num_groups]
                again[int(p)] = Assumption(split=split, kept=kept)
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
        sample = torch.cat([item.words[start:end] for start, end in zstd.sample_ranges(num_bytes)])
        return zstd.bits_from_sample(sample.cpu().numpy(), num_bytes) * 100 < bits * ZSTD_GAIN_PERCENT


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
