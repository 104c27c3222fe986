"""`thinpoint convert`: a checkpoint of any kind as one of another kind."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from thinpoint.cli.options import AllowPickle, Overwrite, Threads, Traceback, check_threads
from thinpoint.cli.reporting import count_text, printable, reporting_errors, size_text

if TYPE_CHECKING:
    from thinpoint.cli.convert_targets import Converted


class Target(str, Enum):
    """What `convert` writes."""

    thin = "thin"
    dcp = "dcp"
    pt = "pt"
    safetensors = "safetensors"
    hf = "hf"


class Dtype(str, Enum):
    """What `convert` casts to."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp64 = "fp64"


Names = Annotated[
    Optional[list[str]],  # noqa: UP045  (typer evaluates this at run time on Python 3.10)
    typer.Option(
        "--names", metavar="GLOB", help="Only these: a name, what begins with it, or a glob. May be repeated."
    ),
]

_MAX_LISTED = 1000


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint: file, folder, directory of steps, or URL.")
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="The file or folder to write.")],
    to: Annotated[
        Target,
        typer.Option(
            "--to",
            help="thin (a file if DST ends in .thin, else a folder), dcp, pt, safetensors, or hf (a folder).",
        ),
    ],
    names: Names = None,
    dtype: Annotated[
        Optional[Dtype],  # noqa: UP045
        typer.Option("--dtype", help="Cast floating-point tensors of 16 bits and more. Loses bits."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if the target cannot hold everything.")
    ] = False,
    overwrite: Overwrite = False,
    allow_pickle: AllowPickle = False,
    threads: Threads = None,
    traceback: Traceback = False,
) -> None:
    """Write a checkpoint as one of another kind: .thin file or folder, PyTorch DCP, torch.save, safetensors, Hugging Face.

    SRC is recognised by what it holds. Bits stay as they are unless --dtype is given. What the target cannot
    hold is listed. Nothing half written is left behind, and nothing replaced without --overwrite.
    """
    with reporting_errors(traceback):
        from thinpoint.cli.convert_targets import Request, run
        from thinpoint.cli.sources import newest_or_itself

        check_threads(threads)
        chosen = newest_or_itself(source)
        if chosen != source:
            typer.echo(printable(f"newest checkpoint: {chosen}"))
        request = Request(
            source=chosen,
            target=target,
            kind=to.value,
            names=names,
            dtype=None if dtype is None else dtype.value,
            is_strict=strict,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            threads=threads,
        )
        _print(request.source, target, run(request))


def _print(source: str, target: str, done: Converted) -> None:
    for label, lines in (
        ("cast", done.cast),
        ("left out", done.left_out),
        ("note", done.notes),
    ):
        for line in lines[:_MAX_LISTED]:
            typer.echo(printable(f"{label}: {line}"))
        if len(lines) > _MAX_LISTED:
            typer.echo(f"{label}: and {len(lines) - _MAX_LISTED:,} more")
    typer.echo(
        printable(
            f"{source} -> {target}  {count_text(done.num_tensors, 'tensor')}, "
            f"{size_text(done.in_bytes)} -> {size_text(done.out_bytes)}"
        )
    )
