"""The ways to encode a tensor and to save a state that `compare.py` measures beside each other."""

from __future__ import annotations

import copy
import io
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from inputs import ROLES, Item

import thinpoint
from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import EncodedPart, PartSpec, serial_map


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A way to encode one tensor in memory.

    Attributes:
        name: for people, with the number of threads.
        prepare: item -> what encode is given; not timed.
        encode: what prepare gave, item -> encoded.
        decode: encoded, item -> flat array that holds the item's bytes.
        stored_bytes: encoded -> number of bytes.
    """

    name: str
    encode: Callable[[Any, Item], Any]
    decode: Callable[[Any, Item], np.ndarray]
    stored_bytes: Callable[[Any], int] = len
    prepare: Callable[[Item], Any] = lambda item: item.words


def torch_codec() -> Codec:
    """torch.save to memory: what no compression costs."""

    def encode(_: Any, item: Item) -> memoryview:
        buffer = io.BytesIO()
        torch.save(item.tensor, buffer)
        return buffer.getbuffer()

    def decode(encoded: memoryview, _: Item) -> np.ndarray:
        return torch.load(io.BytesIO(encoded), weights_only=True).reshape(-1).view(torch.uint8).numpy()

    return Codec(name="torch.save, memory", encode=encode, decode=decode, stored_bytes=lambda m: m.nbytes)


def zstd_codec(level: int) -> Codec:
    """Zstandard on the raw bytes, one thread."""
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return Codec(
        name=f"zstd -{level}",
        encode=lambda words, _: compressor.compress(words.view(np.uint8).data),
        decode=lambda encoded, _: np.frombuffer(decompressor.decompress(encoded), np.uint8),
    )


def zipnn_codec(num_threads: int) -> Codec | None:
    """ZipNN on bytes of a known dtype; None if it is not installed."""
    try:
        from zipnn import ZipNN
    except ImportError:
        return None
    known = {"float32", "bfloat16", "float16"}
    coders = {
        dtype: ZipNN(input_format="byte", bytearray_dtype=dtype, threads=num_threads)
        for dtype in sorted(known)
    }

    def coder(item: Item) -> Any:
        if item.dtype not in known:
            raise NotImplementedError(f"ZipNN has no mode for {item.dtype}")
        return coders[item.dtype]

    return Codec(
        name=f"ZipNN, {num_threads} thread{'s' * (num_threads > 1)}",
        # ZipNN 0.5.4 reorders bits in the buffer it is given, even in immutable bytes: it gets a fresh one.
        prepare=lambda item: bytearray(item.words.tobytes()),
        encode=lambda data, item: coder(item).compress(data),
        decode=lambda encoded, item: np.frombuffer(coder(item).decompress(encoded), np.uint8),
    )


def thinpoint_codec(num_threads: int, prove: bool = False) -> Codec:
    """thinpoint's CPU backend."""
    backend = get_backend("cpu", prove=prove)
    pool = ThreadPoolExecutor(num_threads)
    mapper = serial_map if num_threads == 1 else pool.map

    def encode(words: np.ndarray, item: Item) -> EncodedPart:
        spec = PartSpec(dtype=item.dtype, role=ROLES[item.component], row_elems=item.row_elems)
        return backend.encode(words, spec, map=mapper)

    def decode(part: EncodedPart, _: Item) -> np.ndarray:
        out = np.empty(part.num_elems, f"<u{part.word_bytes}")
        backend.decode(part, 0, part.blocks, out, map=mapper)
        return out

    return Codec(
        name=f"thinpoint, {num_threads} thread{'s' * (num_threads > 1)}{', proof' * prove}",
        encode=encode,
        decode=decode,
        stored_bytes=lambda part: part.stored_bytes,
    )


def codecs() -> list[Codec]:
    """Everything that encodes tensors and runs here."""
    found = [
        torch_codec(),
        zstd_codec(3),
        zipnn_codec(1),
        zipnn_codec(2),
        thinpoint_codec(1),
        thinpoint_codec(2),
        thinpoint_codec(1, prove=True),
        thinpoint_codec(2, prove=True),
    ]
    return [codec for codec in found if codec is not None]


@dataclass(frozen=True, kw_only=True)
class Saver:
    """A way to save a whole state. save: state, path; load: path, state of the same structure -> state."""

    name: str
    save: Callable[[Any, Path], None]
    load: Callable[[Path, Any], Any]


def _torch_save(state: Any, path: Path) -> None:
    torch.save(state, path)


def _torch_load(path: Path, _: Any) -> Any:
    return torch.load(path, weights_only=True)


def thinpoint_saver(name: str, **options: Any) -> Saver:
    """thinpoint.save with some options; load checks every checksum."""
    return Saver(
        name=name,
        save=lambda state, path: thinpoint.save(state, path, **options),
        load=lambda path, _: thinpoint.load(path),
    )


def dcp_saver(name: str, compress: bool) -> Saver:
    """torch.distributed.checkpoint in one process, plain or with its ZStandard stream extension."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    def save(state: Any, path: Path) -> None:
        options: dict[str, Any] = {}
        if compress:
            from torch.distributed.checkpoint._extension import ZStandard

            options["_extensions"] = [ZStandard()]
        writer = FileSystemWriter(path, thread_count=os.cpu_count() or 1, **options)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(path: Path, like: Any) -> Any:
        dcp.load(like, storage_reader=FileSystemReader(path), no_dist=True)
        return like

    return Saver(name=name, save=save, load=load)


def savers() -> list[Saver]:
    """Everything that saves whole states."""
    return [
        Saver(name="torch.save", save=_torch_save, load=_torch_load),
        dcp_saver("DCP", compress=False),
        dcp_saver("DCP + ZStandard extension", compress=True),
        thinpoint_saver("thinpoint"),
        thinpoint_saver("thinpoint, proof", prove=True),
        thinpoint_saver("thinpoint, codec zstd", codec="zstd"),
    ]


def blank_copy(state: Any) -> Any:
    """A copy of a state whose tensors hold zeros: what DCP loads into."""
    blank = copy.deepcopy(state)

    def clear(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value.detach().zero_()
        elif isinstance(value, dict):
            for child in value.values():
                clear(child)
        elif isinstance(value, list | tuple):
            for child in value:
                clear(child)

    clear(blank)
    return blank


def stored_bytes(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    files = [found for found in path.rglob("*") if found.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def remove(path: Path) -> None:
    """Delete a file or a folder if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
