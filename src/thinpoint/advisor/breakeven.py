"""Where a codec stops paying, and what would have the same effect as one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinpoint.advisor.codecs import NONE, Codec
from thinpoint.advisor.costs import at_storage_rate, costs_of, times_of
from thinpoint.advisor.inputs import HOURS_PER_MONTH, Case

LEAST_GB_PER_S, MOST_GB_PER_S = 1e-3, 1e6
"""Where break-even points are looked for."""


def break_even_gb_per_s(case: Case, codec: Codec) -> float | None:
    """The rate of storage, of the case's scope, above which a save waits longer with the codec; None if there is none.

    Where the stages overlap that is the codec's own rate, if the link to the host is faster: raw/encode = raw/storage.
    Where they do not, it is (1 - 1/ratio) / (1/encode - (1 - 1/ratio)/link). Found by bisection, so that it is right for
    every mode.
    """
    raw = case.codec(NONE.name)

    def gain(rate: float) -> float:
        at = at_storage_rate(case, rate)
        raw_s, coded_s = times_of(at, raw).wait_s, times_of(at, codec).wait_s
        return 0.0 if math.isclose(raw_s, coded_s, rel_tol=1e-9) else raw_s - coded_s

    low, high = LEAST_GB_PER_S, MOST_GB_PER_S
    if gain(high) >= 0 or gain(low) < 0:
        return None
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if gain(middle) < 0 else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """What has the same effect on the idle time as a codec, without one. None where nothing has.

    Attributes:
        codec: which.
        interval_min: saving this seldom waits as few hours a month.
        interval_lost_usd: what the longer interval loses more to failures, a month.
        storage_gb_per_s: storage of this rate, of the case's scope, waits as long as the codec.
        storage_worth_usd: the codec's idle and storage dollars a month: faster storage must cost less than that to be the
            better buy.
        storage_cost_usd: what the faster storage costs, a month, if a price is known.
    """

    codec: str
    interval_min: float | None
    interval_lost_usd: float | None
    storage_gb_per_s: float | None
    storage_worth_usd: float
    storage_cost_usd: float | None


def alternatives(case: Case, codec: Codec) -> Alternatives:
    """What a longer interval or faster storage would do instead.

    Interval: idle time is wait / interval, so it must grow as the waits do: interval x wait(none) / wait(codec); lost
    work grows by half the difference for each failure. Storage: the rate at which raw bytes take the codec's wait, raw / wait.
    """
    none, coded = costs_of(case, case.codec(NONE.name)), costs_of(case, codec)
    worth = none.idle_usd + none.storage_usd - coded.idle_usd - coded.storage_usd
    interval = lost = rate = cost = None
    if 0 < coded.times.wait_s < none.times.wait_s:
        interval = case.saves.interval_min * none.times.wait_s / coded.times.wait_s
        failures = HOURS_PER_MONTH / case.cluster.hours_between_failures
        hours = failures * (interval - case.saves.interval_min) / 2 / 60 * case.cluster.gpus
        lost = hours * case.cluster.usd_per_gpu_hour
        if (
            none.mode == "sync"
            and none.times.slowest == "storage"
            and none.times.link_s <= coded.times.wait_s
        ):
            rate = case.storage.gb_per_s * none.times.write_s / coded.times.wait_s
            if case.storage.usd_per_gb_per_s_month is not None:
                nodes = case.cluster.num_writing_nodes if case.storage.scope == "node" else 1
                cost = (rate - case.storage.gb_per_s) * nodes * case.storage.usd_per_gb_per_s_month
    return Alternatives(
        codec=codec.name,
        interval_min=interval,
        interval_lost_usd=lost,
        storage_gb_per_s=rate,
        storage_worth_usd=worth,
        storage_cost_usd=cost,
    )
