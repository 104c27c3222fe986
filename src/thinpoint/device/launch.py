"""Launching kernels over tables: encoding and decoding on the device, each step on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from thinpoint.codec.plan import SEGMENT_STEPS, log2_table
from thinpoint.device.kernels import decode, encode, fields, general, patching, planes
from thinpoint.device.pinned import Arena, SlabPool
from thinpoint.device.plans import Plans
from thinpoint.device.tables import Variant
from thinpoint.device.worklists import DeviceTables, Programs, Uploader

ALIGNMENT = 16
TABLE_SLOTS = 32
REPORT_WORDS = 512
REPORT_SLAB_BYTES = 4 << 20


@dataclass(frozen=True)
class Report:
    """Numbers on their way to host memory.

    Attributes:
        words: int64, host memory; valid after `wait`.
        done: recorded behind the copy; None where there is no CUDA device.
    """

    words: np.ndarray
    done: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the words are there."""
        if self.done is not None:
            self.done.synchronize()


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


class Launcher:
    """The kernels on one device. Nothing here waits for it.

    Attributes:
        log2: int32, the codec's table of logarithms.
    """

    def __init__(self, device: torch.device) -> None:
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._sides: list[torch.cuda.Stream] = []
        self.device = device
        self.upload = Uploader(device)
        self._reports = Arena(SlabPool(is_pinned=device.type == "cuda", slab_bytes=REPORT_SLAB_BYTES))
        self.log2 = self.upload(log2_table().astype(np.int32))
        # 64 registers let as many programs run as a multiprocessor takes; with the 80 that the compiler likes, a quarter fewer.
        on_nvidia = device.type == "cuda" and torch.version.hip is None
        self._fast: dict[str, int] = {"num_warps": 1, **({"maxnreg": 64} if on_nvidia else {})}

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
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

    def report(self, words: torch.Tensor) -> Report:
        """Begin to copy int64 words to the host: by a kernel, as a copy would wait for the large ones of other streams."""
        _, slab, memory, array = self._reports.place(np.array([8 * words.numel()], np.int64))
        grid = (triton.cdiv(words.numel(), REPORT_WORDS),)
        host = memory.view(torch.int64)
        self.run(planes.report, grid, words, host, words.numel(), WORDS=REPORT_WORDS, num_warps=4)
        if self.device.type != "cuda":
            return Report(array.view(np.int64), None)
        slab.copied = torch.cuda.current_stream(self.device).record_event()
        return Report(array.view(np.int64), slab.copied)

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
            partial(self.run, rest, (len(own),), own, *general_arguments, WIDTH=width, num_warps=1)
            for width, own in programs[1].items()
        ]
        for variant, own in programs[0].items():
            options = {**fast_constants(variant), **self._fast}
            launches.append(partial(self.run, fast, (len(own),), own, *arguments, **options))
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
        self.run(
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
        self.run(
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
        self.run(
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
        self.run(
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
            self.run(
                patching.apply_patches,
                (triton.cdiv(num, 256),),
                patches,
                num,
                parts,
                WIDTH=width,
                BLOCK=256,
                num_warps=1,
            )
