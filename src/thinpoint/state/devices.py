"""Where a storage goes: the recorded device, and `map_location` as `torch.load` understands it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thinpoint.errors import BackendUnavailableError, UsageError

MapLocation = Any
"""None, a device or its name, a dict from recorded to wanted devices, or `function(storage, location)`."""


def resolve_device(recorded: str, map_location: MapLocation = None) -> Any:
    """The `torch.device` on which a storage that was recorded on `recorded` is to be made.

    A device that the user named must be there; a recorded one that is not gives the CPU. With a callable it is the
    CPU: `place` then calls it.

    Raises:
        BackendUnavailableError: map_location names a device that this machine does not have.
        UsageError: map_location is none of the accepted types, or no device has that name.
    """
    import torch

    if callable(map_location):
        return torch.device("cpu")
    if isinstance(map_location, Mapping):
        keys = {str(key): value for key, value in map_location.items()}
        if recorded not in keys:
            return _recorded_or_cpu(recorded)
        map_location = keys[recorded]
    if map_location is None:
        return _recorded_or_cpu(recorded)
    try:
        device = torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"map_location {map_location!r} is no device: {error}") from error
    reason = _why_unavailable(device)
    if reason is not None:
        raise BackendUnavailableError(
            f"map_location asks for {device}, which this machine does not have: {reason}"
        )
    return device


def place(storage: Any, recorded: str, map_location: MapLocation = None) -> Any:
    """What a callable `map_location` makes of a CPU storage; any other leaves `storage` as it is."""
    if not callable(map_location):
        return storage
    call: Callable[[Any, str], Any] = map_location
    placed = call(storage, recorded)
    if placed is None:
        device = _recorded_or_cpu(recorded)
        return storage if device.type == "cpu" else storage.to(device=device)
    return getattr(placed, "_untyped_storage", placed)


def _recorded_or_cpu(recorded: str) -> Any:
    import torch

    try:
        device = torch.device(recorded)
    except (RuntimeError, TypeError):
        # A backend that is not installed here.
        return torch.device("cpu")
    # A storage with bytes was never on the meta device; a file that says so would lose them.
    return torch.device("cpu") if device.type == "meta" or _why_unavailable(device) else device


def _why_unavailable(device: Any) -> str | None:
    import torch

    if device.type in ("cpu", "meta"):
        return None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        return str(error).split("\n")[0]
    return None
