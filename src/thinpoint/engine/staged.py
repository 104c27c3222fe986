"""A state that is encoded now, in host memory, and written later: all of it or a part."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from thinpoint.engine.backends import Backends
from thinpoint.engine.encode import LARGE_WAVES, MakeParts, encode_waves
from thinpoint.engine.flow import Flow
from thinpoint.engine.save import Saving
from thinpoint.engine.splice import Kept, parts_at, places_of, spliced
from thinpoint.engine.workers import Workers
from thinpoint.errors import NotEnoughMemoryError, UsageError
from thinpoint.state.leaves import FlatState
from thinpoint.state.tree import Path
from thinpoint.state.tree_names import tensor_names


class StagedState:
    """Encoded parts of a state's storages, and the records of its tensors. Holds nothing of the state itself.

    Its parts can be written once, by the process that encoded them, from any thread.

    Attributes:
        raw_bytes: bytes that were encoded, before coding.
        tensors: the records of the tensors.
        storages: the storages, without a way to their bytes.
    """

    def __init__(self, state: FlatState, waves: deque[tuple[MakeParts, int]]) -> None:
        self.tensors = state.tensors
        self._tree = state.tree
        self.storages = [replace(storage, read=_gone, view=None) for storage in state.storages]
        self.raw_bytes = sum(region.num_bytes for storage in state.storages for region in storage.regions)
        self._waves = waves
        self._is_taken = False
        self._pid = os.getpid()

    @cached_property
    def tensor_ids(self) -> dict[Path, int]:
        """The id of the tensor at every path of the state that holds one."""
        return tensor_names(self._tree, len(self.tensors))

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the parts take which are not written yet."""
        return sum(num_bytes for _, num_bytes in list(self._waves))

    def take(self) -> deque[tuple[MakeParts, int]]:
        """(what makes its parts, bytes it takes) of each wave, in order, to be popped one after the other. Only once.

        Raises:
            UsageError: they were taken or released before, or this is another process.
        """
        if os.getpid() != self._pid:
            raise UsageError("a staged state can only be written by the process that staged it")
        if self._is_taken:
            raise UsageError("the staged state was written, or given up, before", hint="Stage it again")
        self._is_taken = True
        return self._waves

    def release(self) -> None:
        """Let go of the parts; what is not written yet cannot be written any more."""
        self._is_taken = True
        self._waves.clear()


def encode_state(
    state: FlatState,
    backends: Backends,
    workers: Workers,
    *,
    host_bytes: int,
    seconds: dict[str, float] | None = None,
) -> StagedState:
    """Encode all of a state, each storage where it is; returns when the state may change again.

    Device memory besides the state: three waves of LARGE_WAVES x DEVICE_WAVE_BYTES and what encoding two of them takes.

    Args:
        host_bytes: host memory that the encoded parts may take; a single part of 64 MiB may be more.
        seconds: of each stage; added to.

    Raises:
        NotEnoughMemoryError: they take more.
        StateChangedError: a tensor changed while it was being read.
    """
    held = _Held(host_bytes)
    encode_waves(
        state.storages,
        held,
        backends.host,
        workers,
        devices=backends.devices,
        seconds={} if seconds is None else seconds,
        wave_scale=LARGE_WAVES,
    )
    return StagedState(state, held.waves)


class StagedSaving(Saving):
    """A save of tensors that are staged, and of others beside them. See `Saving`.

    Args:
        state: where staged tensors stand, it has others without elements; those whose staged originals share a storage
            share one too. What else it holds is encoded by `encode`.
        staged: holds the staged tensors. It is released when `encode` has ended, however it did.
        tensor_ids: for each path in `state` where a staged tensor stands, its id in `staged`.
        backends, options: as for `Saving`.
    """

    def __init__(
        self,
        state: FlatState,
        staged: StagedState,
        tensor_ids: Mapping[Path, int],
        backends: Backends,
        **options: Any,
    ) -> None:
        ids = tensor_names(state.tree, len(state.tensors))
        kept = [Kept(path, ids[path], staged.tensors[old_id]) for path, old_id in tensor_ids.items()]
        places = places_of(state, staged.storages, kept)
        super().__init__(spliced(state, staged.storages, kept, places), backends, **options)
        self._staged = staged
        self._places = places

    def encode(self, workers: Workers) -> None:
        """Pass on what is staged, then encode the rest. See `Saving.encode`."""
        try:
            with self._stopping_on_error():
                waves = self._staged.take()
                while waves:
                    make_parts, num_bytes = waves.popleft()
                    self._flow.reserve(num_bytes)
                    in_place = partial(parts_at, self._places, make_parts)
                    self._flow.put(in_place, reserved=num_bytes, kept=num_bytes)
                    del make_parts, in_place
            super().encode(workers)
        finally:
            self._staged.release()


class _Held(Flow[MakeParts]):
    """A flow that nobody drains: what does not fit is an error.

    Attributes:
        waves: what was put, with the bytes that each takes.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.waves: deque[tuple[MakeParts, int]] = deque()

    def reserve(self, num_bytes: int) -> None:
        """Take room for so many bytes.

        Raises:
            NotEnoughMemoryError: there is none.
        """
        if not self.has_room(num_bytes):
            raise NotEnoughMemoryError(
                "the compressed state does not fit into the host memory that staging may take",
                expected=f"at most {self.limit_bytes:,} bytes",
                actual=f"{self._reserved_bytes:,} and {num_bytes:,} more to encode",
                hint="Set host_memory= or THINPOINT_HOST_MEMORY, or save synchronously; the state is unchanged",
            )
        super().reserve(num_bytes)

    def put(self, item: MakeParts, *, reserved: int, kept: int) -> None:
        """Keep an item, which needs `kept` of the `reserved` bytes."""
        self.waves.append((item, kept))
        self._reserved_bytes += kept - reserved


def _gone(start: int, end: int) -> np.ndarray:
    raise AssertionError("a staged storage is not read")
