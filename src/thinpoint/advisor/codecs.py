"""What each codec does to each component and how fast, with where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from thinpoint.advisor.checks import choice, number
from thinpoint.advisor.sizes import FIRST, SECOND, Component
from thinpoint.errors import UsageError

Key = tuple[str, str]
"""A component's name and precision."""

SCOPES = ("gpu", "aggregate")


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How a codec shrinks a checkpoint and how fast.

    Attributes:
        name: what users call it.
        ratios: raw over stored bytes by component and precision. A component that is missing gets the ratio of weights of its
            precision; a precision that is missing does not shrink.
        ratio: one ratio for everything, instead; None for `ratios`.
        encode_gb_per_s, decode_gb_per_s: raw bytes; None for no time at all.
        scope: "gpu": each GPU that writes has these rates; "aggregate": all together.
        fixed_s: seconds that every save takes besides.
        overlaps: encoding, copying and writing run at the same time; otherwise one after the other.
        batch_bytes: raw bytes that each GPU encodes at once; what the stages wait for at the begin and the end.
        source: where the numbers come from.
    """

    name: str
    ratios: Mapping[Key, float] = field(default_factory=dict)
    ratio: float | None = None
    encode_gb_per_s: float | None = None
    decode_gb_per_s: float | None = None
    scope: str = "gpu"
    fixed_s: float = 0.0
    overlaps: bool = True
    batch_bytes: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError("codecs: a name is needed", actual=repr(self.name))
        where = f"codecs.{self.name}"
        if self.ratio is not None:
            number(f"{where}.ratio", self.ratio, above=True, most=1e6)
        for (component, precision), ratio in self.ratios.items():
            number(f"{where}.ratios.{component}.{precision}", ratio, above=True, most=1e6)
        for name in ("encode_gb_per_s", "decode_gb_per_s"):
            if getattr(self, name) is not None:
                number(f"{where}.{name}", getattr(self, name), above=True)
        number(f"{where}.fixed_s", self.fixed_s)
        number(f"{where}.batch_bytes", self.batch_bytes)
        choice(f"{where}.scope", self.scope, SCOPES)
        if not isinstance(self.overlaps, bool):
            raise UsageError(
                f"{where}.overlaps is not valid", expected="true or false", actual=repr(self.overlaps)
            )

    def ratio_of(self, component: Component) -> float:
        """Raw over stored bytes of a component; at least 1, as what does not shrink is stored raw."""
        if self.ratio is not None:
            return self.ratio
        name = "weights" if component.name == "master" else component.name
        kinds = (
            (component.name, component.precision),
            (name, component.precision),
            ("weights", component.precision),
        )
        return next((max(self.ratios[kind], 1.0) for kind in kinds if kind in self.ratios), 1.0)

    def stored_bytes(self, components: Iterable[Component]) -> float:
        """Size after coding: each component by its own ratio, which is the harmonic mean by size, not the mean.

        Source: size = sum of raw_bytes / ratio; see docs/cost-model.md for what one ratio for a whole file hides.
        """
        return sum(component.raw_bytes / self.ratio_of(component) for component in components)

    def is_measured(self, component: Component) -> bool:
        """Whether there is a ratio for a component's precision at all."""
        return self.ratio is not None or any(precision == component.precision for _, precision in self.ratios)


_H200 = "docs/gpu.md: 137M AdamW after 600 steps, one H200, all codecs in one run"

NONE = Codec(name="none", ratio=1.0, source="the bytes as they are")

NVCOMP_ZSTD = Codec(
    name="nvcomp-zstd",
    ratios={
        ("weights", "fp32"): 1.079,
        (FIRST, "fp32"): 1.078,
        (SECOND, "fp32"): 1.125,
        ("weights", "bf16"): 1.278,
        ("gradients", "bf16"): 1.273,
        ("weights", "fp8"): 1.217,
    },
    encode_gb_per_s=9.3,
    decode_gb_per_s=42.0,
    source=f"{_H200}; rates of the published mix, nvCOMP 6.0.0.12, without proof",
)

NVCOMP_ANS = Codec(
    name="nvcomp-ans",
    ratios={
        ("weights", "fp32"): 1.196,
        (FIRST, "fp32"): 1.191,
        (SECOND, "fp32"): 1.216,
        ("weights", "bf16"): 1.500,
        ("gradients", "bf16"): 1.482,
        ("weights", "fp8"): 1.207,
    },
    encode_gb_per_s=212.0,
    decode_gb_per_s=891.0,
    source=f"{_H200}; rates of the published mix, nvCOMP 6.0.0.12, modes <f4 and <f2, 256 KiB, without proof",
)

THINPOINT = Codec(
    name="thinpoint",
    ratios={
        ("weights", "fp32"): 1.207,
        (FIRST, "fp32"): 1.205,
        (SECOND, "fp32"): 1.336,
        ("weights", "bf16"): 1.523,
        ("gradients", "bf16"): 1.514,
        (FIRST, "bf16"): 1.53,
        (SECOND, "bf16"): 1.97,
        ("weights", "fp16"): 1.18,
        ("weights", "fp8"): 1.224,
        (FIRST, "fp8"): 1.17,
        (SECOND, "fp8"): 1.56,
        (FIRST, "int8"): 1.10,
        (SECOND, "int8"): 1.21,
    },
    encode_gb_per_s=50.0,
    decode_gb_per_s=170.0,
    batch_bytes=256 << 20,
    source=f"{_H200}; rates of FP32 w+m+v with checksums and, for encode, proof, 256 MiB in flight; BF16 moments, FP16, FP8 and "
    "INT8 moments from entropies of the same kind of state, not from files",
)

BUILT_IN = (NONE, NVCOMP_ZSTD, NVCOMP_ANS, THINPOINT)
