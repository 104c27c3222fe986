"""The plain writer that saves are measured against loses nothing, whatever the sizes and threads."""

from pathlib import Path

import pytest
import torch
from bench.gpu.raw_io import RawFiles

CHUNK_BYTES = 1 << 12
CPU = torch.device("cpu")


def make_tensors(sizes: list[int]) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=draws) for size in sizes]


@pytest.mark.parametrize("file_per_thread", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize(
    "sizes",
    [
        [0],
        [1],
        [CHUNK_BYTES],
        [CHUNK_BYTES - 1, 2],
        [5 * CHUNK_BYTES + 7],
        [3, 0, 9000, 1, CHUNK_BYTES, 77] * 3,
    ],
)
def test_what_was_saved_is_loaded(
    tmp_path: Path, sizes: list[int], num_threads: int, file_per_thread: bool
) -> None:
    tensors = make_tensors(sizes)
    files = RawFiles(
        tmp_path / "raw",
        CPU,
        num_threads=num_threads,
        file_per_thread=file_per_thread,
        chunk_bytes=CHUNK_BYTES,
    )
    files.save(tensors)
    assert sum(path.stat().st_size for path in files.paths) == sum(sizes)
    loaded = [torch.full_like(tensor, 0xA5) for tensor in tensors]
    files.load(loaded)
    assert all(torch.equal(a, b) for a, b in zip(loaded, tensors, strict=True))


def test_threads_share_a_chunk_evenly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 threads"):
        RawFiles(tmp_path, CPU, num_threads=3, chunk_bytes=CHUNK_BYTES)


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    tensors = make_tensors([3 * CHUNK_BYTES])
    files = RawFiles(tmp_path / "raw", CPU, num_threads=2, chunk_bytes=CHUNK_BYTES)
    files.save(tensors)
    with (tmp_path / "raw").open("r+b") as file:
        file.truncate(3 * CHUNK_BYTES - 1)
    with pytest.raises(EOFError):
        files.load(tensors)
