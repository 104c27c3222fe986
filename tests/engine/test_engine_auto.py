"""Codec "auto": what earlier saves have taken decides."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import thinpoint
from thinpoint.engine import auto as auto_room
from thinpoint.engine.auto import AutoCodec, place_of
from thinpoint.engine.report import SaveReport
from thinpoint.pace import PROBE_EVERY


def report_of(codec: str, *, encode_s: float, storage_s: float) -> SaveReport:
    return SaveReport(
        path="x",
        file_id="0" * 16,
        file_bytes=80_000_000,
        raw_bytes=100_000_000,
        seconds=1.0,
        backend="cpu",
        codec=codec,
        stages={"encode": encode_s, "storage": storage_s, "commit": 0.0},
    )


def test_slow_storage_is_worth_compressing_and_fast_storage_is_not(caplog: pytest.LogCaptureFixture) -> None:
    chooser = AutoCodec()
    assert chooser.choose("a", mode="sync") == "thin"
    chooser.learn("a", report_of("thin", encode_s=0.1, storage_s=0.8))
    assert chooser.choose("a", mode="sync") == "thin"
    chooser.learn("b", report_of("thin", encode_s=0.8, storage_s=0.1))
    with caplog.at_level(logging.WARNING, "thinpoint"):
        assert [chooser.choose("b", mode="sync") for _ in range(3)] == ["raw"] * 3
    assert caplog.text.count("stored raw") == 1
    assert chooser.choose("a", mode="sync") == "thin"


def test_after_many_raw_saves_one_is_compressed_again_and_may_change_the_choice() -> None:
    chooser = AutoCodec()
    chooser.learn("a", report_of("thin", encode_s=0.8, storage_s=0.1))
    for _ in range(PROBE_EVERY):
        assert chooser.choose("a", mode="sync") == "raw"
        chooser.learn("a", report_of("raw", encode_s=0.0, storage_s=0.1))
    assert chooser.choose("a", mode="sync") == "thin"
    chooser.learn("a", report_of("thin", encode_s=0.1, storage_s=0.8))
    assert chooser.choose("a", mode="sync") == "thin"


def test_an_asynchronous_save_compresses_unless_that_takes_longer_than_writing_raw() -> None:
    chooser = AutoCodec()
    chooser.learn("a", report_of("thin", encode_s=0.1, storage_s=0.1))
    chooser.learn("b", report_of("thin", encode_s=0.5, storage_s=0.1))
    assert (chooser.choose("a", mode="async"), chooser.choose("b", mode="async")) == ("thin", "raw")


class SlowSink:
    """A file object that takes bytes at a rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        time.sleep(num_bytes / self.bytes_per_s)
        return num_bytes


@pytest.mark.parametrize(
    ("backend", "bytes_per_s", "expected"), [("cpu", 2e6, "thin"), ("reference", 1e12, "raw")]
)
def test_a_save_learns_from_the_one_before(
    backend: str, bytes_per_s: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far apart: a slow place or a slow coder, so that a busy machine does not decide."""
    monkeypatch.setattr(auto_room.auto, "_known", {})
    state = {f"w{i}": torch.randn(50_000) for i in range(4)}
    thinpoint.save(state, SlowSink(1e12), backend=backend)  # compiles
    first, second = (
        thinpoint.save(state, SlowSink(bytes_per_s), codec="auto", backend=backend) for _ in range(2)
    )
    assert (first.codec, second.codec) == ("thin", expected)
    assert first.stages["storage"] > 0
    far, near = ("storage", "encode") if expected == "thin" else ("encode", "storage")
    assert first.stages[far] > 2 * first.stages[near], "else the test shows nothing"


def test_files_of_both_kinds_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_room.auto, "_known", {})
    state = {"w": torch.randn(5000)}
    for name in ("a", "b", "c"):
        thinpoint.async_save(state, tmp_path / name, codec="auto").result()
        loaded = thinpoint.load(tmp_path / name)
        assert torch.equal(loaded["w"].view(torch.uint8), state["w"].view(torch.uint8))


def test_places() -> None:
    assert place_of("s3://user:secret@bucket/run/a") == place_of("s3://bucket/run/b") == "s3://bucket"
    assert place_of("/tmp/no/such/folder/x").startswith("device")
    assert place_of(SlowSink(1)) == "SlowSink"
