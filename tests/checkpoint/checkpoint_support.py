"""What the tests of checkpoints share: states, stores that hang or fail, child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from thinpoint.checkpoint.names import step_folder
from thinpoint.store import LocalStore

FAST: dict[str, Any] = {"codec": "zstd", "backend": "cpu", "num_threads": 1, "delete_pause": 0}
"""Options that make a save of a small state take milliseconds."""


def state(step: int, elems: int = 3000) -> dict[str, Any]:
    """A small state, another one for each step."""
    generator = torch.Generator().manual_seed(step)
    return {"model": {"w": torch.randn(elems, generator=generator)}, "step": step}


def weights(step: int, elems: int = 3000) -> torch.Tensor:
    return state(step, elems)["model"]["w"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def data_files(folder: Path, step: int) -> list[Path]:
    return sorted((folder / step_folder(step)).glob("*.thin"))


def flip_a_bit(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


class Wrapped:
    """A `LocalStore` in which single methods are replaced."""

    def __init__(self, folder: Path) -> None:
        self._store = LocalStore(str(folder))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def sink(self, name: str, *, overwrite: bool = False) -> Any:
        return self._store.sink(name, overwrite=overwrite)

    def files(self, prefix: str = "") -> Any:
        return self._store.files(prefix)


class StuckStore(Wrapped):
    """While `stuck`, calls of one method never return. The test lets them go in the end."""

    def __init__(self, folder: Path, method: str = "write") -> None:
        super().__init__(folder)
        self.method = method
        self.stuck = threading.Event()
        self.let_go = threading.Event()
        self.num_stuck = 0

    def block(self, method: str) -> None:
        if method == self.method and self.stuck.is_set():
            self.num_stuck += 1
            self.let_go.wait()

    @contextmanager
    def sink(self, name: str, *, overwrite: bool = False) -> Iterator[Any]:
        self.block("sink")
        with self._store.sink(name, overwrite=overwrite) as sink:
            yield _StuckSink(self, sink)
            self.block("commit")

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        if not name.startswith("runs/"):
            self.block("put")
        self._store.put(name, data, if_absent=if_absent)

    def rename(self, old: str, new: str) -> None:
        self.block("rename")
        self._store.rename(old, new)


class _StuckSink:
    def __init__(self, store: StuckStore, sink: Any) -> None:
        self._store, self._sink = store, sink

    def write(self, buffer: Any) -> None:
        self.write_all([buffer])

    def write_all(self, buffers: Any, map: Any = map) -> None:
        self._store.block("write")
        self._sink.write_all(buffers, map)

    def tell(self) -> int:
        return self._sink.tell()


class NoRenameStore(Wrapped):
    """A store that cannot rename, as object stores are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from dataclasses import replace

        self.capabilities = replace(self._store.capabilities, rename=False)
        self.deleted: list[str] = []

    def rename(self, old: str, new: str) -> None:
        raise AssertionError("it has no rename")

    def delete(self, name: str) -> None:
        self.deleted.append(name)
        self._store.delete(name)


def python(code: str, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """A child process that runs the code; this folder is on its path."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )
