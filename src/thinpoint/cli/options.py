"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

Threads = Annotated[
    Optional[int],  # noqa: UP045  (typer evaluates this at run time on Python 3.10)
    typer.Option(
        "--threads", min=1, metavar="N", help="Threads to use; by default the CPUs of this process."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist already.")]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle", help="Run the code that the file's pickle names. Only for files you trust."
    ),
]
Output = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--output", "-o", metavar="OUT", help="A file, or a folder for several files."),
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")]


class Codec(str, Enum):
    """What `compress` codes with."""

    thin = "thin"
    zstd = "zstd"


class Kind(str, Enum):
    """What `decompress` can write."""

    pt = "pt"
    safetensors = "safetensors"


def check_threads(threads: int | None) -> None:
    """Raises UsageError if THINPOINT_THREADS counts and is not valid: once, before the first file."""
    if threads is None:
        from thinpoint.engine.workers import default_threads

        default_threads()
