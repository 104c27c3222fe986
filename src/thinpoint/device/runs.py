"""Runs over parts on the device under assumptions: the work that does not depend on values, launching it, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from thinpoint.codec.contract import PartSpec
from thinpoint.codec.plan import SEGMENT_ELEMS
from thinpoint.codec.transforms.predict import GROUP_ELEMS, MIN_PROFILE_ROWS
from thinpoint.codec.transforms.split import Split
from thinpoint.device.contract import EncodeItem
from thinpoint.device.kernels import fields as f
from thinpoint.device.launch import Launcher, Report
from thinpoint.device.plans import Plans, make_plans
from thinpoint.device.tables import PartShape, make_tables
from thinpoint.device.worklists import DeviceTables, PlanTables, make_plan_tables, upload_tables

MIN_PATCHES = 1 << 12
"""Room for patches at least; a wave with more is coded again with enough."""

Shapes = tuple[tuple[int, int, PartSpec], ...]
"""(bytes, bytes of a word, what is known) of each part of a wave."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """What is taken for granted about a part while it is coded.

    Attributes:
        split: fields of its words.
        kept: the groups that are coded, or None for all.
    """

    split: Split
    kept: np.ndarray | None = None


def shapes_of(items: Sequence[EncodeItem]) -> Shapes:
    return tuple([(item.words.numel(), item.word_bytes, item.spec) for item in items])


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run over some parts found out, in host memory. kept_changed: other groups are zero than was assumed."""

    parts: np.ndarray
    masks: np.ndarray
    sizes: np.ndarray
    kept_changed: bool

    @property
    def num_patches(self) -> int:
        return int(self.parts[:, f.NUM_PATCHES.value].sum())


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run does, on the device.

    Attributes:
        block_of_segment: int32.
        kept: where the groups of parts that leave some out have their flags (int64), and what those should be (uint8);
            None if every part codes all of its groups.
    """

    assumptions: list[Assumption]
    tables: DeviceTables
    lists: PlanTables
    block_of_segment: torch.Tensor
    kept: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(kw_only=True)
class Run:
    """Parts that are being coded on the device: what is read and written, and the report on its way to the host.

    Attributes:
        counters: int64[2]: patches, groups that are not zero or not as was assumed.
    """

    items: list[EncodeItem]
    work: Work
    report: torch.Tensor
    parts: torch.Tensor
    sizes: torch.Tensor
    counters: torch.Tensor
    plans: Plans
    raw: torch.Tensor
    scratch: torch.Tensor
    counts: torch.Tensor
    states: torch.Tensor
    entropy: torch.Tensor
    patches: torch.Tensor
    blocks: torch.Tensor | None = None
    found: Report | None = None


class Runner:
    """Launches runs on one device; waits for nothing but reports."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def make_work(self, shapes: Sequence[tuple[int, int, PartSpec]], assumptions: list[Assumption]) -> Work:
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
        return Work(
            assumptions=assumptions,
            tables=upload_tables(tables, upload),
            lists=lists,
            block_of_segment=upload(np.repeat(np.arange(len(blocks), dtype=np.int32), blocks)),
            kept=self._expected(parts, assumptions),
        )

    def _expected(
        self, parts: np.ndarray, assumptions: list[Assumption]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        elided = [(p, a.kept) for p, a in enumerate(assumptions) if a.kept is not None]
        if not elided:
            return None
        at = [parts[p, f.GROUP_MEANS_AT.value] + np.arange(kept.size) for p, kept in elided]
        flags = np.concatenate([kept for _, kept in elided]).astype(np.uint8)
        return self._launcher.upload(np.concatenate(at)), self._launcher.upload(flags)

    def launch(self, items: list[EncodeItem], work: Work) -> Run:
        """Everything that codes the parts; waits for nothing."""
        launcher, host = self._launcher, work.tables.host
        num_parts, num_blocks = len(host.parts), len(host.blocks)
        addresses = np.array([item.words.data_ptr() for item in items], np.int64)
        columns, mask_columns = f.PART_COLUMNS.value, f.MASK_COLUMNS.value
        # Pieces of whole 16 bytes, as kernels want them.
        layout = [num_parts * columns, num_parts * mask_columns, num_blocks + num_blocks % 2, 2]
        fresh = np.zeros(sum(layout), np.int64)
        own_columns = fresh[: layout[0]].reshape(num_parts, columns)
        own_columns[...] = host.parts
        own_columns[:, f.ADDRESS.value] = addresses
        # All that the host will want to know lies together: one copy up, one down.
        report = launcher.upload(fresh)
        parts, masks, sizes, counters = report.split(layout)
        aligned = bool((addresses % 16 == 0).all())
        plans = make_plans(launcher, work.tables, work.lists, parts, masks, aligned)
        if work.kept is not None:
            at, flags = work.kept
            counters[1] = (plans.kept[at] != flags).sum()
        # As large as it may get: to wait for its size would leave the device idle.
        most = len(host.segments) * 4 * 33 + 2 * host.num_scratch + 8 * num_blocks
        run = Run(
            items=items,
            work=work,
            report=report,
            parts=parts,
            sizes=sizes,
            counters=counters,
            plans=plans,
            raw=launcher.empty(host.num_raw_words, torch.int32).view(torch.uint32),
            scratch=launcher.empty(host.num_scratch, torch.int16).view(torch.uint16),
            counts=launcher.empty(len(host.segments), torch.int32),
            states=launcher.empty(len(host.segments) * 32, torch.int32).view(torch.uint32),
            entropy=launcher.empty(-(-most // 8), torch.int64).view(torch.uint8),
            patches=launcher.empty(max(MIN_PATCHES, host.num_scratch // 256), torch.int64),
        )
        self.code(run)
        return run

    def code(self, run: Run) -> None:
        """Encode and compact, and begin to copy the report."""
        launcher, work = self._launcher, run.work
        launcher.encode(
            work.tables,
            run.parts,
            run.plans,
            run.raw,
            run.scratch,
            run.counts,
            run.states,
            run.patches,
            run.counters,
        )
        run.blocks = launcher.compact(
            work.tables,
            work.block_of_segment,
            run.parts,
            run.sizes,
            run.counts,
            run.states,
            run.scratch,
            run.entropy,
        )
        run.found = launcher.report(run.report)

    def facts(self, run: Run) -> Facts:
        """Wait for the device and take the report apart."""
        assert run.found is not None
        run.found.wait()
        words = run.found.words
        num_parts, num_blocks = len(run.work.tables.host.parts), len(run.work.tables.host.blocks)
        columns, masks = f.PART_COLUMNS.value, f.MASK_COLUMNS.value
        parts, mask_values, sizes = np.split(words, np.cumsum([num_parts * columns, num_parts * masks]))
        return Facts(
            parts=parts.reshape(num_parts, columns),
            masks=mask_values.reshape(num_parts, masks),
            sizes=sizes[:num_blocks],
            kept_changed=bool(words[-1]),
        )
