"""States on a GPU: coded there, loaded back there, the same bytes as on the CPU and readable without a GPU."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same, tensor_bits
from torch import nn

import thinpoint
from thinpoint import errors
from thinpoint.device.select import why_not

NO_TRITON = why_not() if torch.cuda.is_available() else "needs a CUDA device"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("THINPOINT_BACKEND", "THINPOINT_CODEC"):
        monkeypatch.delenv(name, raising=False)


def state(device: str) -> dict[str, Any]:
    """Several blocks of FP32 and BF16, ties, views, integers, an empty tensor and an optimizer's step."""
    torch.manual_seed(0)
    weight = (torch.randn(3000, 700) * 0.02).to(device)
    base = torch.randn(700_000).to(device)
    return {
        "w": weight,
        "tied": weight,
        "half": (torch.randn(900, 1024) * 0.02).bfloat16().to(device),
        "transposed": torch.randn(640, 900).to(device).t(),
        "step": torch.tensor(7.0),
        "left": base[:400_000],
        "across": base[100_000:500_000],
        "ids": torch.randint(0, 9, (600_001,)).to(device),
        "mask": (torch.rand(5001) > 0.5).to(device),
        "complex": torch.randn(3000, dtype=torch.complex64).to(device),
        "double": (torch.randn(2000).double() / 3).to(device),
        "zeros": torch.zeros(1_000_000, device=device),
        "empty": torch.zeros(0, 4, device=device),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], device=device),
        "rng": torch.get_rng_state(),
    }


def assert_same_on(loaded: dict[str, Any], expected: dict[str, Any], device: str) -> None:
    assert {key for key, value in loaded.items() if value.device.type != device} == (
        {"step", "rng"} if device == "cuda" else set()
    )
    assert_same(loaded, expected)


def test_a_state_on_the_gpu_comes_back_there(tmp_path: Path) -> None:
    saved = state("cuda")
    thinpoint.save(saved, tmp_path / "s.thin")
    loaded = thinpoint.load(tmp_path / "s.thin")
    assert_same_on(loaded, saved, "cuda")
    assert loaded["tied"].data_ptr() == loaded["w"].data_ptr()
    assert loaded["across"].untyped_storage().data_ptr() == loaded["left"].untyped_storage().data_ptr()


def test_it_loads_on_the_cpu_and_the_other_way_round(tmp_path: Path) -> None:
    thinpoint.save(state("cuda"), tmp_path / "gpu.thin")
    assert_same_on(thinpoint.load(tmp_path / "gpu.thin", map_location="cpu"), state("cpu"), "cpu")
    thinpoint.save(state("cpu"), tmp_path / "cpu.thin")
    on_gpu = thinpoint.load(tmp_path / "cpu.thin", map_location="cuda")
    assert {tensor.device.type for tensor in on_gpu.values()} == {"cuda"}
    assert_same(on_gpu, state("cuda"))


@needs_triton
def test_bytes_are_those_of_the_cpu_and_the_report_says_what_coded(tmp_path: Path) -> None:
    saved = state("cuda")
    reports = {
        name: thinpoint.save(saved, tmp_path / name, backend=name) for name in ("auto", "triton", "cpu")
    }
    assert {name: report.backend for name, report in reports.items()} == {
        "auto": "triton+cpu",
        "triton": "triton+cpu",
        "cpu": "cpu",
    }
    assert len({(tmp_path / name).read_bytes() for name in reports}) == 1
    unproven = thinpoint.save(saved, tmp_path / "unproven", prove=False)
    assert unproven.file_id == reports["cpu"].file_id


@needs_triton
def test_an_optimizer_with_its_steps_on_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3000, 256), nn.Linear(256, 512), nn.Linear(512, 300)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.randint(0, 3000, (8, 16), device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert thinpoint.save(saved, tmp_path / "a").backend == "triton+cpu"
    thinpoint.save(saved, tmp_path / "b", backend="cpu")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert_same(thinpoint.load(tmp_path / "a")["optimizer"], saved["optimizer"])


@pytest.mark.parametrize(("codec", "backend"), [("zstd", "cpu"), ("raw", "copies+cpu")])
def test_other_codecs_need_no_kernels_to_save_and_load_on_the_gpu(
    codec: str, backend: str, tmp_path: Path
) -> None:
    saved = state("cuda")
    report = thinpoint.save(saved, tmp_path / "s.thin", codec=codec)
    assert (report.backend, report.codec) == (backend if NO_TRITON is None else "cpu", codec)
    assert_same_on(thinpoint.load(tmp_path / "s.thin"), saved, "cuda")


def test_load_into_tensors_on_the_gpu(tmp_path: Path) -> None:
    saved = state("cuda")
    thinpoint.save(saved, tmp_path / "s.thin")
    target = {key: torch.zeros_like(value) for key, value in saved.items()}
    places = {key: value.data_ptr() for key, value in target.items()}
    thinpoint.load_into(tmp_path / "s.thin", target)
    for key, value in saved.items():
        assert tensor_bits(target[key]) == tensor_bits(value), key
    assert places == {key: value.data_ptr() for key, value in target.items()}


def test_load_into_other_strides_and_dtypes_on_the_gpu(tmp_path: Path) -> None:
    saved = state("cuda")
    thinpoint.save(saved, tmp_path / "s.thin")
    target = {
        "w": torch.zeros(700, 3000, device="cuda").t(),
        "half": torch.zeros(900, 1024, device="cuda"),
        "left": torch.zeros(800_000, device="cuda")[::2],
        "transposed": torch.zeros(900, 640),
    }
    thinpoint.load_into(tmp_path / "s.thin", target, strict=False, cast=True)
    for key, value in target.items():
        assert tensor_bits(value) == tensor_bits(saved[key].to(value.dtype)), key


def test_values_that_a_stream_of_the_caller_still_computes_are_saved(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        value = torch.ones(4096, 4096, device="cuda")
        for _ in range(40):
            value = (value @ value) / 4096
        value = value * 3 + torch.arange(4096.0, device="cuda")
        thinpoint.save(value, tmp_path / "s.thin")
        loaded = thinpoint.load(tmp_path / "s.thin")
        same = loaded.equal(value)
    assert same


@needs_triton
def test_the_environment_replaces_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINPOINT_BACKEND", "cpu")
    assert thinpoint.save(state("cuda"), tmp_path / "s.thin").backend == "cpu"
    assert thinpoint.save(state("cuda"), tmp_path / "s.thin", backend="triton").backend == "triton+cpu"


def test_a_device_that_triton_cannot_serve_is_an_error_by_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thinpoint.device import select

    monkeypatch.setattr(select, "why_not", lambda device_type="cuda": "triton is not installed")
    assert thinpoint.save(state("cuda"), tmp_path / "auto.thin").backend == "cpu"
    with pytest.raises(errors.BackendUnavailableError, match="not installed"):
        thinpoint.save(state("cuda"), tmp_path / "s.thin", backend="triton")
    with pytest.raises(errors.BackendUnavailableError, match="not installed"):
        thinpoint.load(tmp_path / "auto.thin", backend="triton")
    assert [path.name for path in tmp_path.iterdir()] == ["auto.thin"]


def test_damage_is_located(tmp_path: Path) -> None:
    thinpoint.save(
        {"a": torch.randn(1000, device="cuda"), "b": torch.randn(900_000, device="cuda")}, tmp_path / "s"
    )
    with thinpoint.open(tmp_path / "s") as file:
        entry = file._reader.index.parts[1]
    data = bytearray((tmp_path / "s").read_bytes())
    data[entry.offset + entry.head_bytes + entry.body_bytes // 2] ^= 1
    (tmp_path / "s").write_bytes(data)
    found = []
    for where in ("cuda", "cpu"):
        with pytest.raises(errors.DigestMismatchError) as caught:
            thinpoint.load(tmp_path / "s", map_location=where)
        found.append(str(caught.value))
    assert found[0] == found[1] and "tensor b" in found[0]
    with pytest.raises(errors.DigestMismatchError):
        thinpoint.verify(tmp_path / "s", deep=True, backend="triton" if NO_TRITON is None else "auto")


def test_two_thousand_small_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = {f"t{i}": torch.randn(i % 97 * 50 + 1, device="cuda") for i in range(2000)}
    thinpoint.save(saved, tmp_path / "s.thin")
    thinpoint.save(saved, tmp_path / "cpu.thin", backend="cpu")
    assert (tmp_path / "s.thin").read_bytes() == (tmp_path / "cpu.thin").read_bytes()
    assert_same(thinpoint.load(tmp_path / "s.thin"), saved)


@pytest.fixture
def ram_file(tmp_path: Path) -> Iterator[str]:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    path = os.path.join(folder, f"thinpoint-test-{os.getpid()}.thin")
    yield path
    if os.path.exists(path):
        os.remove(path)


@needs_triton
def test_two_gigabytes_take_little_memory_on_host_and_gpu(ram_file: str) -> None:
    small = {"w": torch.randn(300_000, device="cuda")}
    thinpoint.save(small, ram_file)
    thinpoint.load(ram_file)
    saved = {"w": torch.randn(256 << 20, device="cuda"), "v": torch.rand(256 << 20, device="cuda").bfloat16()}
    state_bytes = sum(value.numel() * value.element_size() for value in saved.values())
    gc.collect()
    torch.cuda.synchronize()

    def peaks(call: Any, kept_bytes: int) -> tuple[int, int]:
        """More bytes of host and GPU memory than what `call` leaves there."""
        torch.cuda.reset_peak_memory_stats()
        gpu, host = torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        call()
        host_more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - host
        return host_more, torch.cuda.max_memory_allocated() - gpu - kept_bytes

    host, gpu = peaks(lambda: thinpoint.save(saved, ram_file), 0)
    assert host < 1536 << 20 and gpu < 2560 << 20, (host, gpu)
    loaded: dict[str, Any] = {}
    host, gpu = peaks(lambda: loaded.update(thinpoint.load(ram_file)), state_bytes)
    assert host < 1536 << 20 and gpu < 1024 << 20, (host, gpu)
    host, gpu = peaks(lambda: thinpoint.load_into(ram_file, loaded), 0)
    assert host < 1536 << 20 and gpu < 1024 << 20, (host, gpu)
    assert_same(loaded, saved)
