"""Helpers of the tests: a state through a `.thin` file in memory, and bits of tensors."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thinpoint.codec.backend import get_backend
from thinpoint.engine.restore import Restorer
from thinpoint.engine.save import write_file
from thinpoint.engine.workers import Workers
from thinpoint.file.reader import FileReader
from thinpoint.state.leaves import FlatState
from thinpoint.store import open_sink, open_source


def thin_bytes(state: FlatState, meta: dict[str, Any] | None = None) -> bytes:
    target = io.BytesIO()
    with Workers(2) as workers, open_sink(target) as sink:
        write_file(state, sink, get_backend(), workers, meta=meta)
    return target.getvalue()


@contextmanager
def opened(data: bytes) -> Iterator[tuple[Restorer, Workers]]:
    with open_source(io.BytesIO(data)) as source, Workers(2) as workers:
        yield Restorer(FileReader(source), get_backend(), workers), workers


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in row-major order, whatever the dtype."""
    flat = tensor.detach().contiguous()
    storage = flat.untyped_storage()
    start = flat.storage_offset() * flat.element_size()
    return bytes(storage[start : start + flat.numel() * flat.element_size()].tolist())


class Gathering:
    """A sink in memory that counts the largest write."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.largest = 0

    def write(self, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        self.largest = max(self.largest, view.nbytes)
        self.data += view

    def tell(self) -> int:
        return len(self.data)
