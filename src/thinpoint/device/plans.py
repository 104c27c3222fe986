"""Planning on the device: what is in the parts of a batch, and the tables that they are coded with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from thinpoint.device.kernels import fields, plan, scan
from thinpoint.device.worklists import PROFILE_COLUMNS, SCAN_STEP, TABLE_STEP, DeviceTables, PlanTables

if TYPE_CHECKING:
    from thinpoint.device.launch import Launcher

SCAN_GROUPS, SCAN_WARPS = 4, 1
HISTOGRAM_GROUPS = 16
PROFILE_ROWS = 32


@dataclass(kw_only=True)
class Plans:
    """What planning made, on the device.

    Attributes:
        numbers: int32, all that prefixes are made of; `layout` says how many are means, profiles, and freqs[parts, 256].
        kept: uint8 flags of groups.
        entries: int64[parts, 256], the encoder's table.
    """

    numbers: torch.Tensor
    layout: tuple[int, int, int]
    kept: torch.Tensor
    entries: torch.Tensor

    def __post_init__(self) -> None:
        self.means, self.profiles, self.freqs = self.numbers.split(self.layout)


def make_plans(
    launcher: Launcher,
    tables: DeviceTables,
    lists: PlanTables,
    parts: torch.Tensor,
    masks: torch.Tensor,
    aligned: bool,
) -> Plans:
    """Scan all parts and plan them; fills the second block of columns of `parts`, and `masks` (zeros before)."""
    host = tables.host
    num_parts = len(host.parts)
    # Pieces of whole 16 bytes, as kernels want them.
    layout = (_padded4(host.num_means), _padded4(lists.num_profile), num_parts * 256)
    plans = Plans(
        numbers=launcher.empty(sum(layout), torch.int32),
        layout=layout,
        kept=launcher.empty(host.num_means, torch.uint8),
        entries=launcher.empty(num_parts * 256, torch.int64),
    )
    _scan(launcher, tables, lists, parts, masks, plans, aligned)
    if lists.columns is not None:
        _profile(launcher, lists, parts, plans)
    _choose(launcher, tables, lists, parts, plans)
    return plans


def _scan(
    launcher: Launcher,
    tables: DeviceTables,
    lists: PlanTables,
    parts: torch.Tensor,
    masks: torch.Tensor,
    plans: Plans,
    aligned: bool,
) -> None:
    """Means of groups and of parts, which groups are coded, and which bits occur."""
    for width, chunks in lists.scan.items():
        launcher.run(
            scan.scan_groups,
            (len(chunks),),
            chunks,
            parts,
            plans.means,
            plans.kept,
            masks,
            WORD_BITS=width,
            GROUPS=SCAN_GROUPS,
            ROUNDS=SCAN_STEP // SCAN_GROUPS,
            ALIGNED=aligned,
            num_warps=SCAN_WARPS,
        )
    num_parts = len(tables.host.parts)
    launcher.run(plan.part_means, (num_parts,), parts, tables.order, plans.means, num_warps=4)


def _profile(launcher: Launcher, lists: PlanTables, parts: torch.Tensor, plans: Plans) -> None:
    """The column profiles of the parts that may get one."""
    assert lists.columns is not None
    launcher.run(
        plan.column_sums,
        (len(lists.columns),),
        lists.columns,
        parts,
        plans.means,
        plans.profiles,
        COLUMNS=PROFILE_COLUMNS,
        ROWS=PROFILE_ROWS,
        num_warps=4,
    )
    launcher.run(
        plan.finish_profiles,
        (len(lists.profiled),),
        lists.profiled,
        parts,
        plans.profiles,
        TILE=1024,
        num_warps=4,
    )


def _choose(
    launcher: Launcher, tables: DeviceTables, lists: PlanTables, parts: torch.Tensor, plans: Plans
) -> None:
    """From a sample how each part is predicted and its window, from a larger one the frequencies in it."""
    num_parts = len(tables.host.parts)
    num_sampled = num_parts * fields.CANDIDATES.value * fields.HIST_COLUMNS.value
    histograms = launcher.zeros(num_sampled + lists.num_rows * 256, torch.int32)
    large = histograms[num_sampled:]
    planned = (parts, tables.order, plans.means, plans.profiles)
    for width, rows in lists.candidates.items():
        launcher.run(
            plan.sample_histograms,
            (len(rows), 256 // HISTOGRAM_GROUPS),
            rows,
            *planned,
            histograms,
            WIDTH=width,
            GROUPS=HISTOGRAM_GROUPS,
            num_warps=4,
        )
    launcher.run(plan.choose_candidates, (num_parts,), parts, histograms, launcher.log2, num_warps=4)
    for width, chunks in lists.chunks.items():
        launcher.run(
            plan.table_histograms,
            (len(chunks),),
            chunks,
            *planned,
            large,
            WIDTH=width,
            GROUPS=HISTOGRAM_GROUPS,
            ROUNDS=TABLE_STEP // HISTOGRAM_GROUPS,
            num_warps=4,
        )
    launcher.run(
        plan.make_tables,
        (num_parts,),
        parts,
        histograms,
        lists.rows,
        large,
        plans.freqs,
        plans.entries,
        num_warps=4,
    )


def _padded4(size: int) -> int:
    return -(-max(size, 1) // 4) * 4
