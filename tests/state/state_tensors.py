"""Tensor subclasses that states in the tests contain."""

from __future__ import annotations

from typing import Any

import torch


class Scaled(torch.Tensor):
    """A wrapper that names a part which is no tensor, as DTensor does with its device mesh."""

    values: torch.Tensor
    scale: Any

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: Any, context: Any = None) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype
        )
        made.values, made.scale, made.context = values, scale, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.context

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], context: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(parts["values"], parts["scale"], context)

    def __repr__(self) -> str:
        return f"Scaled({self.scale})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (tensor,) = args
            return Scaled(tensor.values.detach(), tensor.scale, tensor.context)
        raise NotImplementedError(f"{func} on a Scaled tensor")
