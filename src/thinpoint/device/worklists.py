"""Work lists on the device: which programs scan, plan, encode and decode what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from thinpoint.device.kernels import fields
from thinpoint.device.tables import PAIR, Tables, Variant

SCAN_STEP = 128
"""Groups that a program scans."""
TABLE_STEP = 64
"""Sampled groups that a program counts the symbols of."""
PROFILE_COLUMNS = 32
"""Columns that a program sums."""


class Uploader:
    """Moves small host arrays to the device: through page-locked memory where there is a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return host.clone()
        return host.pin_memory().to(self.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class DeviceTables:
    """`Tables` on the device. `parts` is a template: every use works on a copy with addresses filled in."""

    host: Tables
    parts: torch.Tensor
    segments: torch.Tensor
    blocks: torch.Tensor
    order: torch.Tensor
    whole: dict[Variant, torch.Tensor]
    general: dict[int, torch.Tensor]


def upload_tables(tables: Tables, upload: Uploader) -> DeviceTables:
    """Tables to the device."""
    return DeviceTables(
        host=tables,
        parts=upload(tables.parts),
        segments=upload(tables.segments),
        blocks=upload(tables.blocks),
        order=upload(tables.order),
        whole={variant: upload(programs) for variant, programs in tables.whole.items()},
        general={width: upload(programs) for width, programs in tables.general.items()},
    )


@dataclass(frozen=True, kw_only=True)
class PlanTables:
    """Which programs scan and plan which parts; lists on the device, by width of a word where kernels differ.

    Attributes:
        scan: int64[programs, 2], part and first group.
        candidates: int64[programs, 2], part and candidate.
        columns: int64[programs, 2], part and first column, or None.
        profiled: int64[parts that may get a profile].
        chunks: int64[programs, 3], part, first sampled group, row of the histogram.
        rows: int64[parts], row of the histogram of its table or -1.
        num_rows: rows of table histograms.
        num_profile: length of the array of profiles.
    """

    scan: dict[int, torch.Tensor]
    candidates: dict[int, torch.Tensor]
    columns: torch.Tensor | None
    profiled: torch.Tensor
    chunks: dict[int, torch.Tensor]
    rows: torch.Tensor
    num_rows: int
    num_profile: int


def make_plan_tables(parts: np.ndarray, upload: Uploader) -> PlanTables:
    """Lists for parts whose columns are filled; sets PROFILE_AT in them."""
    f = fields
    num_parts = len(parts)
    widths = parts[:, f.WORD_BITS.value]
    groups = -(-parts[:, f.NUM_ELEMS.value] // 256)
    candidates = parts[:, f.NUM_CANDIDATES.value]
    row_elems = parts[:, f.ROW_ELEMS.value]
    parts[:, f.PROFILE_AT.value] = np.cumsum(row_elems) - row_elems
    kinds = np.where((widths > 8) & (groups > 1), np.where(row_elems > 0, 3, 2), 1)
    counts = candidates // fields.SAMPLE_DIVISOR.value
    large = counts > fields.SAMPLE_GROUPS.value
    rows = np.where(large, np.cumsum(large) - 1, -1)

    def spread(per_part: np.ndarray, step: int) -> np.ndarray:
        owner = np.repeat(np.arange(num_parts), per_part)
        index = np.arange(owner.size) - np.repeat(np.cumsum(per_part) - per_part, per_part)
        return np.stack([owner, index * step], 1)

    scans = spread(-(-groups // SCAN_STEP), SCAN_STEP)
    tried = spread(kinds, 1)
    chunks = spread(np.where(large, -(-counts // TABLE_STEP), 0), TABLE_STEP)
    chunks = np.concatenate([chunks, rows[chunks[:, :1]]], 1)
    columns = spread(-(-row_elems // PROFILE_COLUMNS), PROFILE_COLUMNS)

    def by_width(table: np.ndarray) -> dict[int, torch.Tensor]:
        own = widths[table[:, 0]]
        return {int(w): upload(table[own == w]) for w in np.unique(own)}

    return PlanTables(
        scan=by_width(scans),
        candidates=by_width(tried),
        columns=upload(columns) if len(columns) else None,
        profiled=upload(np.flatnonzero(row_elems > 0)),
        chunks=by_width(chunks),
        rows=upload(rows),
        num_rows=int(large.sum()),
        num_profile=int(row_elems.sum()),
    )


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Which programs decode which segments; lists on the device.

    Attributes:
        whole: for each fast variant the first segments of its programs.
        general: for each width of a word the segments that the general kernel takes.
        segments_in_block: a power of two, at least the segments of any block.
    """

    whole: dict[Variant, torch.Tensor]
    general: dict[int, torch.Tensor]
    segments_in_block: int


def decode_programs(
    tables: DeviceTables, parts: np.ndarray, wanted: np.ndarray, upload: Uploader
) -> Programs:
    """Programs for the wanted parts (bool); parts: their planned columns in host memory."""
    host = tables.host
    single = wanted & (parts[:, fields.SINGLE.value] >= 0)
    if wanted.all() and not single.any():
        whole, general_lists = tables.whole, tables.general
    else:
        of = host.segments[:, fields.SEG_PART.value]
        chosen = {v: p[(wanted & ~single)[of[p]]] for v, p in host.whole.items()}
        # The fast kernels know no parts of a single symbol.
        extra = np.concatenate([p[single[of[p]]] for p in host.whole.values()] or [np.zeros(0, np.int64)])
        extra = (extra[:, None] + np.arange(PAIR)).reshape(-1)
        widths = parts[of[extra], fields.WORD_BITS.value]
        whole = {v: upload(p) for v, p in chosen.items() if p.size}
        general_lists = {}
        for width in {*host.general, *np.unique(widths).tolist()}:
            own = host.general.get(width, np.zeros(0, np.int64))
            rest = np.concatenate([own[wanted[of[own]]], extra[widths == width]])
            if rest.size:
                general_lists[width] = upload(rest)
    most = int(host.blocks[:, fields.BLOCK_SEGMENTS.value].max(initial=1))
    return Programs(
        whole=whole,
        general=general_lists,
        segments_in_block=triton.next_power_of_2(max(most, 8)),
    )
