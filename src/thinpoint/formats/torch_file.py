"""Files of `torch.save` to objects on the CPU and back, with the devices that storages were saved from."""

from __future__ import annotations

import os
import pickle
import re
import struct
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from thinpoint.errors import (
    MalformedFileError,
    StorageError,
    ThinpointError,
    TruncatedFileError,
    UnsafeObjectError,
    UnsupportedError,
)
from thinpoint.formats.numpy_pickles import resolve, stand_ins
from thinpoint.store.local import LocalSource

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")
"""The number that begins every file before torch 1.6, pickled: 0x1950A86A20F9469CFC6C."""

_LEGACY_HEAD_BYTES = 32
_FIRST_PACKAGE = -1000
"""Priority of our tagger among torch's (10 to 23); the lowest is asked first."""

_UNSAFE_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_UNSAFE = re.compile(
    r"GLOBAL|Unsupported|not allowed|unrecognized|Can only|must be imported|NumPy", re.IGNORECASE
)
_PREFIX = "Weights only load failed. "
_ADVICE = (
    "In PyTorch 2.6",
    "Re-running",
    "This file can still",
    "Please file an issue",
    "Check the documentation",
    "(1)",
    "(2)",
)
"""How the lines of torch's message begin that do not say what is wrong."""

_LOAD_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    EOFError,
    OverflowError,
    MemoryError,
    struct.error,
    ImportError,
)
"""What torch raises on a file that it cannot make sense of."""

_loading = threading.RLock()


@dataclass(kw_only=True)
class Devices:
    """The devices of storages that are on the CPU now. Keeps them alive: storages are known by address."""

    by_storage: dict[int, str] = field(default_factory=dict)
    storages: list[Any] = field(default_factory=list)

    def keep(self, storage: Any, device: str) -> Any:
        """Note where a `torch.UntypedStorage` was; returns the storage. Fits `map_location`."""
        self.storages.append(storage)
        self.by_storage[storage._cdata] = device
        return storage

    def __call__(self, storage: Any) -> str | None:
        """The device that was noted for a storage (typed or not), or None."""
        untyped = getattr(storage, "_untyped_storage", storage)
        return self.by_storage.get(untyped._cdata)


@dataclass(frozen=True, kw_only=True)
class TorchFile:
    """What a file held.

    Attributes:
        obj: the object; its tensors are on the CPU, mapped from the file if it is a zip archive.
        devices: where its storages were saved from.
        is_zip: whether the file is a zip archive, as torch writes since 1.6.
    """

    obj: Any
    devices: Devices
    is_zip: bool


def torch_kind(head: bytes) -> str | None:
    """The format of `torch.save` that a file with this beginning may have, "zip" or "legacy", else None.

    Args:
        head: the first 32 bytes, or all.
    """
    if head.startswith(_ZIP_MAGIC):
        return "zip"
    return "legacy" if _LEGACY_MAGIC in head[:_LEGACY_HEAD_BYTES] else None


def read_torch(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> TorchFile:
    """The object that `torch.save` wrote to a file. No code of the file is run unless `allow_pickle` is True.

    A zip archive is mapped: its tensors cost memory only while they are read. Older files are read whole.

    Args:
        path: the file; it must not change while the object is used.
        allow_pickle: unpickle whatever the file names, as `torch.load(weights_only=False)` does.

    Raises:
        UnsafeObjectError: the pickle names a global that is not safe, and `allow_pickle` is False.
        MalformedFileError, TruncatedFileError: no file of `torch.save`, or damaged.
        UnsupportedError: a TorchScript archive, compressed entries, or a module that is not installed.
        StorageError: the system refused.
    """
    name = os.fspath(path)
    with LocalSource(name) as source:
        if source.size == 0:
            raise TruncatedFileError("the file is empty", where=name)
        kind = torch_kind(source.read_at(0, min(_LEGACY_HEAD_BYTES, source.size)).tobytes())
    if kind is None:
        raise MalformedFileError(
            "the file does not begin as one that torch.save wrote",
            where=name,
            hint="Is it a checkpoint at all?",
        )
    if kind == "zip":
        _check_zip(name)
    devices = Devices()
    obj = load_stream(
        name, name, map_location=devices.keep, allow_pickle=allow_pickle, mmap=True if kind == "zip" else None
    )
    return TorchFile(obj=obj, devices=devices, is_zip=kind == "zip")


def load_stream(
    stream: Any, where: str, *, map_location: Any, allow_pickle: bool = False, mmap: bool | None = None
) -> Any:
    """The object that `torch.save` wrote to a path or a seekable binary stream, arrays of NumPy included.

    Args:
        where: what messages call it.
        map_location, mmap: as for `torch.load`.
        allow_pickle: as for `read_torch`.

    Raises: as `read_torch`.
    """
    torch = import_torch()
    try:
        # Only one at a time: the stand-ins are in a list that belongs to torch.
        with _loading, stand_ins():
            obj = torch.load(stream, map_location=map_location, weights_only=not allow_pickle, mmap=mmap)
        return resolve(obj)
    except pickle.UnpicklingError as error:
        raise _unpickling_error(error, where, allow_pickle) from error
    except ImportError as error:
        raise UnsupportedError(
            f"the file needs a module that cannot be imported: {error}",
            where=where,
            hint="Install it, then try again",
        ) from error
    except RecursionError as error:
        raise UnsupportedError("the object is nested too deeply", where=where) from error
    except _LOAD_ERRORS as error:
        text = str(error).splitlines()
        raise MalformedFileError(
            f"torch cannot read the file ({type(error).__name__}: {text[0] if text else ''})", where=where
        ) from error
    finally:
        _forget_map_location(torch)


def _forget_map_location(torch: Any) -> None:
    """Clear what a failed `torch.load` leaves behind on this thread: the next unpickled tensor subclass would use it."""
    local = getattr(torch.serialization, "_serialization_tls", None)
    if local is not None and hasattr(local, "map_location"):
        local.map_location = None


def _unpickling_error(error: pickle.UnpicklingError, name: str, allow_pickle: bool) -> ThinpointError:
    reason = _reason(str(error))
    if allow_pickle or not _UNSAFE.search(reason):
        return MalformedFileError(f"the pickle in the file is damaged ({reason})", where=name)
    found = _UNSAFE_GLOBAL.search(reason)
    return UnsafeObjectError(
        f"the pickle names {found[1]}, which is not safe to call or import"
        if found
        else f"the pickle cannot be read without running code in it ({reason})",
        where=name,
        hint="Only if you trust the file: --allow-pickle runs it",
    )


def _reason(text: str) -> str:
    """The line of torch's message that says what is wrong; the rest is advice."""
    lines = [line.strip() for line in text.rpartition("WeightsUnpickler error:")[2].splitlines()]
    telling = [
        line
        for line in (line.removeprefix(_PREFIX) for line in lines)
        if line and not line.startswith(_ADVICE)
    ]
    return telling[0] if telling else "no reason given"


def _check_zip(name: str) -> None:
    """Refuse archives that torch would map wrongly or run as code."""
    try:
        with zipfile.ZipFile(name) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise TruncatedFileError(f"the zip archive is not complete ({error})", where=name) from error
    members = {entry.filename.partition("/")[2] for entry in entries}
    if "constants.pkl" in members:
        raise UnsupportedError(
            "the file is a TorchScript archive, which holds code",
            where=name,
            hint="Save its state_dict() instead",
        )
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise UnsupportedError(
            "the entries of the archive are compressed, which torch.save never does",
            where=name,
            hint="Load it with torch and save it again",
        )
    if "data.pkl" not in members:
        raise MalformedFileError(
            "the zip archive is none that torch.save wrote: it has no data.pkl", where=name
        )


def write_torch(obj: Any, sink: Any, devices: Devices, *, is_zip: bool = True) -> None:
    """Write an object as `torch.save` does, with the noted devices in place of those where its storages are.

    Changes torch's list of packages while it runs, so no other thread should save meanwhile.

    Args:
        obj: what `torch.save` takes.
        sink: gets the file from front to back.
        devices: for storages that it does not know, their own device is written.
        is_zip: False for the format before torch 1.6.

    Raises:
        StorageError: the sink refused.
    """
    torch = import_torch()
    stream = _SinkStream(sink)
    try:
        with _tagged(devices):
            torch.save(obj, stream, _use_new_zipfile_serialization=is_zip)
    except Exception:
        # Torch's writer may hide what the sink raised behind an error of its own.
        if stream.error is not None:
            raise stream.error from None
        raise


@contextmanager
def _tagged(devices: Devices) -> Iterator[None]:
    """While the block runs, `torch.save` writes the noted devices."""
    from torch import serialization

    active: list[Devices] = [devices]

    def tag(storage: Any) -> str | None:
        return active[0](storage) if active else None

    def deserialize(storage: Any, location: str) -> None:
        return None

    serialization.register_package(_FIRST_PACKAGE, tag, deserialize)
    try:
        yield
    finally:
        # Should torch one day keep its packages elsewhere, ours stays there and does nothing.
        active.clear()
        registry = getattr(serialization, "_package_registry", [])
        registry[:] = [package for package in registry if package[1] is not tag]


class _SinkStream:
    """A sink as the file object that `torch.save` needs; remembers the first error."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self.error: StorageError | None = None

    def write(self, buffer: Any) -> int:
        try:
            self._sink.write(buffer)
        except StorageError as error:
            self.error = self.error or error
            raise
        return memoryview(buffer).nbytes

    def flush(self) -> None:
        """Nothing is held back."""


def import_torch() -> Any:
    """The torch module.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            f"this needs torch, which cannot be imported ({error})", hint="pip install 'thinpoint[torch]'"
        ) from error
    return torch
