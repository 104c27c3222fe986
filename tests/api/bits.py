"""Comparing objects bit for bit."""

from __future__ import annotations

from typing import Any

import torch


def tensor_bits(tensor: torch.Tensor) -> bytes:
    """The elements' bits in logical order."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return b""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integers).contiguous().numpy().tobytes()


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Same types, structure, dtypes, shapes, strides and bits."""
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (
            b.dtype,
            b.shape,
            b.stride(),
            b.requires_grad,
        ), path
        assert tensor_bits(a) == tensor_bits(b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key, value in a.items():
            assert_same(value, b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    else:
        assert a == b, path
