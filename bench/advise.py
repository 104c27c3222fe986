"""The advisor's model against measurement: the wait of `thinpoint.save` at storage of a given rate.

    python -m bench.advise

Calibrates on two sizes of one state, saved to a sink that takes everything at once: the rates of the coder and of the writer,
and what a save takes besides. Then predicts saves of states of other sizes and ratios to a sink of a given rate, with
the ratio from a sample of the state's file, and measures them. On the CPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench.gpu.throttled import ThrottledSink
from bench.results import describe, spread, write
from rich.console import Console
from rich.table import Table

import thinpoint
from thinpoint.advisor.measure import synthetic_state
from thinpoint.advisor.sample import sample_checkpoint
from thinpoint.codec.plan import PART_BYTES
from thinpoint.pace import Rates, save_times
from thinpoint.proof.throttle import Throttle

State = dict[str, torch.Tensor]

BATCH_BYTES = 2 * PART_BYTES
"""On the CPU a wave of this half size is handed to the writer when the next one is encoded."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was learnt: raw bytes a second of the coder, stored bytes a second of the writer alone, seconds of a save besides.

    The writer makes and checks what comes next while the storage takes what came before: the slower of the two counts.
    """

    encode: float
    handling: float
    fixed_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """A prediction beside what was measured, in seconds."""

    raw_bytes: int
    ratio: float
    bytes_per_s: float
    predicted_s: float
    measured_s: float
    measured: list[float]

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def raw_bytes(state: State) -> int:
    """Size of a state."""
    return sum(tensor.nbytes for tensor in state.values())


def mixed_state(num_bytes: int, seed: int = 7) -> State:
    """A state that is not calibrated with: rows of another width, an eighth of them idle, moments of other spreads."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(num_bytes // (10 * 768), 1)
    first = torch.randn((rows, 768), generator=generator) * torch.logspace(-7, -2, 768)
    first[::8] = 0
    return {
        "model.weight": torch.randn((rows, 768), generator=generator).to(torch.bfloat16),
        "optim.exp_avg": first,
        "optim.exp_avg_sq": first.square(),
    }


def save_s(state: State, bytes_per_s: float) -> tuple[float, thinpoint.SaveReport]:
    """Seconds of one synchronous save to storage of a rate, and its report."""
    sink = ThrottledSink(Throttle(bytes_per_s))
    begin = time.perf_counter()
    report = thinpoint.save(state, sink)
    return time.perf_counter() - begin, report


def calibrate(num_bytes: int, num_repeats: int) -> Calibration:
    """The rates and the rest, from a state of so many bytes and one of a quarter, saved to a sink that takes no time."""
    coding, handling, besides = [], [], []
    for size in (num_bytes // 4, num_bytes):
        state = synthetic_state(size)
        save_s(state, 1e12)
        for _ in range(num_repeats):
            seconds, report = save_s(state, 1e12)
            coding.append(report.raw_bytes / report.stages["encode"])
            handling.append(report.file_bytes / report.stages["write"])
            times = save_times(
                report.raw_bytes,
                report.file_bytes,
                Rates(encode=coding[-1], link=float("inf"), storage=handling[-1]),
                batch_bytes=BATCH_BYTES,
            )
            besides.append(seconds - times.wait_s)
    return Calibration(encode=median(coding), handling=median(handling), fixed_s=max(median(besides), 0.0))


def compare(state: State, bytes_per_s: float, calibration: Calibration, num_repeats: int) -> Result:
    """Predict, then measure."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "state.pt")
        torch.save(state, path)
        sample = sample_checkpoint(path, budget_bytes=8 << 20)
    stored = sum(
        part.raw_bytes / sample.ratios["thinpoint"][part.name, part.precision] for part in sample.components
    )
    size = raw_bytes(state)
    storage = min(bytes_per_s, calibration.handling)
    rates = Rates(encode=calibration.encode, link=float("inf"), storage=storage)
    predicted = save_times(size, stored, rates, batch_bytes=BATCH_BYTES, fixed_s=calibration.fixed_s)
    measured = [save_s(state, bytes_per_s)[0] for _ in range(num_repeats)]
    return Result(
        raw_bytes=size,
        ratio=size / stored,
        bytes_per_s=bytes_per_s,
        predicted_s=predicted.wait_s,
        measured_s=median(measured),
        measured=measured,
    )


def main() -> None:
    """Print a table of predictions and measurements, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=200.0, help="size of the state to calibrate with")
    parser.add_argument("--repeat", type=int, default=5, help="saves of each")
    options = parser.parse_args()
    console = Console(highlight=False)
    console.print(describe())
    calibration = calibrate(int(options.mb * 1e6), options.repeat)
    console.print(
        f"coder {calibration.encode / 1e9:.3f} GB/s, writer {calibration.handling / 1e9:.3f} GB/s, "
        f"besides {calibration.fixed_s * 1e3:.0f} ms"
    )
    results = []
    for share, rate in ((0.5, 0.02), (1.5, 0.05), (0.75, 0.1), (1.75, 0.3), (2.0, 2.0)):
        state = mixed_state(int(options.mb * 1e6 * share))
        results.append(compare(state, rate * 1e9, calibration, options.repeat))
    table = Table("MB", "ratio", "storage GB/s", "predicted s", "measured s", "error")
    rows: list[dict[str, Any]] = []
    for result in results:
        table.add_row(
            f"{result.raw_bytes / 1e6:.0f}",
            f"{result.ratio:.3f}",
            f"{result.bytes_per_s / 1e9:g}",
            f"{result.predicted_s:.2f}",
            str(spread(result.measured)),
            f"{result.error:+.1%}",
        )
        rows.append({**asdict(result), "error": result.error})
    console.print(table)
    console.print(f"Written: {write('advise', {'calibration': asdict(calibration), 'rows': rows})}")


if __name__ == "__main__":
    main()
