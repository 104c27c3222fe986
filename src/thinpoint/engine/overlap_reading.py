"""State that is being read in place: optimizers' steps wait until it has been."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinpoint.engine.overlap_owners import Owned, has_stepped, storage_key, tensors_of

_under_way: list[Reading] = []


class Reading:
    """Holds back the steps of all optimizers that would write to storages that are being read.

    Made on the thread whose work the values are of: on each GPU, reading begins behind what its current stream has by then.

    Args:
        owned: what is read, and whose it is.
        devices: where the state is.

    Attributes:
        held_s: for how long the host has held a step back; final when reading has ended.
    """

    def __init__(self, owned: Owned, devices: Iterable[torch.device]) -> None:
        self.held_s = 0.0
        self._keys = frozenset(owned.tensors)
        self._ready = [_recorded(torch.cuda.current_stream(d)) for d in devices if d.type == "cuda"]
        # Of the reading streams, behind all that reads.
        self._read: list[tuple[torch.device, torch.cuda.Event]] = []
        self._held_since: float | None = None
        self._is_launched = threading.Event()
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """From here on steps wait."""
        _hold_steps()
        _under_way.append(self)

    @contextmanager
    def on_streams(self) -> Iterator[None]:
        """What runs inside, on one thread, reads on streams of its own; left when the devices have done it."""
        streams = [_stream(device) for device, _ in self._ready]
        with ExitStack() as stack:
            for stream, (_, ready) in zip(streams, self._ready, strict=True):
                stack.enter_context(torch.cuda.stream(stream))
                # On the host: other threads, whose streams are others, may read too.
                ready.synchronize()
            try:
                yield
            finally:
                for stream in streams:
                    stream.synchronize()

    def launched(self) -> None:
        """All that reads has been done or launched: steps need no more wait for the host, only for the devices."""
        self._read = [_recorded(_stream(device)) for device, _ in self._ready]
        self._let_go()

    def end(self) -> None:
        """Nothing reads any more, or what is read does not count. May be called again."""
        if self in _under_way:
            _under_way.remove(self)
        self._let_go()
        self._is_over.set()

    def hold(self, optimizer: Optimizer, *, in_graph: bool) -> None:
        """Wait if this optimizer would write to what is being read: the host, then the current streams.

        Args:
            in_graph: what follows is captured, and cannot wait for other streams.
        """
        if not any(storage_key(tensor) in self._keys for tensor in tensors_of(optimizer)):
            return
        with self._lock:
            if self._held_since is None:
                self._held_since = time.perf_counter()
        if in_graph:
            self._is_over.wait()
            return
        self._is_launched.wait()
        for device, event in self._read:
            torch.cuda.current_stream(device).wait_event(event)

    def _let_go(self) -> None:
        with self._lock:
            if self._held_since is not None and not self._is_launched.is_set():
                self.held_s = time.perf_counter() - self._held_since
            self._is_launched.set()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    in_graph = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    has_stepped(optimizer, in_graph=in_graph)
    for reading in tuple(_under_way):
        reading.hold(optimizer, in_graph=in_graph)


@cache
def _hold_steps() -> None:
    """Once, for good: torch goes through its hooks while one of them waits, so that none may be removed then."""
    register_optimizer_step_pre_hook(_before_step)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Always the same: what the allocator keeps for a stream serves the next save."""
    return torch.cuda.Stream(device)


def _recorded(stream: torch.cuda.Stream) -> tuple[torch.device, torch.cuda.Event]:
    event = torch.cuda.Event()
    event.record(stream)
    return stream.device, event


# A forked process has no thread that would let steps go on.
os.register_at_fork(after_in_child=_under_way.clear)
