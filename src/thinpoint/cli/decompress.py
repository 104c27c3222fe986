"""`thinpoint decompress`: `.thin` files back to the kind that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from thinpoint.cli.compress import LABEL_WIDTH, SAFETENSORS_SUFFIX, THIN_SUFFIX, TORCH_SUFFIXES
from thinpoint.cli.options import AllowPickle, Kind, Output, Overwrite, Threads, Traceback, check_threads
from thinpoint.cli.reporting import reporting_errors, shorten_middle

if TYPE_CHECKING:
    from thinpoint.cli.run import Done
    from thinpoint.cli.worklist import Job
    from thinpoint.engine.restore import Restorer
    from thinpoint.engine.workers import Workers

_PICKLE_HINT = "Only if you trust the file: --allow-pickle"
_SUFFIX_OF = {Kind.pt: ".pt", Kind.safetensors: SAFETENSORS_SUFFIX}


def decompress(
    inputs: Annotated[list[Path], typer.Argument(metavar="IN...", help="Files, or folders of them.")],
    output: Output = None,
    to: Annotated[
        Optional[Kind],  # noqa: UP045
        typer.Option("--to", help="Convert to this kind; needed for a file that thinpoint.save wrote."),
    ] = None,
    overwrite: Overwrite = False,
    allow_pickle: AllowPickle = False,
    threads: Threads = None,
    traceback: Traceback = False,
) -> None:
    """Make the original file of a .thin file again.

    A .safetensors file comes back byte for byte. A torch file comes back such that torch.load gives the
    same object with the same bits, on the same devices. MODEL.pt.thin becomes MODEL.pt beside it, or in
    OUT.
    """
    with reporting_errors(traceback):
        from thinpoint.cli.run import run_worklist
        from thinpoint.cli.worklist import make_worklist

        check_threads(threads)
        worklist = make_worklist(inputs, output, _refusal, lambda name: _target_name(name, to))
        run_worklist(
            worklist,
            lambda job: decompress_one(
                job,
                to=to,
                is_target_fixed=worklist.names_target,
                overwrite=overwrite,
                allow_pickle=allow_pickle,
                threads=threads,
            ),
            is_compressing=False,
            nothing="there is no .thin file to decompress",
            traceback=traceback,
        )


def _refusal(path: Path, named: bool) -> str | None:
    return None if named or path.suffix.lower() == THIN_SUFFIX else "no .thin file"


def _kind_of_name(name: str) -> Kind | None:
    suffix = Path(name).suffix.lower()
    if suffix == SAFETENSORS_SUFFIX:
        return Kind.safetensors
    return Kind.pt if suffix in TORCH_SUFFIXES else None


def _target_name(name: str, kind: Kind | None) -> str:
    """The name without `.thin`, and with the suffix of `kind` unless it has one of that kind."""
    stem = (
        name[: -len(THIN_SUFFIX)]
        if name.lower().endswith(THIN_SUFFIX) and len(name) > len(THIN_SUFFIX)
        else name
    )
    if kind is None or _kind_of_name(stem) is kind:
        return stem
    return (Path(stem).stem if _kind_of_name(stem) else stem) + _SUFFIX_OF[kind]


def decompress_one(
    job: Job,
    *,
    to: Kind | None,
    is_target_fixed: bool,
    overwrite: bool,
    allow_pickle: bool,
    threads: int | None,
) -> Done:
    """Make the original of a `.thin` file again, or a file of another kind.

    Args:
        is_target_fixed: the name of the target is the user's, not derived from that of the input.
    """
    from thinpoint.cli.progress import progress_bar
    from thinpoint.cli.run import Done, file_bytes, refuse_same_file
    from thinpoint.engine.backends import choose_backends
    from thinpoint.engine.restore import Restorer
    from thinpoint.engine.workers import Workers
    from thinpoint.errors import UsageError
    from thinpoint.file.reader import FileReader
    from thinpoint.formats.source import SAFETENSORS, source_of
    from thinpoint.store import open_sink, open_source

    with open_source(job.source) as source:
        reader = FileReader(source)
        note = source_of(reader.index.meta, job.source)
        if note is None and to is None:
            raise UsageError(
                "the file was written by thinpoint.save, not made from another file",
                where=job.source,
                hint="Say what to make of it: --to pt or --to safetensors",
            )
        is_from_safetensors = note is not None and note["kind"] == SAFETENSORS
        kind = to or (Kind.safetensors if is_from_safetensors else Kind.pt)
        target = job.target
        if not is_target_fixed and _kind_of_name(target.name) is not kind:
            target = target.with_name(_target_name(target.name, kind))
        refuse_same_file(job.source, target)
        total = sum(part.raw_bytes for part in reader.index.parts)
        with (
            open_sink(target, overwrite=overwrite) as sink,
            Workers(threads) as workers,
            progress_bar(shorten_middle(job.source.name, LABEL_WIDTH), total) as progress,
        ):
            restorer = Restorer(reader, choose_backends().host, workers, progress)
            if kind is Kind.pt:
                is_zip = note is None or is_from_safetensors or note["zip"]
                _write_torch(
                    restorer, workers, sink, is_zip=is_zip, allow_pickle=allow_pickle, progress=progress
                )
            elif note is not None and is_from_safetensors:
                from thinpoint.formats.safetensors_file import write_safetensors

                write_safetensors(restorer, workers, note["header"], sink)
            else:
                from thinpoint.formats.flat_tensors import write_flat_tensors

                write_flat_tensors(restorer, workers, sink)
    return Done(target=target, in_bytes=file_bytes(job.source), out_bytes=file_bytes(target))


def _write_torch(
    restorer: Restorer, workers: Workers, sink: Any, *, is_zip: bool, allow_pickle: bool, progress: Any
) -> None:
    from thinpoint.engine.backends import choose_backends
    from thinpoint.errors import UnsafeObjectError
    from thinpoint.formats.torch_file import Devices, import_torch, write_torch

    import_torch()
    from thinpoint.engine.load import load_object

    devices = Devices()
    try:
        obj = load_object(
            restorer.reader,
            choose_backends().host,
            workers,
            map_location=devices.keep,
            weights_only=not allow_pickle,
            progress=progress,
        )
    except UnsafeObjectError as error:
        error.hint = _PICKLE_HINT
        raise
    write_torch(obj, sink, devices, is_zip=is_zip)
