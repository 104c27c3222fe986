"""NumPy dtypes, arrays and scalars to plain data and back. Refuses object dtypes; evaluates nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from thinpoint.state.scalars import NotPlainError, decode_base64
from thinpoint.state.tree import Node

_SIMPLE = re.compile(r"[<>|](?:[?biufcSUV][0-9]{0,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,7}\])?)")
_MAX_DTYPE_DEPTH = 16
_MAX_SUBARRAY_DIMS = 32

_TORCH_NAMES = {
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "b1": "bool",
}


def encode_dtype(dtype: np.dtype[Any]) -> Node:
    """A string for a simple dtype, a list for a structured or subarray one.

    Raises:
        NotPlainError: holds Python objects, has metadata, or is an extension dtype.
    """
    if dtype.hasobject or dtype.metadata:
        raise NotPlainError(f"NumPy dtype {dtype}")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ["array", encode_dtype(base), list(shape)]
    if dtype.names is not None and dtype.fields is not None:
        if dtype.type is not np.void:
            raise NotPlainError(f"NumPy dtype {dtype}")
        fields = []
        for name in dtype.names:
            field, offset, *title = dtype.fields[name]
            if title and not isinstance(title[0], str):
                raise NotPlainError(f"NumPy dtype {dtype}")
            fields.append([name, encode_dtype(field), offset, *title])
        return ["struct", fields, dtype.itemsize, dtype.isalignedstruct]
    if dtype.isbuiltin == 2 or not _SIMPLE.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype:
        raise NotPlainError(f"NumPy dtype {dtype}")
    return dtype.str


def decode_dtype(node: Node, depth: int = 0) -> np.dtype[Any]:
    """The inverse of `encode_dtype`.

    Raises:
        ValueError, TypeError: not a dtype as `encode_dtype` gives them.
    """
    if depth > _MAX_DTYPE_DEPTH:
        raise ValueError("dtype nested too deeply")
    if isinstance(node, str):
        if not _SIMPLE.fullmatch(node):
            raise ValueError("not a plain NumPy dtype")
        return np.dtype(node)
    kind, *rest = node
    if kind == "array":
        base, shape = rest
        if not isinstance(shape, list) or len(shape) > _MAX_SUBARRAY_DIMS:
            raise ValueError("not the shape of a subarray")
        return np.dtype((decode_dtype(base, depth + 1), checked_shape(shape)))
    if kind != "struct":
        raise ValueError("unknown kind of dtype")
    fields, itemsize, align = rest
    spec: dict[str, Any] = {"names": [], "formats": [], "offsets": [], "titles": []}
    for name, field, offset, *title in fields:
        if not isinstance(name, str) or type(offset) is not int or not all(isinstance(t, str) for t in title):
            raise TypeError("a field of a dtype is a name, a dtype, an offset and perhaps a title")
        spec["names"].append(name)
        spec["formats"].append(decode_dtype(field, depth + 1))
        spec["offsets"].append(offset)
        spec["titles"].append(title[0] if title else None)
    if type(itemsize) is not int or not isinstance(align, bool):
        raise TypeError("itemsize and alignment of a dtype")
    dtype: np.dtype[Any] = np.dtype(cast(Any, {**spec, "itemsize": itemsize}), align=align)
    if dtype.hasobject:
        raise ValueError("object dtype")
    return dtype


def checked_shape(shape: Any) -> tuple[int, ...]:
    """`shape` as a tuple.

    Raises:
        ValueError: not a list of integers from 0 to 2^63 - 1.
    """
    if not isinstance(shape, list) or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise ValueError("not a shape")
    return tuple(shape)


def array_bytes(array: np.ndarray) -> tuple[np.ndarray, str]:
    """The elements as flat uint8, and their order, "C" or "F"; copies only if they lie neither way."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = (array.T if order == "F" else np.ascontiguousarray(array)).reshape(-1)
    if flat.nbytes == 0:
        return np.zeros(0, np.uint8), order
    return flat.view(np.uint8), order


def build_array(dtype: Node, shape: Any, order: Any, data: bytearray) -> np.ndarray:
    """The array over `data`, which it keeps: no copy, writable.

    Raises:
        ValueError, TypeError: the parts do not fit together.
    """
    np_dtype = decode_dtype(dtype)
    sizes = checked_shape(shape)
    num_elems = 1
    for size in sizes:
        num_elems *= size
    if order not in ("C", "F") or np_dtype.subdtype is not None or num_elems * np_dtype.itemsize != len(data):
        raise ValueError("shape, dtype and bytes of an array do not fit")
    return np.ndarray(sizes, np_dtype, buffer=data, order=order)


def encode_scalar(value: np.generic) -> tuple[Node, bytes]:
    """Dtype and bytes of a NumPy scalar.

    Raises:
        NotPlainError: as `encode_dtype`.
    """
    if type(value) is not value.dtype.type:
        raise NotPlainError(f"a {type(value).__name__}")
    return encode_dtype(value.dtype), value.tobytes()


def build_scalar(dtype: Node, data: bytearray) -> Any:
    """The inverse of `encode_scalar`.

    Raises:
        ValueError, TypeError: the parts do not fit together.
    """
    return build_array(dtype, [], "C", data)[()]


def _decode_scalar(body: Any) -> Any:
    dtype, data = body
    return build_scalar(dtype, bytearray(decode_base64(data)))


def _decode_str(body: Any) -> np.str_:
    if not isinstance(body, str):
        raise TypeError("expected a string")
    return np.str_(body)


DECODERS: dict[str, Callable[[Any], Any]] = {
    "numpy_dtype": decode_dtype,
    "numpy_scalar": _decode_scalar,
    "numpy_str": _decode_str,
    "numpy_bytes": lambda body: np.bytes_(decode_base64(body)),
}


def region_dtype(dtype: np.dtype[Any]) -> str:
    """Torch's name for the dtype of an array if the codec can make use of it, else "bytes"."""
    if dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big"):
        return "bytes"
    return _TORCH_NAMES.get(dtype.str[1:], "bytes")
