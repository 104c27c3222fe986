"""Which backends an operation uses: one for host memory, and for each accelerator its own where it has one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinpoint.codec.backend import HostBackend, get_backend
from thinpoint.errors import BackendUnavailableError, UsageError

if TYPE_CHECKING:
    import torch

    from thinpoint.device.contract import DeviceBackend

NAMES = ("auto", "triton", "cpu", "reference")
"""Names that `backend=` and THINPOINT_BACKEND take."""

HOST_CODECS = {"thin": "thin", "zstd": "zstd", "raw": "raw", "nvcomp-zstd": "zstd", "nvcomp-ans": "thin"}
"""Names that `codec=` and THINPOINT_CODEC take, and what tensors in host memory are coded with."""

_ONLY_ON_HOST = ("zstd",)


class Devices:
    """The device backends of one operation or open file, each made when it is first asked for.

    May be shared between threads.

    Args:
        make: the backend for a device, or None if what is there is to be coded on the CPU.
    """

    def __init__(self, make: Callable[[torch.device], DeviceBackend | None] = lambda device: None) -> None:
        self._make = make
        self._made: dict[torch.device, DeviceBackend | None] = {}
        self._by_name: dict[str, DeviceBackend | None] = {}
        self._lock = threading.Lock()

    def named(self, device: str) -> DeviceBackend | None:
        """As `get`, for a device as PyTorch spells it."""
        # A state has hundreds of tensors on one device.
        if device not in self._by_name:
            import torch

            self._by_name[device] = self.get(torch.device(device))
        return self._by_name[device]

    def get(self, device: torch.device) -> DeviceBackend | None:
        """The backend for a device, or None if it has none.

        Raises:
            BackendUnavailableError: one was asked for by name and cannot run there.
        """
        with self._lock:
            if device not in self._made:
                self._made[device] = self._make(device)
            return self._made[device]


_locks: dict[torch.device, threading.Lock] = {}


def device_lock(device: torch.device) -> threading.Lock:
    """To be held while a backend of this device works: it takes one call at a time, and all operations share it."""
    return _locks.setdefault(device, threading.Lock())


@dataclass(frozen=True)
class Backends:
    """What codes.

    Attributes:
        host: words in host memory.
        devices: words on accelerators.
        scratch: the device that decodes what no tensor waits for (`verify`); None for the CPU.
    """

    host: HostBackend
    devices: Devices = field(default_factory=Devices)
    scratch: torch.device | None = None


def codec_named(codec: str) -> str:
    """The codec asked for, or THINPOINT_CODEC, which overrides it."""
    return os.environ.get("THINPOINT_CODEC") or codec


def choose_backends(name: str = "auto", *, codec: str = "thin", prove: bool | None = None) -> Backends:
    """The backends that `name` stands for; THINPOINT_BACKEND stands in for "auto".

    Args:
        name: one of NAMES.
        codec: one of HOST_CODECS.
        prove: decode what was encoded and compare; None: on accelerators only.

    Raises:
        UsageError: no backend or codec has that name.
        BackendUnavailableError: the backend asked for by name cannot run here, with the reason.
    """
    if name == "auto":
        name = os.environ.get("THINPOINT_BACKEND") or name
    if codec not in HOST_CODECS:
        if codec == "auto":
            raise UsageError("codec 'auto' is not offered here", expected=" or ".join(HOST_CODECS))
        raise UsageError(f"unknown codec {codec!r}", expected=" or ".join(HOST_CODECS))
    if name not in NAMES:
        raise UsageError(f"unknown backend {name!r}", expected=" or ".join(NAMES))
    is_triton = name == "triton"
    reason = why_not_triton() if is_triton else None
    if reason is not None:
        raise BackendUnavailableError(f"backend 'triton' cannot run here: {reason}")
    host = get_backend("auto" if is_triton else name, codec=HOST_CODECS[codec], prove=bool(prove))

    def make(device: torch.device) -> DeviceBackend | None:
        on_host = device.type == "cpu" and not (is_triton and interprets())
        if on_host or device.type == "meta" or codec in _ONLY_ON_HOST:
            return None
        from thinpoint.device.select import device_backend

        return device_backend(name, device, codec=codec, prove=prove is not False)

    return Backends(host, Devices(make), triton_device() if is_triton else None)


def interprets() -> bool:
    """Whether Triton's kernels are interpreted, on CPU tensors, instead of compiled."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton() -> str | None:
    """None if Triton's kernels work on this machine, else the reason why not."""
    try:
        from thinpoint.device.select import why_not
    except ImportError as error:
        return str(error)
    return why_not("cpu" if interprets() else "cuda")


def triton_device() -> torch.device:
    """Where Triton's kernels run: the current GPU, or the CPU if they are interpreted. Only where they work."""
    import torch

    return torch.device("cpu") if interprets() else torch.device("cuda", torch.cuda.current_device())
