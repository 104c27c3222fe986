"""Values that are kept as runs of bytes: byte strings, long texts, long lists of numbers, NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from thinpoint.state import arrays, scalars
from thinpoint.state.tree import Path, malformed

FetchBlob = Callable[[int], "bytes | bytearray | memoryview"]
"""Storage id to all its bytes."""


class ByteReader:
    """Gives the bytes that a tree spells out or has in a storage.

    Args:
        num_storages: of the file.
        fetch_blob: called at most once for each storage.
    """

    def __init__(self, num_storages: int, fetch_blob: FetchBlob) -> None:
        self._num_storages = num_storages
        self._fetch_blob = fetch_blob
        self._used: set[int] = set()

    def data(self, data: Any, path: Path) -> bytes | bytearray | memoryview:
        """The bytes of a DATA.

        Raises:
            MalformedFileError: neither base64 nor a storage that was not used yet.
        """
        if isinstance(data, str):
            try:
                return scalars.decode_base64(data)
            except ValueError as error:
                malformed(path, f"bytes that are no base64 ({error})")
        if type(data) is not int or not 0 <= data < self._num_storages:
            malformed(path, "bytes that are neither base64 nor in a storage")
        # Else a small file could ask for one large storage again and again.
        if data in self._used:
            malformed(path, f"storage {data} is used twice")
        self._used.add(data)
        return self._fetch_blob(data)

    def value(self, tag: str, body: Any, path: Path) -> Any:
        """The value of a node whose tag is one of `BYTE_TAGS`.

        Raises:
            MalformedFileError: the body is not valid for the tag.
        """
        return _VALUES[tag](self, body, path)

    def _bytes(self, body: Any, path: Path) -> bytes:
        return bytes(self.data(body, path))

    def _bytearray(self, body: Any, path: Path) -> bytearray:
        return bytearray(self.data(body, path))

    def _text(self, body: Any, path: Path) -> str:
        try:
            return str(self.data(body, path), "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            malformed(path, "text that is no UTF-8")

    def _int_list(self, body: Any, path: Path) -> list[int]:
        return self._numbers(body, "<i8", path)

    def _float_list(self, body: Any, path: Path) -> list[float]:
        return self._numbers(body, "<f8", path)

    def _numbers(self, body: Any, dtype: str, path: Path) -> list[Any]:
        data = self.data(body, path)
        if len(data) % 8:
            malformed(path, "a list of numbers that are not 8 bytes each")
        values = np.frombuffer(data, dtype) if len(data) else np.zeros(0)
        return values.tolist()  # type: ignore[no-any-return]

    def _array(self, body: Any, path: Path) -> np.ndarray:
        if not isinstance(body, list) or len(body) != 4:
            malformed(path, "an array is a dtype, a shape, an order and bytes")
        dtype, shape, order, data = body
        buffer = self.data(data, path)
        try:
            return arrays.build_array(
                dtype, shape, order, buffer if isinstance(buffer, bytearray) else bytearray(buffer)
            )
        except scalars.DECODE_ERRORS as error:
            malformed(path, f"not a valid array ({str(error)[:200]})")


_VALUES: dict[str, Callable[[ByteReader, Any, Path], Any]] = {
    "bytes": ByteReader._bytes,
    "bytearray": ByteReader._bytearray,
    "text": ByteReader._text,
    "int_list": ByteReader._int_list,
    "float_list": ByteReader._float_list,
    "array": ByteReader._array,
}
BYTE_TAGS = frozenset(_VALUES)
