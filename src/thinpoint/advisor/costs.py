"""What a codec and a mode cost a month, from the times of one save."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from thinpoint.advisor.codecs import Codec
from thinpoint.advisor.inputs import HOURS_PER_MONTH, Case
from thinpoint.advisor.interval import best_interval_s
from thinpoint.pace import Rates, SaveTimes, restore_time, save_times


@dataclass(frozen=True, kw_only=True)
class Costs:
    """One codec in one mode.

    Attributes:
        codec, mode: which.
        raw_bytes, stored_bytes: of one checkpoint.
        times: of one save.
        restore_s: of one load, without the restart before it.
        idle_gpu_hours, idle_usd: a month, while training waits for saves.
        storage_usd: a month, for the checkpoints that are kept.
        failures: a month.
        lost_gpu_hours, lost_usd: a month, for work done again, restarts and restores.
        network_bytes: a month, written and read back.
        best_interval_min: by Daly.
    """

    codec: str
    mode: str
    raw_bytes: float
    stored_bytes: float
    times: SaveTimes
    restore_s: float
    idle_gpu_hours: float
    idle_usd: float
    storage_usd: float
    failures: float
    lost_gpu_hours: float
    lost_usd: float
    network_bytes: float
    best_interval_min: float

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return self.raw_bytes / self.stored_bytes

    @property
    def total_usd(self) -> float:
        """A month: idle, storage and lost work."""
        return self.idle_usd + self.storage_usd + self.lost_usd


def rates_of(case: Case, codec: Codec) -> Rates:
    """The rates of a save, all that write together, in bytes a second.

    Every GPU that writes encodes and copies its own share; storage is one rate for all, or one a node. Counting one GPU's codec
    against the whole cluster's storage is the mistake to avoid: 16 GB/s on each of 64 GPUs is 1,024 GB/s.
    """
    cluster, storage, unit = case.cluster, case.storage, case.storage.unit_bytes
    nodes = cluster.num_writing_nodes if storage.scope == "node" else 1
    return Rates(
        encode=_total(codec.encode_gb_per_s, codec, case),
        link=cluster.link_gb_per_s * cluster.num_writers * unit,
        storage=storage.gb_per_s * nodes * unit,
    )


def _total(gb_per_s: float | None, codec: Codec, case: Case) -> float:
    if gb_per_s is None:
        return math.inf
    many = case.cluster.num_writers if codec.scope == "gpu" else 1
    return gb_per_s * many * case.storage.unit_bytes


def times_of(case: Case, codec: Codec, *, mode: str | None = None) -> SaveTimes:
    """The times of one save. `mode` instead of the case's."""
    components = case.model.parts()
    return save_times(
        sum(component.raw_bytes for component in components),
        codec.stored_bytes(components),
        rates_of(case, codec),
        mode=mode or case.saves.mode,
        overlaps=codec.overlaps,
        batch_bytes=codec.batch_bytes * case.cluster.num_writers,
        fixed_s=codec.fixed_s,
        window_s=case.cluster.step_s,
        interval_s=case.saves.interval_min * 60,
    )


def restore_s_of(case: Case, codec: Codec) -> float:
    """Seconds of one load by all GPUs that hold a share."""
    rates = rates_of(case, codec)
    storage = case.storage
    read = 1.0 if storage.read_gb_per_s is None else storage.read_gb_per_s / storage.gb_per_s
    components = case.model.parts()
    return restore_time(
        sum(component.raw_bytes for component in components),
        codec.stored_bytes(components),
        decode=_total(codec.decode_gb_per_s, codec, case),
        link=rates.link,
        storage=rates.storage * read,
        overlaps=codec.overlaps,
    )


def costs_of(case: Case, codec: Codec, *, mode: str | None = None) -> Costs:
    """What a month costs.

    idle $ = wait x saves x GPUs x $/GPU hour / 3,600; storage $ = stored GB x kept x $/GB-month (both: the published case).
    lost $ = failures x (interval / 2 + durable + restart + restore) x GPUs x $/GPU hour: a failure falls on average in the
    middle of an interval (Young 1974, first order), and goes back one interval more if the newest checkpoint is not durable
    yet, which is so for durable / interval of the time: interval x durable / interval. Network bytes are one write a save
    and one read a failure.
    """
    mode = mode or case.saves.mode
    cluster, storage, saves = case.cluster, case.storage, case.saves
    components = case.model.parts()
    stored = codec.stored_bytes(components)
    times, restore_s = times_of(case, codec, mode=mode), restore_s_of(case, codec)
    idle_hours = times.wait_s * saves.per_month / 3600 * cluster.gpus
    failures = HOURS_PER_MONTH / cluster.hours_between_failures
    lost_s = saves.interval_min * 60 / 2 + times.durable_s + cluster.restart_s + restore_s
    lost_hours = failures * lost_s / 3600 * cluster.gpus
    return Costs(
        codec=codec.name,
        mode=mode,
        raw_bytes=sum(component.raw_bytes for component in components),
        stored_bytes=stored,
        times=times,
        restore_s=restore_s,
        idle_gpu_hours=idle_hours,
        idle_usd=idle_hours * cluster.usd_per_gpu_hour,
        storage_usd=stored / storage.unit_bytes * storage.kept * storage.usd_per_gb_month,
        failures=failures,
        lost_gpu_hours=lost_hours,
        lost_usd=lost_hours * cluster.usd_per_gpu_hour,
        network_bytes=stored * (saves.per_month + failures),
        best_interval_min=best_interval_s(
            times.wait_s, cluster.hours_between_failures * 3600, least_s=times.durable_s
        )
        / 60,
    )


def at_storage_rate(case: Case, gb_per_s: float) -> Case:
    """The case with another rate of storage, of the same scope; reading keeps its proportion to writing."""
    storage = case.storage
    read = None if storage.read_gb_per_s is None else storage.read_gb_per_s * gb_per_s / storage.gb_per_s
    return replace(case, storage=replace(storage, gb_per_s=gb_per_s, read_gb_per_s=read))
