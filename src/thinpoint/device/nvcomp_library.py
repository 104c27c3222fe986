"""The part of nvCOMP's C interface that is used: batches of buffers, by address, on torch's current stream.

The C interface and not the Python package: it reports a status for every buffer, takes its scratch memory from us, so
from torch's caching allocator, bounds every output, and depends on no version of Python.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from thinpoint.codec.nvcomp import EXTRA, AnsMode
from thinpoint.errors import BackendUnavailableError, ThinpointError

MAJOR_VERSION = 6
"""The releases whose ANS stream and C interface this file knows: both changed with 6.0."""

_TYPES = {"|u1": 1, "|f1": 9, "<f2": 10, "<f4": 11}
_SIZE, _POINTER, _STATUS = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int


class _Options(ctypes.Structure):
    """Options of every algorithm: 64 bytes, zero where not used, passed by value."""

    _fields_ = [("fields", ctypes.c_uint8 * 64)]


class _Properties(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("cuda_version", ctypes.c_uint32)]


_CALLS: dict[str, list[Any]] = {
    "CompressGetMaxOutputChunkSize": [_SIZE, _Options, _POINTER],
    "CompressGetTempSize": [_SIZE, _SIZE, _Options, _POINTER, _SIZE, _POINTER],
    "DecompressGetTempSize": [_SIZE, _SIZE, _Options, _POINTER, _SIZE, _POINTER],
    "CompressAsync": [
        *(_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE),
        *(_POINTER, _POINTER, _Options, _POINTER, _POINTER),
    ],
    "DecompressAsync": [
        *(_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER),
        *(_SIZE, _POINTER, _Options, _POINTER, _POINTER),
    ],
}


def _options(*integers: int) -> _Options:
    return _Options.from_buffer_copy(struct.pack(f"<{len(integers)}i", *integers).ljust(64, b"\0"))


@dataclass(frozen=True)
class Algorithm:
    """One of nvCOMP's algorithms with its options.

    Attributes:
        name: as in the names of its functions.
        encode, decode: options, as 32-bit integers; what is not named is 0.
    """

    name: str
    encode: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()


ZSTD = Algorithm("Zstd")


def ans(mode: AnsMode) -> Algorithm:
    """rANS for values of one kind. Decoding refuses a stream of another kind."""
    return Algorithm("ANS", encode=(0, _TYPES[mode.name]), decode=(0, _TYPES[mode.name]))


class Library:
    """nvCOMP, loaded. Calls may come from any thread; those that take a device use its current stream.

    Attributes:
        version: release as text, "6.0.0.12".

    Raises:
        ImportError, OSError: it is not installed or cannot be loaded.
        BackendUnavailableError: it is of another major version.
    """

    def __init__(self) -> None:
        from nvidia import libnvcomp  # type: ignore[import-not-found, unused-ignore]

        self.version = str(libnvcomp.__version__)
        self._library = libnvcomp.load_library()
        if self._library is None:
            raise OSError("the package nvidia-libnvcomp is installed but holds no library that can be loaded")
        properties = _Properties()
        self._check(self._library.nvcompGetProperties(ctypes.byref(properties)), "nvcompGetProperties")
        if properties.version // 1000 != MAJOR_VERSION:
            raise BackendUnavailableError(
                "the nvCOMP installed here is of a version that thinpoint does not know",
                expected=f"{MAJOR_VERSION}.x",
                actual=self.version,
            )

    def max_stored_bytes(self, algorithm: Algorithm, raw_bytes: int) -> int:
        """Room that a buffer of raw_bytes needs for its stored form."""
        size = _SIZE()
        self._call(
            algorithm,
            "CompressGetMaxOutputChunkSize",
            raw_bytes,
            _options(*algorithm.encode),
            ctypes.byref(size),
        )
        return size.value

    def encode(
        self, algorithm: Algorithm, sources: np.ndarray, sizes: np.ndarray, targets: np.ndarray, device: Any
    ) -> torch.Tensor:
        """Compress buffers; does not wait for the device.

        Args:
            sources: int64 array: addresses, multiples of 16, of words.
            sizes: int64 array: bytes of each, at least 1 and a multiple of the values' width.
            targets: int64 array: addresses, multiples of 16, each with room for `max_stored_bytes` of the largest size.
            device: where they are.

        Returns:
            int64 tensor on the device, shape (2, buffers): stored bytes and statuses, 0 for success.
        """
        return self._run(algorithm, "Compress", sources, sizes, targets, sizes, device)

    def decode(
        self,
        algorithm: Algorithm,
        sources: np.ndarray,
        sizes: np.ndarray,
        targets: np.ndarray,
        capacities: np.ndarray,
        device: Any,
    ) -> torch.Tensor:
        """Decompress buffers; does not wait for the device.

        Args:
            sources: int64 array: addresses of stored forms, multiples of 16.
            sizes: int64 array: bytes of each.
            targets: int64 array: addresses, multiples of 16.
            capacities: int64 array: bytes that each may become at most.
            device: where they are.

        Returns:
            int64 tensor on the device, shape (2, buffers): raw bytes and statuses, 0 for success.
        """
        return self._run(algorithm, "Decompress", sources, sizes, targets, capacities, device)

    def _run(
        self,
        algorithm: Algorithm,
        direction: str,
        sources: np.ndarray,
        sizes: np.ndarray,
        targets: np.ndarray,
        raw_sizes: np.ndarray,
        device: Any,
    ) -> torch.Tensor:
        num, largest, total = sources.size, int(raw_sizes.max()), int(raw_sizes.sum())
        encoding = direction == "Compress"
        options = _options(*(algorithm.encode if encoding else algorithm.decode))
        with _current(device) as stream:
            need = _SIZE()
            name = f"{direction}GetTempSize"
            self._call(algorithm, name, num, largest, options, ctypes.byref(need), total, stream)
            # Freed when this returns: the allocator gives memory on only to later work of the same stream.
            scratch = torch.empty(max(need.value, 1), dtype=torch.uint8, device=device)
            table = torch.from_numpy(np.stack([sources, sizes, targets, raw_sizes])).to(device)
            source, size, target, raw_size = (row.data_ptr() for row in table)
            # No success unless nvCOMP says so.
            got = torch.full((num,), -1, dtype=torch.int64, device=device)
            status = torch.full((num,), -1, dtype=torch.int32, device=device)
            room, made, failed = (scratch.data_ptr(), need.value), got.data_ptr(), status.data_ptr()
            if encoding:
                arguments = (source, size, largest, num, *room, target, made, options, failed, stream)
            else:
                arguments = (source, size, raw_size, made, num, *room, target, options, failed, stream)
            self._call(algorithm, f"{direction}Async", *arguments)
            return torch.stack([got, status.to(torch.int64)])

    def _call(self, algorithm: Algorithm, name: str, *arguments: Any) -> None:
        function = getattr(self._library, f"nvcompBatched{algorithm.name}{name}")
        function.argtypes, function.restype = _CALLS[name], _STATUS
        self._check(function(*arguments), function.__name__)

    def _check(self, status: int, name: str) -> None:
        if status:
            raise BackendUnavailableError(f"{name} of nvCOMP failed: {self.status_text(status)}")

    def status_text(self, status: int) -> str:
        """What a status means, in nvCOMP's words."""
        describe = self._library.nvcompGetStatusString
        describe.restype = ctypes.c_char_p
        return f"{(describe(status) or b'unknown').decode('ascii', 'replace')} (status {status})"


@contextmanager
def _current(device: Any) -> Iterator[int]:
    """Makes the device the current one; gives the address of its current stream."""
    with torch.cuda.device(device):
        yield int(torch.cuda.current_stream(device).cuda_stream)


@cache
def library() -> Library:
    """The one library of the process. Raises as `Library`."""
    return Library()


@cache
def why_not() -> str | None:
    """None if nvCOMP works on the current CUDA device, else the reason."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    try:
        found = library()
    except ImportError:
        return f'nvCOMP is not installed: pip install "{EXTRA}"'
    except (OSError, ThinpointError) as error:
        return f"nvCOMP cannot be loaded: {error}"
    try:
        # The library can be older or newer than the driver, or know nothing of this GPU: only a call tells.
        data = torch.arange(4096, device="cuda", dtype=torch.int32)
        room = torch.zeros(found.max_stored_bytes(ZSTD, 16384), device="cuda", dtype=torch.uint8)
        address, size = np.array([data.data_ptr()]), np.array([16384])
        _, status = found.encode(ZSTD, address, size, np.array([room.data_ptr()]), data.device).tolist()
    except (RuntimeError, ThinpointError) as error:
        return f"nvCOMP {found.version} does not work here: {error}"
    return f"nvCOMP {found.version} does not work here: {found.status_text(status[0])}" if status[0] else None
