"""Save, load, open, verify: the whole flow on one screen.

save:  object -> state.flatten -> engine (codec, part by part) -> file -> store
load:  object <- state.unflatten <- engine (codec, block by block) <- file <- store
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from thinpoint.collector import collector_paused
from thinpoint.engine.auto import auto, place_of
from thinpoint.engine.backends import choose_backends, codec_named
from thinpoint.engine.background import save_at_once, save_in_background
from thinpoint.engine.budget import host_memory_bytes
from thinpoint.engine.future import SaveFuture
from thinpoint.engine.into import LoadIntoReport, load_state_into
from thinpoint.engine.load import load_object
from thinpoint.engine.report import SaveReport
from thinpoint.engine.task import SaveTask
from thinpoint.engine.verify import VerifyReport, verify_file
from thinpoint.engine.workers import Workers, checked_threads
from thinpoint.errors import UsageError
from thinpoint.file.reader import FileReader
from thinpoint.opened import ThinFile
from thinpoint.store import Sink, open_sink, open_source

__all__ = [
    "LoadIntoReport",
    "SaveFuture",
    "SaveReport",
    "ThinFile",
    "VerifyReport",
    "async_save",
    "load",
    "load_into",
    "open",
    "save",
    "verify",
]

Path = str | os.PathLike[str]
Progress = Callable[[int], None]


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
    host_memory: int | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Save whatever `torch.save` takes; returns a report when the file is durable.

    The file appears under its name only when it is complete; on any error what was there before is untouched. The
    object must not change while it is being saved.

    Args:
        obj: any object; tensors on any device.
        path: str, PathLike, a URL of a store (`docs/storage.md`), or a binary file object open for writing (which is then the
            caller's to flush and close). Or what `Store.sink` gives.
        codec: "thin", "zstd" (standard Zstandard frames) or "raw". "nvcomp-zstd" and "nvcomp-ans" code tensors on a GPU with
            NVIDIA's library, and all others with "zstd" and "thin". "auto" is "thin", or "raw" where earlier saves to the same
            disk or store show that compressing makes training wait longer; the log says so once. The environment variable
            THINPOINT_CODEC overrides it.
        backend: "auto" codes tensors on a GPU there if Triton works, everything else on the CPU. "triton" does so or fails,
            "cpu" (Numba) and "reference" (NumPy, slow) code everything on the CPU, as the codecs "zstd" and "raw" always
            do. All write the same bytes. The environment variable THINPOINT_BACKEND replaces "auto".
        prove: decode everything that was encoded and compare before it is written; None does so on GPUs only.
        allow_pickle: pickle objects that have no plain form. Loading them needs `weights_only=False`.
        overwrite: replace an existing file; if False, an existing file is an error.
        num_threads: None for the CPUs this process may use (THINPOINT_THREADS overrides).
        host_memory: bytes of host memory that encoded tensors may take before they are written; None for THINPOINT_HOST_MEMORY
            or half of what is free, divided by the ranks on this machine. At least one part of 64 MiB is always held.
        progress: called with raw bytes done so far, from one thread at a time.

    Raises:
        UnsupportedObjectError: something in the object cannot be stored; the message names where.
        StorageError (NoSpaceError, PermissionDeniedError, NotFoundError, AlreadyExistsError): the system refused.
        StateChangedError: a tensor changed while it was being read.
        BackendUnavailableError: the backend or codec asked for by name cannot run here; the message says why.
        UsageError: an option is not valid.
    """
    task = _save_task(
        "sync", path, codec, backend, prove, allow_pickle, overwrite, num_threads, host_memory, progress
    )
    return task.run(obj)


def async_save(
    obj: Any,
    path: Path | Any,
    *,
    codec: str = "thin",
    backend: str = "auto",
    prove: bool | None = None,
    allow_pickle: bool = True,
    overwrite: bool = True,
    num_threads: int | None = None,
    host_memory: int | None = None,
    progress: Progress | None = None,
    overlap: bool = False,
    optimizers: Any = None,
) -> SaveFuture:
    """Save whatever `torch.save` takes; returns a future as soon as the object may change again.

    On return everything is encoded, in host memory; a thread writes it. If the compressed state does not fit into
    `host_memory`, the call also waits until so much is written that the rest fits; the log says so once.

    Saves in the background run one after the other: the call waits first until the one before has ended or was cancelled.
    When the process ends, also by an exception, it first finishes the one that is under way; if it fails, or the store does
    not answer for 10 minutes (THINPOINT_EXIT_WAIT, in seconds), log and stderr say so. A forked process inherits no save.
    With THINPOINT_DISABLE_ASYNC=1 the future is done on return.

    With `overlap` the call returns before the object is encoded. What belongs to torch optimizers, parameters and state, is
    read where it is while forward and backward run, and only their `step` waits until it has been; everything else is copied
    before the call returns. Where that is not safe it is saved as without, and log and report say why (`docs/overlap.md`).

    Args:
        obj, path and all other options: as for `save`.
        overlap: return before the object is encoded.
        optimizers: with `overlap`: the optimizer or optimizers whose tensors may be read in place; None for all there are.

    Returns:
        A future whose `result()` is the report. `staging_completion` is done on return; with `overlap` when everything has
        been read. What fails on the way is in the future and in the log, not raised here.

    Raises:
        BackendUnavailableError, UsageError: as `save`; nothing was begun.
    """
    if optimizers is not None and not overlap:
        raise UsageError("optimizers= is for overlap=True")
    task = _save_task(
        "async", path, codec, backend, prove, allow_pickle, overwrite, num_threads, host_memory, progress
    )
    if os.environ.get("THINPOINT_DISABLE_ASYNC") == "1":
        return save_at_once(task, obj, "THINPOINT_DISABLE_ASYNC=1" if overlap else None)
    if not overlap:
        return save_in_background(task, obj)
    from thinpoint.engine.overlap import save_overlapped

    return save_overlapped(task, obj, optimizers)


@collector_paused()
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
        path: str, PathLike, a URL of a store, a seekable binary file object, or what `Store.source` gives.
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
        NotEnoughMemoryError: it does not fit into the memory there is.
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


@collector_paused()
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


def _save_task(
    mode: str,
    path: Any,
    codec: str,
    backend: str,
    prove: bool | None,
    allow_pickle: bool,
    overwrite: bool,
    num_threads: int | None,
    host_memory: int | None,
    progress: Progress | None,
) -> SaveTask:
    begin = time.perf_counter()
    codec = codec_named(codec)
    auto_place = place_of(path) if codec == "auto" else None
    if auto_place is not None:
        codec = auto.choose(auto_place, mode=mode)
    return SaveTask(
        begin=begin,
        target=_sink_for(path, overwrite),
        path=str(path),
        codec=codec,
        backends=choose_backends(backend, codec=codec, prove=prove),
        host_memory_bytes=host_memory_bytes(host_memory),
        num_threads=checked_threads(num_threads),
        allow_pickle=allow_pickle,
        progress=progress,
        auto_place=auto_place,
    )


def _sink_for(path: Any, overwrite: bool) -> AbstractContextManager[Sink]:
    is_path = isinstance(path, str | bytes | os.PathLike)
    if not is_path and not hasattr(path, "write") and isinstance(path, AbstractContextManager):
        return path
    return open_sink(path, overwrite=overwrite)
