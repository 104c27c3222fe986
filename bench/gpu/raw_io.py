"""Tensors to a file and back as plain bytes, as fast as page-locked memory and threads allow: the ceiling for a save.

Two buffers of 64 MiB take turns: while threads write one (or read into it), the device copies from (or to) the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
_NUM_BUFFERS = 2

Pieces = list[tuple[Tensor, int]]
"""Flat bytes of tensors, each with its offset in the chunk."""


def chunks_of(tensors: Sequence[Tensor], chunk_bytes: int) -> Iterator[tuple[int, Pieces]]:
    """Number of bytes and pieces of every chunk; all but the last are full. tensors: contiguous."""
    pieces: Pieces = []
    used = 0
    for tensor in tensors:
        rest = tensor.detach().reshape(-1).view(torch.uint8)
        while rest.numel():
            piece, rest = rest[: chunk_bytes - used], rest[chunk_bytes - used :]
            pieces.append((piece, used))
            used += piece.numel()
            if used == chunk_bytes:
                yield used, pieces
                pieces, used = [], 0
    if pieces:
        yield used, pieces


class RawFiles:
    """Writes and reads with `num_threads` threads, into one file or into one file a thread.

    Args:
        path: the file, or a folder for the files, made if needed.
        device: where the tensors are.
        chunk_bytes: size of a buffer, a multiple of `num_threads`.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        *,
        num_threads: int,
        file_per_thread: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if chunk_bytes % num_threads:
            raise ValueError(f"{num_threads} threads cannot share {chunk_bytes} bytes evenly")
        self.device = device
        self.num_threads = num_threads
        self.paths = [path / f"{i}.raw" for i in range(num_threads)] if file_per_thread else [path]
        self.chunk_bytes = chunk_bytes
        self.slice_bytes = chunk_bytes // num_threads

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Write the tensors' bytes end to end; returns when they are durable."""
        self.paths[0].parent.mkdir(parents=True, exist_ok=True)
        buffers = self._buffers()
        writes: list[list[Future[None]]] = [[] for _ in buffers]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with ExitStack() as stack:
            files = self._open(stack, flags)
            pool = stack.enter_context(ThreadPoolExecutor(self.num_threads))
            for i_chunk, (num_bytes, pieces) in enumerate(chunks_of(tensors, self.chunk_bytes)):
                i_buffer = i_chunk % _NUM_BUFFERS
                _finish(writes[i_buffer])
                buffer = buffers[i_buffer]
                for piece, start in pieces:
                    buffer[start : start + piece.numel()].copy_(piece, non_blocking=True)
                self._wait_for_copies()
                data = buffer.numpy().data
                writes[i_buffer] = [
                    pool.submit(_write, files[i_file], data[start:end], offset)
                    for i_file, start, end, offset in self._slices(i_chunk, num_bytes)
                ]
            for each in writes:
                _finish(each)
            list(pool.map(os.fsync, files))

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Read what `save` wrote into tensors of the same sizes; returns when they are filled."""
        buffers = self._buffers()
        chunks = list(chunks_of(tensors, self.chunk_bytes))
        with ExitStack() as stack:
            files = self._open(stack, os.O_RDONLY)
            pool = stack.enter_context(ThreadPoolExecutor(self.num_threads))

            def read(i_chunk: int) -> list[Future[None]]:
                data = buffers[i_chunk % _NUM_BUFFERS].numpy().data
                return [
                    pool.submit(_read, files[i_file], data[start:end], offset)
                    for i_file, start, end, offset in self._slices(i_chunk, chunks[i_chunk][0])
                ]

            reads = read(0) if chunks else []
            for i_chunk, (_, pieces) in enumerate(chunks):
                # The next chunk's buffer is free: its copy to the device was waited for.
                following = read(i_chunk + 1) if i_chunk + 1 < len(chunks) else []
                _finish(reads)
                buffer = buffers[i_chunk % _NUM_BUFFERS]
                for piece, start in pieces:
                    piece.copy_(buffer[start : start + piece.numel()], non_blocking=True)
                self._wait_for_copies()
                reads = following

    def _buffers(self) -> list[Tensor]:
        pinned = self.device.type == "cuda"
        return [
            torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(_NUM_BUFFERS)
        ]

    def _open(self, stack: ExitStack, flags: int) -> list[int]:
        files = [os.open(path, flags, 0o644) for path in self.paths]
        for file in files:
            stack.callback(os.close, file)
        return files

    def _slices(self, i_chunk: int, num_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(index of the file, start and end in the chunk, offset in the file) for each thread that has work."""
        per_file = self.slice_bytes if len(self.paths) > 1 else self.chunk_bytes
        for i_thread, start in enumerate(range(0, num_bytes, self.slice_bytes)):
            end = min(start + self.slice_bytes, num_bytes)
            if len(self.paths) > 1:
                yield i_thread, start, end, i_chunk * per_file
            else:
                yield 0, start, end, i_chunk * per_file + start

    def _wait_for_copies(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _finish(futures: list[Future[None]]) -> None:
    wait(futures)
    for future in futures:
        future.result()


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _read(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(file, [data], offset)
        if not count:
            raise EOFError(f"the file ends at byte {offset}")
        data, offset = data[count:], offset + count
