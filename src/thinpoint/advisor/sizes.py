"""What a checkpoint consists of and how many bytes each component has."""

from __future__ import annotations

from dataclasses import dataclass

FIRST, SECOND = "first_moment", "second_moment"

OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": (FIRST, SECOND),
    "adam": (FIRST, SECOND),
    "lion": (FIRST,),
    "muon": (FIRST,),
    "sgd-momentum": (FIRST,),
    "sgd": (),
    "adafactor": (),
}
"""The moments that each optimizer keeps, one value a parameter. Adafactor's second moment is a row and a column a matrix, and
Muon keeps second moments for embeddings and head alone: neither is counted."""

PRECISIONS: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5,
}
"""Bytes a value. Scales of 8- and 4-bit formats are not counted: at most 1/16 more with one byte for 16 4-bit values."""

COMPONENTS = ("weights", "master", FIRST, SECOND, "gradients", "other")


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of a checkpoint whose values are of one kind.

    Attributes:
        name: one of COMPONENTS.
        precision: one of PRECISIONS, or whatever dtype a file holds.
        raw_bytes: size before coding.
    """

    name: str
    precision: str
    raw_bytes: float

    @property
    def label(self) -> str:
        """For people: "first moment, fp32"."""
        return f"{self.name.replace('_', ' ')}, {self.precision}"


def components_of(
    params: float, *, optimizer: str, weights: str, moments: str, gradients: str, master: str
) -> tuple[Component, ...]:
    """The components of a checkpoint: bytes = parameters x bytes a value, for each.

    Source: the published case: BF16 weights + FP32 m + FP32 v + BF16 gradients = 2 + 4 + 4 + 2 = 12 bytes a parameter, 782 GiB
    for 70 billion.

    Args:
        optimizer: one of OPTIMIZERS.
        weights, moments: one of PRECISIONS.
        gradients, master: one of PRECISIONS, or "none".
    """
    kinds = [("weights", weights), ("master", master)]
    kinds += [(name, moments) for name in OPTIMIZERS[optimizer]]
    kinds.append(("gradients", gradients))
    return tuple(
        Component(name=name, precision=precision, raw_bytes=params * PRECISIONS[precision])
        for name, precision in kinds
        if precision != "none"
    )
