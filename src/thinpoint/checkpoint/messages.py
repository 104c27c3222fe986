"""What ranks send each other: outcomes, as bytes in tensors. Trusted: these are processes of one program."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from thinpoint.errors import CheckpointError

Outcome = tuple[Any, "BaseException | None"]
"""(result, None) or (None, error)."""


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """What a function returns, or raises."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001
        return None, portable(error)


def result_of(outcome: Outcome) -> Any:
    """The result, or raises the error."""
    result, error = outcome
    if error is not None:
        raise error
    return result


def portable(error: BaseException) -> BaseException:
    """The error as other ranks can get it: without what holds this one's memory."""
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return CheckpointError(f"{type(error).__name__}: {error}")
    return copy


def packed(value: Any) -> torch.Tensor:
    """A flat uint8 CPU tensor that stands for the value."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def padded(raw: torch.Tensor, size: int) -> torch.Tensor:
    """With zeros behind, up to this size."""
    return torch.nn.functional.pad(raw, (0, size - len(raw)))


def unpacked(raw: torch.Tensor, size: int) -> Any:
    """The value that the first so many bytes stand for."""
    return pickle.loads(raw[:size].numpy().data)
