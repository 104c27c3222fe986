"""The tables of the codec: ratios and rates beside nvCOMP, modes, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable

from bench.gpu.cells import NONE, Row, number, rate, rate_digits, size, size_gb

from thinpoint.proof.page import markdown_table

MIXES = {
    "w+m+v": ("w", "m", "v"),
    "w bf16 + m + v + g bf16": ("w bf16", "m", "v", "g bf16"),
}
"""What a checkpoint holds, in components: FP32 weights and moments, and the published mix. Bytes and seconds add up."""


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
    return markdown_table(
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
    return markdown_table(headings, rows)


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
    return markdown_table(["", "GB", "ratio", "encode", "decode"], rows)


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
    return markdown_table(headings, rows)


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
