"""What only a real GPU can show: everything at full length, little memory, more values than 2^31."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from device_parts import decode, expect_same

from thinpoint.codec.contract import PartSpec
from thinpoint.codec.rans.spec import CODEC_ID
from thinpoint.device.backend import TritonBackend
from thinpoint.device.contract import EncodeItem

sys.path.insert(0, str(Path(__file__).parents[1] / "codec"))
import codec_zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int16", "uint8")
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_zoo(dtype: str) -> None:
    words, specs, items = [], [], []
    for length in (*codec_zoo.LENGTHS, 65536, 98305, 300001):
        for kind in codec_zoo.KINDS:
            made, row_elems = codec_zoo.make(kind, dtype, length)
            # Every other one begins in the middle of 16 bytes.
            shift = made.itemsize * (length % 2)
            memory = torch.zeros(made.nbytes + 16, dtype=torch.uint8, device=CUDA)
            view = memory[shift : shift + made.nbytes]
            view.copy_(torch.from_numpy(made.view(np.uint8)))
            role = ("first_moment", "weight", "second_moment")[length % 3]
            specs.append(PartSpec(dtype=dtype, role=role, row_elems=row_elems))
            words.append(made)
            items.append(EncodeItem(words=view, word_bytes=made.itemsize, spec=specs[-1]))
    backend = TritonBackend(CUDA, prove=True)
    parts = backend.encode_batch(items)
    for part, made, spec in zip(parts, words, specs, strict=True):
        expect_same(part, made, spec)
    outs, sums = decode(backend, parts, CUDA)
    for out, total, made, part in zip(outs, sums, words, parts, strict=True):
        assert np.array_equal(out, made.view(np.uint8))
        assert total == part.raw_digest


@pytest.fixture
def little_memory() -> Iterator[None]:
    """All but 300 MiB of the GPU's memory is taken, and a GB of state is there.

    The kernels are on the GPU before: their code takes about 90 MiB, once.
    """
    words = torch.randn(1 << 20, device=CUDA).view(torch.uint8)
    TritonBackend(CUDA, prove=True).encode_batch(parts_of(words, PartSpec(dtype="float32", role="weight"), 4))
    del words
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (1300 << 20), dtype=torch.uint8, device=CUDA)
    yield
    del held
    torch.cuda.empty_cache()


def parts_of(data: torch.Tensor, spec: PartSpec, word_bytes: int) -> list[EncodeItem]:
    """A flat uint8 tensor as parts of 64 MiB."""
    return [EncodeItem(words=piece, word_bytes=word_bytes, spec=spec) for piece in data.split(64 << 20)]


def test_300_mib_free_are_enough(little_memory: None) -> None:
    values = torch.randn(256 << 20, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    data = values.view(torch.uint8)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] < 310 << 20
    items = parts_of(data, PartSpec(dtype="float32", role="weight"), 4)
    backend = TritonBackend(CUDA, prove=True)
    parts = backend.encode_batch(items)
    assert all(part.codec_id == CODEC_ID for part in parts)
    expected = [item.words.cpu().numpy() for item in items[:2]]
    for item in items:
        item.words.fill_(0xA5)
    for i, part in enumerate(parts):
        (out,), (total,) = decode(backend, [part], CUDA)
        assert total == part.raw_digest
        if i < len(expected):
            assert np.array_equal(out, expected[i])


def test_more_values_than_2_to_the_31(tmp_path: Path) -> None:
    count = (1 << 31) + 100_001
    generator = torch.Generator(CUDA).manual_seed(0)
    values = torch.empty(count, dtype=torch.bfloat16, device=CUDA)
    for piece in values.split(1 << 28):
        piece.normal_(generator=generator)
    items = parts_of(values.view(torch.uint8), PartSpec(dtype="bfloat16", role="weight"), 2)
    # Without a copy on the host of all of it: the last parts, behind the 2^31st value, are decoded and compared.
    backend = TritonBackend(CUDA, prove=True)
    parts = [
        part
        for first in range(0, len(items), 8)
        for part in backend.encode_batch(items[first : first + 8])[-1:]
    ]
    wanted = [items[min(first + 7, len(items) - 1)] for first in range(0, len(items), 8)]
    outs, sums = decode(backend, parts, CUDA)
    for out, total, item, part in zip(outs, sums, wanted, parts, strict=True):
        assert np.array_equal(out, item.words.cpu().numpy())
        assert total == part.raw_digest
