"""Records back to tensors. Checks what torch does not, so that none can allocate or reach beyond a storage."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from thinpoint.errors import MalformedFileError
from thinpoint.state.scalars import float_from_bits
from thinpoint.state.storages import is_contiguous
from thinpoint.state.tensor_records import PACKED_DTYPES, packed_bytes
from thinpoint.state.torch_values import named
from thinpoint.state.tree import Path, display

BUILD_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError)
"""What torch raises on arguments that do not fit (NotImplementedError is a RuntimeError)."""

_COMPRESSED = frozenset({"sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"})
_MAX_DIMS = 64
_MAX_INT64 = (1 << 63) - 1
_PER_TENSOR = frozenset({"per_tensor_affine", "per_tensor_symmetric"})


def bad_record(path: Path, reason: str) -> NoReturn:
    """Raise the error for a tensor record that makes no sense.

    Raises:
        MalformedFileError: always.
    """
    raise MalformedFileError(f"a tensor's record is malformed: {reason}", tensor=display(path))


def record_dtype(record: dict[str, Any], path: Path) -> torch.dtype:
    """The dtype that a record names.

    Raises:
        MalformedFileError: this version of torch has no such dtype.
    """
    dtype = named("torch_dtype").get(record["dtype"]) if isinstance(record.get("dtype"), str) else None
    if dtype is None:
        bad_record(path, f"this version of torch has no dtype {str(record.get('dtype'))[:40]!r}")
    return dtype  # type: ignore[no-any-return]


def view_range(record: dict[str, Any], path: Path) -> tuple[int, int]:
    """The bytes of its storage that a strided record covers, half-open; equal if there are none.

    Raises:
        MalformedFileError: shape, stride or offset are not valid.
    """
    shape, stride, offset = (checked_sizes(record, key, path) for key in ("shape", "stride", "offset"))
    if len(shape) != len(stride) or len(offset) != 1 or len(shape) > _MAX_DIMS:
        bad_record(path, "shape, stride and offset do not fit")
    if math.prod(shape) > _MAX_INT64:
        bad_record(path, "more elements than 2^63 - 1")
    item_bytes = record_dtype(record, path).itemsize
    if 0 in shape:
        return 0, 0
    if record["dtype"] in PACKED_DTYPES:
        if not is_contiguous(shape, stride) or offset[0]:
            bad_record(path, f"a {record['dtype']} tensor that is no contiguous whole")
        return 0, packed_bytes(record["dtype"], shape)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset[0] * item_bytes, (offset[0] + extent) * item_bytes


def checked_sizes(record: dict[str, Any], key: str, path: Path) -> list[int]:
    """The integers of `record[key]`, a list; of "offset", one.

    Raises:
        MalformedFileError: not integers from 0 to 2^63 - 1.
    """
    value = record.get(key)
    sizes = [value] if key == "offset" else value
    if isinstance(sizes, list):
        for n in sizes:
            if type(n) is not int or not 0 <= n <= _MAX_INT64:
                break
        else:
            return sizes
    bad_record(path, f"{key} is not made of integers from 0 to 2^63 - 1")


def build_strided(
    record: dict[str, Any], storage: torch.UntypedStorage | None, inner: dict[str, torch.Tensor], path: Path
) -> torch.Tensor:
    """The view of `storage` that a record describes; on the meta device if storage is None.

    Args:
        inner: scales and zero points of a tensor quantised per channel, else empty.

    Raises:
        MalformedFileError: the view does not lie inside the storage.
    """
    _, end = view_range(record, path)
    shape, stride, offset = record["shape"], record["stride"], record["offset"]
    dtype = record_dtype(record, path)
    if storage is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    # `set_` would grow the storage.
    if end > storage.nbytes():
        raise MalformedFileError(
            "a tensor reaches beyond its storage",
            tensor=display(path),
            expected=f"at most {storage.nbytes():,} bytes",
            actual=f"{end:,}",
        )
    if "quantizer" in record:
        tensor = _empty_quantized(record, dtype, inner, storage.device, path)
    else:
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
    num_bytes = storage.nbytes()
    tensor.set_(storage, offset, shape, stride)
    if storage.nbytes() != num_bytes:
        bad_record(path, "the view does not fit into its storage")
    if _flag(record, "conj", path):
        tensor = tensor.conj()
    if _flag(record, "neg", path):
        tensor = torch._neg_view(tensor)
    return tensor.detach() if "conj" in record or "neg" in record else tensor


def _empty_quantized(
    record: dict[str, Any],
    dtype: torch.dtype,
    inner: dict[str, torch.Tensor],
    device: torch.device,
    path: Path,
) -> torch.Tensor:
    quantizer = record["quantizer"]
    if not isinstance(quantizer, dict):
        bad_record(path, "the quantizer is no object")
    # Without elements: the size comes with the storage, and nothing is allocated on the word of a record.
    if quantizer.get("scheme") in _PER_TENSOR:
        zero_point = quantizer["zero_point"]
        scale = float_from_bits(quantizer["scale"])
        return torch._empty_affine_quantized(
            [0], scale=scale, zero_point=zero_point, dtype=dtype, device=device
        )
    axis, scales = quantizer["axis"], inner["scales"]
    if type(axis) is not int or not 0 <= axis < len(record["shape"]) or scales.ndim != 1:
        bad_record(path, "the axis of the quantizer")
    num_channels = scales.numel()
    sizes = [0] * len(record["shape"])
    sizes[axis] = num_channels
    if record["shape"][axis] != num_channels or inner["zero_points"].shape != scales.shape:
        bad_record(path, "scales and zero points do not fit the shape")
    return torch._empty_per_channel_affine_quantized(
        sizes, scales=scales, zero_points=inner["zero_points"], axis=axis, dtype=dtype, device=device
    )


def build_layout(record: dict[str, Any], inner: dict[str, torch.Tensor], path: Path) -> torch.Tensor:
    """The sparse or nested tensor that a record with a `layout` describes, over its inner tensors.

    Raises:
        MalformedFileError: unknown layout; indices or offsets that reach beyond the values.
    """
    layout = record["layout"]
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            inner["indices"],
            inner["values"],
            checked_sizes(record, "shape", path),
            check_invariants=True,
            is_coalesced=_flag(record, "coalesced", path),
        )
    if layout in _COMPRESSED:
        return torch.sparse_compressed_tensor(
            inner["compressed"],
            inner["plain"],
            inner["values"],
            checked_sizes(record, "shape", path),
            layout=named("layout")[layout],
            check_invariants=True,
        )
    if layout == "nested":
        return _build_nested(inner, path)
    if layout == "jagged":
        return _build_jagged(record, inner, path)
    bad_record(path, f"unknown layout {str(layout)[:40]!r}")


def _build_nested(inner: dict[str, torch.Tensor], path: Path) -> torch.Tensor:
    values, sizes, strides, offsets = (inner[name] for name in ("values", "sizes", "strides", "offsets"))
    metadata = (sizes, strides, offsets)
    if any(part.dtype is not torch.int64 or part.device.type != "cpu" for part in metadata):
        bad_record(path, "sizes of a nested tensor that are not int64")
    if (
        sizes.ndim != 2
        or strides.shape != sizes.shape
        or offsets.shape != sizes.shape[:1]
        or values.ndim != 1
    ):
        bad_record(path, "sizes of a nested tensor that do not fit")
    for shape, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        if min([*shape, *stride, offset]) < 0:
            bad_record(path, "negative sizes in a nested tensor")
        extent = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if offset + extent > values.numel():
            bad_record(path, "a nested tensor reaches beyond its values")
    return torch._nested_view_from_buffer(values, *metadata)


def _build_jagged(record: dict[str, Any], inner: dict[str, torch.Tensor], path: Path) -> torch.Tensor:
    values, offsets, lengths = inner["values"], inner["offsets"], inner.get("lengths")
    dim = record.get("ragged_dim")
    if type(dim) is not int or not 1 <= dim <= values.ndim or offsets.ndim != 1 or offsets.numel() < 2:
        bad_record(path, "the ragged dimension of a nested tensor")
    if offsets.dtype not in (torch.int32, torch.int64) or values.device != offsets.device:
        bad_record(path, "the offsets of a nested tensor")
    bounds = offsets.tolist()
    if bounds[0] < 0 or bounds[-1] > values.shape[dim - 1] or bounds != sorted(bounds):
        bad_record(path, "a nested tensor reaches beyond its values")
    if lengths is not None:
        counts = lengths.tolist()
        fits = lengths.ndim == 1 and len(counts) == len(bounds) - 1 and lengths.dtype is offsets.dtype
        if not fits or any(n < 0 or start + n > bounds[-1] for start, n in zip(bounds, counts, strict=False)):
            bad_record(path, "the lengths of a nested tensor")
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)


def finish(tensor: torch.Tensor, record: dict[str, Any], path: Path) -> torch.Tensor:
    """The tensor as a Parameter, or with `requires_grad`, if the record says so.

    Raises:
        MalformedFileError: another kind.
    """
    requires_grad = _flag(record, "requires_grad", path)
    kind = record.get("kind")
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if kind is not None:
        bad_record(path, f"unknown kind {str(kind)[:40]!r}")
    return tensor.requires_grad_() if requires_grad else tensor


def _flag(record: dict[str, Any], key: str, path: Path) -> bool:
    value = record.get(key, False)
    if not isinstance(value, bool):
        bad_record(path, f"{key} is no boolean")
    return value
