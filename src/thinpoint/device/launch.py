"""Launching kernels over tables: the steps of encoding and decoding on the device, each on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from thinpoint.codec.plan import SEGMENT_STEPS, log2_table
from thinpoint.device.kernels import decode, encode, fields, general, patching, plan, planes, scan
from thinpoint.device.tables import Variant
from thinpoint.device.worklists import (
    PROFILE_COLUMNS,
    SCAN_STEP,
    TABLE_STEP,
    DeviceTables,
    PlanTables,
    Programs,
    Uploader,
)

ALIGNMENT = 16
SCAN_GROUPS, SCAN_WARPS = 4, 1
HISTOGRAM_GROUPS = 16
PROFILE_ROWS = 32
TABLE_SLOTS = 32
DIGEST_WORDS, DIGEST_ROUNDS = 1024, 8
DIGEST_BYTES = 8 * DIGEST_WORDS * DIGEST_ROUNDS
COMPARE_BYTES, COMPARE_ROUNDS = 8192, 8


def fast_constants(variant: Variant) -> dict[str, Any]:
    """Compile-time parameters of the fast kernels, in the order of their signatures."""
    return {
        "WIDTH": variant.word_bits,
        "RAW_BITS": variant.raw_bits,
        "LOW_BITS": variant.low_bits,
        "SHIFT": variant.trailing_zeros,
        "SIGNED": variant.signed,
        "STEPS": SEGMENT_STEPS,
    }


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


class Launcher:
    """The kernels on one device. Nothing here waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._sides: list[torch.cuda.Stream] = []
        self.device = device
        self.upload = Uploader(device)
        self._log2 = self.upload(log2_table().astype(np.int32))
        # 64 registers let as many programs run as a multiprocessor takes; with the 80 that the compiler likes, a quarter fewer.
        on_nvidia = device.type == "cuda" and torch.version.hip is None
        self._fast: dict[str, int] = {"num_warps": 1, **({"maxnreg": 64} if on_nvidia else {})}

    def _run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch a kernel; `constants` are its compile-time parameters and options.

        What was compiled for the first call serves all later ones: Triton would look at every argument again each time, which
        takes longer than small kernels run. So tensors must begin at multiples of 16 bytes, and integers are not specialised.
        """
        key = (id(kernel), *constants.values())
        known = self._compiled.get(key)
        if known is None:
            unaligned = [
                a.shape for a in arguments if isinstance(a, torch.Tensor) and a.data_ptr() % ALIGNMENT
            ]
            assert not unaligned, (kernel, unaligned)
            # Under the interpreter nothing is compiled.
            compiled = kernel[grid](*arguments, **constants)
            rest = [constants[name] for name in kernel.arg_names[len(arguments) :]] if compiled else []
            self._compiled[key] = compiled and (compiled, rest)
            return
        compiled, rest = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)

    def _side_by_side(self, launches: Sequence[Callable[[], None]]) -> None:
        """Kernels that do not depend on each other, each on a stream of its own; what is launched after waits for all.

        A few segments take as long as many, so that the kinds of segments need not come one after the other.
        """
        if len(launches) < 2 or self.device.type != "cuda":
            for launch in launches:
                launch()
            return
        current = torch.cuda.current_stream(self.device)
        while len(self._sides) < len(launches) - 1:
            self._sides.append(torch.cuda.Stream(self.device))
        sides = self._sides[: len(launches) - 1]
        ready = current.record_event()
        try:
            for side, launch in zip(sides, launches[1:], strict=True):
                side.wait_event(ready)
                torch.cuda.set_stream(side)
                launch()
            torch.cuda.set_stream(current)
            launches[0]()
        finally:
            torch.cuda.set_stream(current)
            for side in sides:
                current.wait_stream(side)

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory, at least one element: no kernel gets a null pointer."""
        return torch.empty(max(size, 1), dtype=dtype, device=self.device)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(max(size, 1), dtype=dtype, device=self.device)

    def plan(
        self, tables: DeviceTables, lists: PlanTables, parts: torch.Tensor, masks: torch.Tensor, aligned: bool
    ) -> Plans:
        """Scan all parts and plan them; fills the second block of columns of `parts`, and `masks` (zeros before)."""
        host = tables.host
        num_parts = len(host.parts)
        # Pieces of whole 16 bytes, as kernels want them.
        layout = (_padded4(host.num_means), _padded4(lists.num_profile), num_parts * 256)
        plans = Plans(
            numbers=self.empty(sum(layout), torch.int32),
            layout=layout,
            kept=self.empty(host.num_means, torch.uint8),
            entries=self.empty(num_parts * 256, torch.int64),
        )
        means, kept, profiles = plans.means, plans.kept, plans.profiles
        num_sampled = num_parts * fields.CANDIDATES.value * fields.HIST_COLUMNS.value
        histograms = self.zeros(num_sampled + lists.num_rows * 256, torch.int32)
        large = histograms[num_sampled:]
        for width, chunks in lists.scan.items():
            self._run(
                scan.scan_groups,
                (len(chunks),),
                chunks,
                parts,
                means,
                kept,
                masks,
                WORD_BITS=width,
                GROUPS=SCAN_GROUPS,
                ROUNDS=SCAN_STEP // SCAN_GROUPS,
                ALIGNED=aligned,
                num_warps=SCAN_WARPS,
            )
        self._run(plan.part_means, (num_parts,), parts, tables.order, means, num_warps=4)
        if lists.columns is not None:
            self._run(
                plan.column_sums,
                (len(lists.columns),),
                lists.columns,
                parts,
                means,
                profiles,
                COLUMNS=PROFILE_COLUMNS,
                ROWS=PROFILE_ROWS,
                num_warps=4,
            )
            self._run(
                plan.finish_profiles,
                (len(lists.profiled),),
                lists.profiled,
                parts,
                profiles,
                TILE=1024,
                num_warps=4,
            )
        for width, rows in lists.candidates.items():
            self._run(
                plan.sample_histograms,
                (len(rows), 256 // HISTOGRAM_GROUPS),
                rows,
                parts,
                tables.order,
                means,
                profiles,
                histograms,
                WIDTH=width,
                GROUPS=HISTOGRAM_GROUPS,
                num_warps=4,
            )
        self._run(plan.choose_candidates, (num_parts,), parts, histograms, self._log2, num_warps=4)
        for width, chunks in lists.chunks.items():
            self._run(
                plan.table_histograms,
                (len(chunks),),
                chunks,
                parts,
                tables.order,
                means,
                profiles,
                large,
                WIDTH=width,
                GROUPS=HISTOGRAM_GROUPS,
                ROUNDS=TABLE_STEP // HISTOGRAM_GROUPS,
                num_warps=4,
            )
        self._run(
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
        return plans

    def encode(
        self,
        tables: DeviceTables,
        parts: torch.Tensor,
        plans: Plans,
        raw: torch.Tensor,
        scratch: torch.Tensor,
        counts: torch.Tensor,
        states: torch.Tensor,
        patches: torch.Tensor,
        num_patches: torch.Tensor,
    ) -> None:
        """All segments: raw plane, words in scratch, counts and lane states. num_patches: int64, the first is 0."""
        planned = (tables.segments, parts, plans.means, plans.profiles)
        coded = (plans.entries, raw, scratch, counts, states, patches, num_patches, patches.numel())
        self._code(
            (encode.encode_whole, general.encode_any),
            (tables.whole, tables.general),
            (*planned, *coded),
            (*planned, tables.order, *coded),
        )

    def _code(
        self,
        kernels: tuple[Any, Any],
        programs: tuple[dict[Variant, torch.Tensor], dict[int, torch.Tensor]],
        arguments: tuple[Any, ...],
        general_arguments: tuple[Any, ...],
    ) -> None:
        """The fast and the general form of a kernel, each over its programs."""
        fast, rest = kernels
        launches = [
            partial(self._run, rest, (len(own),), own, *general_arguments, WIDTH=width, num_warps=1)
            for width, own in programs[1].items()
        ]
        for variant, own in programs[0].items():
            options = {**fast_constants(variant), **self._fast}
            launches.append(partial(self._run, fast, (len(own),), own, *arguments, **options))
        self._side_by_side(launches)

    def compact(
        self,
        tables: DeviceTables,
        block_of_segment: torch.Tensor,
        parts: torch.Tensor,
        sizes: torch.Tensor,
        counts: torch.Tensor,
        states: torch.Tensor,
        scratch: torch.Tensor,
        plane: torch.Tensor,
    ) -> torch.Tensor:
        """The entropy plane (uint8) from what `encode` left in scratch; fills `sizes`, bytes of each block.

        Returns:
            The table of blocks with place and size.
        """
        blocks = torch.empty_like(tables.blocks)
        self._run(
            planes.place_blocks,
            (1,),
            tables.blocks,
            blocks,
            tables.segments,
            parts,
            counts,
            sizes,
            len(tables.blocks),
            BLOCKS=512,
            SEGMENTS=8,
            num_warps=8,
        )
        self._run(
            planes.compact,
            (len(tables.segments),),
            block_of_segment,
            blocks,
            counts,
            states,
            scratch,
            tables.segments,
            plane.view(torch.int16).view(torch.uint16),
            plane.view(torch.int32).view(torch.uint32),
            CHUNK=512,
            num_warps=1,
        )
        return blocks

    def decode_tables(self, freqs: torch.Tensor, num_parts: int) -> torch.Tensor:
        """uint32[parts x TABLE_WORDS] from int32[parts x 256]."""
        tables = self.empty(num_parts * fields.TABLE_WORDS.value, torch.int32)
        self._run(
            planes.decode_tables,
            (num_parts, 4096 // TABLE_SLOTS),
            freqs,
            tables.view(torch.uint32),
            tables.view(torch.uint8),
            SLOTS=TABLE_SLOTS,
            num_warps=4,
        )
        return tables.view(torch.uint32)

    def decode(
        self,
        programs: Programs,
        order: torch.Tensor,
        parts: torch.Tensor,
        blocks: torch.Tensor,
        segments: torch.Tensor,
        means: torch.Tensor,
        profiles: torch.Tensor,
        decode_tables: torch.Tensor,
        raw: torch.Tensor,
        entropy: torch.Tensor,
        errors: torch.Tensor,
    ) -> None:
        """Open blocks of the entropy plane and decode segments; patches are left to `apply_patches`.

        blocks: with place and size. segments: their places in the entropy plane are filled in. raw: uint32; entropy: uint8,
        a multiple of 8 bytes. errors: int32[parts], or-ed.
        """
        as16, as32 = (
            entropy.view(torch.int16).view(torch.uint16),
            entropy.view(torch.int32).view(torch.uint32),
        )
        counts = self.empty(len(segments), torch.int32)
        self._run(
            planes.open_blocks,
            (len(blocks),),
            blocks,
            segments,
            parts,
            as32,
            counts,
            errors,
            SEGMENTS=programs.segments_in_block,
            num_warps=1,
        )
        planned = (segments, parts, means, profiles)
        streams = (decode_tables, raw, as16, as32, counts, errors)
        self._code(
            (decode.decode_whole, general.decode_any),
            (programs.whole, programs.general),
            (*planned, *streams),
            (*planned, order, *streams),
        )

    def apply_patches(self, patches: torch.Tensor, parts: torch.Tensor, width: int) -> None:
        """Entries of parts of one width that have an address."""
        num = patches.numel()
        if num:
            self._run(
                patching.apply_patches,
                (triton.cdiv(num, 256),),
                patches,
                num,
                parts,
                WIDTH=width,
                BLOCK=256,
                num_warps=1,
            )

    def digests(self, address: np.ndarray, size: np.ndarray, first_word: np.ndarray) -> torch.Tensor:
        """int64[ranges]: digests of byte ranges on the device (`thinpoint.digest`); first_word: index of the first word."""
        sums = self.zeros(address.size, torch.int64)
        aligned = (address % 8 == 0) & (size % 8 == 0)
        for is_aligned in (True, False):
            rows = np.flatnonzero((aligned == is_aligned) & (size > 0))
            owner, start, length = _chunks(size[rows], DIGEST_BYTES)
            if not owner.size:
                continue
            row = rows[owner]
            table = np.stack([address[row] + start, length, first_word[row] + start // 8, row], 1)
            self._run(
                planes.digest_ranges,
                (len(table),),
                self.upload(table),
                sums,
                WORDS=DIGEST_WORDS,
                ROUNDS=DIGEST_ROUNDS,
                ALIGNED=is_aligned,
                num_warps=4,
            )
        return sums

    def differences(self, one: np.ndarray, other: np.ndarray, size: np.ndarray) -> torch.Tensor:
        """int32[ranges]: how many words (or bytes) differ between pairs of byte ranges."""
        sums = self.zeros(one.size, torch.int32)
        aligned = (one % 8 == 0) & (other % 8 == 0) & (size % 8 == 0)
        for is_aligned in (True, False):
            rows = np.flatnonzero((aligned == is_aligned) & (size > 0))
            owner, start, length = _chunks(size[rows], COMPARE_BYTES * COMPARE_ROUNDS)
            if not owner.size:
                continue
            row = rows[owner]
            table = np.stack([one[row] + start, other[row] + start, length, row], 1)
            self._run(
                planes.compare_ranges,
                (len(table),),
                self.upload(table),
                sums,
                BYTES=COMPARE_BYTES,
                ROUNDS=COMPARE_ROUNDS,
                WIDTH=64 if is_aligned else 8,
                num_warps=4,
            )
        return sums


def _chunks(sizes: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(owner, start, length) of pieces of at most `step` of things of these sizes."""
    per = -(-sizes // step)
    owner = np.repeat(np.arange(sizes.size), per)
    start = (np.arange(owner.size) - np.repeat(np.cumsum(per) - per, per)) * step
    return owner, start, np.minimum(step, sizes[owner] - start)


def _padded4(size: int) -> int:
    return -(-max(size, 1) // 4) * 4
