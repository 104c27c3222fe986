"""How encoding and decoding scale with threads, beside a peer that only computes: what the machine can give.

    python bench/cores.py FILE.safetensors... [--threads 1 2 4]

The peer is zstd level 3 on pieces of 1 MiB, which needs little memory traffic and no interpreter: its speed-up is what the cores
have to offer at that moment (virtual machines often give less than they show). All take turns within every round. Tensors are
enlarged to one part of 64 MiB; rates are medians with the least and the greatest, in decimal GB of uncompressed data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from inputs import ROLES, enlarge, items_of, read_state
from results import describe, spread, write
from rich.console import Console
from rich.table import Table

from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import PartSpec, serial_map

PART_BYTES = 64_000_000
_PEER_TASKS = 32


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def compress(piece: bytes) -> bytes:
    """The peer's task."""
    return zstandard.ZstdCompressor(level=3).compress(piece)


def measure(file: Path, threads: list[int], num_rounds: int) -> dict[str, Any]:
    """Rates of the peer and of every component at each number of threads."""
    backend = get_backend("cpu")
    piece = np.random.default_rng(0).integers(0, 16, 1 << 20, dtype=np.uint8).tobytes()
    pools = {n: ThreadPoolExecutor(n) for n in threads}
    maps: dict[int, Any] = {n: pools[n].map if n > 1 else serial_map for n in threads}
    parts = {}
    for item in items_of(read_state(file)):
        parts.setdefault(f"{item.component} {item.dtype}", []).append(item)
    large = {name: enlarge(items, PART_BYTES, PART_BYTES)[0] for name, items in parts.items()}
    rates: dict[str, dict[int, list[float]]] = {}

    def note(name: str, n: int, rate: float, i_round: int) -> None:
        if i_round >= 0:
            rates.setdefault(name, {}).setdefault(n, []).append(rate)

    for i_round in range(-1, num_rounds):
        for n in threads:
            taken, _ = seconds(lambda n=n: list(maps[n](compress, [piece] * _PEER_TASKS)))
            note("peer: zstd -3", n, _PEER_TASKS * len(piece) / taken / 1e9, i_round)
            for name, item in large.items():
                words = item.words
                spec = PartSpec(dtype=item.dtype, role=ROLES[item.component], row_elems=item.row_elems)
                taken, part = seconds(lambda w=words, s=spec, n=n: backend.encode(w, s, map=maps[n]))
                note(f"{name} encode", n, words.nbytes / taken / 1e9, i_round)
                out = np.empty_like(words)
                taken, partial = seconds(
                    lambda p=part, o=out, n=n: backend.decode(p, 0, p.blocks, o, map=maps[n])
                )
                if partial != part.raw_digest or not np.array_equal(out, words):
                    raise SystemExit(f"{name} did not come back bit for bit: no numbers")
                note(f"{name} decode", n, words.nbytes / taken / 1e9, i_round)
    for pool in pools.values():
        pool.shutdown()
    return {name: {str(n): asdict(spread(values)) for n, values in by.items()} for name, by in rates.items()}


def main() -> None:
    """Measure and print; write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console(highlight=False)
    console.print(describe())
    measured = {}
    for file in options.files:
        rows = measured[file.name] = measure(file, options.threads, options.rounds)
        table = Table("GB/s", title=file.name, title_justify="left")
        for n in options.threads:
            table.add_column(f"{n} threads" if n > 1 else "1 thread", justify="right")
        for name, by in rows.items():
            base = by[str(options.threads[0])]["median"]
            cells = [f"{r['median']:.2f} ({r['median'] / base:.2f}x)" for r in by.values()]
            table.add_row(name, *cells)
        console.print(table)
    console.print(f"Written: {write('cores', {'num_rounds': options.rounds, 'data': measured})}")


if __name__ == "__main__":
    main()
