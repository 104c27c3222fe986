"""The whole advice for a case: costs of every codec and mode, break-even points, what else would help, "
"and one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from thinpoint.advisor.breakeven import Alternatives, alternatives, break_even_gb_per_s
from thinpoint.advisor.codecs import NONE
from thinpoint.advisor.costs import Costs, costs_of
from thinpoint.advisor.inputs import MODES, Case
from thinpoint.advisor.notes import notes_of
from thinpoint.advisor.words import minutes, percent, seconds, size, usd

WORTH_SHARE = 0.01
"""A codec that saves less than this part of what checkpoints cost is not worth another format."""

WORTH_USD = 10.0
"""Nor is one that saves less than this a month."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do and why.

    Attributes:
        case: what was asked.
        rows: every codec in the case's mode.
        modes: every codec in every mode.
        break_even: by codec, storage in GB/s of the case's scope above which a save waits longer; None if there is none.
        alternatives: by codec, what would have the same effect on idle time.
        best: the codec recommended, "none" included.
        cheapest_interval: no codec, the case's mode, saving as seldom as is best (Daly).
        recommendation: one sentence.
        notes: what decides here, a sentence or two each.
    """

    case: Case
    rows: tuple[Costs, ...]
    modes: tuple[Costs, ...]
    break_even: dict[str, float | None]
    alternatives: dict[str, Alternatives]
    best: str
    cheapest_interval: Costs
    recommendation: str
    notes: tuple[str, ...]

    def row(self, codec: str, mode: str | None = None) -> Costs:
        """The costs of a codec in a mode, the case's by default."""
        mode = mode or self.case.saves.mode
        return next(costs for costs in self.modes if (costs.codec, costs.mode) == (codec, mode))


def advise(case: Case | None = None) -> Advice:
    """The advice for a case; None is the published case in decimal units.

    Raises:
        UsageError: a field is not valid; raised when the case is made.
    """
    case = case or Case()
    modes = tuple(costs_of(case, codec, mode=mode) for mode in MODES for codec in case.codecs)
    rows = tuple(costs for costs in modes if costs.mode == case.saves.mode)
    none = next(costs for costs in rows if costs.codec == NONE.name)
    codecs = [codec for codec in case.codecs if codec.name != NONE.name]
    seldom = (
        replace(case, saves=replace(case.saves, interval_min=none.best_interval_min))
        if none.best_interval_min
        else case
    )
    cheapest_interval = costs_of(seldom, case.codec(NONE.name))
    best = _best(rows, none)
    advice = Advice(
        case=case,
        rows=rows,
        modes=modes,
        break_even={codec.name: break_even_gb_per_s(case, codec) for codec in codecs},
        alternatives={codec.name: alternatives(case, codec) for codec in codecs},
        best=best.codec,
        cheapest_interval=cheapest_interval,
        recommendation="",
        notes=(),
    )
    return replace(advice, recommendation=_sentence(advice, none, best), notes=tuple(notes_of(case)))


def _best(rows: tuple[Costs, ...], none: Costs) -> Costs:
    """The cheapest codec, if it is worth it."""
    best = min(rows, key=lambda costs: costs.total_usd)
    gain = none.total_usd - best.total_usd
    return best if gain >= max(WORTH_USD, WORTH_SHARE * none.total_usd) else none


def _sentence(advice: Advice, none: Costs, best: Costs) -> str:
    if best is none:
        return f"Do not compress: {_why_not(advice, none)}{_lever(advice, none, best)}."
    gain = none.total_usd - best.total_usd
    total, left = usd(none.total_usd), usd(best.total_usd)
    return (
        f"Use {best.codec}: {_waits(none, best)}, stored bytes fall to {size(best.stored_bytes)} ({best.ratio:.2f}x), and "
        f"checkpoints cost {left} instead of {total} a month ({usd(gain)} less, {percent(gain / none.total_usd)})"
        f"{_lever(advice, none, best)}."
    )


def _waits(none: Costs, best: Costs) -> str:
    """What a codec that pays does to the wait, and why."""
    before, after = seconds(none.times.wait_s), seconds(best.times.wait_s)
    if math.isclose(none.times.wait_s, best.times.wait_s, rel_tol=1e-3):
        return f"saves wait as long as without ({before}), but checkpoints are smaller"
    if best.times.wait_s > none.times.wait_s:
        return f"the smaller files outweigh a wait that grows from {before} to {after} a save"
    is_storage = none.mode == "sync" and none.times.slowest == "storage"
    stage = "storage" if is_storage else "the link to the host"
    return (
        f"{stage} is the slowest stage, so a save of {size(none.raw_bytes)} waits {after} instead of {before}"
    )


def _why_not(advice: Advice, none: Costs) -> str:
    others = [costs for costs in advice.rows if costs is not none]
    if not others:
        return "there is no codec to compare with"
    least = min(others, key=lambda costs: costs.total_usd)
    gain = none.total_usd - least.total_usd
    waits = f"a save waits {seconds(none.times.wait_s)} without and {seconds(least.times.wait_s)} with {least.codec}"
    if gain < 0 and least.times.wait_s > none.times.wait_s:
        rate = "it codes more slowly than the bytes could be written"
        return f"{waits}, as {rate}, which costs {usd(-gain)} a month more than the smaller files bring"
    return f"{least.codec} would save {usd(max(gain, 0))} of {usd(none.total_usd)} a month, and {waits}"


def _lever(advice: Advice, none: Costs, best: Costs) -> str:
    """The clause about what helps more than a codec, if anything does."""
    gain = max(none.total_usd - best.total_usd, WORTH_USD)
    levers = []
    if none.mode == "sync":
        saved = none.total_usd - advice.row(NONE.name, "async").total_usd
        levers.append((saved, "saving asynchronously"))
    saved = none.total_usd - advice.cheapest_interval.total_usd
    every = minutes(advice.cheapest_interval.best_interval_min)
    levers.append((saved, f"saving every {every} instead of every {minutes(advice.case.saves.interval_min)}"))
    saved, how = max(levers)
    return f"; {how} alone would save more, {usd(saved)} a month" if saved > gain else ""
