"""Values that are kept as runs of bytes, for the tree: spelled out if short, else in a storage of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from thinpoint.state import arrays, scalars
from thinpoint.state.storages import StorageTable, View, contiguous_view
from thinpoint.state.tree import Node, Path

MAX_INLINE_BYTES = 1 << 10

RoleAt = Callable[[Path, str], str]
"""Path and dtype (torch's name without `torch.`, or "bytes") to role."""


class ByteWriter:
    """Gives what stands in the tree for values that are bytes.

    Args:
        storages: where long ones go; they are not copied.
        role_at: of the values of an array.
    """

    def __init__(self, storages: StorageTable, role_at: RoleAt) -> None:
        self._storages = storages
        self._role_at = role_at

    def data(self, data: bytes | bytearray, path: Path) -> str | int:
        """The DATA of bytes."""
        flat = np.frombuffer(data, np.uint8) if len(data) else np.zeros(0, np.uint8)
        return self._data(flat, self._view((flat.size,), "bytes", 1, path))

    def numbers(self, values: np.ndarray, path: Path) -> str | int:
        """The DATA of a list of numbers, as an int64 or float64 array."""
        view = contiguous_view(
            shape=values.shape,
            dtype=arrays.region_dtype(values.dtype),
            item_bytes=8,
            role="other",
            name=path,
        )
        return self._data(values.view(np.uint8), view)

    def array(self, array: np.ndarray, path: Path) -> Node:
        """The body of an `array`.

        Raises:
            NotPlainError: its dtype is no plain data.
        """
        dtype = arrays.encode_dtype(array.dtype)
        flat, order = arrays.array_bytes(array)
        torch_dtype = arrays.region_dtype(array.dtype)
        if torch_dtype == "bytes":
            view = self._view((flat.size,), torch_dtype, 1, path)
        else:
            shape = array.shape[::-1] if order == "F" else array.shape
            view = self._view(shape, torch_dtype, array.dtype.itemsize, path)
        return [dtype, list(array.shape), order, self._data(flat, view)]

    def _data(self, flat: np.ndarray, view: View) -> str | int:
        if flat.size <= MAX_INLINE_BYTES:
            return scalars.encode_base64(flat.tobytes())
        return self._storages.add_blob(flat, view)

    def _view(self, shape: tuple[int, ...], dtype: str, item_bytes: int, path: Path) -> View:
        role = self._role_at(path, dtype)
        return contiguous_view(shape=shape, dtype=dtype, item_bytes=item_bytes, role=role, name=path)


def numpy_scalar(scalar: np.generic) -> Node:
    """The node of a NumPy scalar.

    Raises:
        NotPlainError: its dtype is no plain data.
    """
    # `dtype` and `tobytes` of a string scalar disagree about trailing zeros and the empty string.
    if type(scalar) is np.str_:
        return {"numpy_str": str(scalar)}
    if type(scalar) is np.bytes_:
        return {"numpy_bytes": scalars.encode_base64(bytes(scalar))}
    dtype, data = arrays.encode_scalar(scalar)
    return {"numpy_scalar": [dtype, scalars.encode_base64(data)]}
