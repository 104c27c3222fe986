"""A state that does not fit into memory says nothing about the checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import thinpoint
from thinpoint import errors
from thinpoint.codec.backend import get_backend


def test_too_little_memory_is_no_reason_to_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with thinpoint.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"w": torch.randn(70_000), "step": step}, step)

        def too_large(*arguments: object, **options: object) -> np.ndarray:
            raise MemoryError

        monkeypatch.setattr(type(get_backend()), "decode", too_large)
        with pytest.raises(errors.NotEnoughMemoryError):
            checkpointer.load()
        with pytest.raises(errors.NotEnoughMemoryError):
            checkpointer.restore({"w": torch.zeros(70_000), "step": 0})
