"""Python's garbage collector, kept from running in the midst of a save or a load.

These make some hundred small objects for every tensor, and keep most of them for as long as they run. To the collector that
looks like growth, so that about once in every save it goes through all objects of the process: 0.2 s where torch and Triton are
imported, with every thread of Python standing still, training's among them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_pauses: set[object] = set()
"""Those under way that have found the collector on."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection begins by itself meanwhile; what no cycle holds is freed as ever. Also a decorator.

    For what training waits for, and for short work beside it: all of the process's garbage waits. The collector is off
    afterwards if it was before, so threads may pause at the same time; the first to end then lets it go on.
    """
    pause = object()
    was_enabled = gc.isenabled()
    try:
        if was_enabled:
            _pauses.add(pause)
            gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
            _pauses.discard(pause)


def _after_fork() -> None:
    """A forked process has not the thread that would end the pause."""
    if _pauses:
        _pauses.clear()
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
