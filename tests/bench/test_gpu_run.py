"""The GPU benchmark runs from its command line and measures what it says, here with tiny models on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu import codec, states

from thinpoint.codec.contract import PartSpec
from thinpoint.device.contract import EncodeItem

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dense() -> states.State:
    return states.make_dense(states.TINY, CPU)


def run(out: Path, *arguments: str, module: str = "bench.gpu") -> dict[str, Any]:
    """The records that a run writes, by kind."""
    command = [sys.executable, "-m", module, "--out", str(out), "--device", "cpu", "--tiny", *arguments]
    environment = {**os.environ, "THINPOINT_COMMIT": "0123456789ab"}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(path.read_text()) for path in out.glob("*.json")]
    return {record["kind"]: record for record in records}


@pytest.mark.slow
def test_saves_and_loads_are_measured_and_exact(tmp_path: Path) -> None:
    places = ["--ram-dir", str(tmp_path), "--disk-dir", str(tmp_path)]
    records = run(tmp_path / "out", "--only", "e2e", *places)
    assert records["gpu-e2e"]["commit"] == "0123456789ab"
    for place in records["gpu-e2e"]["places"].values():
        rows = {row["name"]: row for row in place["rows"]}
        for name in ("raw bytes, one file, 8 threads", "thinpoint", "DCP, 8 threads", "torch.save"):
            assert "error" not in rows[name], rows[name]
            assert rows[name]["save"]["gb_per_s"]["median"] > 0
        assert rows["thinpoint"]["stored_bytes"] < rows["torch.save"]["stored_bytes"]
        assert rows["raw bytes, one file, 8 threads"]["ratio"] == 1
        assert set(place["targets"]) == {"save", "load"}


@pytest.mark.slow
def test_what_would_begin_too_late_is_left_out(tmp_path: Path) -> None:
    records = run(tmp_path, "--states", "dense", "--max-s", "0")
    assert "dense w" in records["gpu-codec"]["skipped"]
    assert "RAM disk: thinpoint" in records["gpu-e2e"]["skipped"]


@pytest.mark.slow
def test_stalls_and_storage_of_given_rates_are_measured_and_exact(tmp_path: Path) -> None:
    records = run(tmp_path / "out", "--folder", str(tmp_path), "--saves", "2", module="bench.gpu.saving")
    rows = {row["name"]: row for row in records["gpu-stall"]["rows"]}
    for name in ("thinpoint.save", "thinpoint.async_save", "torch.save", "dcp.save, 8 threads"):
        assert "error" not in rows[name], rows[name]
        assert 0 < rows[name]["stall"]["median"] <= rows[name]["durable"]["median"]
    assert records["gpu-stall"]["target"]["compressed_over_link_s"] > 0
    for row in records["gpu-throttled"]["rows"]:
        for codec_name in ("thin", "raw"):
            for verb in ("save", "load"):
                # Nothing is faster than the storage.
                assert row[codec_name][verb]["over_storage"] >= 1, row


def test_states_have_what_training_leaves_behind(dense: states.State) -> None:
    w, m, v = (dense.components[component] for component in "wmv")
    assert list(w) == list(m) == list(v)
    assert all(tensor.any() for tensor in (*w.values(), *m.values(), *v.values()))
    assert all((tensor >= 0).all() for tensor in v.values())
    assert all(tensor.dtype == torch.float8_e4m3fn for tensor in dense.components["w fp8"].values())
    assert dense.components["g bf16"].keys() <= w.keys()


def test_idle_experts_have_no_moments(dense: states.State) -> None:
    moe = states.make_moe(states.TINY, CPU)
    assert states.zero_percent(moe.components["v"]) > states.zero_percent(dense.components["v"])


def test_a_fine_tune_begins_at_rounded_weights(dense: states.State) -> None:
    tuned = states.make_tune(states.TINY, dense)
    for name, tensor in tuned.components["w"].items():
        start = dense.components["w"][name].bfloat16().float()
        assert 0 < (tensor - start).abs().max() < 0.01


def test_small_tensors_are_cut_from_the_dense_state(dense: states.State) -> None:
    small = states.make_small(states.TINY, dense)
    tensors = [tensor for component in small.components.values() for tensor in component.values()]
    assert len(tensors) == states.TINY.num_small
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def test_a_cached_state_is_not_made_again(dense: states.State, tmp_path: Path) -> None:
    first = states.cached(lambda: dense, "dense", states.TINY, tmp_path)
    again = states.cached(lambda: pytest.fail("made again"), "dense", states.TINY, tmp_path)
    assert first is dense
    assert again.about == dense.about
    assert torch.equal(again.components["v"]["head.weight"], dense.components["v"]["head.weight"])
    other = states.cached(lambda: dense, "dense", states.QUICK, tmp_path)
    assert other is dense


def test_parts_are_those_of_a_save(dense: states.State) -> None:
    components = {"m": dense.components["m"], "v": dense.components["v"]}
    items = codec.encode_items(components)
    assert sum(item.words.numel() for item in items) == 2 * sum(t.nbytes for t in components["m"].values())
    assert [item.spec.role for item in items] == sorted(item.spec.role for item in items)
    assert {item.spec.role for item in items} == {"first_moment", "second_moment"}
    batches = codec.batches_of(items, 1 << 14)
    assert [item for batch in batches for item in batch] == items
    assert all(len(batch) == 1 or sum(i.words.numel() for i in batch) <= 1 << 14 for batch in batches)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
def test_the_codec_is_measured_and_exact(dense: states.State) -> None:
    pytest.importorskip("triton")
    head = {"head.weight": dense.components["v"]["head.weight"]}
    settings = codec.Settings(in_flight_bytes=(1 << 20,), num_repeats=0)
    rows = list(codec.thin_rows(codec.encode_items({"v": head}), CPU, settings))
    assert [(row["digest"], row["prove"]) for row in rows] == list(settings.modes)
    for row in rows:
        assert "error" not in row, row
        assert row["ratio"] > 1
        assert row["uncoded_bytes"] == 0


def test_batches_are_at_most_what_was_asked_for_or_one_item() -> None:
    items = [
        EncodeItem(words=torch.zeros(size, dtype=torch.uint8), word_bytes=4, spec=PartSpec(dtype="float32"))
        for size in (400, 300, 200, 500, 100)
    ]

    def sizes(in_flight: int) -> list[int]:
        batches = codec.batches_of(items, in_flight)
        return [sum(item.words.numel() for item in batch) for batch in batches]

    assert sizes(2000) == [1500]
    assert sizes(700) == [700, 700, 100]
    assert sizes(300) == [400, 300, 200, 500, 100]
