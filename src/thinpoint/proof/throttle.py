"""Storage of a given rate: bytes in memory that take their time to be read."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import numpy as np

from thinpoint.formats.torch_item import Window
from thinpoint.store import MemorySource

_SPIN_S = 2e-4
"""A sleep ends so much too late that shorter waits are waited out."""


class Throttle:
    """Lets callers pass as if one pipe moved their bytes one after another. May be shared between threads.

    Args:
        bytes_per_s: its rate.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def move(self, num_bytes: int) -> None:
        """Waits until the pipe has moved so many bytes."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self.bytes_per_s
            done = self._free_at
        while (left := done - time.perf_counter()) > 0:
            time.sleep(left - _SPIN_S if left > _SPIN_S else 0)


class ThrottledSource(MemorySource):
    """Bytes in memory, read at a rate."""

    def __init__(self, data: np.ndarray, throttle: Throttle) -> None:
        super().__init__(data)
        self._throttle = throttle

    def read_into(self, offset: int, buffer: Any) -> None:
        """See `Source.read_into`."""
        super().read_into(offset, buffer)
        self._throttle.move(memoryview(buffer).nbytes)


def throttled_file(data: np.ndarray, throttle: Throttle) -> Window:
    """The same as a file object, for `torch.load`."""
    return Window(ThrottledSource(data, throttle), 0, data.size)


class MemorySink(io.RawIOBase):
    """A file object that keeps what is written to it, or only counts it.

    Args:
        keep: whether to keep it.

    Attributes:
        num_bytes: written so far.
    """

    def __init__(self, *, keep: bool) -> None:
        self._kept: list[bytes] | None = [] if keep else None
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._kept is not None:
            self._kept.append(bytes(view))
        self.num_bytes += view.nbytes
        return view.nbytes

    def data(self) -> np.ndarray:
        """What was written: uint8, flat."""
        return np.frombuffer(b"".join(self._kept or []), np.uint8)
