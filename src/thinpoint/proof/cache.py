"""Files that are read from storage, not from the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_PAGE = mmap.PAGESIZE


def files_of(path: Path) -> Iterator[Path]:
    """The file, or all files in the folder."""
    if path.is_dir():
        yield from (found for found in sorted(path.rglob("*")) if found.is_file())
    else:
        yield path


def make_durable(path: Path) -> None:
    """An fsync of the file, or of all files in the folder: pages that were not written cannot be dropped."""
    for found in files_of(path):
        with found.open("rb") as file:
            os.fsync(file.fileno())


def drop_from_cache(path: Path) -> bool:
    """Asks the kernel to forget the pages of a file or folder; whether it did."""
    for found in files_of(path):
        with found.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return all(num_cached_pages(found) == 0 for found in files_of(path))


def num_cached_pages(path: Path) -> int | None:
    """How many whole pages of a file are in memory, by mincore(2), which reads none; None if the system does not tell.

    The end of a file that does not fill a page does not count: the kernel forgets whole pages only.
    """
    num_pages = path.stat().st_size // _PAGE
    if not num_pages:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), num_pages * _PAGE, prot=mmap.PROT_READ) as mapped:
        flags = (ctypes.c_ubyte * num_pages)()
        view = np.frombuffer(mapped, np.uint8)
        try:
            libc = ctypes.CDLL(None)
            failed = libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(num_pages * _PAGE), flags
            )
        except (OSError, AttributeError):
            failed = 1
        finally:
            # A map that is still viewed cannot be closed.
            del view
    return None if failed else int((np.ctypeslib.as_array(flags) & 1).sum())
