"""Values of torch that are no tensors: dtypes, devices, layouts, sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thinpoint.state.tree import Node

_NAMED: dict[str, type] = {
    "torch_dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "qscheme": torch.qscheme,
}


@functools.cache
def named(tag: str) -> dict[str, Any]:
    """Every value of one of torch's enumerations, by torch's name without `torch.`."""
    cls = _NAMED[tag]
    values = [value for value in vars(torch).values() if isinstance(value, cls)]
    return {str(value).rpartition(".")[2]: value for value in values}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without `torch.`: "float32"."""
    return str(dtype).rpartition(".")[2]


def _encode_named(tag: str, value: Any) -> Node:
    return {tag: str(value).rpartition(".")[2]}


def _decode_named(tag: str, body: Any) -> Any:
    return named(tag)[body]


def _decode_device(body: Any) -> torch.device:
    if not isinstance(body, str):
        raise TypeError("a device is a string")
    return torch.device(body)


def _decode_size(body: Any) -> torch.Size:
    if not isinstance(body, list) or any(type(n) is not int for n in body):
        raise TypeError("a size is a list of integers")
    return torch.Size(body)


ENCODERS: dict[type, Callable[[Any], Node]] = {
    **{cls: functools.partial(_encode_named, tag) for tag, cls in _NAMED.items()},
    torch.device: lambda value: {"device": str(value)},
    torch.Size: lambda value: {"size": list(value)},
}

DECODERS: dict[str, Callable[[Any], Any]] = {
    **{tag: functools.partial(_decode_named, tag) for tag in _NAMED},
    "device": _decode_device,
    "size": _decode_size,
}
