"""Ratio and throughput of thinpoint beside its peers, in one run, on the same tensors.

    python bench/compare.py --make                      # a model trained here
    python bench/compare.py --data FILE...              # .safetensors, .pt or .thin

Contestants take turns within every round; medians with the least and the greatest. Each result is compared
with its input in every round: a contestant that is not bit-exact is reported as such and without numbers.
Ratios are those of the tensors as they are; for timing, rows are repeated to --tensor-mb a tensor, new
low bits drawn, and --min-mb a component. GB are decimal, of uncompressed data.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contestants import Codec, Saver, blank_copy, codecs, remove, savers, stored_bytes
from inputs import Item, enlarge, items_of, read_state, state_of, train_state
from results import describe, spread, write
from rich.console import Console
from rich.table import Table

from thinpoint.demo.compare import differences

Row = dict[str, Any]
Least = tuple[int, int]
"""Bytes of each component and of each tensor that is timed."""


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds and result of one call."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def round_trip(codec: Codec, items: list[Item]) -> tuple[float, float, int, str | None]:
    """Seconds to encode, seconds to decode, stored bytes, and the name of a tensor that came back changed."""
    encode_s = decode_s = 0.0
    num_bytes = 0
    wrong = None
    for item in items:
        given = codec.prepare(item)
        seconds, encoded = timed(codec.encode, given, item)
        encode_s += seconds
        seconds, decoded = timed(codec.decode, encoded, item)
        decode_s += seconds
        num_bytes += codec.stored_bytes(encoded)
        if not np.array_equal(decoded.view(np.uint8), item.words.view(np.uint8)):
            wrong = item.name
    return encode_s, decode_s, num_bytes, wrong


def compare_codecs(items: list[Item], entrants: list[Codec], num_rounds: int, least: Least) -> list[Row]:
    """A row a codec for the tensors of one component and dtype; `error` instead of numbers if not exact."""
    large = enlarge(items, *least)
    raw_bytes = sum(item.tensor.nbytes for item in items)
    large_bytes = sum(item.tensor.nbytes for item in large)
    rows: dict[str, Row] = {codec.name: {"name": codec.name} for codec in entrants}
    encode_rates: dict[str, list[float]] = {codec.name: [] for codec in entrants}
    decode_rates: dict[str, list[float]] = {codec.name: [] for codec in entrants}
    for i_round in range(-1, num_rounds):
        for codec in entrants:
            row = rows[codec.name]
            if "error" in row:
                continue
            try:
                encode_s, decode_s, num_bytes, wrong = round_trip(codec, items if i_round < 0 else large)
            except NotImplementedError as error:
                row["error"] = str(error)
                continue
            if wrong is not None:
                row["error"] = f"not exact: {wrong} came back changed"
            elif i_round < 0:
                row["stored_bytes"] = num_bytes
                row["ratio"] = raw_bytes / num_bytes
                row["bits_per_value"] = 8 * num_bytes / sum(item.tensor.numel() for item in items)
            else:
                row["timed_ratio"] = large_bytes / num_bytes
                encode_rates[codec.name].append(large_bytes / encode_s / 1e9)
                decode_rates[codec.name].append(large_bytes / decode_s / 1e9)
    for name, row in rows.items():
        if "error" in row:
            rows[name] = {"name": name, "error": row["error"]}
        else:
            row["encode_gb_per_s"] = asdict(spread(encode_rates[name]))
            row["decode_gb_per_s"] = asdict(spread(decode_rates[name]))
    return list(rows.values())


def compare_savers(
    state: Any, entrants: list[Saver], folder: Path, num_rounds: int, least: Least
) -> list[Row]:
    """A row for each way to save the whole state; `error` instead of numbers if not exact."""
    groups = groups_of(items_of(state)).values()
    large = state_of([item for items in groups for item in enlarge(items, *least)])
    raw_bytes, large_bytes = (sum(item.tensor.nbytes for item in items_of(each)) for each in (state, large))
    blanks = [blank_copy(state), blank_copy(large)]
    rows: dict[str, Row] = {saver.name: {"name": saver.name} for saver in entrants}
    save_rates: dict[str, list[float]] = {saver.name: [] for saver in entrants}
    load_rates: dict[str, list[float]] = {saver.name: [] for saver in entrants}
    for i_round in range(-1, num_rounds):
        for saver in entrants:
            row = rows[saver.name]
            if "error" in row:
                continue
            given = state if i_round < 0 else large
            path = folder / "thinpoint-bench.out"
            remove(path)
            save_s, _ = timed(saver.save, given, path)
            num_bytes = stored_bytes(path)
            load_s, loaded = timed(saver.load, path, blanks[i_round >= 0])
            if found := differences(given, loaded):
                row["error"] = f"not exact: {found[0]}"
            elif i_round < 0:
                row["stored_bytes"] = num_bytes
                row["ratio"] = raw_bytes / num_bytes
            else:
                row["timed_ratio"] = large_bytes / num_bytes
                save_rates[saver.name].append(large_bytes / save_s / 1e9)
                load_rates[saver.name].append(large_bytes / load_s / 1e9)
            remove(path)
    for name, row in rows.items():
        if "error" in row:
            rows[name] = {"name": name, "error": row["error"]}
        else:
            row["save_gb_per_s"] = asdict(spread(save_rates[name]))
            row["load_gb_per_s"] = asdict(spread(load_rates[name]))
    return list(rows.values())


def as_table(title: str, rows: list[Row], verbs: tuple[str, str]) -> Table:
    """The rows with ratio and both rates; what is not exact shows its error."""
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("ratio", f"{verbs[0]} GB/s", f"{verbs[1]} GB/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], "-", row["error"], "")
            continue
        rates = (row[f"{verb}_gb_per_s"] for verb in verbs)
        cells = [f"{r['median']:.2f} ({r['least']:.2f}-{r['greatest']:.2f})" for r in rates]
        table.add_row(row["name"], f"{row['ratio']:.3f}x", *cells)
    return table


def groups_of(items: list[Item]) -> dict[str, list[Item]]:
    """ "w float32" and so on -> its items, in the order w, m, v, g."""
    groups: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: "wmvg".index(item.component)):
        groups.setdefault(f"{item.component} {item.dtype}", []).append(item)
    return groups


def main() -> None:
    """Measure what the command line names; print tables and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="files with training state")
    parser.add_argument("--make", action="store_true", help="train a small model and measure its state")
    parser.add_argument("--steps", type=int, default=100, help="steps to train with --make")
    parser.add_argument(
        "--min-mb", type=int, default=64, help="enlarge every component to this size for timing"
    )
    parser.add_argument("--tensor-mb", type=int, default=64, help="and every timed tensor to this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where whole files are saved")
    parser.add_argument("--only", choices=["codecs", "files"], help="measure one half only")
    options = parser.parse_args()
    if not options.make and not options.data:
        parser.error("give --data FILE... or --make")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    console = Console(highlight=False)
    console.print(describe())
    states = {path.name: read_state(path) for path in options.data}
    if options.make:
        console.print(f"Training a model of 3.3 M parameters for {options.steps} steps")
        states[f"demo-step{options.steps}"] = train_state(options.steps)
    entrants = codecs()
    least = (options.min_mb * 1_000_000, options.tensor_mb * 1_000_000)
    measured: dict[str, Any] = {}
    for name, state in states.items():
        rows: dict[str, Any] = {"components": {}, "files": []}
        if options.only != "files":
            for group, items in groups_of(items_of(state)).items():
                found = compare_codecs(items, entrants, options.rounds, least)
                rows["components"][group] = found
                console.print(as_table(f"{name}: {group}, tensors in memory", found, ("encode", "decode")))
        if options.only != "codecs":
            rows["files"] = compare_savers(state, savers(), options.dir, options.rounds, least)
            title = f"{name}: whole state, files in {options.dir}"
            console.print(as_table(title, rows["files"], ("save", "load")))
        measured[name] = rows
    settings = {
        "num_rounds": options.rounds,
        "min_mb": options.min_mb,
        "tensor_mb": options.tensor_mb,
        "dir": str(options.dir),
    }
    console.print(f"Written: {write('compare', {'settings': settings, 'data': measured})}")


if __name__ == "__main__":
    main()
