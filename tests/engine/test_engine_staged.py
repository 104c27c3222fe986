"""States that are encoded first and written later."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from engine_backend import CopyingBackend, on_cpu

from thinpoint import errors
from thinpoint.codec.backend import get_backend
from thinpoint.engine import encode as engine_encode
from thinpoint.engine.backends import Backends
from thinpoint.engine.save import run, write_file
from thinpoint.engine.staged import StagedSaving, StagedState, encode_state
from thinpoint.engine.workers import Workers
from thinpoint.state.flatten import flatten
from thinpoint.state.tree_names import tensor_names
from thinpoint.store import FileObjectSink, open_sink

HOST = get_backend("cpu")


def saved(obj: Any) -> bytes:
    memory = io.BytesIO()
    with Workers(2) as workers:
        write_file(flatten(obj), FileObjectSink(memory), HOST, workers)
    return memory.getvalue()


def staged(tensors: dict[str, torch.Tensor], backends: Backends, host_bytes: int = 1 << 30) -> StagedState:
    with Workers(2) as workers:
        return encode_state(flatten(tensors), backends, workers, host_bytes=host_bytes)


def written(held: StagedState, tensors: dict[str, torch.Tensor], rest: dict[str, Any], sink: Any) -> None:
    """Write tensors that are staged, each with a storage of its own, and others beside them."""
    stands = {name: torch.empty(0) for name in tensors}
    ids = tensor_names(flatten(tensors).tree, len(tensors))
    with Workers(2) as workers:
        saving = StagedSaving(flatten({**stands, **rest}), held, ids, Backends(HOST), host_bytes=1 << 20)
        run(saving, open_sink(sink), workers)


@pytest.mark.parametrize("wave_bytes", [1, 3_000_000, 256 << 20])
def test_a_device_encodes_them_and_the_file_is_that_of_the_cpu(
    wave_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(200_000 * (1 + i)) for i in range(5)}
    rest = {"text": "x" * 70_000, "others": torch.arange(9)}
    expected = saved({**tensors, **rest})
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", wave_bytes)
    backend = CopyingBackend()
    held = staged(tensors, Backends(HOST, on_cpu(backend)))
    assert sum(map(sum, backend.encoded)) == held.raw_bytes == sum(t.nbytes for t in tensors.values())
    for tensor in tensors.values():
        tensor.zero_()
    memory = io.BytesIO()
    written(held, tensors, rest, memory)
    assert memory.getvalue() == expected


def test_memory_is_given_back_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", 1 << 19)
    tensors = {f"t{i}": torch.randn(1 << 18) for i in range(8)}
    backend = CopyingBackend()
    held = staged(tensors, Backends(HOST, on_cpu(backend)))
    assert len(backend.alive) == 8
    alive: list[int] = []

    class Watched(FileObjectSink):
        def write_all(self, buffers: Any, map: Any = map) -> None:
            alive.append(sum(part() is not None for batch in backend.alive for part in batch))
            super().write_all(buffers, map)

    written(held, tensors, {}, Watched(io.BytesIO()))
    # The one before is written while the next is taken.
    assert alive[1] >= 7 and alive[-2] <= 2 and held.num_bytes == 0


def test_the_budget_counts_what_is_kept_and_the_wave_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_encode, "DEVICE_WAVE_BYTES", 1 << 20)
    tensors = {f"t{i}": torch.randn(1 << 18) for i in range(8)}
    needed = staged(tensors, Backends(HOST, on_cpu(CopyingBackend()))).num_bytes
    assert 6 << 20 < needed < 8 << 20
    for host_bytes in (needed + (1 << 20), needed - 1):
        backend = CopyingBackend()
        if host_bytes > needed:
            assert staged(tensors, Backends(HOST, on_cpu(backend)), host_bytes).num_bytes == needed
        else:
            with pytest.raises(errors.NotEnoughMemoryError):
                staged(tensors, Backends(HOST, on_cpu(backend)), host_bytes)


def test_they_are_written_once() -> None:
    tensors = {"w": torch.randn(1000)}
    held = staged(tensors, Backends(HOST))
    written(held, tensors, {}, io.BytesIO())
    with pytest.raises(errors.UsageError, match="before"):
        written(held, tensors, {}, io.BytesIO())
