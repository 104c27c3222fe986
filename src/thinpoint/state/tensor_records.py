"""A live tensor described as a record: its strides and flags, and the inner tensors it is made of."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thinpoint.errors import UnsupportedObjectError
from thinpoint.state.classes import instance_dict
from thinpoint.state.scalars import float_bits
from thinpoint.state.torch_values import ENCODERS, dtype_name
from thinpoint.state.tree import Path, display

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, *ENCODERS})
PACKED_DTYPES = {"quint4x2": 2, "quint2x4": 4}
"""Elements in a byte of the dtypes whose elements share one; each row begins at a whole byte."""


def packed_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor of a packed dtype."""
    last = shape[-1] if shape else 1
    return math.prod(shape[:-1]) * -(-last // PACKED_DTYPES[dtype])


@dataclass(kw_only=True)
class Description:
    """What there is to store of one tensor.

    Attributes:
        record: the JSON record without ids and trees.
        storage: the storage that holds the elements, None if they are in `inner` or nowhere (meta).
        inner: the tensors this one is made of, by name.
        subclass: the class to rebuild by `__tensor_unflatten__`, or None.
        objects: parts of a subclass that are no tensors, by name.
        context: what `__tensor_flatten__` gave besides the names of its parts.
        attrs: instance attributes to store.
    """

    record: dict[str, Any]
    storage: torch.UntypedStorage | None = None
    inner: dict[str, torch.Tensor] = field(default_factory=dict)
    subclass: type | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    context: Any = None
    attrs: dict[str, Any] = field(default_factory=dict)


def is_describable(tensor: torch.Tensor) -> bool:
    """Whether the tensor can be stored without pickle: a plain tensor or Parameter, or a wrapper subclass."""
    cls = type(tensor)
    return (
        cls in PLAIN_CLASSES
        or is_jagged(tensor)
        or (hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__"))
    )


def needs_no_pickle(tensor: torch.Tensor) -> bool:
    """Whether a describable tensor is surely rebuilt without any pickle, its attributes aside."""
    if type(tensor) in PLAIN_CLASSES:
        return True
    description = _describe_jagged(tensor) if is_jagged(tensor) else _describe_subclass(tensor)
    return (
        not description.objects
        and _is_plain_data(description.context)
        and all(is_describable(part) and needs_no_pickle(part) for part in description.inner.values())
    )


def _is_plain_data(obj: Any) -> bool:
    if type(obj) is dict:
        return all(_is_plain_data(key) and _is_plain_data(value) for key, value in obj.items())
    if type(obj) in (list, tuple):
        return all(map(_is_plain_data, obj))
    return type(obj) in _PLAIN_TYPES


def is_jagged(tensor: torch.Tensor) -> bool:
    """Whether this is a nested tensor of the jagged layout."""
    module = sys.modules.get("torch.nested._internal.nested_tensor")
    return module is not None and type(tensor) is module.NestedTensor


def refuse_unreal(tensor: torch.Tensor, path: Path) -> None:
    """Refuse tensors without values of their own.

    Raises:
        UnsupportedObjectError: a fake or functional tensor, or one inside a functorch transform.
    """
    if type(tensor) not in PLAIN_CLASSES:
        module = sys.modules.get("torch._subclasses.fake_tensor")
        name = type(tensor).__name__
        if (module is not None and isinstance(tensor, module.FakeTensor)) or name == "FunctionalTensor":
            raise UnsupportedObjectError(
                f"{display(path)} is a {name}, which has no values to store",
                hint="Save outside of FakeTensorMode and of torch.compile's tracing",
            )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UnsupportedObjectError(
            f"{display(path)} is a tensor inside a torch.func transform", hint="Save outside of vmap and grad"
        )


def describe(tensor: torch.Tensor, path: Path) -> Description:
    """The description of a tensor for which `is_describable` holds.

    Raises:
        UnsupportedObjectError: a layout or device whose values cannot be reached.
    """
    is_plain = type(tensor) in PLAIN_CLASSES
    description = _describe_plain(tensor, path) if is_plain else _describe_wrapper(tensor)
    record = description.record
    attrs = instance_dict(tensor)
    if tensor.requires_grad:
        record["requires_grad"] = True
    # What makes another tensor a Parameter is an attribute.
    if (attrs or type(tensor) is not torch.Tensor) and isinstance(tensor, torch.nn.Parameter):
        record["kind"] = "parameter"
    if is_plain:
        description.attrs = dict(attrs)
    return description


def _describe_wrapper(tensor: torch.Tensor) -> Description:
    return _describe_jagged(tensor.detach()) if is_jagged(tensor) else _describe_subclass(tensor)


def _describe_plain(tensor: torch.Tensor, path: Path) -> Description:
    names = getattr(tensor, "names", None)
    if names and any(name is not None for name in names):
        raise UnsupportedObjectError(
            f"{display(path)} is a tensor with named dimensions",
            hint="Save tensor.rename(None) and the names beside it",
        )
    if tensor.layout is torch.strided and not tensor.is_nested:
        return _describe_strided(tensor, path)
    detached = tensor.detach()
    if tensor.is_nested:
        return _describe_nested(detached)
    if tensor.layout is torch.sparse_coo:
        inner = {"indices": detached._indices(), "values": detached._values()}
        record = _empty_record(tensor, layout="sparse_coo", coalesced=bool(tensor.is_coalesced()))
        return Description(record=record, inner=inner)
    if tensor.layout in _COMPRESSED:
        compressed, plain = _COMPRESSED[tensor.layout]
        inner = {
            "compressed": getattr(detached, compressed)(),
            "plain": getattr(detached, plain)(),
            "values": detached.values(),
        }
        return Description(record=_empty_record(tensor, layout=str(tensor.layout)[6:]), inner=inner)
    raise UnsupportedObjectError(
        f"{display(path)} has the layout {tensor.layout}, which cannot be stored",
        hint="Save tensor.to_dense()",
    )


def _describe_strided(tensor: torch.Tensor, path: Path) -> Description:
    record: dict[str, Any] = {
        "storage": None,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
    }
    if tensor.is_meta:
        return Description(record=record)
    try:
        description = Description(record=record, storage=tensor.untyped_storage())
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedObjectError(
            f"{display(path)} is on {tensor.device}, whose memory cannot be reached: {error}",
            hint="Save tensor.cpu() instead",
        ) from error
    if record["dtype"] in PACKED_DTYPES and (record["offset"] or not tensor.is_contiguous()):
        raise UnsupportedObjectError(
            f"{display(path)} is a {record['dtype']} tensor that is no contiguous whole",
            hint="Save tensor.clone()",
        )
    if tensor.is_conj():
        record["conj"] = True
    if tensor.is_neg():
        record["neg"] = True
    if tensor.is_quantized:
        _describe_quantizer(tensor.detach(), description)
    return description


def _describe_quantizer(tensor: torch.Tensor, description: Description) -> None:
    scheme = str(tensor.qscheme())[6:]
    if scheme.startswith("per_tensor"):
        quantizer = {
            "scheme": scheme,
            "scale": float_bits(tensor.q_scale()),
            "zero_point": tensor.q_zero_point(),
        }
    else:
        quantizer = {"scheme": scheme, "axis": tensor.q_per_channel_axis()}
        description.inner = {
            "scales": tensor.q_per_channel_scales(),
            "zero_points": tensor.q_per_channel_zero_points(),
        }
    description.record["quantizer"] = quantizer


def _describe_nested(tensor: torch.Tensor) -> Description:
    inner = {
        "values": tensor.values(),
        "sizes": tensor._nested_tensor_size(),
        "strides": tensor._nested_tensor_strides(),
        "offsets": tensor._nested_tensor_storage_offsets(),
    }
    return Description(record=_empty_record(tensor, shape=[], layout="nested"), inner=inner)


def _describe_jagged(tensor: Any) -> Description:
    inner = {"values": tensor._values, "offsets": tensor._offsets}
    if tensor._lengths is not None:
        inner["lengths"] = tensor._lengths
    record = _empty_record(tensor, shape=[], layout="jagged", ragged_dim=tensor._ragged_idx)
    return Description(record=record, inner=inner)


def _describe_subclass(tensor: Any) -> Description:
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    inner = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    return Description(
        record=_empty_record(tensor),
        inner=inner,
        # The device mesh of a DTensor, since torch 2.13.
        objects={name: part for name, part in parts.items() if name not in inner},
        subclass=type(tensor),
        context=context,
    )


def _empty_record(tensor: torch.Tensor, shape: list[int] | None = None, **extra: Any) -> dict[str, Any]:
    """The record of a tensor without a storage of its own. The shape of a nested one is in its inner tensors."""
    sizes = list(tensor.shape) if shape is None else shape
    base = {"storage": None, "dtype": dtype_name(tensor.dtype), "shape": sizes, "stride": [], "offset": 0}
    return {**base, **extra}
