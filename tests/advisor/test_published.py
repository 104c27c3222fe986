"""The published figures, to the dollar and to the second."""

from dataclasses import replace

import pytest

from thinpoint.advisor import BUILT_IN, Case, Codec, Costs, Model, Storage, advise, costs_of
from thinpoint.advisor.codecs import NONE
from thinpoint.advisor.published import ROWS, Row, published_case


def both(case: Case) -> tuple[Costs, Costs]:
    """Without and with the codec."""
    return costs_of(case, case.codec("none")), costs_of(case, case.codec("published"))


def bill(costs: Costs) -> float:
    """What the published case counts."""
    return costs.idle_usd + costs.storage_usd


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_published_rows_are_reproduced_to_the_dollar(row: Row) -> None:
    for ratio, saved in row.saved.items():
        none, coded = both(published_case(row.params, row.gpus, ratio))
        assert round(none.raw_bytes / 2**30) == row.gib
        assert none.times.wait_s == pytest.approx(row.write_s, abs=0.5)
        assert round(none.idle_usd) == row.idle_usd
        assert round(none.storage_usd) == row.storage_usd
        assert round(bill(none) - bill(coded)) == saved


def test_the_headlines_are_405b_on_128_gpus() -> None:
    saved = {}
    for ratio in (1.27, 1.18):
        none, coded = both(published_case(405e9, 128, ratio))
        saved[ratio] = round((bill(none) - bill(coded)) / 1000)
    assert saved == {1.27: 56, 1.18: 40}


@pytest.mark.parametrize(("ratio", "seconds"), [(1.27, 123), (1.18, 133)])
def test_the_wait_of_70b_falls_from_156_seconds(ratio: float, seconds: int) -> None:
    none, coded = both(published_case(70e9, 8, ratio))
    assert int(none.times.wait_s) == 156
    assert round(coded.times.wait_s) == seconds


def test_components_are_130_521_and_130_gib_and_1440_saves_a_month_1_13_pb() -> None:
    case = published_case(70e9, 8, 1.27)
    by_name = {part.name: part.raw_bytes / 2**30 for part in case.model.parts()}
    assert round(by_name["weights"]) == round(by_name["gradients"]) == 130
    assert int(by_name["first_moment"] + by_name["second_moment"]) == 521
    assert case.saves.per_month == 1440 and case.saves.per_month / 30 == 48
    none, _ = both(case)
    # The published petabytes count a GiB as a GB.
    assert none.raw_bytes / 2**30 * case.saves.per_month / 1e6 == pytest.approx(1.13, abs=0.005)
    assert none.raw_bytes * case.saves.per_month / 1e15 == pytest.approx(1.21, abs=0.005)


def test_a_codec_of_16_gb_per_s_at_20_gb_per_s_of_storage_makes_the_idle_time_longer() -> None:
    none, coded = both(published_case(70e9, 64, 1.27, codec_gb_per_s=16, storage_gb_per_s=20))
    assert round(none.times.wait_s) == 39 and round(coded.times.wait_s) == 49
    assert coded.times.slowest == "codec"
    assert coded.idle_usd / none.idle_usd == pytest.approx(20 / 16)
    assert round(coded.idle_usd - none.idle_usd) == 1101


@pytest.mark.parametrize(("params", "gpus", "pays"), [(70e9, 8, True), (70e9, 64, True), (671e9, 256, False)])
def test_whether_that_codec_pays_all_the_same_depends_on_the_gpus_that_wait(
    params: float, gpus: int, pays: bool
) -> None:
    case = published_case(params, gpus, 1.27, codec_gb_per_s=16, storage_gb_per_s=20)
    none, coded = both(case)
    assert coded.idle_usd > none.idle_usd and coded.storage_usd < none.storage_usd
    assert (bill(coded) < bill(none)) == pays
    advice = advise(case)
    assert advice.best == ("published" if pays else "none")
    assert (
        "outweigh a wait that grows from 39.1 s to 48.9 s" if params == 70e9 else "Do not compress"
    ) in advice.recommendation


def test_fp8_moments_halve_the_checkpoint_and_so_the_benefit() -> None:
    full = [bill(costs) for costs in both(published_case(70e9, 64, 1.18))]
    eight = [bill(costs) for costs in both(published_case(70e9, 64, 1.18, moments="fp8"))]
    assert eight[0] == pytest.approx(full[0] / 2)
    assert eight[0] - eight[1] == pytest.approx((full[0] - full[1]) / 2)


def test_sgd_leaves_a_third() -> None:
    full, _ = both(published_case(70e9, 64, 1.18))
    plain, _ = both(published_case(70e9, 64, 1.18, optimizer="sgd"))
    assert plain.raw_bytes == pytest.approx(full.raw_bytes / 3)


@pytest.mark.parametrize(("price", "less"), [(0.02, 0.857), (0.05, 0.643)])
def test_object_storage_takes_64_to_86_percent_off_the_storage_part(price: float, less: float) -> None:
    for at in (0, 1):
        warm = both(published_case(70e9, 64, 1.18))[at]
        cold = both(published_case(70e9, 64, 1.18, usd_per_gb_month=price))[at]
        assert 1 - cold.storage_usd / warm.storage_usd == pytest.approx(less, abs=0.001)
        assert cold.idle_usd == warm.idle_usd


def test_the_published_70_percent_need_a_price_of_4_2_cents() -> None:
    warm, cold = (both(published_case(70e9, 64, 1.18, usd_per_gb_month=price))[0] for price in (0.14, 0.042))
    assert 1 - cold.storage_usd / warm.storage_usd == pytest.approx(0.70)


def whole_ratio(bf16: float, fp32: float) -> float:
    """The ratio of the published mix, of one ratio for each precision."""
    parts = Model().parts()
    ratios = {("weights", "bf16"): bf16, ("first_moment", "fp32"): fp32, ("second_moment", "fp32"): fp32}
    return sum(part.raw_bytes for part in parts) / Codec(name="x", ratios=ratios).stored_bytes(parts)


def test_the_corrected_ratio_of_1_18_is_within_what_its_components_give_and_1_14_is_not() -> None:
    low, high = whole_ratio(1.46, 1.06), whole_ratio(1.48, 1.11)
    assert low == pytest.approx(1.167, abs=0.001) and high == pytest.approx(1.211, abs=0.001)
    assert low < 1.18 < high and not low <= 1.14 <= high


def test_1_27_for_zstd_is_not_what_the_same_codec_gives_on_trained_state() -> None:
    parts = Model().parts()
    zstd = next(codec for codec in BUILT_IN if codec.name == "nvcomp-zstd")
    assert sum(part.raw_bytes for part in parts) / zstd.stored_bytes(parts) == pytest.approx(1.154, abs=0.001)


def test_decimal_units_cost_seven_percent_more() -> None:
    case = published_case(70e9, 64, 1.18)
    decimal = replace(case, storage=Storage(unit="GB"))
    assert bill(costs_of(decimal, NONE)) / bill(costs_of(case, NONE)) == pytest.approx(2**30 / 1e9)
