"""How `thinpoint convert` writes each kind of checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinpoint.cli.compress import LABEL_WIDTH, THIN_SUFFIX, compress_one
from thinpoint.cli.decompress import decompress_one
from thinpoint.cli.options import Kind
from thinpoint.cli.progress import Advance, progress_bar
from thinpoint.cli.reporting import shorten_middle
from thinpoint.cli.worklist import Job
from thinpoint.engine.backends import choose_backends, codec_named
from thinpoint.engine.workers import Workers
from thinpoint.errors import AlreadyExistsError, UnsupportedObjectError, UsageError
from thinpoint.folder.names import DCP_METADATA, MANIFEST, save_id_in
from thinpoint.formats.leaves import OpenCheckpoint, materialized, sharing
from thinpoint.formats.new_folder import check_folder_target, new_folder
from thinpoint.formats.opening import open_checkpoint
from thinpoint.formats.safetensors_source import INDEX_NAMES
from thinpoint.state.tree import display
from thinpoint.store import LocalStore, open_sink, open_store

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be converted.

    Attributes:
        source, target: paths or URLs.
        kind: of the target: "thin", "dcp", "pt", "safetensors" or "hf".
        names: patterns that select values; None for all.
        dtype: what to cast to: "bf16", ...; None to keep every bit.
        is_strict: what the target cannot hold is an error.
        overwrite, allow_pickle, threads: as the options of the command.
    """

    source: str
    target: str
    kind: str
    names: list[str] | None
    dtype: str | None
    is_strict: bool
    overwrite: bool
    allow_pickle: bool
    threads: int | None

    @property
    def is_file(self) -> bool:
        """Whether the target is a single file."""
        if self.kind == "thin":
            return self.target.lower().endswith(THIN_SUFFIX)
        return self.kind in ("pt", "safetensors")


@dataclass(kw_only=True)
class Converted:
    """What was written.

    Attributes:
        num_tensors: by names.
        in_bytes, out_bytes: of all files.
        cast, left_out, notes: lines for people.
    """

    num_tensors: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    cast: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(request: Request) -> Converted:
    """Convert.

    Raises:
        UsageError: the target is the source, or cannot be of that kind.
        AlreadyExistsError: it exists, and is not to be replaced.
        UnsupportedObjectError: the target cannot hold something, and that is an error.
        And what reading and writing raise.
    """
    _check_target(request)
    with open_checkpoint(
        request.source, threads=request.threads, allow_pickle=request.allow_pickle
    ) as opened:
        done = Converted(in_bytes=opened.num_bytes)
        checkpoint = opened.selected(request.names or None)
        done.num_tensors = len(checkpoint.tensors())
        if not _exactly(request, opened, done):
            if request.dtype is not None:
                checkpoint = _cast(checkpoint, request.dtype, done)
            _WRITERS[request.kind](request, checkpoint, done)
    done.out_bytes = _bytes_of(request.target)
    return done


def _check_target(request: Request) -> None:
    store = open_store(request.target)
    if not isinstance(store, LocalStore):
        if not (request.is_file and request.kind != "pt"):
            raise UsageError(
                f"--to {request.kind} is written to a local disk only",
                where=request.target,
                hint="Copy it then",
            )
        return
    if os.path.exists(request.source) and os.path.exists(request.target):
        if os.path.samefile(request.source, request.target):
            raise UsageError("the output would replace the input", where=request.source, hint="Name another")
    if not request.is_file:
        check_folder_target(
            request.target, overwrite=request.overwrite, is_replaceable=_REPLACEABLE[request.kind]
        )
    elif not request.overwrite and os.path.lexists(request.target):
        raise AlreadyExistsError(
            "the file exists already",
            where=request.target,
            hint="Choose another name, or allow it with --overwrite",
        )


def _cast(checkpoint: OpenCheckpoint, dtype: str, done: Converted) -> OpenCheckpoint:
    import torch

    tensors = {display(path): leaf for path, leaf in checkpoint.tensors().items()}
    cast, names = checkpoint.cast(getattr(torch, _DTYPES[dtype]))
    done.cast += [f"{name} from {tensors[name].dtype_name} to {_DTYPES[dtype]}" for name in names]
    return cast


def _exactly(request: Request, opened: OpenCheckpoint, done: Converted) -> bool:
    """Write between .thin and other files as `compress` and `decompress` do, which keep strides, devices and all; False if
    that is not asked for."""
    is_local = all(isinstance(open_store(place), LocalStore) for place in (request.source, request.target))
    if request.names or request.dtype or not request.is_file or not is_local:
        return False
    job = Job(source=Path(request.source), target=Path(request.target))
    options: dict[str, Any] = {
        "overwrite": request.overwrite,
        "allow_pickle": request.allow_pickle,
        "threads": request.threads,
    }
    if opened.kind in ("pt", "safetensors") and request.kind == "thin":
        codec = codec_named("thin")
        compress_one(job, codec=codec, is_verified=False, **options)
        return True
    if opened.kind == "thin" and request.kind == "pt" and os.path.isfile(request.source):
        decompress_one(job, to=Kind.pt, is_target_fixed=True, **options)
        return True
    return False


def _to_thin(request: Request, checkpoint: OpenCheckpoint, done: Converted) -> None:
    from thinpoint.engine.save import write_file
    from thinpoint.formats.to_thin import flat_state

    if not request.is_file:
        _to_thin_folder(request, checkpoint, done)
        return
    state = flat_state(checkpoint.tree, allow_pickle=request.allow_pickle)
    _note_sharing(checkpoint, done, keeps_equal_views=True)
    backend = choose_backends(codec=codec_named("thin")).host
    with (
        open_sink(request.target, overwrite=request.overwrite) as sink,
        Workers(request.threads) as workers,
        _bar(checkpoint) as progress,
    ):
        write_file(state, sink, backend, workers, progress=progress)


def _to_thin_folder(request: Request, checkpoint: OpenCheckpoint, done: Converted) -> None:
    from thinpoint.formats.to_dcp import dcp_state, write_dcp
    from thinpoint.formats.to_thin_folder import LeafWriter

    given = dcp_state(checkpoint.tree, where=request.target)
    _settle(request, given.left_out, done)
    _note_sharing(checkpoint, done, keeps_equal_views=True)
    with _folder(request) as folder, _bar(checkpoint) as progress:
        writer = LeafWriter(
            folder,
            given.leaves,
            progress=progress,
            threads=request.threads,
            allow_pickle=request.allow_pickle,
        )
        write_dcp(given, writer, lambda size: None, where=request.target)


def _to_dcp(request: Request, checkpoint: OpenCheckpoint, done: Converted) -> None:
    from thinpoint.formats.to_dcp import dcp_state, stock_writer, write_dcp

    given = dcp_state(checkpoint.tree, where=request.target)
    _settle(request, given.left_out, done)
    _note_sharing(checkpoint, done)
    with _folder(request) as folder, _bar(checkpoint) as progress:
        write_dcp(given, stock_writer(folder, request.target), _counted(progress), where=request.target)


def _to_pt(request: Request, checkpoint: OpenCheckpoint, done: Converted) -> None:
    from thinpoint.formats.torch_file import Devices, write_torch

    _note_sharing(checkpoint, done, keeps_equal_views=True)
    with _bar(checkpoint) as progress:
        obj = materialized(checkpoint.tree, _counted(progress))
    with open_sink(request.target, overwrite=request.overwrite) as sink:
        write_torch(obj, sink, Devices())


def _to_safetensors(request: Request, checkpoint: OpenCheckpoint, done: Converted) -> None:
    from thinpoint.formats.to_safetensors import fitting, write_file, write_shards

    fits = fitting(checkpoint)
    _settle(request, fits.left_out, done)
    if not fits.tensors:
        raise UnsupportedObjectError("there is no tensor to write", where=request.source)
    done.num_tensors = len(fits.tensors)
    _note_sharing(checkpoint, done)
    with _bar(checkpoint) as progress:
        if request.kind == "hf":
            with _folder(request) as folder:
                write_shards(list(fits.tensors.items()), folder, _counted(progress))
        else:
            with open_sink(request.target, overwrite=request.overwrite) as sink:
                write_file(list(fits.tensors.items()), sink, _counted(progress))


_WRITERS: dict[str, Callable[[Request, OpenCheckpoint, Converted], None]] = {
    "thin": _to_thin,
    "dcp": _to_dcp,
    "pt": _to_pt,
    "safetensors": _to_safetensors,
    "hf": _to_safetensors,
}


def _is_thin_name(name: str) -> bool:
    return name in (MANIFEST, DCP_METADATA) or save_id_in(name) is not None


_REPLACEABLE: dict[str, Callable[[str], bool]] = {
    "thin": _is_thin_name,
    "dcp": lambda name: name == DCP_METADATA or name.endswith(".distcp"),
    "hf": lambda name: name in INDEX_NAMES or name.endswith(".safetensors"),
}
"""Which files a folder of each kind consists of."""


def _settle(request: Request, left_out: list[str], done: Converted) -> None:
    """Note what is left out, or refuse."""
    if left_out and request.is_strict:
        more = f"; and {len(left_out) - _MAX_LISTED} more" if len(left_out) > _MAX_LISTED else ""
        raise UnsupportedObjectError(
            f"--to {request.kind} cannot hold everything: {'; '.join(left_out[:_MAX_LISTED])}{more}",
            where=request.source,
            hint="Select with --names, or leave out --strict",
        )
    done.left_out += left_out


def _note_sharing(checkpoint: OpenCheckpoint, done: Converted, *, keeps_equal_views: bool = False) -> None:
    tensors = checkpoint.tensors()
    if keeps_equal_views:
        tensors = {path: leaf for leaf, path in {leaf: path for path, leaf in tensors.items()}.items()}
    done.notes += [
        f"{display(path)} shares memory with another tensor; both are written in full"
        for path in sharing(tensors)
    ]


def _folder(request: Request) -> Any:
    return new_folder(request.target, overwrite=request.overwrite, is_replaceable=_REPLACEABLE[request.kind])


@contextmanager
def _bar(checkpoint: OpenCheckpoint) -> Iterator[Advance]:
    label = shorten_middle(os.path.basename(checkpoint.name.rstrip("/")), LABEL_WIDTH)
    with progress_bar(label, checkpoint.tensor_bytes) as progress:
        yield progress


def _counted(progress: Advance) -> Advance:
    """What takes bytes since the last call, and tells how many there were in all."""
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(done)

    return advance


def _bytes_of(target: str) -> int:
    store = open_store(target)
    if not isinstance(store, LocalStore):
        from thinpoint.store import open_source

        with open_source(target) as source:
            return source.size
    if os.path.isdir(target):
        return sum(file.size for file in store.files())
    return os.path.getsize(target)
