"""Save, load, open, verify: the whole flow on one screen.

save:  object -> state.flatten -> engine (codec, part by part) -> file -> store
load:  object <- state.unflatten <- engine (codec, block by block) <- file <- store
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thinpoint.engine.backends import choose_backends
from thinpoint.engine.into import LoadIntoReport, load_state_into
from thinpoint.engine.load import load_object
from thinpoint.engine.save import backend_names, write_file
from thinpoint.engine.verify import VerifyReport, verify_file
from thinpoint.engine.workers import Workers
from thinpoint.file.reader import FileReader
from thinpoint.opened import ThinFile
from thinpoint.state.flatten import flatten
from thinpoint.store import open_sink, open_source

__all__ = [
    "LoadIntoReport",
    "SaveReport",
    "ThinFile",
    "VerifyReport",
    "load",
    "load_into",
    "open",
    "save",
    "verify",
]

Path = str | os.PathLike[str]
Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: where, or the file object's name.
        file_id: digest of the index, 16 hex digits: the file's identity.
        file_bytes: size of the file.
        raw_bytes: bytes of all tensors (and large byte strings), shared ones counted once.
        seconds: from the call to the durable file.
        backend: what coded the tensors: "cpu", "triton", "triton+cpu", ...
        codec: what was asked for.
        roles: for each role (raw bytes, stored bytes).
    """

    path: str
    file_id: str
    file_bytes: int
    raw_bytes: int
    seconds: float
    backend: str
    codec: str
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """raw_bytes / file_bytes."""
        return self.raw_bytes / self.file_bytes


def save(
    obj: Any,
    path: Path | Any,
    *,
    codec: str = "thin",
    backend: str = "auto",
    prove: bool | None = None,
    allow_pickle: bool = True,
    overwrite: bool = True,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Save whatever `torch.save` takes; returns a report when the file is durable.

    The file appears under its name only when it is complete; on any error what was there before is untouched. The
    object must not change while it is being saved.

    Args:
        obj: any object; tensors on any device.
        path: str, PathLike, or a binary file object open for writing (which is then the caller's to flush and close).
        codec: "thin", "zstd" (standard Zstandard frames) or "raw". "nvcomp-zstd" and "nvcomp-ans" code tensors on a GPU with
            NVIDIA's library, and all others with "zstd" and "thin". The environment variable THINPOINT_CODEC overrides it.
        backend: "auto" codes tensors on a GPU there if Triton works, everything else on the CPU. "triton" does so or fails,
            "cpu" (Numba) and "reference" (NumPy, slow) code everything on the CPU, as the codecs "zstd" and "raw" always
            do. All write the same bytes. The environment variable THINPOINT_BACKEND replaces "auto".
        prove: decode everything that was encoded and compare before it is written; None does so on GPUs only.
        allow_pickle: pickle objects that have no plain form. Loading them needs `weights_only=False`.
        overwrite: replace an existing file; if False, an existing file is an error.
        num_threads: None for the CPUs this process may use (THINPOINT_THREADS overrides).
        progress: called with raw bytes done so far, from one thread at a time.

    Raises:
        UnsupportedObjectError: something in the object cannot be stored; the message names where.
        StorageError (NoSpaceError, PermissionDeniedError, NotFoundError, AlreadyExistsError): the system refused.
        StateChangedError: a tensor changed while it was being read.
        BackendUnavailableError: the backend or codec asked for by name cannot run here; the message says why.
        UsageError: an option is not valid.
    """
    begin = time.perf_counter()
    codec = os.environ.get("THINPOINT_CODEC") or codec
    chosen = choose_backends(backend, codec=codec, prove=prove)
    state = flatten(obj, allow_pickle=allow_pickle)
    used = backend_names(state.storages, chosen.host, chosen.devices)
    # Workers end first: none may still write or read when the file is closed.
    with open_sink(path, overwrite=overwrite) as sink, Workers(num_threads) as workers:
        summary, entries = write_file(
            state, sink, chosen.host, workers, devices=chosen.devices, progress=progress
        )
    roles: dict[str, tuple[int, int]] = {}
    for entry in entries:
        raw, stored = roles.get(entry.role, (0, 0))
        roles[entry.role] = raw + entry.raw_bytes, stored + entry.stored_bytes
    return SaveReport(
        path=str(getattr(sink, "name", path)),
        file_id=f"{summary.file_id:016x}",
        file_bytes=summary.file_bytes,
        raw_bytes=sum(entry.raw_bytes for entry in entries),
        seconds=time.perf_counter() - begin,
        backend=used,
        codec=codec,
        roles=roles,
    )


def load(
    path: Path | Any,
    map_location: Any = None,
    weights_only: bool = True,
    names: Any = None,
    *,
    backend: str = "auto",
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> Any:
    """The object that was saved, bit for bit.

    Args:
        path: str, PathLike, or a seekable binary file object.
        map_location: as for `torch.load`. None puts tensors where they were saved from, or on the CPU if that device
            is not here.
        weights_only: refuse pickled objects, and classes of modules that are not imported. Set it to False only for
            files you trust.
        names: load only these: a name, a glob, a tuple of keys, or a list of such. Dicts keep the keys that lead to
            them, lists and tuples their length with None in the other places. Nothing else is read.
        backend: as for `save`: "auto" and "triton" decode tensors that go to a GPU there, "triton" or fails.
        num_threads, progress: as for `save`.

    Raises:
        NotThinFileError, TruncatedFileError, DigestMismatchError, MalformedFileError, LimitExceededError: the file is damaged.
        UnsupportedVersionError, UnsupportedFeatureError, UnknownCodecError: it is of a newer version.
        UnsafeObjectError: it holds a pickled object and `weights_only` is True.
        UnknownNameError: one of `names` selects nothing.
        BackendUnavailableError: the backend asked for by name cannot run here, or `map_location` names a device that is
            not here.
        StorageError: the system refused.
    """
    chosen = choose_backends(backend)
    with open_source(path) as source, Workers(num_threads) as workers:
        return load_object(
            FileReader(source),
            chosen.host,
            workers,
            devices=chosen.devices,
            map_location=map_location,
            weights_only=weights_only,
            names=names,
            progress=progress,
        )


def load_into(
    path: Path | Any,
    state: Any,
    strict: bool = True,
    *,
    cast: bool = False,
    weights_only: bool = True,
    backend: str = "auto",
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> LoadIntoReport:
    """Load into the tensors of `state`, in place and without a second copy of them.

    Everything is compared before the first tensor is touched. If the file turns out to be damaged while it is read,
    tensors may have been partly overwritten.

    Args:
        path: as for `load`.
        state: nested dicts and lists of tensors (`{"model": model.state_dict(), ...}`); entries that are no tensors are
            replaced in their dict or list.
        strict: missing or unexpected names are errors; if False they are only reported.
        cast: convert where dtypes differ, as `Tensor.copy_` does; otherwise a difference is an error.
        weights_only, backend, num_threads, progress: as for `load`.

    Raises:
        StateMismatchError: names, shapes or dtypes differ; lists in `missing`, `unexpected`, `mismatched`.
        And what `load` raises.
    """
    chosen = choose_backends(backend)
    with open_source(path) as source, Workers(num_threads) as workers:
        return load_state_into(
            FileReader(source),
            chosen.host,
            workers,
            state,
            devices=chosen.devices,
            strict=strict,
            cast=cast,
            weights_only=weights_only,
            progress=progress,
        )


def open(path: Path | Any, *, backend: str = "auto", num_threads: int | None = None) -> ThinFile:
    """The file, opened: names, dtypes, shapes and sizes at once; tensors, or slices of them, when asked for.

    Raises: as `load`.
    """
    return ThinFile(path, backend=backend, num_threads=num_threads)


def verify(
    path: Path | Any,
    deep: bool = False,
    *,
    backend: str = "auto",
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """A report if every byte of the file is as it was written; raises otherwise.

    Args:
        path: as for `load`.
        deep: also decode every tensor and compare its bits with their checksum.
        backend: what decodes: "triton" a GPU; "auto" does not take a GPU's memory and decodes on the CPU.
        num_threads: as for `save`.
        progress: called with bytes of the file done so far.

    Raises:
        DamagedFileError or UnsupportedError: the first problem; all of them are in its attribute `problems`.
        StorageError: the system refused.
    """
    chosen = choose_backends(backend)
    with open_source(path) as source, Workers(num_threads) as workers:
        report = verify_file(
            FileReader(source),
            chosen.host,
            workers,
            deep=deep,
            devices=chosen.devices,
            scratch=chosen.scratch,
            progress=progress,
        )
    report.raise_if_damaged()
    return report
