"""What `backend=`, `codec=`, `prove=` and the environment choose."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bits import assert_same
from engine_backend import zoo

import thinpoint
from thinpoint.codec.backend import get_backend
from thinpoint.engine.backends import choose_backends
from thinpoint.errors import BackendUnavailableError, UsageError

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("THINPOINT_BACKEND", "THINPOINT_CODEC", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


def test_auto_takes_the_fastest_for_the_cpu_and_leaves_it_its_tensors() -> None:
    chosen = choose_backends()
    assert chosen.host == get_backend("auto")
    assert chosen.devices.get(CPU) is None and chosen.devices.get(META) is None
    assert chosen.scratch is None


def test_the_environment_replaces_auto_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINPOINT_BACKEND", "reference")
    assert choose_backends().host.name == "reference"
    assert choose_backends("cpu").host.name == "cpu"
    assert thinpoint.save([torch.ones(3)], io.BytesIO()).backend == "reference"
    monkeypatch.setenv("THINPOINT_BACKEND", "")
    assert choose_backends().host.name == "cpu"
    monkeypatch.setenv("THINPOINT_BACKEND", "tpu")
    with pytest.raises(UsageError, match="tpu"):
        choose_backends()


@pytest.mark.parametrize(
    ("codec", "host_codec"),
    [("thin", "thin"), ("zstd", "zstd"), ("raw", "raw"), ("nvcomp-zstd", "zstd"), ("nvcomp-ans", "thin")],
)
def test_each_codec_has_one_for_the_cpu(codec: str, host_codec: str) -> None:
    assert choose_backends(codec=codec).host.codec == host_codec


def test_tensors_on_the_cpu_are_coded_there_whatever_is_for_gpus() -> None:
    state = zoo()
    for codec, host_codec in (("nvcomp-zstd", "zstd"), ("nvcomp-ans", "thin")):
        files = []
        for name in (codec, host_codec):
            files.append(io.BytesIO())
            report = thinpoint.save(state, files[-1], codec=name)
            assert (report.codec, report.backend) == (name, "cpu")
        assert files[0].getvalue() == files[1].getvalue()


def test_proving_is_for_accelerators_unless_it_is_asked_for() -> None:
    assert [choose_backends(prove=prove).host.prove for prove in (None, False, True)] == [False, False, True]


@pytest.mark.parametrize("options", [{"codec": "lzma"}, {"name": "numpy"}])
def test_unknown_names_are_refused_with_those_that_are_known(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"expected .*(thin|triton)"):
        choose_backends(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_triton_by_name_fails_at_once_where_there_is_no_gpu(tmp_path: Path) -> None:
    thinpoint.save({"w": torch.ones(3)}, tmp_path / "s.thin")
    for call in (
        lambda: thinpoint.save({"w": torch.ones(3)}, tmp_path / "new.thin", backend="triton"),
        lambda: thinpoint.load(tmp_path / "s.thin", backend="triton"),
        lambda: thinpoint.load_into(tmp_path / "s.thin", {"w": torch.zeros(3)}, backend="triton"),
        lambda: thinpoint.open(tmp_path / "s.thin", backend="triton"),
        lambda: thinpoint.verify(tmp_path / "s.thin", backend="triton"),
    ):
        with pytest.raises(BackendUnavailableError, match="backend 'triton' cannot run here: "):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["s.thin"]


_INTERPRETED = """
import sys, torch, thinpoint
torch.manual_seed(0)
state = {"w": torch.randn(150, 40) * 0.02, "step": torch.tensor(3.0), "ids": torch.arange(700)}
state["half"], state["tied"] = state["w"].bfloat16(), state["w"][:50]
folder = sys.argv[1]
report = thinpoint.save(state, folder + "/triton.thin", backend="triton")
assert report.backend == "triton", report.backend
assert thinpoint.save(state, folder + "/cpu.thin").backend == "cpu"
for name in ("triton", "auto"):
    loaded = thinpoint.load(folder + "/triton.thin", backend=name)
    assert all(loaded[key].equal(value) for key, value in state.items())
target = {key: torch.zeros_like(value) for key, value in state.items()}
thinpoint.load_into(folder + "/triton.thin", target, backend="triton")
assert all(target[key].equal(value) for key, value in state.items())
thinpoint.verify(folder + "/triton.thin", deep=True, backend="triton")
"""


@pytest.mark.timeout(600)
def test_interpreted_triton_serves_tensors_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED, str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "triton.thin").read_bytes() == (tmp_path / "cpu.thin").read_bytes()
    assert_same(thinpoint.load(tmp_path / "cpu.thin")["step"], torch.tensor(3.0))
