"""Records as `thinpoint bench` writes them, with small figures."""

from __future__ import annotations

from typing import Any

from thinpoint.proof.record import new_record
from thinpoint.proof.spread import spread

Row = dict[str, Any]
_MODEL = {"width": 64, "num_layers": 2, "context": 64, "batch": 4}


def record(piece: str, result: Row) -> Row:
    """A complete record."""
    made = new_record(piece, {"scale": "tiny", "device": "cpu"}, None)
    return {**made, "error": None, "result": result}


def step_row(name: str, cost_s: float) -> Row:
    """What a way to save cost."""
    values = spread([cost_s, 2 * cost_s, 3 * cost_s])
    return {
        "name": name,
        "quiet_step": 0.02,
        "cost": values,
        **{key: spread([cost_s]) for key in ("stall", "held", "slowdown", "durable")},
        "num_steps": 5,
        "noise": spread([0.0]),
        "percent": 100 * values["median"] / 900,
        "shortest_interval_s": 100 * values["median"],
        "ratio": 1.25,
        "mode": None,
        "fallback": None,
        "first": {"cost": 1.0},
        "trace": {"num_before": 2, "steps": [0.02, 0.02, 0.1, 0.03, 0.02]},
    }


def step_record(cost_s: float = 0.01) -> Row:
    """Step times: two ways with figures, one that is not available, one that failed."""
    loop = {
        "name": "full load",
        "model": _MODEL,
        "num_parameters": 1000,
        "raw_bytes": 12_000,
        "idle": 0.03,
        "idle_unknown": None,
        "step": spread([0.02, 0.021]),
        "rows": [
            step_row("thinpoint.async_save", cost_s),
            {**step_row("thinpoint.async_save, overlap", cost_s / 10), "fallback": "a <reason>"},
            {"name": "dcp.async_save", "unavailable": "this version has none"},
            {"name": "torch.save", "error": "OSError: full"},
        ],
    }
    return record("step", {"every_s": 900.0, "share": 0.01, "num_saves": 3, "loops": [loop]})


def restore_record() -> Row:
    """Restores at one rate, and from a folder where one way failed."""

    def way(name: str, over_raw: float) -> Row:
        return {
            "name": name,
            "stored_bytes": 9,
            "cold": True,
            "seconds": spread([over_raw / 10]),
            "over_raw": spread([over_raw]),
        }

    ways = [way("thinpoint", 0.8), way("thinpoint, codec raw", 1.0), way("torch.load", 1.1)]
    failed = {"name": "dcp.load", "stored_bytes": 9, "cold": True, "error": "not exact: a"}
    return record(
        "restore",
        {
            "target": 1.0,
            "num_rounds": 3,
            "model": _MODEL,
            "num_parameters": 1000,
            "raw_bytes": 12_000,
            "rows": [
                {"storage": "1 GB/s", "gb_per_s": 1.0, "cold": None, "ways": ways},
                {
                    "storage": "folder",
                    "gb_per_s": None,
                    "cold": True,
                    "filesystem": "ext4",
                    "ways": [*ways, failed],
                },
            ],
        },
    )


def resume_record(verdict: str = "identical") -> Row:
    """A run of ten steps that was killed twice."""
    counts = ("num_parameters", "num_steps", "num_kills", "num_restores", "num_kills_in_save")
    more = ("num_steps_again", "num_losses_compared", "num_checkpoints", "num_tensors", "num_bytes")
    return record(
        "resume",
        {
            "verdict": verdict,
            "differences": [] if verdict == "identical" else ["killed.model.w: 3 of 8 bytes"],
            **dict.fromkeys((*counts, *more), 10),
            "config": {"batch": 8},
            "seconds": 3.0,
            "seed": 0,
            "kills": [
                {"start": 0, "last_step": 5, "in_save": False},
                {"start": 4, "last_step": 8, "in_save": True},
            ],
            "last_start": 6,
            "losses": {"stride": 1, "values": [5.0 / (1 + i) for i in range(10)]},
            "first_loss": 5.0,
            "last_loss": 0.5,
        },
    )


def rates_record() -> Row:
    """Two rates."""
    return record(
        "rates",
        {
            "model": _MODEL,
            "num_parameters": 1000,
            "raw_bytes": 12_000,
            "gb_per_s": {"encode": spread([2.0]), "to_host": spread([50.0, 55.0])},
            "ratio": 1.25,
            "cold": True,
            "filesystem": "ext4",
        },
    )


ALL = (rates_record, step_record, restore_record, resume_record)
