"""What decides in a case, in sentences: what is often overlooked, and common errors."""

from __future__ import annotations

from collections.abc import Iterator

from thinpoint.advisor.codecs import NONE
from thinpoint.advisor.costs import costs_of, rates_of, times_of
from thinpoint.advisor.inputs import UNITS, Case
from thinpoint.advisor.words import hours, minutes, percent, rate, seconds, size, usd

GPUDIRECT_GB_PER_S = 15.0
SMALL_BYTES = 10e9
OBJECT_STORAGE_USD = 0.05


def notes_of(case: Case) -> Iterator[str]:
    """The notes that apply to a case, the weightiest first."""
    yield from _about_rates(case)
    yield from _about_contents(case)
    yield from _about_mode(case)
    yield from _about_money(case)
    yield "Activation checkpointing is about memory in training; it does not make checkpoints smaller."


def _about_rates(case: Case) -> Iterator[str]:
    cluster, storage = case.cluster, case.storage
    none = case.codec(NONE.name)
    nodes = cluster.num_writing_nodes
    times = times_of(case, none)
    if storage.scope == "aggregate" and nodes > 1:
        at_node = times.write_s / nodes
        idle = ", and most of the idle time is not there" if case.saves.mode == "sync" else ""
        yield (
            f"{rate(storage.gb_per_s)} is taken as the whole cluster's. If it is each node's, {nodes} "
            f"nodes write {nodes} times as fast, "
            f"{seconds(at_node)} a save{idle}: --storage-scope node."
        )
    if storage.scope == "node":
        total = rates_of(case, none).storage / storage.unit_bytes
        yield (
            f"{rate(storage.gb_per_s)} a node times {nodes} is {rate(total)}; a shared file system may not "
            "give that to all at once."
        )
    total = rates_of(case, none).storage / storage.unit_bytes
    if total >= GPUDIRECT_GB_PER_S:
        yield (
            f"Storage takes {rate(total)} in all (GPUDirect and parallel file systems: 15 to 50 GB/s and "
            "more): a codec that codes less "
            f"than {rate(total / cluster.num_writers)} on each of {cluster.num_writers:,} GPUs makes a "
            "synchronous save longer."
        )
    if storage.unit == "GB":
        yield (
            "Sizes are decimal. The published case divides GiB by GB/s, which makes everything "
            f"{percent(1 - 1e9 / UNITS['GiB'])} smaller: "
            "--unit GiB counts so."
        )
    if times.wait_s >= case.saves.interval_min * 60:
        yield (
            "A save takes as long as the interval or longer: training would not get on. "
            f"{rate(storage.gb_per_s)} is too slow for this."
        )


def _about_contents(case: Case) -> Iterator[str]:
    parts = case.model.parts()
    total = sum(part.raw_bytes for part in parts)
    names = {part.name for part in parts}
    if "gradients" in names:
        share = sum(part.raw_bytes for part in parts if part.name == "gradients") / total
        yield (
            f"{percent(share)} of this checkpoint are gradients, as in the published case. Most frameworks "
            "do not save them: "
            "--gradients none."
        )
    masters = [part for part in parts if part.name == "master"]
    copies = [part for part in parts if part.name == "weights" and part.precision in ("bf16", "fp16")]
    if masters and copies:
        share = sum(part.raw_bytes for part in copies) / total
        yield (
            f"The {copies[0].precision.upper()} weights are the rounded master copy, {percent(share)} of "
            "the checkpoint: leaving them out "
            "saves more than coding them. No codec here does that by itself."
        )
    if not any(name.endswith("moment") for name in names):
        yield (
            "There are no moments in this checkpoint: it is that much smaller, and only weights and "
            "gradients are left to code."
        )
    small = sorted({part.precision for part in parts if part.precision in ("fp8", "int8", "fp4")})
    if small:
        text = " and ".join(small).upper()
        yield (
            f"{text} values hold little that is redundant, and are few bytes: the smaller the "
            "checkpoint, the less there is to save."
        )
    for codec in case.codecs:
        unknown = sorted({part.precision for part in parts if not codec.is_measured(part)})
        if unknown and codec.name != NONE.name:
            yield (
                f"{codec.name}: nothing is known about {', '.join(unknown)}; counted as not shrinking. "
                "--checkpoint FILE measures it."
            )
    if total < SMALL_BYTES:
        yield (
            f"The checkpoint has only {size(total)}: what a save takes besides moving bytes may outweigh "
            "all of this."
        )


def _about_mode(case: Case) -> Iterator[str]:
    none = case.codec(NONE.name)
    now, later = costs_of(case, none), costs_of(case, none, mode="async")
    if case.saves.mode == "sync":
        saved = now.idle_usd - later.idle_usd
        yield (
            f"Saving asynchronously waits {seconds(later.times.wait_s)} instead of "
            f"{seconds(now.times.wait_s)} and brings "
            f"{usd(saved)} of the {usd(now.idle_usd)} idle dollars back without any codec; then a codec "
            "saves storage, network and host memory "
            f"({size(now.stored_bytes)} wait in host memory)."
        )
    else:
        yield (
            "Saves are in the background already: a codec shortens the copy to the host, not the wait for "
            "storage, and host memory must hold "
            f"{size(now.stored_bytes / case.cluster.num_writing_nodes)} a node without one."
        )
    if case.saves.mode == "overlap":
        yield (
            "Overlap hides the copy of parameters and the state of torch optimizers; all else is copied before the call returns, "
            "and where that is not safe all is (docs/overlap.md)."
        )
    if now.best_interval_min > 2 * case.saves.interval_min:
        yield (
            f"With a failure every {hours(case.cluster.hours_between_failures)}, a save every "
            f"{minutes(now.best_interval_min)} would lose the least "
            f"(Daly); every {minutes(case.saves.interval_min)} costs more waiting than it saves work."
        )


def _about_money(case: Case) -> Iterator[str]:
    storage = case.storage
    if storage.usd_per_gb_month > OBJECT_STORAGE_USD and storage.kept > 2:
        none = costs_of(case, case.codec(NONE.name))
        low = none.storage_usd * OBJECT_STORAGE_USD / storage.usd_per_gb_month
        yield (
            "Cold checkpoints on object storage at $0.02 to $0.05 a GB-month would cost at most "
            f"{usd(low)} instead of {usd(none.storage_usd)} a month, "
            f"with or without a codec; keeping fewer than {storage.kept} helps the same way."
        )
