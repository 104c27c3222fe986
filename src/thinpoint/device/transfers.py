"""Copies from the device to page-locked host memory, many at a time."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thinpoint.device.pinned import Arena, Slab

OutOfMemory: type[Exception] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
"""An allocation on a device failed; the name changed in torch 2.5."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of host memory in order.

    Attributes:
        spans: pieces that follow one another, uint8, and where each of them ends in there.
    """

    spans: list[tuple[np.ndarray, np.ndarray]]

    def cut(self) -> list[np.ndarray]:
        """The pieces: thousands, which is nothing to do while training waits."""
        return [
            memory[start:end]
            for memory, ends in self.spans
            for start, end in itertools.pairwise([0, *ends.tolist()])
        ]


class HostCopies:
    """Copies that run together, once, behind what is on the device's current stream when they begin.

    Args:
        device: where from.
        stream: what they run on, so that later work on the current stream does not wait for them; None for that stream.
        arena: where large ones go.

    Attributes:
        done: recorded behind the last copy; None before they began, and where there is no CUDA device.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._device = device
        self._stream = stream
        self._arena = arena
        self._wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._slabs: list[Slab] = []
        self.done: torch.cuda.Event | None = None

    def add(self, tensor: torch.Tensor) -> np.ndarray:
        """Host memory for a contiguous tensor, which must stay as it is until `wait`; the array is valid after that.

        uint8 for unsigned wider types.
        """
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        self._wanted.append((host, tensor))
        array: np.ndarray = host.numpy()
        return array

    def add_pieces(self, tensor: torch.Tensor, sizes: np.ndarray) -> Pieces:
        """The same for a flat uint8 tensor in pieces of these sizes (int64): in the arena, which `HostCopies` must have."""
        assert self._arena is not None
        spans: list[tuple[np.ndarray, np.ndarray]] = []
        start = 0
        while sizes.size:
            ends = np.cumsum(sizes)
            count, slab, memory, array = self._arena.place(ends)
            self._slabs.append(slab)
            self._wanted.append((memory, tensor[start : start + array.size]))
            spans.append((array, ends[:count]))
            start += array.size
            sizes = sizes[count:]
        return Pieces(spans)

    def add_whole(self, tensor: torch.Tensor) -> np.ndarray:
        """The same for a flat uint8 tensor in one piece."""
        (piece,) = self.add_pieces(tensor, np.array([tensor.numel()], np.int64)).cut()
        return piece

    def begin(self, after: torch.cuda.Event | None = None) -> None:
        """Start all copies that were added; no more may be added.

        Args:
            after: what they wait for, if it is less than all that is on the current stream.
        """
        if self.done is not None or not self._wanted:
            return
        if self._device.type != "cuda":
            for host, tensor in self._wanted:
                host.copy_(tensor)
            self._wanted = []
            return
        current = torch.cuda.current_stream(self._device)
        stream = self._stream or current
        if after is not None:
            stream.wait_event(after)
        elif stream is not current:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for host, tensor in self._wanted:
                host.copy_(tensor, non_blocking=True)
        self.done = stream.record_event()
        for slab in self._slabs:
            slab.copied = self.done

    def wait(self) -> None:
        """Wait until all copies are there; they begin now if they have not."""
        self.begin()
        if self.done is not None:
            self.done.synchronize()
        # Freed before the copies are done, memory would go to others.
        self._wanted = []


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one, for launches and new tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def free_bytes(device: torch.device) -> int:
    """Bytes that an allocation on the device may hope for; a lot on the CPU."""
    if device.type != "cuda":
        return 1 << 40
    free, _ = torch.cuda.mem_get_info(device)
    # `memory_reserved` and `memory_allocated` make and sort a flat table of all statistics each time.
    of = torch.cuda.memory_stats_as_nested_dict(device)
    if of:
        free += of["reserved_bytes"]["all"]["current"] - of["allocated_bytes"]["all"]["current"]
    return free


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat contiguous tensor as uint8; no copy."""
    as_signed: Any = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(as_signed).view(torch.uint8)
