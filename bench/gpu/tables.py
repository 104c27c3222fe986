"""The numbers of `bench.gpu` as Markdown.

python -m bench.gpu.tables FILE.json...                       # to the terminal
python -m bench.gpu.tables FILE.json... --into docs/gpu.md    # between the page's two marks
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.gpu.cells import NONE, Row, number, size_gb
from bench.gpu.codec_tables import render_codec

from thinpoint.proof.page import markdown_table, put_into

BEGIN = "<!-- bench.gpu: begin -->"
END = "<!-- bench.gpu: end -->"


def machine_line(record: Row) -> str:
    """On what and with what a record was measured."""
    machine = record["machine"]
    gpu = machine.get("gpu")
    packages = {**machine["packages"], **(gpu or {}).get("packages", {})}
    names = [
        name for name in ("torch", "triton", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12") if packages.get(name)
    ]
    where = f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; " if gpu else ""
    versions = ", ".join(f"{name} {packages[name]}" for name in names)
    cpu = f"{machine['cpu']}, {machine['num_cores']} cores"
    return f"{where}{cpu}; Python {machine['python']}, {versions}; commit {record['commit']}, {record['date'][:10]}"


def end_to_end_table(rows: list[Row]) -> str:
    """Seconds, rates and peak memory of saves and loads."""
    cells = []
    for row in rows:
        if "error" in row:
            cells.append([row["name"], row["error"], *[NONE] * 8])
            continue
        line = [row["name"], f"{row['ratio']:.3f}x"]
        for verb in ("save", "load"):
            values = row[verb]
            line += [f"{values['seconds']['median']:.2f}", f"{values['gb_per_s']['median']:.2f}"]
            line += [number(values["peak_host_mib"], 0), number(values["peak_device_mib"], 0)]
        cells.append(line)
    headings = ["", "ratio"]
    for verb in ("save", "load"):
        headings += [f"{verb}: s", "GB/s", "host MiB", "GPU MiB"]
    return markdown_table(headings, cells)


def target_lines(targets: dict[str, Row]) -> list[str]:
    """Whether thinpoint keeps up with plain bytes, a line for saving and one for loading."""
    return [
        f"- {verb}: {100 * values['share']:.0f} % of the plain writer's rate times the ratio "
        f"({values['ceiling_gb_per_s']:.2f} GB/s); target 90 %: {'met' if values['met'] else 'missed'}"
        for verb, values in targets.items()
    ]


def failures(values: Any) -> dict[str, None]:
    """The distinct "name: error" of all rows, in order."""
    if isinstance(values, list):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        return {}
    found = {f"{values.get('name', 'stages')}: {values['error']}": None} if "error" in values else {}
    for child in values.values():
        found |= failures(child)
    return found


def render_end_to_end(record: Row, brief: bool) -> list[str]:
    """The sections of an end-to-end record."""
    blocks = []
    for name, place in record["places"].items():
        if not place["rows"] and not place.get("targets"):
            continue
        blocks += [f"#### Save and load, {name} ({place['filesystem']})", end_to_end_table(place["rows"])]
        if lines := target_lines(place.get("targets", {})):
            blocks.append("\n".join(lines))
    return blocks


def render_states(record: Row, brief: bool) -> list[str]:
    """What the states are."""
    rows = []
    for name, about in record["states"].items():
        total = sum(each["raw_bytes"] for each in about["components"].values())
        zeros = {key: each["zero_percent"] for key, each in about["components"].items()}
        rows.append(
            [
                name,
                number(about.get("num_parameters"), 0),
                number(about.get("num_steps"), 0),
                number(about.get("loss"), 3),
                size_gb(total),
                number(zeros.get("v"), 2),
            ]
        )
    return [markdown_table(["state", "parameters", "steps", "loss", "GB", "% zeros in v"], rows)]


def render_stall(record: Row, brief: bool) -> list[str]:
    """How long training stood still."""
    rows = []
    for row in record["rows"]:
        if "error" in row:
            rows.append([row["name"], *["failed"] * 6])
            continue
        meanwhile = row["steps_meanwhile"]
        rows.append(
            [
                row["name"],
                number(row["raw_bytes"] / row["stored_bytes"], 3) + "x",
                number(row["stall"]["median"] * 1e3, 0),
                number(row["durable"]["median"] * 1e3, 0),
                number(row["first"]["stall"] * 1e3, 0),
                number(row["step_alone"] * 1e3, 1),
                number(meanwhile["median"] * 1e3 if meanwhile else None, 1),
            ]
        )
    headings = ["ms", "ratio", "stall", "durable after", "first stall", "step alone", "step meanwhile"]
    millions = record["state"]["num_parameters"] / 1e6
    blocks = [
        f"#### Stall of a save, {millions:,.0f}M parameters in training",
        markdown_table(headings, rows),
    ]
    if target := record.get("target"):
        blocks.append(
            f"Compressed bytes over the link ({record['link_gb_per_s']:.1f} GB/s) take "
            f"{target['compressed_over_link_s'] * 1e3:.0f} ms; the asynchronous save stalls for "
            f"{target['stall_over_that']:.2f} times that; target 1.15: {'met' if target['met'] else 'missed'}."
        )
    return blocks


def render_throttled(record: Row, brief: bool) -> list[str]:
    """Saves and loads at storage of given rates."""

    def cells(row: Row, codec: str, verb: str) -> list[str]:
        found = row.get(codec, {}).get(verb)
        if not found or "error" in found:
            return [NONE if not found else "failed", NONE]
        return [number(found["seconds"]["median"] * 1e3, 0), number(found["over_storage"], 2)]

    blocks = []
    for verb, peers in (("save", ("thin", "raw")), ("load", ("thin", "raw", "dcp"))):
        rows = [
            [number(row["gb_per_s"], 0), *(cell for who in peers for cell in cells(row, who, verb))]
            for row in record["rows"]
        ]
        names = [{"thin": "thinpoint", "raw": "raw", "dcp": "dcp.load"}[who] for who in peers]
        headings = ["storage, GB/s", *(h for name in names for h in (f"{name}: ms", "over storage alone"))]
        blocks += [f"#### {verb.capitalize()} at storage of a given rate", markdown_table(headings, rows)]
    return blocks


def render_sharded(record: Row, brief: bool) -> list[str]:
    """Checkpoints of all ranks of a sharded training."""
    about = record["state"]
    blocks = [
        f"FSDP2 on {about['num_ranks']} ranks, {about['num_parameters']:,} parameters, BF16 in the layers, AdamW. "
        "Of times the slowest rank's. What a checkpoint costs training: the stall, and what steps take longer until "
        "it is durable. Host memory is a rank's, machine memory that of all."
    ]
    for name, place in record["places"].items():
        rows = []
        for row in place["rows"]:
            if "error" in row:
                rows.append([row["name"], "failed", *[NONE] * 10])
                continue
            seconds = [row[key]["median"] for key in ("stall", "cost", "durable")] + [row["first"]["stall"]]
            loads = [row["load"], row["load_by_one"]]
            rows.append(
                [
                    row["name"],
                    size_gb(row["stored_bytes"]),
                    f"{row['raw_bytes'] / row['stored_bytes']:.3f}x",
                    *(number(value * 1e3, 0) for value in seconds),
                    number(row["step_alone"] * 1e3, 1),
                    number(row["host_mib"], 0),
                    number(row["machine_mib"], 0),
                    *(number(load["median"] * 1e3 if load else None, 0) for load in loads),
                ]
            )
        headings = [
            "ms",
            "GB",
            "ratio",
            "stall",
            "costs training",
            "durable after",
            "first stall",
            "step alone",
        ]
        headings += ["host MiB", "machine MiB", f"load by {about['num_ranks']}", "load by 1"]
        blocks += [
            f"#### Sharded checkpoints, {name} ({place['filesystem']})",
            markdown_table(headings, rows),
        ]
    return blocks


_RENDERERS = {
    "gpu-states": render_states,
    "gpu-codec": render_codec,
    "gpu-e2e": render_end_to_end,
    "gpu-stall": render_stall,
    "gpu-throttled": render_throttled,
    "gpu-sharded": render_sharded,
}


def render(records: Iterable[Row], *, brief: bool = False) -> str:
    """All records as Markdown, in the order given; `brief` leaves out the details of the codec.

    Raises:
        ValueError: a record is of another benchmark.
    """
    blocks: list[str] = []
    line = ""
    for record in records:
        if record["kind"] not in _RENDERERS:
            raise ValueError(f"no table for records of kind {record['kind']!r}")
        if line != (line := machine_line(record)):
            blocks.append(line)
        blocks += _RENDERERS[record["kind"]](record, brief)
        if failed := failures(record):
            blocks.append("\n".join(["Failed:", "", *(f"- {each}" for each in failed)]))
        if record.get("skipped"):
            blocks.append(f"Left out for lack of time: {', '.join(record['skipped'])}.")
    return "\n\n".join(blocks) + "\n"


def main() -> None:
    """Print the tables of some files, or put them into a page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, help="a page with the two marks")
    options = parser.parse_args()
    text = render(json.loads(path.read_text()) for path in options.files)
    if options.into:
        page = put_into(options.into.read_text(), text, begin=BEGIN, end=END)
        options.into.write_text(page)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
