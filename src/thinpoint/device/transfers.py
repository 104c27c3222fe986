"""Copies from the device to page-locked host memory, many at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

OutOfMemory: type[Exception] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
"""An allocation on a device failed; the name changed in torch 2.5."""


class HostCopies:
    """Copies that run together, once, behind what is on the device's current stream when they begin.

    Args:
        device: where from.
        stream: what they run on, so that later work on the current stream does not wait for them; None for that stream.

    Attributes:
        done: recorded behind the last copy; None before they began, and where there is no CUDA device.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream
        self._wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done: torch.cuda.Event | None = None

    def add(self, tensor: torch.Tensor) -> np.ndarray:
        """Host memory for a contiguous tensor, which must stay as it is until `wait`; the array is valid after that.

        uint8 for unsigned wider types.
        """
        if self._device.type != "cuda":
            copy: np.ndarray = tensor.clone().numpy()
            return copy
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._wanted.append((host, tensor))
        array: np.ndarray = host.numpy()
        return array

    def begin(self, after: torch.cuda.Event | None = None) -> None:
        """Start all copies that were added; no more may be added.

        Args:
            after: what they wait for, if it is less than all that is on the current stream.
        """
        if self.done is not None or not self._wanted:
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
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat contiguous tensor as uint8; no copy."""
    as_signed: Any = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(as_signed).view(torch.uint8)
