"""The numbers of `bench.gpu` as Markdown.

python -m bench.gpu.tables FILE.json...                       # to the terminal
python -m bench.gpu.tables FILE.json... --into docs/gpu.md    # between the page's two marks
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from thinpoint.proof.page import put_into

BEGIN = "<!-- bench.gpu: begin -->"
END = "<!-- bench.gpu: end -->"

Row = dict[str, Any]
NONE = "-"

MIXES = {
    "w+m+v": ("w", "m", "v"),
    "w bf16 + m + v + g bf16": ("w bf16", "m", "v", "g bf16"),
}
"""What a checkpoint holds, in components: FP32 weights and moments, and the published mix. Bytes and seconds add up."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    lines = [_line(headings), "| --- |" + " ---: |" * (len(headings) - 1), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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


def size(num_bytes: int) -> str:
    """Bytes in binary units."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):g} {unit}"
    return f"{num_bytes} B"


def rate(row: Row, verb: str, clock: str = "wall") -> float | None:
    """The median GB/s of a row; None if it has none."""
    return row[verb][f"{clock}_gb_per_s"]["median"] if f"{clock}_gb_per_s" in row.get(verb, {}) else None


def number(value: float | None, digits: int) -> str:
    """The number, or a dash."""
    return NONE if value is None else f"{value:,.{digits}f}"


def rate_digits(value: float | None) -> int:
    """Digits after the point that make sense for GB/s."""
    return 0 if value is not None and value >= 100 else 1 if value is not None and value >= 10 else 2


def three_cells(row: Row | None) -> list[str]:
    """Ratio, encode and decode GB/s of a row, or dashes."""
    if row is None or "error" in row:
        return ["failed" if row else NONE, NONE, NONE]
    speeds = [rate(row, verb) for verb in ("encode", "decode")]
    return [f"{row['ratio']:.3f}x", *(number(speed, rate_digits(speed)) for speed in speeds)]


def find(rows: list[Row], accept: Callable[[Row], bool]) -> Row | None:
    """The accepted row with the most bytes in flight."""
    return max(filter(accept, rows), key=lambda row: row["in_flight_bytes"], default=None)


def contestants(group: Row) -> dict[str, Row | None]:
    """The rows that are shown beside each other."""
    rows = group["rows"]
    return {
        "thinpoint": find(rows, lambda r: r["name"] == "thinpoint" and not r["digest"] and not r["prove"]),
        "nvCOMP ANS": find(
            rows, lambda r: r["name"].startswith("nvCOMP ANS") and r["name"].endswith("256 KiB")
        ),
        "nvCOMP Zstd": find(
            rows, lambda r: r["name"].startswith("nvCOMP Zstd") and r["name"].endswith(" KiB")
        ),
    }


def combined(rows: list[Row | None], raw_bytes: list[int]) -> Row | None:
    """A row for several components one after another, from a row of each; None if one has no numbers."""
    found = [row for row in rows if row is not None and "error" not in row]
    if len(found) < len(rows):
        return None
    result: Row = {"ratio": sum(raw_bytes) / sum(row["stored_bytes"] for row in found)}
    for verb in ("encode", "decode"):
        seconds = sum(size / (rate(row, verb) or 1) for row, size in zip(found, raw_bytes, strict=True))
        result[verb] = {"wall_gb_per_s": {"median": sum(raw_bytes) / seconds}}
    return result


def codec_table(groups: dict[str, Row]) -> str:
    """Ratio and rates of a state's components and of what checkpoints are made of, thinpoint beside nvCOMP."""
    found = {group: contestants(values) for group, values in groups.items()}
    raw = {group: values["raw_bytes"] for group, values in groups.items()}
    bits = {
        group: 8 * row["stored_bytes"] / groups[group]["num_values"]
        for group, rows in found.items()
        if (row := rows["thinpoint"]) and "error" not in row
    }
    for mix, parts in MIXES.items():
        if mix not in found and all(part in found for part in parts):
            found[mix] = {
                name: combined([found[part][name] for part in parts], [raw[part] for part in parts])
                for name in found[parts[0]]
            }
            raw[mix] = sum(raw[part] for part in parts)
    uncoded = {
        group: 100 * row["uncoded_bytes"] / raw[group]
        for group, rows in found.items()
        if (row := rows["thinpoint"]) and row.get("uncoded_bytes") is not None
    }
    headings = ["", "GB", "bits/value", "% uncoded"]
    for name in ("thinpoint", "nvCOMP ANS", "nvCOMP Zstd"):
        headings += [f"{name}: ratio", "encode", "decode"]
    return table(
        headings,
        (
            [
                group,
                size_gb(raw[group]),
                number(bits.get(group), 2),
                number(uncoded.get(group), 1),
                *(cell for row in rows.values() for cell in three_cells(row)),
            ]
            for group, rows in found.items()
        ),
    )


def copy_share(row: Row, verb: str, copy_gb_per_s: float) -> float | None:
    """Bytes that must be read and written at least, over the time they took, in percent of the copy's rate."""
    speed = rate(row, verb)
    return None if speed is None else 100 * speed * (1 + 1 / row["ratio"]) / copy_gb_per_s


def modes_table(group: Row, copy_gb_per_s: float) -> str:
    """thinpoint's rates with each number of bytes in flight, with and without checksums and proof."""
    rows = []
    for row in group["rows"]:
        if row["name"] != "thinpoint":
            continue
        what = "proof" if row["prove"] else "checksums" if row["digest"] else "coding only"
        cells = [f"{what}, {size(row['in_flight_bytes'])} in flight"]
        if "error" in row:
            rows.append([*cells, row["error"], *[NONE] * 5])
            continue
        for verb in ("encode", "decode"):
            speeds = rate(row, verb), rate(row, verb, "device")
            cells += [number(speed, rate_digits(speed)) for speed in speeds]
            cells.append(number(copy_share(row, verb, copy_gb_per_s), 0))
        rows.append(cells)
    headings = ["w+m+v", "encode", "by events", "% of copy", "decode", "by events", "% of copy"]
    return table(headings, rows)


def others_table(groups: dict[str, Row]) -> str:
    """Every way to use nvCOMP on every component, with what failed."""
    rows = []
    for group, values in groups.items():
        for row in values["rows"]:
            if row["name"] == "thinpoint":
                continue
            cells = [
                f"{group}, {row['name']}, {size(row['in_flight_bytes'])} in flight",
                size_gb(row["raw_bytes"]),
            ]
            if "error" in row:
                rows.append([*cells, row["error"], NONE, NONE])
            else:
                rows.append([*cells, *three_cells(row)])
    return table(["", "GB", "ratio", "encode", "decode"], rows)


def size_gb(num_bytes: int) -> str:
    """Decimal gigabytes."""
    return f"{num_bytes / 1e9:.2f}"


def stages_table(groups: dict[str, Row]) -> str | None:
    """Where the time goes: for each stage of the codec its share and its rate; None if nothing was profiled."""
    profiles = {group: v["stages"] for group, v in groups.items() if v["stages"].get("seconds")}
    if not profiles:
        return None
    names = list(dict.fromkeys(name for profile in profiles.values() for name in profile["seconds"]))
    rows = []
    for name in names:
        cells = [name]
        for profile in profiles.values():
            seconds = profile["seconds"].get(name)
            cells += [NONE, NONE]
            if seconds:
                speed = profile["raw_bytes"] / seconds / 1e9
                cells[-2:] = [f"{1e3 * seconds:.3f}", number(speed, rate_digits(speed))]
        rows.append(cells)
    headings = ["stage"]
    for group, profile in profiles.items():
        headings += [f"{group}, {size(profile['raw_bytes'])}: ms", "GB/s"]
    return table(headings, rows)


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
    return table(headings, cells)


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


def render_codec(record: Row, brief: bool) -> list[str]:
    """The sections of a codec record."""
    copies = {name: values["wall_gb_per_s"]["median"] for name, values in record["copy"].items()}
    blocks = [
        "Copy within the device {device:,.0f} GB/s (read + write), to the host {device_to_host:.1f}, "
        "from the host {host_to_device:.1f}.".format(**copies)
    ]
    for name, state in record["states"].items():
        groups = state["groups"]
        if not groups:
            continue
        blocks += [f"#### {name}: device to device, GB/s of raw bytes", codec_table(groups)]
        if brief:
            continue
        if "w+m+v" in groups:
            blocks.append(modes_table(groups["w+m+v"], copies["device"]))
        if stages := stages_table(groups):
            blocks += [f"Where the time goes, {name}:", stages]
        blocks += [f"All of nvCOMP, {name}:", others_table(groups)]
    return blocks


def render_end_to_end(record: Row, brief: bool) -> list[str]:
    """The sections of an end-to-end record."""
    blocks = []
    for name, place in record["places"].items():
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
    return [table(["state", "parameters", "steps", "loss", "GB", "% zeros in v"], rows)]


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
    blocks = ["#### Stall of a save, a model in training", table(headings, rows)]
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
        blocks += [f"#### {verb.capitalize()} at storage of a given rate", table(headings, rows)]
    return blocks


def render_sharded(record: Row, brief: bool) -> list[str]:
    """Checkpoints of all ranks of a sharded training."""
    about = record["state"]
    blocks = [
        f"FSDP2 on {about['num_ranks']} ranks, {about['num_parameters']:,} parameters, BF16 in the layers, AdamW. "
        "Of times the slowest rank's; host memory is a rank's, machine memory that of all."
    ]
    for name, place in record["places"].items():
        rows = []
        for row in place["rows"]:
            if "error" in row:
                rows.append([row["name"], "failed", *[NONE] * 10])
                continue
            seconds = [row["stall"]["median"], row["durable"]["median"], row["first"]["stall"]]
            meanwhile, loads = row["steps_meanwhile"], [row["load"], row["load_by_one"]]
            rows.append(
                [
                    row["name"],
                    size_gb(row["stored_bytes"]),
                    f"{row['raw_bytes'] / row['stored_bytes']:.3f}x",
                    *(number(value * 1e3, 0) for value in seconds),
                    number(row["step_alone"] * 1e3, 1),
                    number(meanwhile["median"] * 1e3 if meanwhile else None, 1),
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
            "durable after",
            "first stall",
            "step alone",
            "step meanwhile",
        ]
        headings += ["host MiB", "machine MiB", f"load by {about['num_ranks']}", "load by 1"]
        blocks += [f"#### Sharded checkpoints, {name} ({place['filesystem']})", table(headings, rows)]
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
