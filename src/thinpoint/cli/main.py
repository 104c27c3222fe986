"""The command line `thinpoint`. One file a command; each imports what is heavy only when it runs."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from thinpoint.cli import (
    advise,
    bench,
    compress,
    convert,
    decompress,
    diff,
    doctor,
    gc,
    inspect,
    ls,
    salvage,
    verify,
)
from thinpoint.version import __version__

_EPILOG = (
    "Exit codes: 0 ok, 1 unexpected, 2 usage, 3 damaged file, 4 not supported here, 5 unsafe object, "
    "6 storage, 7 state, 8 failed proof, 9 checkpoints, 130 interrupted. If several files fail, damage comes before the "
    "first failure."
)

app = typer.Typer(
    name="thinpoint",
    help="Exact training checkpoints, a fifth to a third smaller.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"thinpoint {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


app.command("compress", short_help="Make .thin files of checkpoints.", epilog=_EPILOG)(compress.compress)
app.command("decompress", short_help="Make the original files again.", epilog=_EPILOG)(decompress.decompress)
app.command("convert", short_help="Write a checkpoint as one of another kind.", epilog=_EPILOG)(
    convert.convert
)
app.command("diff", short_help="Show how two checkpoints differ, in bits.", epilog=_EPILOG)(diff.diff)
app.command("inspect", short_help="Show what a .thin file holds.", epilog=_EPILOG)(inspect.inspect_file)
app.command("verify", short_help="Check .thin files and checkpoints.", epilog=_EPILOG)(verify.verify)
app.command("ls", short_help="List the checkpoints in a directory.", epilog=_EPILOG)(ls.ls)
app.command("gc", short_help="Delete what no checkpoint needs.", epilog=_EPILOG)(gc.gc)
app.command("salvage", short_help="Save what is intact of damaged .thin files.", epilog=_EPILOG)(
    salvage.salvage
)
app.command("advise", short_help="Tell whether compressing checkpoints pays here.", epilog=_EPILOG)(
    advise.advise_command
)
app.command("bench", short_help="Measure what saving costs on this machine.", epilog=_EPILOG)(bench.bench)
app.command("doctor", short_help="Check this machine.", epilog=_EPILOG)(doctor.doctor)


def main() -> None:
    """The entry point; exits the process."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding does not have must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions:
        # What torch says to its callers about its own future is nothing to those who run a command.
        warnings.simplefilter("ignore")
    app()
