"""Whether two states are the same bits."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in logical order as a flat uint8 tensor on its device."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def differences(a: Any, b: Any, path: str = "state") -> list[str]:
    """Where two states differ, in words; empty if all values, key orders, types, strides and bits agree."""
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        for what in ("dtype", "device", "shape"):
            if getattr(a, what) != getattr(b, what):
                return [f"{path}: {what} {getattr(a, what)} and {getattr(b, what)}"]
        if a.stride() != b.stride():
            return [f"{path}: stride {a.stride()} and {b.stride()}"]
        num_different = int((tensor_bytes(a) != tensor_bytes(b)).sum())
        return [f"{path}: {num_different:,} of {a.nbytes:,} bytes"] if num_different else []
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return [f"{path}: keys {list(a)} and {list(b)}"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} items"]
        return [found for i in range(len(a)) for found in differences(a[i], b[i], f"{path}.{i}")]
    if is_dataclass(a) and not isinstance(a, type):
        return [
            found
            for entry in fields(a)
            for found in differences(getattr(a, entry.name), getattr(b, entry.name), f"{path}.{entry.name}")
        ]
    same = struct.pack("<d", a) == struct.pack("<d", b) if isinstance(a, float) else a == b
    return [] if same else [f"{path}: {a!r} and {b!r}"]


def count(state: Any) -> tuple[int, int]:
    """The number of tensors in a state and of their bytes, each name counted, shared or not."""
    if isinstance(state, torch.Tensor):
        return 1, state.nbytes
    children = list(state.values()) if isinstance(state, Mapping) else state
    if not isinstance(children, list | tuple):
        return 0, 0
    counts = [count(child) for child in children]
    return sum(tensors for tensors, _ in counts), sum(num_bytes for _, num_bytes in counts)
