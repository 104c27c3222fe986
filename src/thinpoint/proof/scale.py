"""How large the models are that the proofs train, from one word or number."""

from __future__ import annotations

from dataclasses import dataclass

from thinpoint.errors import UsageError

SCALES = {"tiny": 400_000, "small": 25_000_000, "134m": 134_000_000, "1b": 1_080_000_000}
"""Parameters, before rounding to whole layers."""

_HEAD_WIDTH = 64
_SMALL = 10_000_000
"""Fewer parameters are for trying out: everything is shorter."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A language model and its batches.

    Attributes:
        width: a multiple of 64.
        num_layers: each has 12 x width^2 parameters.
        context: bytes of text in a sequence.
        batch: sequences in a training step.
    """

    width: int
    num_layers: int
    context: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the proofs run.

    Attributes:
        name: as it was asked for.
        busy: fills the device: work for each kernel is large.
        launch_bound: tiny layers: the host cannot launch kernels as fast as the device runs them.
        quiet_steps: training steps of a block without saves.
        run_width, run_layers: the model of the run that is killed.
        run_steps, num_kills: its training steps, and how often it is killed.
        corpus_bytes: text to train on.
        num_threads: of PyTorch on a CPU; None for as many as it takes by itself.
    """

    name: str
    busy: Shape
    launch_bound: Shape
    quiet_steps: int
    run_width: int
    run_layers: int
    run_steps: int
    num_kills: int
    corpus_bytes: int
    num_threads: int | None


def parse_scale(text: str, *, on_gpu: bool) -> Scale:
    """The scale of that name, or of so many parameters.

    Args:
        text: a key of SCALES, or a number ("30000000", "3e7").
        on_gpu: a CPU gets short sequences: its steps would take seconds.

    Raises:
        UsageError: neither, or out of range.
    """
    num_parameters = SCALES.get(text.lower()) or _number(text)
    is_small = num_parameters < _SMALL
    # Depth grows with width, as in the models that people train: layers = width / 64.
    width = _HEAD_WIDTH * max(1, round((num_parameters / (12 * _HEAD_WIDTH**2)) ** (1 / 3)))
    long = on_gpu and not is_small
    tiny_width = 64 if is_small else 256
    return Scale(
        name=text.lower(),
        busy=Shape(
            width=width,
            num_layers=max(1, round(num_parameters / (12 * width**2))),
            context=1024 if long else 64,
            batch=8 if long else 4,
        ),
        launch_bound=Shape(
            width=tiny_width,
            num_layers=min(32, max(4, round(num_parameters / (12 * tiny_width**2)))) if not is_small else 8,
            context=64,
            batch=1,
        ),
        quiet_steps=24 if is_small else 60,
        run_width=64 if is_small else 256 if num_parameters < 4 * _SMALL else 512,
        run_layers=2 if is_small else 4 if num_parameters < 4 * _SMALL else 6,
        run_steps=120 if is_small else 500 if num_parameters < 4 * _SMALL else 2000,
        num_kills=3 if is_small else 8 if num_parameters < 4 * _SMALL else 20,
        corpus_bytes=500_000 if is_small else 8_000_000,
        # Threads that wait for each other at every tiny operation are slow where others run too.
        num_threads=1 if is_small else None,
    )


def _number(text: str) -> int:
    try:
        value = int(float(text))
    except (ValueError, OverflowError):
        value = 0
    if not 50_000 <= value <= 1_000_000_000_000:
        raise UsageError(
            "there is no such scale",
            expected=f"{', '.join(SCALES)}, or a number of parameters from 50,000 on",
            actual=repr(text),
        )
    return value
