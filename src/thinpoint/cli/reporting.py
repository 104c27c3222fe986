"""Errors as paragraphs and exit codes, and text that is safe and short enough for a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import traceback as tracebacks
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from thinpoint.errors import DamagedFileError, StorageError, ThinpointError, from_os_error

INTERRUPTED = 130
UNEXPECTED = 1
_MAX_TEXT_WIDTH = 100


@contextmanager
def reporting_errors(traceback: bool, *, unexpected: int = UNEXPECTED) -> Iterator[None]:
    """Runs a command's body; an error becomes one paragraph on stderr and the exit code of its class.

    Args:
        unexpected: the exit code for a bug.
    """
    try:
        yield
        sys.stdout.flush()
    except ThinpointError as error:
        print_error(error, traceback=traceback)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:
        # Whoever read our output has enough. What is still in the buffer must not fail when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        print_error(from_os_error(error, "the system refused", where=error.filename), traceback=traceback)
        raise typer.Exit(StorageError.exit_code) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001  (no command ends in a bare traceback)
        if traceback:
            tracebacks.print_exc()
        hint = "" if traceback else " (--traceback shows where)"
        _print_paragraph(
            f"unexpected error: {type(error).__name__}: {error}{hint}. This is a bug: please report it with "
            "the file that `thinpoint doctor --bundle` writes."
        )
        raise typer.Exit(unexpected) from None


def print_error(
    error: ThinpointError, *, label: str = "error", traceback: bool = False, to_stdout: bool = False
) -> None:
    """One paragraph, on stderr unless it is the result asked for: what, where, expected and found, hint."""
    if traceback:
        tracebacks.print_exception(error)
    _print_paragraph(f"{label}: {error}", to_stdout=to_stdout)


def _print_paragraph(text: str, *, to_stdout: bool = False) -> None:
    text = printable(text)
    if (sys.stdout if to_stdout else sys.stderr).isatty():
        width = min(shutil.get_terminal_size().columns, _MAX_TEXT_WIDTH)
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    typer.echo(text, err=not to_stdout)


def worst_exit_code(errors: list[ThinpointError]) -> int:
    """0 without errors, 3 if anything is damaged, else the code of the first."""
    if any(isinstance(error, DamagedFileError) for error in errors):
        return DamagedFileError.exit_code
    return errors[0].exit_code if errors else 0


def printable(text: str) -> str:
    """The text with control characters spelled out, so that a name in a file cannot drive the terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "replace").decode("ascii")
        for char in text
    )


def shorten_middle(text: str, width: int) -> str:
    """The text, or its beginning and end with `...` between them, `width` characters long."""
    if len(text) <= width:
        return text
    if width < 8:
        return text[: max(width, 0)]
    head = (width - 3) // 3
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def size_text(num_bytes: int) -> str:
    """A number of bytes for people, decimal: "41.4 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value, units = num_bytes / 1000, ["kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.1f} {units[0]}"


def ratio_text(raw_bytes: int, stored_bytes: int) -> str:
    """Raw over stored: "1.242x"; "-" if nothing is stored."""
    return f"{raw_bytes / stored_bytes:.3f}x" if stored_bytes else "-"


def count_text(count: int, noun: str) -> str:
    """ "1 file", "2 files"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
