"""The published case and what was said against it, as cases of this model.

Source: NVIDIA's technical blog, 9 April 2026, two editions. docs/cost-model.md lists what cannot be reproduced, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinpoint.advisor.codecs import NONE, Codec
from thinpoint.advisor.inputs import Case, Cluster, Model, Saves, Storage


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the published figures, in dollars a month.

    Attributes:
        saved: by the ratio of the whole checkpoint.
    """

    name: str
    params: float
    gpus: int
    gib: float
    write_s: float
    idle_usd: int
    storage_usd: int
    saved: dict[float, int]


ROWS = (
    Row(
        name="70B, 8 GPUs",
        params=70e9,
        gpus=8,
        gib=782,
        write_s=156.5,
        idle_usd=2_203,
        storage_usd=10_514,
        saved={1.18: 1_940, 1.27: 2_704, 1.40: 3_633},
    ),
    Row(
        name="70B, 64 GPUs",
        params=70e9,
        gpus=64,
        gib=782,
        write_s=156.5,
        idle_usd=17_624,
        storage_usd=10_514,
        saved={1.18: 4_292, 1.27: 5_982, 1.40: 8_039},
    ),
    Row(
        name="405B, 128 GPUs",
        params=405e9,
        gpus=128,
        gib=4_526,
        write_s=905,
        idle_usd=203_934,
        storage_usd=60_833,
        saved={1.18: 40_388, 1.27: 56_289, 1.40: 75_647},
    ),
    Row(
        name="671B MoE, 256 GPUs",
        params=671e9,
        gpus=256,
        gib=7_499,
        write_s=1_500,
        idle_usd=675_751,
        storage_usd=100_787,
        saved={1.18: 118_455, 1.27: 165_091, 1.40: 221_868},
    ),
)


def published_case(
    params: float,
    gpus: int,
    ratio: float,
    *,
    codec_gb_per_s: float | None = None,
    storage_gb_per_s: float = 5.0,
    usd_per_gb_month: float = 0.14,
    moments: str = "fp32",
    optimizer: str = "adamw",
) -> Case:
    """The published arithmetic: synchronous, one ratio for the whole file, GiB divided by GB/s, one rate for all of storage.

    Args:
        ratio: of the codec "published".
        codec_gb_per_s: of all GPUs together, as its critics count; None: coding is free, as published.
    """
    codec = Codec(name="published", ratio=ratio, encode_gb_per_s=codec_gb_per_s, scope="aggregate")
    return Case(
        model=Model(params=params, moments=moments, optimizer=optimizer),
        cluster=Cluster(gpus=gpus, usd_per_gpu_hour=4.40),
        storage=Storage(gb_per_s=storage_gb_per_s, usd_per_gb_month=usd_per_gb_month, kept=96, unit="GiB"),
        saves=Saves(interval_min=30, mode="sync"),
        codecs=(NONE, codec),
    )
