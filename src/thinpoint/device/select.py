"""Which backend serves state on a device, and why not."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from typing import TYPE_CHECKING

from thinpoint.errors import BackendUnavailableError

if TYPE_CHECKING:
    import torch

    from thinpoint.device.contract import DeviceBackend

MIN_TRITON = (3, 4)
_MIN_COMPUTE_CAPABILITY = (7, 5)


def why_not(device_type: str = "cuda") -> str | None:
    """None if the Triton kernels work on devices of this type here, else the reason. "cuda" stands for ROCm too."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (PyTorch for CUDA and ROCm brings it along)"
    import triton

    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    if version < MIN_TRITON:
        return f"triton {triton.__version__} is too old: {MIN_TRITON[0]}.{MIN_TRITON[1]} is the first that will do"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return (
            None if device_type == "cpu" else f"Triton's interpreter runs on the CPU, not on {device_type!r}"
        )
    if device_type != "cuda":
        return f"there are no kernels for {device_type!r}"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return None


def _why_not_on(device: torch.device) -> str | None:
    reason = why_not(device.type)
    if reason is None and device.type == "cuda":
        import torch

        if torch.version.hip is None and torch.cuda.get_device_capability(device) < _MIN_COMPUTE_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} is older than Triton supports"
    return reason


def device_backend(
    name: str, device: torch.device, *, codec: str = "thin", prove: bool = True
) -> DeviceBackend | None:
    """The backend for state on a device, or None if it is to be coded on the CPU.

    Backends are kept: what a state's shapes need is worked out once.

    Args:
        name: "auto", "triton", "cpu" or "reference".
        codec: "thin", "raw", "nvcomp-zstd" or "nvcomp-ans".
        prove: decode on the device what was encoded, and compare.

    Raises:
        BackendUnavailableError: it was asked for by name, or nvCOMP was, and cannot run there; with the reason.
    """
    if codec.startswith("nvcomp"):
        return _nvcomp(codec, device, prove)
    if name in ("cpu", "reference"):
        return None
    reason = _why_not_on(device)
    if reason is None:
        return _plain(device) if codec == "raw" else _triton(device, prove)
    if name == "triton":
        raise BackendUnavailableError(f"backend 'triton' cannot run on {device}: {reason}")
    _log_cpu(str(device), reason)
    return None


@cache
def _triton(device: torch.device, prove: bool) -> DeviceBackend:
    from thinpoint.device.backend import TritonBackend

    return TritonBackend(device, prove=prove)


@cache
def _plain(device: torch.device) -> DeviceBackend:
    from thinpoint.device.backend import PlainBackend

    return PlainBackend(device)


@cache
def _nvcomp(codec: str, device: torch.device, prove: bool) -> DeviceBackend:
    from thinpoint.device.nvcomp import make_backend

    return make_backend(codec, device, prove)


@cache
def _log_cpu(device: str, reason: str) -> None:
    """Say once why state on a device goes through the CPU."""
    logging.getLogger("thinpoint").warning(
        "state on %s is coded on the CPU, which is slower: %s", device, reason
    )
