"""Sampled ratios beside those of whole files."""

from pathlib import Path
from typing import Any

import pytest
import torch

import thinpoint
from thinpoint.advisor import Case, advise
from thinpoint.advisor.measure import synthetic_state
from thinpoint.advisor.sample import Sample, sample_checkpoint
from thinpoint.errors import NotFoundError, UsageError

ROLES = {"weights": "weight", "first_moment": "first_moment", "second_moment": "second_moment"}


def training_state() -> dict[str, Any]:
    """Four layers with AdamW's moments, as a module and an optimizer give them."""
    model: dict[str, torch.Tensor] = {}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for i in range(4):
        made = synthetic_state(1 << 20)
        model[f"layer{i}.weight"] = made["weights"].float() * (1 + i) / 3
        state[i] = {
            "exp_avg": made["exp_avg"] * (1 + i),
            "exp_avg_sq": made["exp_avg_sq"],
            "step": torch.tensor(100.0),
        }
    return {
        "model": model,
        "optimizer": {"state": state, "param_groups": [{"lr": 1e-3, "params": [0, 1, 2, 3]}]},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A file of torch.save, and the ratios by role that thinpoint.save reports for it."""
    folder = tmp_path_factory.mktemp("sample")
    obj = training_state()
    torch.save(obj, folder / "state.pt")
    report = thinpoint.save(obj, folder / "state.thin")
    return folder / "state.pt", {role: raw / stored for role, (raw, stored) in report.roles.items()}


def ratios(sample: Sample, codec: str = "thinpoint") -> dict[str, float]:
    return {name: ratio for (name, _), ratio in sample.ratios[codec].items()}


@pytest.mark.parametrize(("budget", "tolerance"), [(64 << 20, 0.002), (256 << 10, 0.02)])
def test_ratios_are_those_of_a_save(
    saved: tuple[Path, dict[str, float]], budget: int, tolerance: float
) -> None:
    path, roles = saved
    sample = sample_checkpoint(str(path), budget_bytes=budget)
    for name, role in ROLES.items():
        assert ratios(sample)[name] == pytest.approx(roles[role], rel=tolerance)
    assert sample.read_bytes <= 3.2 * budget


def test_kinds_of_files_give_the_same(saved: tuple[Path, dict[str, float]]) -> None:
    path, _ = saved
    one, two = (sample_checkpoint(str(path.with_suffix(suffix))) for suffix in (".pt", ".thin"))
    assert one.ratios == two.ratios and one.components == two.components


def test_a_sample_gives_the_case_its_sizes_and_ratios(saved: tuple[Path, dict[str, float]]) -> None:
    path, _ = saved
    sample = sample_checkpoint(str(path), budget_bytes=1 << 20)
    obj = training_state()
    assert sample.params == sum(tensor.numel() for tensor in obj["model"].values())
    case = sample.apply(Case())
    sizes = {part.name: part.raw_bytes for part in case.model.parts()}
    assert sizes["weights"] == sizes["first_moment"] == sizes["second_moment"] == 4 * sample.params
    advice = advise(case)
    row = advice.row("thinpoint")
    measured = path.with_suffix(".thin").stat().st_size
    assert row.stored_bytes == pytest.approx(measured, rel=0.03)
    assert case.codec("nvcomp-ans") == Case().codec("nvcomp-ans")
    assert "sampled from" in case.codec("thinpoint").source


def test_components_of_all_sorts(tmp_path: Path) -> None:
    shared = torch.randn(300, 40)
    obj = {
        "model": {
            "a": shared.bfloat16(),
            "e": torch.empty(0, 3),
            "n": torch.arange(50),
            "b": torch.ones(7, dtype=torch.bool),
        },
        "optimizer": {"master_params": {"a": shared}, "exp_avg": {"a": shared * 2, "again": shared}},
        "grads": {"a": torch.randn(300, 40).half()},
        "complex": torch.randn(20, 20, dtype=torch.complex128),
        "scalar": torch.tensor(1.0),
        "name": "x",
    }
    torch.save(obj, tmp_path / "x.pt")
    sample = sample_checkpoint(str(tmp_path / "x.pt"))
    found = {(part.name, part.precision): part.raw_bytes for part in sample.components}
    assert found == {
        ("weights", "bf16"): 24_000,
        ("other", "int64"): 400,
        ("other", "bool"): 7,
        ("master", "fp32"): 48_000,
        ("first_moment", "fp32"): 48_000,
        ("gradients", "fp16"): 24_000,
        ("weights", "complex128"): 6_400,
        ("weights", "fp32"): 4,
    }
    advice = advise(sample.apply(Case()))
    assert advice.row("none").raw_bytes == sum(found.values())


def test_files_without_tensors_and_no_files(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="holds no tensors"):
        sample_checkpoint(str(tmp_path / "x.pt"))
    with pytest.raises(NotFoundError):
        sample_checkpoint(str(tmp_path / "y.pt"))
    (tmp_path / "z.txt").write_text("no checkpoint")
    with pytest.raises(UsageError, match="no checkpoint"):
        sample_checkpoint(str(tmp_path / "z.txt"))
