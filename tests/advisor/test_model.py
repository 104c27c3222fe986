"""The parts of the model: times, break-even points, intervals, costs, advice."""

import itertools
import math
from dataclasses import replace

import pytest

from thinpoint.advisor import (
    BUILT_IN,
    Case,
    Cluster,
    Codec,
    Component,
    Model,
    Saves,
    Storage,
    advise,
    costs_of,
)
from thinpoint.advisor.breakeven import alternatives, break_even_gb_per_s
from thinpoint.advisor.codecs import NONE
from thinpoint.advisor.costs import at_storage_rate, times_of
from thinpoint.advisor.inputs import MODES
from thinpoint.advisor.interval import best_interval_s, daly_s, young_s
from thinpoint.pace import Rates, choose_codec, measured_rates, save_times

RATES = Rates(encode=10.0, link=20.0, storage=2.0)


def one_codec(**fields: object) -> Codec:
    return Codec(**{"name": "it", "ratio": 1.25, "encode_gb_per_s": 16.0, "scope": "aggregate", **fields})


def case_with(codec: Codec, **fields: object) -> Case:
    return Case(codecs=(NONE, codec), **fields)


def test_a_save_takes_its_slowest_stage_or_the_sum() -> None:
    times = save_times(100, 80, RATES)
    assert (times.encode_s, times.link_s, times.write_s) == (10, 4, 40)
    assert times.wait_s == times.durable_s == 40 and times.slowest == "storage"
    assert save_times(100, 80, RATES, overlaps=False).wait_s == 54
    assert save_times(100, 80, RATES, fixed_s=3).wait_s == 43


def test_few_batches_pass_the_other_stages_on_their_own() -> None:
    assert save_times(100, 80, RATES, batch_bytes=25).wait_s == 40 + 14 / 4
    assert save_times(100, 80, RATES, batch_bytes=1000).wait_s == 54


def test_modes_wait_for_less_and_less() -> None:
    waits = {mode: save_times(100, 80, RATES, mode=mode, window_s=6) for mode in MODES}
    assert [waits[mode].wait_s for mode in MODES] == [40, 10, 4]
    assert {times.durable_s for times in waits.values()} == {40}
    assert save_times(100, 80, RATES, mode="async", interval_s=35).wait_s == 10 + 5
    assert save_times(100, 80, RATES, mode="overlap", window_s=60).wait_s == 0


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_break_even_point_is_that_of_the_closed_form(overlaps: bool) -> None:
    codec = one_codec(overlaps=overlaps)
    case = case_with(replace(codec), cluster=Cluster(gpus=8))
    link, gain = 8 * 55.0, 1 - 1 / 1.25
    # Where a codec's stages do not overlap, neither do those without one.
    case = replace(case, codecs=(replace(NONE, overlaps=overlaps), codec))
    expected = 16.0 if overlaps else gain / (1 / 16 - gain / link)
    found = break_even_gb_per_s(case, codec)
    assert found == pytest.approx(expected, rel=1e-6)
    for factor, longer in ((0.99, False), (1.01, True)):
        at = at_storage_rate(case, expected * factor)
        assert (times_of(at, codec).wait_s > times_of(at, at.codec("none")).wait_s) == longer


def test_a_codec_faster_than_the_link_never_costs_time() -> None:
    codec = one_codec(encode_gb_per_s=100.0, scope="gpu")
    assert break_even_gb_per_s(case_with(codec), codec) is None


def test_in_the_background_the_rate_of_storage_decides_only_where_a_write_outlasts_the_interval() -> None:
    codec = one_codec()
    case = case_with(codec, saves=Saves(mode="async"))
    edge = break_even_gb_per_s(case, codec)
    assert edge is not None and edge < 840 / 1800
    slow = one_codec(ratio=1.0)
    assert break_even_gb_per_s(case_with(slow, saves=Saves(mode="async")), slow) is None


def test_rates_are_each_gpus_or_the_clusters() -> None:
    cluster = Cluster(gpus=64, gpus_per_node=8)
    shared = Case(cluster=cluster)
    own = Case(cluster=cluster, storage=Storage(scope="node"))
    assert times_of(shared, NONE).wait_s == pytest.approx(8 * times_of(own, NONE).wait_s)
    at_gpu, in_all = one_codec(scope="gpu"), one_codec()
    assert times_of(shared, in_all).encode_s == pytest.approx(64 * times_of(shared, at_gpu).encode_s)
    replicas = Case(cluster=replace(cluster, writers=16), storage=Storage(scope="node"))
    assert times_of(replicas, NONE).wait_s == pytest.approx(4 * times_of(own, NONE).wait_s)


def daly_waste(work_s: float, wait_s: float, mtbf_s: float) -> float:
    """Total over useful time of Daly's complete model, without the restart, which does not move its minimum."""
    return mtbf_s * math.expm1((work_s + wait_s) / mtbf_s) / work_s


@pytest.mark.parametrize(("wait_s", "mtbf_s"), [(1, 1e5), (30, 1e4), (156, 11_000), (1500, 12_000)])
def test_dalys_interval_loses_the_least(wait_s: float, mtbf_s: float) -> None:
    candidates = (3 * mtbf_s / 1.001**i for i in range(15_000))
    best = min(candidates, key=lambda work_s: daly_waste(work_s, wait_s, mtbf_s))
    assert daly_s(wait_s, mtbf_s) == pytest.approx(best, rel=0.02)
    at_best, at_daly = (daly_waste(work_s, wait_s, mtbf_s) for work_s in (best, daly_s(wait_s, mtbf_s)))
    assert at_daly == pytest.approx(at_best, rel=1e-4)


def test_intervals_at_the_ends() -> None:
    assert young_s(50, 10_000) == 1000
    assert daly_s(20_000, 10_000) == 10_000
    assert best_interval_s(0, 10_000, least_s=40) == 40
    assert best_interval_s(50, 10_000) == pytest.approx(daly_s(50, 10_000) + 50)


def test_failures_and_lost_work() -> None:
    cluster = Cluster(gpus=16_384, mtbf_hours=None)
    assert cluster.hours_between_failures == pytest.approx(54 * 24 / 419)
    case = Case(
        cluster=Cluster(gpus=10, mtbf_hours=72, restart_s=100, usd_per_gpu_hour=2),
        storage=Storage(gb_per_s=840),
    )
    costs = costs_of(case, NONE)
    assert costs.failures == 10
    assert costs.restore_s == pytest.approx(840 / 550)
    lost_s = 10 * (900 + costs.times.durable_s + 100 + costs.restore_s)
    assert costs.lost_gpu_hours == pytest.approx(10 * lost_s / 3600)
    assert costs.lost_usd == pytest.approx(2 * costs.lost_gpu_hours)
    assert costs.network_bytes == pytest.approx(840e9 * 1450)


def test_lost_work_is_that_of_failures_at_every_moment_of_an_interval() -> None:
    case = Case()
    costs = costs_of(case, NONE)
    interval_s, num_moments = 60 * case.saves.interval_min, 20_000
    lost_s = 0.0
    for i in range(num_moments):
        since_begin_s = interval_s * (i + 0.5) / num_moments
        is_durable = since_begin_s >= costs.times.durable_s
        lost_s += since_begin_s if is_durable else interval_s + since_begin_s
    after_s = case.cluster.restart_s + costs.restore_s
    a_failure_s = costs.lost_gpu_hours * 3600 / case.cluster.gpus / costs.failures
    assert a_failure_s == pytest.approx(lost_s / num_moments + after_s, rel=1e-3)


def test_the_alternatives_have_the_same_effect() -> None:
    case = Case()
    codec = case.codec("thinpoint")
    other = alternatives(case, codec)
    coded = costs_of(case, codec)
    assert other.interval_min is not None and other.storage_gb_per_s is not None
    seldom = replace(case, saves=Saves(interval_min=other.interval_min))
    assert costs_of(seldom, NONE).idle_usd == pytest.approx(coded.idle_usd)
    more = costs_of(seldom, NONE).lost_usd - costs_of(case, NONE).lost_usd
    assert other.interval_lost_usd == pytest.approx(more)
    faster = at_storage_rate(case, other.storage_gb_per_s)
    assert costs_of(faster, NONE).idle_usd == pytest.approx(coded.idle_usd)
    assert other.storage_cost_usd is None
    priced = replace(case, storage=Storage(usd_per_gb_per_s_month=100.0))
    assert alternatives(priced, codec).storage_cost_usd == pytest.approx(100 * (other.storage_gb_per_s - 5))
    assert alternatives(replace(case, saves=Saves(mode="async")), codec).storage_gb_per_s is None


def test_a_ratio_is_that_of_its_component_or_else_of_weights_or_else_one() -> None:
    codec = Codec(
        name="x", ratios={("weights", "bf16"): 1.5, ("first_moment", "fp32"): 1.2, ("weights", "int8"): 0.9}
    )
    parts = {
        ("weights", "bf16"): 1.5,
        ("master", "bf16"): 1.5,
        ("gradients", "bf16"): 1.5,
        ("first_moment", "fp32"): 1.2,
        ("second_moment", "fp32"): 1.0,
        ("weights", "int8"): 1.0,
        ("weights", "fp4"): 1.0,
    }
    for (name, precision), ratio in parts.items():
        assert codec.ratio_of(Component(name=name, precision=precision, raw_bytes=1)) == ratio


def test_the_published_case_is_told_of_what_helps_more_than_a_codec() -> None:
    advice = advise()
    assert advice.best == "thinpoint" and advice.recommendation.startswith(
        "Use thinpoint: storage is the slowest stage"
    )
    assert "saving asynchronously alone would save more" in advice.recommendation
    assert advice.recommendation.count(". ") == 0


def test_a_small_model_is_told_not_to() -> None:
    advice = advise(Case(model=Model(params=125e6, gradients="none"), cluster=Cluster(gpus=1)))
    assert advice.best == "none" and advice.recommendation.startswith(
        "Do not compress: thinpoint would save $"
    )
    assert any("only 1.2" in note for note in advice.notes)


def test_without_a_codec_there_is_nothing_to_recommend() -> None:
    advice = advise(Case(codecs=(NONE,)))
    assert advice.best == "none" and "there is no codec to compare with" in advice.recommendation


NOTES = {
    "If it is each node's": Case(),
    "a shared file system may not give that": Case(storage=Storage(scope="node")),
    "GPUDirect": Case(storage=Storage(gb_per_s=40)),
    "divides GiB by GB/s": Case(),
    "The BF16 weights are the rounded master copy": Case(model=Model(master="fp32")),
    "no moments": Case(model=Model(optimizer="sgd")),
    "Most frameworks do not save them": Case(),
    "FP8 values hold little": Case(model=Model(moments="fp8")),
    "nothing is known about fp4": Case(model=Model(weights="fp4")),
    "in the background already": Case(saves=Saves(mode="async")),
    "Overlap hides the copy": Case(saves=Saves(mode="overlap")),
    "object storage": Case(),
    "Activation checkpointing": Case(),
    "takes as long as the interval": Case(storage=Storage(gb_per_s=0.1)),
    "outweigh all of this": Case(model=Model(params=1e6)),
}


@pytest.mark.parametrize("words", NOTES)
def test_what_decides_is_said_where_it_applies(words: str) -> None:
    assert any(words in note for note in advise(NOTES[words]).notes)


def test_notes_are_not_given_where_they_do_not_apply() -> None:
    case = Case(
        model=Model(gradients="none"),
        storage=Storage(unit="GiB", usd_per_gb_month=0.02),
        cluster=Cluster(gpus=8),
    )
    notes = " ".join(advise(case).notes)
    wrong = (
        "each node's",
        "GPUDirect",
        "divides GiB",
        "master copy",
        "no moments",
        "do not save them",
        "object storage",
    )
    assert not [words for words in wrong if words in notes]


def test_every_combination_gives_finite_advice() -> None:
    models = [
        Model(optimizer=o, moments=m, master="fp32")
        for o in ("adamw", "sgd", "muon")
        for m in ("fp32", "int8", "fp4")
    ]
    for model, mode, gb_per_s in itertools.product(models, MODES, (0.01, 5.0, 5000.0)):
        advice = advise(Case(model=model, saves=Saves(mode=mode), storage=Storage(gb_per_s=gb_per_s)))
        for costs in advice.modes:
            assert math.isfinite(costs.total_usd) and costs.total_usd >= 0
            assert costs.best_interval_min >= costs.times.durable_s / 60 * (1 - 1e-9)
        assert advice.recommendation.endswith(".") and "nan" not in advice.recommendation


# ---- the choice of a save with codec "auto" -------------------------------------------------------------------------


def test_auto_compresses_where_storage_is_slow_and_not_where_the_coder_is() -> None:
    slow = Rates(encode=2e9, link=math.inf, storage=1e9)
    fast = Rates(encode=2e9, link=math.inf, storage=20e9)
    assert choose_codec(10e9, 1.25, slow).codec == "thin"
    choice = choose_codec(10e9, 1.25, fast)
    assert choice.codec == "raw" and choice.thin_s == 5.0 and choice.raw_s == 0.5
    assert "would wait 5 s compressed (1.250x, coded at 2 GB/s), 0.5 s raw" in choice.reason


def test_auto_does_not_change_its_mind_for_little() -> None:
    near = Rates(encode=1e9, link=math.inf, storage=0.98e9)
    assert choose_codec(1e9, 1.25, near, now="thin").codec == "thin"
    assert choose_codec(1e9, 1.25, near, now="raw").codec == "raw"


def test_auto_counts_what_training_waits_for() -> None:
    # On a CPU, staging a raw state is a copy: coding it makes an asynchronous save's stall longer, however slow storage is.
    rates = Rates(encode=1e9, link=10e9, storage=1e8)
    assert choose_codec(1e9, 1.25, rates, mode="sync").codec == "thin"
    assert choose_codec(1e9, 1.25, rates, mode="async").codec == "raw"
    # Unless the write takes longer than the interval, and the next save waits for it.
    assert choose_codec(1e9, 1.25, rates, mode="async", interval_s=5).codec == "thin"


def test_rates_of_a_save_come_from_its_report() -> None:
    rates = measured_rates(raw_bytes=1000, stored_bytes=800, encode_s=2.0, write_s=4.0)
    assert rates == Rates(encode=500.0, link=math.inf, storage=200.0)
    assert measured_rates(raw_bytes=1000, stored_bytes=800, encode_s=0.0, write_s=0.0).encode == math.inf


def test_built_in_codecs_say_where_their_numbers_come_from() -> None:
    assert all(codec.source for codec in BUILT_IN)
