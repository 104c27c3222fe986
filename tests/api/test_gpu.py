"""States on a GPU: saved from there, loaded back there, and readable without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same

import thinpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def state(device: str) -> dict[str, Any]:
    """Several blocks of FP32 and BF16, a tie, a transposed view and an optimizer's step, all on one device."""
    torch.manual_seed(0)
    weight = (torch.randn(3000, 700) * 0.02).to(device)
    return {
        "w": weight,
        "tied": weight,
        "half": (torch.randn(900, 1024) * 0.02).bfloat16().to(device),
        "transposed": torch.randn(640, 900).to(device).t(),
        "step": torch.tensor(7.0),
        "rng": torch.get_rng_state(),
    }


def test_a_state_on_the_gpu_comes_back_there(tmp_path: Path) -> None:
    saved = state("cuda")
    thinpoint.save(saved, tmp_path / "s.thin", prove=True)
    loaded = thinpoint.load(tmp_path / "s.thin")
    assert_same(loaded, saved)
    assert {k: v.device for k, v in loaded.items()} == {k: v.device for k, v in saved.items()}
    assert loaded["tied"].data_ptr() == loaded["w"].data_ptr()


def test_it_loads_on_the_cpu_and_the_other_way_round(tmp_path: Path) -> None:
    thinpoint.save(state("cuda"), tmp_path / "gpu.thin")
    loaded = thinpoint.load(tmp_path / "gpu.thin", map_location="cpu")
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
    assert_same(loaded, state("cpu"))
    thinpoint.save(state("cpu"), tmp_path / "cpu.thin")
    on_gpu = thinpoint.load(tmp_path / "cpu.thin", map_location="cuda")
    assert {tensor.device.type for tensor in on_gpu.values()} == {"cuda"}
    assert_same(on_gpu, state("cuda"))


def test_load_into_tensors_on_the_gpu(tmp_path: Path) -> None:
    thinpoint.save(state("cuda"), tmp_path / "s.thin")
    target = {key: torch.zeros_like(value) for key, value in state("cuda").items()}
    places = {key: value.data_ptr() for key, value in target.items()}
    thinpoint.load_into(tmp_path / "s.thin", target)
    assert_same(target, {**state("cuda"), "tied": state("cuda")["w"]})
    assert places == {key: value.data_ptr() for key, value in target.items()}
