"""Kernels on whatever this machine has: a GPU, or Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    # Kernels are interpreted if the variable is set when they, and Triton, are imported; other tests must not see it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("thinpoint.device.backend")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set while a test of this folder runs, where there is no GPU."""
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 32 steps for every backend, so that a few thousand values make several blocks."""
    from thinpoint.codec import plan, raw
    from thinpoint.codec.rans import encoder
    from thinpoint.device import launch, outgoing, runs, tables

    for module in (plan, encoder, runs, launch, tables, outgoing, raw):
        for name, value in (("SEGMENT_STEPS", 32), ("SEGMENT_ELEMS", 1024), ("BLOCK_ELEMS", 8192)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    defaults = {**tables.PartShape.__init__.__kwdefaults__, "steps": 32, "block_elems": 8192}
    monkeypatch.setattr(tables.PartShape.__init__, "__kwdefaults__", defaults)
