"""Bytes that are in memory already."""

from __future__ import annotations

from typing import Any

import numpy as np

from thinpoint.errors import UsageError
from thinpoint.store.buffers import ReadAt, check_range, writable_bytes


class MemorySource(ReadAt):
    """See `contract.Source`. Threads copy side by side.

    Args:
        data: any contiguous buffer, host memory; only read, and not copied.
    """

    name = "memory"

    def __init__(self, data: Any) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._is_closed = False

    @property
    def size(self) -> int:
        return self._data.size

    def read_into(self, offset: int, buffer: Any) -> None:
        """See `Source.read_into`."""
        if self._is_closed:
            raise UsageError("the file is closed", where=self.name)
        target = np.frombuffer(writable_bytes(buffer), np.uint8)
        check_range(offset, target.size, self.size, self.name)
        # NumPy lets other threads run meanwhile.
        target[...] = self._data[offset : offset + target.size]

    def close(self) -> None:
        """See `Source.close`."""
        self._is_closed = True
