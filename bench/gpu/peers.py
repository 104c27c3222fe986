"""nvCOMP as it is fastest: buffers and configurations of an earlier call are used again, the codec runs on our stream.

nvCOMP gets the tensors of a component end to end in one buffer, cut only at the bytes in flight, so it pays nothing
for the number of tensors. Where a state is about many tensors, it also gets them one by one in batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench.gpu.measure import POISON
from torch import Tensor

_FLOAT_MODES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<f2", "float8_e4m3fn": "|f1"}
_VIEWS = {"<f4": torch.float32, "<f2": torch.float16}

OTHERS = ("LZ4", "Snappy", "GDeflate", "Deflate", "Bitcomp", "Cascaded")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to use nvCOMP.

    Attributes:
        algorithm: nvCOMP's name for it.
        data_type: nvCOMP's name of the values' type, None for its default.
        chunk_bytes: what nvCOMP codes on its own.
    """

    algorithm: str
    data_type: str | None = None
    chunk_bytes: int = 1 << 16

    @property
    def name(self) -> str:
        mode = f" {self.data_type}" if self.data_type else ""
        return f"nvCOMP {self.algorithm}{mode}, {self.chunk_bytes >> 10} KiB"

    def codec(self, stream: int) -> Any:
        """The codec, on a CUDA stream given by its handle. Raises what nvCOMP raises where it cannot run."""
        from nvidia import nvcomp

        options: dict[str, Any] = {"algorithm": self.algorithm, "uncomp_chunk_size": self.chunk_bytes}
        if self.data_type:
            options["data_type"] = self.data_type
        if stream:
            options["cuda_stream"] = stream
        return nvcomp.Codec(**options)


def main_peers(dtype: str) -> list[Peer]:
    """ANS for the dtype with two sizes of chunk, and Zstandard."""
    mode = _FLOAT_MODES.get(dtype, "|u1")
    return [
        Peer(algorithm="ANS", data_type=mode, chunk_bytes=1 << 18),
        Peer(algorithm="ANS", data_type=mode),
        Peer(algorithm="Zstd"),
    ]


class _Memory:
    """Device memory for `torch.as_tensor`: an nvCOMP array gives its DLPack capsule once, maybe of a type torch does not know."""

    def __init__(self, array: Any) -> None:
        self.owner = array
        address = array.__cuda_array_interface__["data"][0]
        size = int(array.buffer_size)
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _torch(array: Any) -> Tensor:
    """An nvCOMP array on the device as flat uint8, the same memory."""
    return torch.as_tensor(_Memory(array), device="cuda")


def _viewed(words: Tensor, peer: Peer) -> Tensor:
    return words.view(_VIEWS.get(peer.data_type or "", torch.uint8))


class NvcompCoder:
    """Encodes buffers one after another; see `bench.gpu.codec.Coder`.

    Args:
        buffers: flat uint8 on the GPU, each encoded in one call.
        reuse: use configurations and the memory of the last time again; otherwise every call makes its own.
    """

    def __init__(self, peer: Peer, buffers: Sequence[Tensor], *, reuse: bool) -> None:
        from nvidia import nvcomp

        stream = torch.cuda.current_stream().cuda_stream
        self.codec = peer.codec(stream)
        self.buffers = buffers
        self.arrays = [nvcomp.as_array(_viewed(buffer, peer), cuda_stream=stream) for buffer in buffers]
        self.reuse = reuse
        if reuse:
            self.encoders = [self.codec.compression_config(buffer.numel()) for buffer in buffers]
            self.decoders = [self.codec.decompression_config(config) for config in self.encoders]
        self.encoded: list[Any] = [None] * len(buffers)
        self.decoded: list[Any] = [None] * len(buffers)

    def encode(self) -> None:
        """Launch the encoding of every buffer."""
        for i, array in enumerate(self.arrays):
            options = {"out": self.encoded[i], "compression_config": self.encoders[i]} if self.reuse else {}
            self.encoded[i] = self.codec.encode(array, **options)

    def stored_bytes(self) -> int:
        """What was encoded, in bytes."""
        return sum(int(array.buffer_size) for array in self.encoded)

    def uncoded_bytes(self) -> None:
        """nvCOMP does not tell."""

    def poison(self) -> None:
        """Overwrite what was decoded before."""
        for array in self.decoded:
            if array is not None:
                _torch(array).fill_(POISON)

    def decode(self) -> None:
        """Launch the decoding of every buffer."""
        for i, array in enumerate(self.encoded):
            options = {"out": self.decoded[i], "decompression_config": self.decoders[i]} if self.reuse else {}
            self.decoded[i] = self.codec.decode(array, **options)

    def exact(self) -> bool:
        """Whether every bit came back."""
        return all(
            torch.equal(_torch(array), buffer)
            for array, buffer in zip(self.decoded, self.buffers, strict=True)
        )


class NvcompBatchCoder:
    """Encodes batches of tensors, each tensor on its own; see `bench.gpu.codec.Coder`.

    Args:
        batches: lists of flat uint8 on the GPU, each list encoded in one call.
    """

    def __init__(self, peer: Peer, batches: Sequence[Sequence[Tensor]]) -> None:
        from nvidia import nvcomp

        stream = torch.cuda.current_stream().cuda_stream
        self.codec = peer.codec(stream)
        self.batches = batches
        self.arrays = [
            nvcomp.as_arrays([_viewed(words, peer) for words in batch], cuda_stream=stream)
            for batch in batches
        ]
        sizes = [[words.numel() for words in batch] for batch in batches]
        self.encoders = [self.codec.compression_config(each) for each in sizes]
        self.decoders = [self.codec.decompression_config(config) for config in self.encoders]
        self.encoded: list[Any] = []
        self.decoded: list[Any] = []

    def encode(self) -> None:
        """Launch the encoding of every batch."""
        self.encoded = [
            self.codec.encode(arrays, compression_config=config)
            for arrays, config in zip(self.arrays, self.encoders, strict=True)
        ]

    def stored_bytes(self) -> int:
        """What was encoded, in bytes."""
        return sum(sum(map(int, arrays.buffer_sizes)) for arrays in self.encoded)

    def uncoded_bytes(self) -> None:
        """nvCOMP does not tell."""

    def poison(self) -> None:
        """Overwrite what was decoded before; decoding goes into the same memory."""
        for arrays in self.decoded:
            for array in arrays:
                _torch(array).fill_(POISON)

    def decode(self) -> None:
        """Launch the decoding of every batch, into the memory of the last time."""
        targets = self.decoded or [None] * len(self.encoded)
        self.decoded = [
            self.codec.decode(arrays, out=target, decompression_config=config)
            for arrays, target, config in zip(self.encoded, targets, self.decoders, strict=True)
        ]

    def exact(self) -> bool:
        """Whether every bit came back."""
        return all(
            torch.equal(_torch(array), words)
            for arrays, batch in zip(self.decoded, self.batches, strict=True)
            for array, words in zip(arrays, batch, strict=True)
        )
