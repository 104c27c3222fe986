"""The advice as JSON values."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from thinpoint.advisor.advice import Advice
from thinpoint.advisor.codecs import Codec
from thinpoint.advisor.costs import Costs
from thinpoint.advisor.measure import Measured
from thinpoint.advisor.sample import Sample

FORMAT = "thinpoint-advise"
VERSION = 1


def advice_json(
    advice: Advice, *, sample: Sample | None = None, measured: Measured | None = None
) -> dict[str, Any]:
    """One JSON object with inputs, results and the recommendation; docs/advise.md lists the keys. No NaN or infinity in it."""
    case = advice.case
    value = {
        "format": FORMAT,
        "version": VERSION,
        "recommendation": advice.recommendation,
        "best": advice.best,
        "notes": list(advice.notes),
        "inputs": {
            "model": asdict(case.model),
            "cluster": {**asdict(case.cluster), "mtbf_hours": case.cluster.hours_between_failures},
            "storage": asdict(case.storage),
            "saves": asdict(case.saves),
            "codecs": {codec.name: _codec(codec) for codec in case.codecs},
        },
        "components": [
            {
                "name": part.name,
                "precision": part.precision,
                "raw_bytes": part.raw_bytes,
                "stored_bytes": {codec.name: part.raw_bytes / codec.ratio_of(part) for codec in case.codecs},
            }
            for part in case.model.parts()
        ],
        "costs": [_costs(costs) for costs in advice.modes],
        "break_even_gb_per_s": advice.break_even,
        "alternatives": [asdict(alternative) for alternative in advice.alternatives.values()],
        "without_codec_at_best_interval": {
            "interval_min": advice.cheapest_interval.best_interval_min,
            "total_usd": advice.cheapest_interval.total_usd,
        },
        "measured": None if measured is None else asdict(measured),
        "sample": None if sample is None else _sample(sample),
    }
    return _finite(value)


def _codec(codec: Codec) -> dict[str, Any]:
    ratios: dict[str, dict[str, float]] = {}
    for (component, precision), ratio in codec.ratios.items():
        ratios.setdefault(component, {})[precision] = ratio
    return {
        "ratio": codec.ratio,
        "ratios": ratios,
        "encode_gb_per_s": codec.encode_gb_per_s,
        "decode_gb_per_s": codec.decode_gb_per_s,
        "scope": codec.scope,
        "fixed_s": codec.fixed_s,
        "overlaps": codec.overlaps,
        "batch_bytes": codec.batch_bytes,
        "source": codec.source,
    }


def _costs(costs: Costs) -> dict[str, Any]:
    return {
        **asdict(costs),
        "ratio": costs.ratio,
        "slowest": costs.times.slowest,
        "total_usd": costs.total_usd,
    }


def _sample(sample: Sample) -> dict[str, Any]:
    ratios = {
        codec: [
            {"component": name, "precision": precision, "ratio": ratio}
            for (name, precision), ratio in found.items()
        ]
        for codec, found in sample.ratios.items()
    }
    return {"name": sample.name, "params": sample.params, "read_bytes": sample.read_bytes, "ratios": ratios}


def _finite(value: Any) -> Any:
    """The value with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
