"""The tables of the GPU benchmark show what is in its JSON files."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench.gpu.tables import BEGIN, END, render

from thinpoint.errors import UsageError
from thinpoint.proof.page import put_into

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"

Row = dict[str, Any]


def gb_per_s(median: float) -> Row:
    return {"wall_gb_per_s": {"median": median, "least": median, "greatest": median}}


def row(name: str, *, stored: int, encode: float, decode: float, **more: Any) -> Row:
    sizes = {"in_flight_bytes": 1 << 30, "raw_bytes": 1000, "stored_bytes": stored, "ratio": 1000 / stored}
    return {
        "name": name,
        **sizes,
        "uncoded_bytes": 100,
        "encode": gb_per_s(encode),
        "decode": gb_per_s(decode),
        **more,
    }


def group(num_values: int, *, stored: int, encode: float, decode: float) -> Row:
    plain: Row = {"digest": False, "prove": False}
    return {
        "dtype": "float32",
        "raw_bytes": 1000,
        "num_values": num_values,
        "num_parts": 1,
        "rows": [
            row("thinpoint", stored=stored, encode=encode, decode=decode, **plain),
            row("thinpoint", stored=stored, encode=1, decode=1, **plain | {"in_flight_bytes": 1 << 26}),
            row("thinpoint", stored=stored, encode=2, decode=2, digest=True, prove=True),
            row("nvCOMP ANS <f4, 256 KiB", stored=900, encode=250, decode=350),
            {"name": "nvCOMP Zstd, 64 KiB", "in_flight_bytes": 1 << 30, "raw_bytes": 1000, "error": "no GPU"},
        ],
        "stages": {"seconds": {"scan": 0.001, "code": 0.002}, "raw_bytes": 1_000_000_000},
    }


def record(kind: str, **values: Any) -> Row:
    machine = {
        "cpu": "a CPU",
        "num_cores": 16,
        "python": "3.12.3",
        "packages": {"torch": "2.11.0"},
        "gpu": {"name": "a GPU", "driver": "580", "cuda": "13.0", "packages": {"triton": "3.6.0"}},
    }
    return {"kind": kind, "date": "2026-11-30T10:00:00+00:00", "commit": "abc", "machine": machine, **values}


def codec_record() -> Row:
    groups = {
        "w": group(250, stored=800, encode=400, decode=800),
        "m": group(250, stored=800, encode=400, decode=800),
        "v": group(250, stored=400, encode=200, decode=800),
    }
    copies = {name: gb_per_s(4000) for name in ("device", "device_to_host", "host_to_device")}
    return record("gpu-codec", copy=copies, states={"dense": {"groups": groups}}, skipped=["moe w"])


def cells_of(text: str, first: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in lines[0].strip("|").split(" | ")]


def test_a_component_shows_bits_ratio_and_rates_of_the_largest_bytes_in_flight() -> None:
    cells = cells_of(render([codec_record()]), "v")
    assert cells == [
        "v",
        "0.00",
        "12.80",
        "10.0",
        "2.500x",
        "200",
        "800",
        "1.111x",
        "250",
        "350",
        "failed",
        "-",
        "-",
    ]


def test_bytes_and_seconds_of_a_mix_add_up() -> None:
    cells = cells_of(render([codec_record()]), "w+m+v")
    # 3000 bytes of raw values in 2000; 1000 at 400, 400 and 200 GB/s take as long as 3000 at 300.
    assert cells[4:7] == ["1.500x", "300", "800"]
    assert cells[7:10] == ["1.111x", "250", "350"]


def test_failures_and_what_was_left_out_are_named() -> None:
    text = render([codec_record()], brief=True)
    assert "- nvCOMP Zstd, 64 KiB: no GPU" in text
    assert "Left out for lack of time: moe w." in text


def test_details_are_left_out_if_asked() -> None:
    assert "| scan |" in render([codec_record()])
    assert "| scan |" not in render([codec_record()], brief=True)


def test_stages_show_milliseconds_and_rate() -> None:
    assert cells_of(render([codec_record()]), "code")[1:3] == ["2.000", "500"]


def test_the_machine_is_named_once() -> None:
    text = render([codec_record(), codec_record()])
    assert (
        text.count("a GPU, driver 580, CUDA 13.0; a CPU, 16 cores; Python 3.12.3, torch 2.11.0, triton 3.6.0")
        == 1
    )


def test_a_missed_target_is_said() -> None:
    target = {"ceiling_gb_per_s": 10.0, "share": 0.85, "met": False}
    places = {"RAM disk": {"filesystem": "tmpfs", "rows": [], "targets": {"save": target}}}
    text = render([record("gpu-e2e", places=places)])
    assert "- save: 85 % of the plain writer's rate times the ratio (10.00 GB/s); target 90 %: missed" in text


def test_a_record_of_another_benchmark_is_refused() -> None:
    with pytest.raises(ValueError, match="compare"):
        render([record("compare")])


def test_committed_results_can_be_rendered() -> None:
    for path in RESULTS.glob("gpu-*.json"):
        found = json.loads(path.read_text())
        assert found["commit"] in render([found])


def test_text_goes_between_the_marks_of_a_page() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_into(page, "new\n", begin=BEGIN, end=END) == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_marks_is_refused(page: str) -> None:
    with pytest.raises(UsageError, match="once each"):
        put_into(page, "new", begin=BEGIN, end=END)
