"""How far values of a dtype are apart, counted in values of that dtype (units in the last place) and as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thinpoint.engine.views import host_bytes

if TYPE_CHECKING:
    import torch

_UNORDERED = ("float4_e2m1fn_x2", "bits", "quint", "qint")
"""Dtypes whose elements are several values, or none."""

_COMPONENTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def largest(
    x: torch.Tensor, y: torch.Tensor, places: np.ndarray
) -> tuple[int, int | None, float | int | None]:
    """The largest difference of elements of two tensors.

    Args:
        x, y: contiguous CPU tensors of one dtype and shape.
        places: the elements to compare, as positions in row-major order.

    Returns:
        How many pairs hold a NaN and were left aside; the most steps from one value to the next in the dtype that lie between
        two elements (-0.0 and 0.0 are one step apart); the largest absolute difference. None if there is none.
    """
    import torch

    name = str(x.dtype).removeprefix("torch.")
    if name.startswith(_UNORDERED):
        return 0, None, None
    dtype = getattr(torch, _COMPONENTS.get(name, name))
    picked = torch.from_numpy(places)
    size = x.dtype.itemsize
    a, b = (torch.from_numpy(host_bytes(t)).view(-1, size)[picked].reshape(-1).view(dtype) for t in (x, y))
    if not dtype.is_floating_point:
        steps = _distance(a, b, signed_integers=dtype.is_signed)
        most = int(steps.max(initial=0))
        return 0, most, most
    p, q = a.to(torch.float64).numpy(), b.to(torch.float64).numpy()
    is_nan = np.isnan(p) | np.isnan(q)
    per_element = is_nan.reshape(len(places), -1).any(axis=1)
    steps = _distance(a, b, signed_integers=False if name == "float8_e8m0fnu" else None)[~is_nan]
    if not len(steps):
        return int(per_element.sum()), None, None
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(p[~is_nan] - q[~is_nan])
    # Of two equal infinities, in components of complex numbers, nothing is left but a NaN.
    return int(per_element.sum()), int(steps.max()), float(np.nan_to_num(apart, nan=0.0, posinf=np.inf).max())


def _distance(a: torch.Tensor, b: torch.Tensor, *, signed_integers: bool | None) -> np.ndarray:
    """Steps between values, uint64, exact.

    Args:
        signed_integers: how bits are to be read: as integers with or without a sign; None: as sign and magnitude.
    """
    p, q = _ordered(a, signed_integers), _ordered(b, signed_integers)
    return np.where(p > q, p - q, q - p).astype(np.uint64)


def _ordered(values: torch.Tensor, signed_integers: bool | None) -> np.ndarray:
    """Unsigned integers in the order of the values, one apart where no value lies between."""
    size = values.dtype.itemsize
    bits = host_bytes(values).view(_UNSIGNED[size])
    top = np.array(1 << (8 * size - 1), bits.dtype)
    if signed_integers is None:
        # These dtypes have no -0.0: its pattern is their NaN.
        one_zero = np.array(str(values.dtype).endswith("fnuz"), bits.dtype)
        return np.where(bits & top, ~bits + one_zero, bits | top)
    return bits ^ top if signed_integers else bits
