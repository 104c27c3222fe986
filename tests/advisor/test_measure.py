"""Measuring rates: what is said, what is left behind, and the model beside a measurement."""

import errno
from pathlib import Path

import pytest
import torch
from bench.advise import Calibration, compare, mixed_state

import thinpoint
from thinpoint.advisor import Case, Storage, advise
from thinpoint.advisor.measure import CodecRate, Measured, measure, plan_text, synthetic_state
from thinpoint.errors import StorageError, UsageError

SMALL = 2 << 20


def test_rates_are_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    said: list[str] = []
    measured = measure(str(tmp_path), num_bytes=SMALL, say=said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    rate = measured.codecs["thinpoint"]
    assert measured.write_gb_per_s is not None and measured.read_gb_per_s is not None
    assert (
        min(rate.encode_gb_per_s, rate.decode_gb_per_s, measured.write_gb_per_s, measured.read_gb_per_s) > 0
    )
    assert said[0] == f"storage: {tmp_path}" and any(line.startswith("codec: thinpoint on ") for line in said)
    if measured.device == "cpu":
        assert measured.link_gb_per_s is None
        assert set(measured.skipped) == {"nvcomp-zstd", "nvcomp-ans"}


def test_a_folder_that_was_not_there_is_gone_afterwards(tmp_path: Path) -> None:
    measure(str(tmp_path / "new"), num_bytes=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_another_kind_is_cleaned_up_too() -> None:
    fsspec = pytest.importorskip("fsspec")
    measured = measure("memory://probe", num_bytes=SMALL)
    assert measured.write_gb_per_s is not None
    assert not [name for name in fsspec.filesystem("memory").find("/") if "probe" in name]


def test_after_an_error_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise StorageError("the disk is full", errno=errno.ENOSPC)

    monkeypatch.setattr("thinpoint.advisor.measure._read", full)
    with pytest.raises(StorageError, match="the disk is full"):
        measure(str(tmp_path / "new"), num_bytes=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    said: list[str] = []
    with pytest.raises(StorageError):
        measure(str(tmp_path / "file" / "below"), num_bytes=SMALL, say=said.append)
    assert len(said) == 1


@pytest.mark.parametrize("num_bytes", [0, 1 << 40])
def test_sizes_have_bounds(num_bytes: int) -> None:
    with pytest.raises(UsageError, match="expected 1,048,576 to"):
        measure(num_bytes=num_bytes)


def test_the_plan_says_what_is_written() -> None:
    assert "writes no files" in plan_text(None, SMALL)
    assert "writes one file of 2.1 MB to /data at a time and deletes it" in plan_text("/data", SMALL)


def test_measured_rates_replace_those_of_the_case() -> None:
    measured = Measured(
        device="cuda:0",
        num_bytes=1,
        codecs={"thinpoint": CodecRate(encode_gb_per_s=80.0, decode_gb_per_s=200.0)},
        skipped={},
        link_gb_per_s=25.0,
        write_gb_per_s=3.0,
        read_gb_per_s=6.0,
        folder="/data",
    )
    case = measured.apply(Case())
    assert (case.storage.gb_per_s, case.storage.read_gb_per_s, case.storage.scope) == (3.0, 6.0, "node")
    assert case.cluster.link_gb_per_s == 25.0
    assert case.codec("thinpoint").encode_gb_per_s == 80.0 and case.codec("nvcomp-ans") == Case().codec(
        "nvcomp-ans"
    )
    assert measured.apply(Case(), keeps_scope=True).storage.scope == "aggregate"
    # A save takes the same seconds in either unit: what was measured is decimal.
    binary = measured.apply(Case(storage=Storage(unit="GiB")))
    seconds = [advise(each).row("thinpoint").times.wait_s for each in (case, binary)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_the_synthetic_state_is_of_the_size_asked_for_and_shrinks_like_a_real_one() -> None:
    state = synthetic_state(8 << 20)
    assert sum(tensor.nbytes for tensor in state.values()) == pytest.approx(8 << 20, rel=0.01)
    assert all(torch.isfinite(tensor.float()).all() for tensor in state.values())

    class Nowhere:
        def write(self, data: object) -> int:
            return memoryview(data).nbytes  # type: ignore[arg-type]

        def flush(self) -> None:
            pass

    assert 1.15 < thinpoint.save(state, Nowhere()).ratio < 1.6


def test_the_wait_for_slow_storage_is_predicted() -> None:
    # The storage is so slow that the coder hardly matters; bench/advise.py compares more closely.
    fast = Calibration(encode=1e9, handling=1e9, fixed_s=0.0)
    compare(mixed_state(1 << 20), 1e9, fast, 1)
    result = compare(mixed_state(4 << 20), 4e6, fast, 3)
    assert result.measured_s >= result.raw_bytes / result.ratio / result.bytes_per_s * 0.98
    assert result.predicted_s == pytest.approx(result.measured_s, rel=0.4)
