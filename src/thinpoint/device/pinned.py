"""Page-locked host memory for what leaves a device: in slabs that are used again, as locking takes longer than copying."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from functools import cache

import numpy as np
import torch

SLAB_BYTES = 64 << 20
"""A power of two, which PyTorch's allocator of page-locked memory does not round up; room for the largest part."""

_ALIGNMENT = 64


class Slab:
    """A piece of host memory.

    Attributes:
        memory: flat uint8 tensor.
        copied: recorded behind the last copy into it, if that was on a CUDA device.
    """

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.copied: torch.cuda.Event | None = None


class SlabPool:
    """Slabs that nobody uses. May be shared between threads.

    Args:
        is_pinned: page-locked, which needs a CUDA device.
        slab_bytes: of each.

    Attributes:
        seconds: spent on getting memory from the system, by all threads so far.
    """

    def __init__(self, *, is_pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self._is_pinned = is_pinned
        self._slab_bytes = slab_bytes
        self._free: deque[Slab] = deque()
        self.seconds = 0.0

    @property
    def num_free(self) -> int:
        """Slabs that wait for their next use."""
        return len(self._free)

    @property
    def num_free_bytes(self) -> int:
        """Bytes of these."""
        return self.num_free * self._slab_bytes

    def borrow(self, num_bytes: int = 0) -> tuple[Slab, np.ndarray]:
        """A slab and all of it as an array; it comes back when the array and all views of it are gone.

        Args:
            num_bytes: what must fit. More than a slab holds is memory of its own, given to the system afterwards.
        """
        if num_bytes > self._slab_bytes:
            own = self._make(num_bytes)
            return own, own.memory.numpy()
        try:
            slab = self._free.pop()
        except IndexError:
            slab = self._make(self._slab_bytes)
        if slab.copied is not None:
            # Nobody may have waited for it, after an error.
            slab.copied.synchronize()
        array: np.ndarray = slab.memory.numpy()
        weakref.finalize(array, self._free.append, slab).atexit = False
        return slab, array

    def _make(self, num_bytes: int) -> Slab:
        begin = time.perf_counter()
        slab = Slab(num_bytes, is_pinned=self._is_pinned)
        self.seconds += time.perf_counter() - begin
        return slab


class Arena:
    """Places in slabs, one behind the other, for the copies of one stream. May be shared between threads."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._slab, self._array = Slab(0, is_pinned=False), np.zeros(0, np.uint8)
        self._used = 0

    def place(self, ends: np.ndarray) -> tuple[int, Slab, torch.Tensor, np.ndarray]:
        """Memory for as many pieces, from the first on, as fit into one slab; for one at least.

        Args:
            ends: int64, where each piece ends if they follow one another.

        Returns:
            (how many, the slab, the memory as uint8 tensor, and as array).
        """
        with self._lock:
            count = self._num_fitting(ends)
            if not count:
                self._slab, self._array = self._pool.borrow(int(ends[0]))
                self._used = 0
                count = self._num_fitting(ends)
            total = int(ends[count - 1])
            start = self._used
            self._used += -(-total // _ALIGNMENT) * _ALIGNMENT
            end = start + total
            return count, self._slab, self._slab.memory[start:end], self._array[start:end]

    def _num_fitting(self, ends: np.ndarray) -> int:
        return int(np.searchsorted(ends, self._array.size - self._used, side="right"))


@cache
def slab_pool(*, is_pinned: bool) -> SlabPool:
    """The pool of this process."""
    return SlabPool(is_pinned=is_pinned)
