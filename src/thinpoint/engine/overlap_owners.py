"""Whose tensors these are: torch optimizers, the storages that they own, and what forbids reading these in place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from thinpoint.errors import UsageError
from thinpoint.state.tensor_records import PLAIN_CLASSES

_GATHERED = ("_fsdp_flattened", "ds_id")
"""Attributes of parameters whose storage comes and goes with forward and backward: FSDP1's and ZeRO-3's."""

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@dataclass(frozen=True)
class Owned:
    """What optimizers own of a state.

    Attributes:
        optimizers: those that own something of it.
        tensors: their tensors, parameters and state, by the key of their storage; only of storages of the state.
    """

    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def storage_key(tensor: torch.Tensor) -> int | None:
    """What two plain tensors have in common if they share a storage, valid as long as that lives; None without a storage."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None
    return key


def checked_optimizers(optimizers: Any) -> list[Optimizer] | None:
    """One optimizer, or several, as a list; None as None.

    Raises:
        UsageError: something else was given.
    """
    if optimizers is None:
        return None
    if isinstance(optimizers, Optimizer):
        return [optimizers]
    found = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                "optimizers= is not valid",
                expected="torch optimizers",
                actual=type(optimizer).__name__,
                hint="Give what was made by a class derived from torch.optim.Optimizer, not its state dict",
            )
    return found


def has_stepped(optimizer: Optimizer, *, in_graph: bool) -> None:
    """Note that an optimizer exists; in_graph: and that its step is in a CUDA graph."""
    _known.add(optimizer)
    if in_graph:
        _captured.add(optimizer)


def known_optimizers(*, search: bool = False) -> list[Optimizer]:
    """The living optimizers that are known.

    Args:
        search: look for others among all objects of the process; takes a fraction of a second.
    """
    if search:
        # By type: `isinstance` would ask objects that pretend.
        for found in gc.get_objects():
            if issubclass(type(found), Optimizer) and _is_hooked(found):
                _known.add(found)
    return list(_known)


def owned_by(optimizers: Iterable[Optimizer], keys: Set[int]) -> Owned:
    """What these optimizers own of the storages with these keys."""
    owned = Owned()
    for optimizer in optimizers:
        is_owner = False
        for tensor in tensors_of(optimizer):
            key = storage_key(tensor)
            if key is not None and key in keys:
                owned.tensors.setdefault(key, []).append(tensor)
                is_owner = True
        if is_owner:
            owned.optimizers.append(optimizer)
    return owned


def tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The plain strided tensors that its parameters and state consist of; of a DTensor the local shard."""
    for parameter in _parameters(optimizer):
        yield from _plain(parameter)
    yield from _plain(list(getattr(optimizer, "state", {}).values()))


def why_not_in_place(optimizers: Iterable[Optimizer]) -> str | None:
    """None if these write to what they own only in `step`, after its global hooks; else the reason."""
    for optimizer in optimizers:
        reason = _why_not(optimizer)
        if reason is not None:
            return f"{type(optimizer).__name__}: {reason}"
    return None


def _why_not(optimizer: Optimizer) -> str | None:
    if not _is_hooked(optimizer):
        return "its step calls no hooks, so that it cannot be held back"
    if optimizer in _captured or any(group.get("capturable") for group in optimizer.param_groups):
        return "its step may be replayed by a CUDA graph (capturable), which no hook can hold back"
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return "it has step pre-hooks of its own, which may change its state"
    for parameter in _parameters(optimizer):
        if any(hasattr(parameter, name) for name in _GATHERED):
            return "its parameters are gathered for forward and backward and freed again (FSDP1, ZeRO-3)"
        # The first attribute is None or a dict; DDP's and torchtitan's optimizers in backward set one of the two.
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(
            parameter, "_in_backward_optimizers"
        ):
            return "a parameter has hooks in backward, from which the optimizer may step"
    return None


def _is_hooked(optimizer: Optimizer) -> bool:
    """Whether torch has put its hooks into `step`; wrappers that only pass it on are without."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _plain(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if type(value) not in PLAIN_CLASSES and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _plain(getattr(value, name))
        elif value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain(item)
