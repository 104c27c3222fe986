"""`thinpoint compress`: files of torch.save and safetensors to `.thin` files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinpoint.cli.options import AllowPickle, Codec, Output, Overwrite, Threads, Traceback, check_threads
from thinpoint.cli.reporting import reporting_errors, shorten_middle

if TYPE_CHECKING:
    from thinpoint.cli.run import Done
    from thinpoint.cli.worklist import Job
    from thinpoint.state.leaves import FlatState

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
AMBIGUOUS_SUFFIXES = (".bin", ".ckpt")
"""Other programs write files of these names too: in a folder their first bytes decide."""

SAFETENSORS_SUFFIX = ".safetensors"
THIN_SUFFIX = ".thin"
LABEL_WIDTH = 28


def compress(
    inputs: Annotated[list[Path], typer.Argument(metavar="IN...", help="Files, or folders of them.")],
    output: Output = None,
    codec: Annotated[Codec, typer.Option("--codec", help="Our own, or Zstandard.")] = Codec.thin,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Decode what was written and compare it with the input, bit for bit."),
    ] = False,
    overwrite: Overwrite = False,
    allow_pickle: AllowPickle = False,
    threads: Threads = None,
    traceback: Traceback = False,
) -> None:
    """Make .thin files of .pt, .pth, .bin, .ckpt and .safetensors files.

    MODEL.pt becomes MODEL.pt.thin beside it, or in OUT. Folders are searched for such files; other files
    are listed and left alone. Nothing is deleted, and nothing replaced without --overwrite.
    """
    with reporting_errors(traceback):
        from thinpoint.cli.run import run_worklist
        from thinpoint.cli.worklist import make_worklist
        from thinpoint.engine.backends import choose_backends, codec_named

        chosen = codec_named(codec.value)
        choose_backends(codec=chosen)
        check_threads(threads)
        worklist = make_worklist(inputs, output, refusal, lambda name: name + THIN_SUFFIX)
        run_worklist(
            worklist,
            lambda job: compress_one(
                job,
                codec=chosen,
                is_verified=verify,
                overwrite=overwrite,
                allow_pickle=allow_pickle,
                threads=threads,
            ),
            is_compressing=True,
            nothing="there is no .pt, .pth, .bin, .ckpt or .safetensors file to compress",
            traceback=traceback,
        )


def refusal(path: Path, named: bool) -> str | None:
    """Why `compress` leaves a file alone, or None if it takes it."""
    suffix = path.suffix.lower()
    if suffix == THIN_SUFFIX:
        return "it is a .thin file already"
    if suffix == SAFETENSORS_SUFFIX or (
        suffix in TORCH_SUFFIXES and (named or suffix not in AMBIGUOUS_SUFFIXES)
    ):
        return None
    if (named or suffix in AMBIGUOUS_SUFFIXES) and _begins_like_torch(path):
        return None
    return "no checkpoint" if suffix not in AMBIGUOUS_SUFFIXES else "no file of torch.save"


def _begins_like_torch(path: Path) -> bool:
    from thinpoint.errors import ThinpointError
    from thinpoint.formats.torch_file import torch_kind
    from thinpoint.store import open_source

    try:
        with open_source(path) as source:
            return torch_kind(source.read_at(0, min(32, source.size)).tobytes()) is not None
    except ThinpointError:
        # Reading it for real reports what is wrong.
        return True


def compress_one(
    job: Job, *, codec: str, is_verified: bool, overwrite: bool, allow_pickle: bool, threads: int | None
) -> Done:
    """Make a `.thin` file of a file of torch.save or safetensors. `codec` as for `thinpoint.save`."""
    from thinpoint.cli.progress import progress_bar
    from thinpoint.cli.run import Done, file_bytes, refuse_same_file
    from thinpoint.engine.backends import choose_backends
    from thinpoint.engine.save import write_file
    from thinpoint.engine.workers import Workers
    from thinpoint.store import open_sink

    in_bytes = file_bytes(job.source)
    refuse_same_file(job.source, job.target)
    label = shorten_middle(job.source.name, LABEL_WIDTH)
    with ExitStack() as stack:
        state, meta = _read(job.source, allow_pickle, stack)
        total = sum(region.num_bytes for storage in state.storages for region in storage.regions)
        # The sink is the outer one: threads that still write are gone before it removes an unfinished file.
        with open_sink(job.target, overwrite=overwrite) as sink, Workers(threads) as workers:
            with progress_bar(label, total) as progress:
                write_file(
                    state, sink, choose_backends(codec=codec).host, workers, meta=meta, progress=progress
                )
        if is_verified:
            _check(job.target, state, threads, total)
    return Done(target=job.target, in_bytes=in_bytes, out_bytes=file_bytes(job.target))


def _read(path: Path, allow_pickle: bool, stack: ExitStack) -> tuple[FlatState, dict[str, Any]]:
    """The state of a file, readable until the stack closes, and the note about where it came from."""
    from thinpoint.formats.source import safetensors_note, torch_note

    if path.suffix.lower() == SAFETENSORS_SUFFIX:
        from thinpoint.formats.safetensors_file import read_safetensors
        from thinpoint.store import open_source

        state, header = read_safetensors(stack.enter_context(open_source(path)))
        return state, safetensors_note(header)
    from thinpoint.formats.torch_file import read_torch
    from thinpoint.state.flatten import flatten

    found = read_torch(path, allow_pickle=allow_pickle)
    state = flatten(found.obj, allow_pickle=allow_pickle, device_of=found.devices)
    return state, torch_note(is_zip=found.is_zip)


def _check(target: Path, state: FlatState, threads: int | None, total: int) -> None:
    from thinpoint.cli.progress import progress_bar
    from thinpoint.engine.backends import choose_backends
    from thinpoint.engine.restore import Restorer
    from thinpoint.engine.workers import Workers
    from thinpoint.file.reader import FileReader
    from thinpoint.formats.compare import compare_with_state
    from thinpoint.store import open_source

    try:
        with (
            Workers(threads) as workers,
            open_source(target) as source,
            progress_bar(f"verify {shorten_middle(target.name, LABEL_WIDTH)}", total) as progress,
        ):
            restorer = Restorer(FileReader(source), choose_backends().host, workers, progress)
            compare_with_state(restorer, state)
    except BaseException:
        # Nobody must take a file for checked that was not.
        target.unlink()
        raise
