"""Text to train on that every machine has: the sources and documentation of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}


def corpus_files(root: Path | None = None) -> list[Path]:
    """The Python files of the standard library, in an order that depends on nothing but their names.

    The documentation (`pydoc_data/topics.py`) comes first.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = [
        path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]

    def order(path: Path) -> tuple[bool, str]:
        name = path.relative_to(root).as_posix()
        return not name.startswith("pydoc_data/"), name

    return sorted(found, key=order)


def corpus_bytes(max_bytes: int, root: Path | None = None) -> bytes:
    """The first `max_bytes` bytes of the corpus files, end to end.

    Raises:
        OSError: a file cannot be read.
    """
    pieces: list[bytes] = []
    num_bytes = 0
    for path in corpus_files(root):
        if num_bytes >= max_bytes:
            break
        pieces.append(path.read_bytes())
        num_bytes += len(pieces[-1])
    return b"".join(pieces)[:max_bytes]
