"""A device backend for machines without a device: CPU tensors play the device's, the codec runs on copies of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from thinpoint import digest as digests
from thinpoint.codec.backend import HostBackend, get_backend
from thinpoint.codec.contract import WORD_DTYPES, EncodedPart
from thinpoint.device.contract import DecodeItem, EncodeItem, FinishDecode, FinishedParts
from thinpoint.engine.backends import Devices
from thinpoint.errors import DigestMismatchError, ThinpointError

CPU = torch.device("cpu")


class CopyingBackend:
    """Keeps the contract of `DeviceBackend` and checks that the engine keeps its own; notes every batch.

    Attributes:
        encoded: for each batch the raw bytes of its items.
        decoded: for each batch the raw bytes of its items.
        alive: weak references to the parts of each batch.
    """

    name = "copying"
    device = CPU

    def __init__(self, host: HostBackend | None = None) -> None:
        self.host = host or get_backend("cpu")
        self.encoded: list[list[int]] = []
        self.decoded: list[list[int]] = []
        self.alive: list[list[weakref.ref[EncodedPart]]] = []
        self._is_busy = threading.Lock()

    def begin_batch(self, items: Sequence[EncodeItem]) -> FinishedParts:
        return FinishedParts(self.encode_batch(items))

    def encode_batch(self, items: Sequence[EncodeItem]) -> list[EncodedPart]:
        assert items and self._is_busy.acquire(blocking=False), "called from two threads at a time"
        try:
            parts = [self._encode(item) for item in items]
        finally:
            self._is_busy.release()
        self.encoded.append([item.words.numel() for item in items])
        self.alive.append([weakref.ref(part) for part in parts])
        return parts

    def _encode(self, item: EncodeItem) -> EncodedPart:
        assert_flat(item.words)
        words = item.words.numpy().copy().view(WORD_DTYPES[item.word_bytes])
        return self.host.encode(words, item.spec)

    def begin_decode(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> FinishDecode:
        return partial(self._decode_all, data, items)

    def _decode_all(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> list[int]:
        assert items and self._is_busy.acquire(blocking=False), "called from two threads at a time"
        try:
            assert_flat(data)
            partials = []
            for place, item in enumerate(items):
                try:
                    partials.append(self._decode(data.numpy(), item))
                except ThinpointError as error:
                    error.item = place  # type: ignore[attr-defined]
                    raise
        finally:
            self._is_busy.release()
        self.decoded.append([item.out.numel() for item in items])
        return partials

    def _decode(self, data: np.ndarray, item: DecodeItem) -> int:
        part = item.part
        assert_flat(item.out)
        assert item.out.data_ptr() % part.word_bytes == 0
        assert item.digests.shape == (part.num_planes, item.num_blocks) and item.digests.dtype == np.uint64
        assert len(item.plane_offsets) == part.num_planes
        last = item.first_block + item.num_blocks
        elems = part.num_elems
        if part.num_planes:
            assert item.num_blocks and last <= part.num_blocks
            elems = min(last * part.block_elems, part.num_elems) - item.first_block * part.block_elems
        assert item.out.numel() == elems * part.word_bytes
        planes: list[list[np.ndarray]] = []
        for plane, position in enumerate(item.plane_offsets):
            assert position % 8 == 0
            planes.append([])
            for i, size in enumerate(part.block_sizes[plane, item.first_block : last].tolist()):
                planes[-1].append(data[position : position + size].copy())
                position += size
                if digests.digest(planes[-1][-1]) != int(item.digests[plane, i]):
                    raise DigestMismatchError("a block is damaged")
        words = np.empty(elems, WORD_DTYPES[part.word_bytes])
        partial = self.host.decode(part, item.first_block, planes, words)
        item.out.copy_(torch.from_numpy(words.view(np.uint8)))
        return partial


def assert_flat(tensor: torch.Tensor) -> None:
    assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()


def on_cpu(backend: Any) -> Devices:
    """Devices of which the CPU has this backend."""
    return Devices(lambda device: backend if device == CPU else None)


def zoo() -> dict[str, Any]:
    """Large and small tensors by turns, of many dtypes; views, ties, empty ones, values and long texts between them."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(700_000, generator=generator)
    weight = torch.randn(1200, 700, generator=generator) * 0.02
    state: dict[str, Any] = {
        "w": weight,
        "step": torch.tensor(7.0),
        "tied": weight,
        "half": (torch.randn(900, 1024, generator=generator) * 0.02).bfloat16(),
        "empty": torch.zeros(0, 4),
        "ids": torch.randint(0, 9, (600_001,), generator=generator),
        "mask": torch.rand(5001, generator=generator) > 0.5,
        "transposed": torch.randn(640, 900, generator=generator).t(),
        "gappy": torch.randn(300, 64, generator=generator)[::2, ::3],
        "left": base[:400_000],
        "right": base[400_000:],
        "across": base[100_000:500_000],
        "complex": torch.randn(3000, dtype=torch.complex64, generator=generator),
        "double": torch.randn(2000, generator=generator).double() / 3,
        "zeros": torch.zeros(1_000_000),
        "bytes": torch.randint(0, 255, (4097,), dtype=torch.uint8, generator=generator),
        "text": "x" * 100_000,
        "array": np.arange(50_000, dtype=np.float32),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    for i in range(40):
        state[f"small{i}"] = torch.randn(i * 7 + 1, generator=generator)
    return state
