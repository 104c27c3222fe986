"""What saves cost a training loop, from the times of its steps. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from thinpoint.proof.spread import spread

EVERY_S = 900.0
"""One save per 15 minutes."""
SHARE = 0.01
"""Of the training time: what saving may cost."""


STEPS_BEFORE, _SHOWN_AFTER = 5, 60
"""Steps before and after a call that are kept to be drawn."""

Row = dict[str, Any]


@dataclass(kw_only=True)
class Block:
    """Training steps that were timed one after another.

    Attributes:
        steps: seconds of each, by the device's clock.
        updates: seconds of each `optimizer.step()`, by the same clock.
        saves: what was saved meanwhile.
    """

    steps: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    saves: list[SaveWindow] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SaveWindow:
    """One save.

    Attributes:
        start, end: the steps that it touched, of its block; `start` holds the call itself.
        stall: seconds until the call returned.
        durable: seconds from the call until the checkpoint was durable.
        stored_bytes: what it takes in the folder.
        mode: what the report says that the caller waited for; None without a report.
        fallback: why that is not what was asked for; None if it is.
    """

    start: int
    end: int
    stall: float
    durable: float
    stored_bytes: int
    mode: str | None = None
    fallback: str | None = None


def summary(block: Block, quiet: Block, raw_bytes: int) -> Row:
    """What the saves of a block cost beside the quiet steps around it. Seconds; the first save stands apart.

    cost: sum over the steps touched of (step - median quiet step). stall: of the call, by the host's clock. held: sum over the
    same steps of (time in `optimizer.step()` - its quiet median). slowdown: what is left of the cost; below 0 where the device
    still had work while the host waited. noise: the same sum as cost, over as many steps without a save.
    """
    base, base_update = median(quiet.steps), median(quiet.updates)
    first, *counted = [_cost(block, save, base, base_update) for save in block.saves]
    num_steps = round(median(save.end - save.start for save in block.saves[1:]))
    costs = [each["cost"] for each in counted]
    cost = median(costs)
    last = block.saves[-1]
    return {
        "quiet_step": base,
        "cost": spread(costs),
        **{key: spread([each[key] for each in counted]) for key in ("stall", "held", "slowdown", "durable")},
        "num_steps": num_steps,
        "noise": spread(noise(quiet.steps, num_steps)),
        "percent": 100 * cost / EVERY_S,
        "shortest_interval_s": max(0.0, cost / SHARE),
        "ratio": raw_bytes / last.stored_bytes,
        "mode": last.mode,
        "fallback": next((save.fallback for save in block.saves if save.fallback), None),
        "first": first,
        "trace": {
            "num_before": min(STEPS_BEFORE, last.start),
            "steps": [
                round(step, 6)
                for step in block.steps[
                    max(0, last.start - STEPS_BEFORE) : min(last.end, last.start + _SHOWN_AFTER)
                ]
            ],
        },
    }


def _cost(block: Block, save: SaveWindow, base: float, base_update: float) -> dict[str, float]:
    steps = block.steps[save.start : save.end]
    cost = sum(steps) - base * len(steps)
    held = sum(block.updates[save.start : save.end]) - base_update * len(steps)
    return {
        "cost": cost,
        "stall": save.stall,
        "held": held,
        "slowdown": cost - save.stall - held,
        "durable": save.durable,
    }


def noise(steps: Sequence[float], num_steps: int) -> list[float]:
    """What `num_steps` steps without a save would cost by the same sum: as many values as fit one after another, at least one."""
    size = min(num_steps, len(steps))
    base = median(steps)
    windows = [steps[i : i + size] for i in range(0, len(steps) - size + 1, size)]
    return [(sum(window) - base * size) * num_steps / size for window in windows]
