"""Checks every stored byte of a file without decoding it."""

from __future__ import annotations

from collections.abc import Callable

from thinpoint.errors import ThinpointError
from thinpoint.file.head import PartHead
from thinpoint.file.reader import FileReader

_READ_BYTES = 16 << 20


def verify_stored(reader: FileReader, progress: Callable[[int], None] | None = None) -> list[ThinpointError]:
    """Every problem in the parts of an open file, in file order; an empty list if there is none.

    Reads every byte and checks every head and digest, and goes on after a problem. Opening the reader has
    checked header, index and trailer already: together that is every byte of the file. Blocks on I/O; holds
    one read of 16 MiB, or of one block where that is larger.

    Args:
        progress: called now and then with the number of bytes done so far, at last with the size of the file.
    """
    problems: list[ThinpointError] = []
    for part, entry in enumerate(reader.index.parts):
        try:
            head = reader.read_head(part)
        except ThinpointError as error:
            problems.append(error)
        else:
            for plane in range(head.num_planes):
                problems += _verify_plane(reader, part, head, plane, progress)
        if progress:
            progress(entry.offset + entry.stored_bytes)
    if progress:
        progress(reader.trailer.file_bytes)
    return problems


def _verify_plane(
    reader: FileReader, part: int, head: PartHead, plane: int, progress: Callable[[int], None] | None
) -> list[ThinpointError]:
    body_offset = reader.index.parts[part].offset + head.head_bytes
    problems: list[ThinpointError] = []
    first = 0
    while first < head.num_blocks:
        last = first + 1
        run_bytes = int(head.block_sizes[plane, first])
        while last < head.num_blocks and run_bytes + int(head.block_sizes[plane, last]) <= _READ_BYTES:
            run_bytes += int(head.block_sizes[plane, last])
            last += 1
        try:
            blocks = reader.read_blocks(part, head, plane, first, last, check=False)
        except ThinpointError as error:
            problems.append(error)
            blocks = []
        for block, data in enumerate(blocks, first):
            try:
                reader.check_block(part, head, plane, block, data)
            except ThinpointError as error:
                problems.append(error)
        if progress:
            progress(body_offset + int(head.block_starts[plane, first]) + run_bytes)
        first = last
    return problems
