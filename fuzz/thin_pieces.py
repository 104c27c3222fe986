"""Small valid `.thin` files, and files taken apart, changed and sealed again, for the tests and the fuzzer.

A change that is not sealed again is caught by a digest; only a sealed one reaches the checks behind it.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from thinpoint.codec.contract import EncodedPart
from thinpoint.digest import digest
from thinpoint.file.head import HEAD, HEAD_FIXED_BYTES
from thinpoint.file.index import StorageEntry, TensorEntry
from thinpoint.file.layout import (
    HEADER_BYTES,
    TRAILER_BYTES,
    TRAILER_SEALED_BYTES,
    WORD,
    Trailer,
    pack_trailer,
    pad8,
    padded,
)
from thinpoint.file.reader import FileReader
from thinpoint.file.writer import FileWriter, compress_index
from thinpoint.store.fileobj import FileObjectSink, FileObjectSource


def raw_part(words: np.ndarray, block_elems: int) -> EncodedPart:
    """A part of codec 0: one plane, each block the words' bytes with zero bytes up to a multiple of 8.

    Args:
        words: flat, uint8, uint16, uint32 or uint64.
    """
    blocks = [padded(words[i : i + block_elems].tobytes()) for i in range(0, words.size, block_elems)]
    return EncodedPart(
        codec_id=0,
        word_bytes=words.itemsize,
        num_elems=words.size,
        block_elems=block_elems,
        prefix=b"",
        block_sizes=np.array([[len(block) for block in blocks]], np.int64),
        blocks=(tuple(np.frombuffer(block, np.uint8) for block in blocks),),
        block_digests=np.array([[digest(block) for block in blocks]], np.uint64),
        raw_digest=digest(words),
        chain="raw",
    )


def planeless_part(num_elems: int, prefix: bytes) -> EncodedPart:
    """A part of no planes, as a codec for constants makes: all in the prefix."""
    return EncodedPart(
        codec_id=7,
        word_bytes=4,
        num_elems=num_elems,
        block_elems=1024,
        prefix=prefix,
        block_sizes=np.zeros((0, 0), np.int64),
        raw_digest=digest(np.zeros(num_elems, np.uint32)),
        chain="const",
    )


def small_file() -> bytes:
    """Two parts of one storage with a gap between: 40 words of 4 bytes in 3 blocks, and 3 words without."""
    sink = io.BytesIO()
    writer = FileWriter(FileObjectSink(sink))
    words = np.arange(40, dtype=np.uint32) * np.uint32(0x9E3779B9)
    writer.add_part(
        raw_part(words, 16),
        storage=0,
        start_bytes=0,
        dtype="float32",
        role="weight",
        label={"name": ["w", 0]},
    )
    writer.add_part(
        planeless_part(3, b"abc"), storage=0, start_bytes=168, dtype="float32", role="other", label={}
    )
    writer.finish(
        storages=[StorageEntry(bytes=180, device="cpu"), StorageEntry(bytes=0, device="cuda:0")],
        tensors=[
            TensorEntry(storage=0, dtype="float32", shape=(5, 8), stride=(8, 1), offset=0),
            TensorEntry(storage=1, dtype="bool", shape=(0, 3), stride=(3, 1), offset=9, extra={"note": [1]}),
            TensorEntry(storage=None, dtype="bfloat16", shape=(2,), stride=(1,), offset=0),
        ],
        tree={"dict": ["w", {"tensor": 0}, 'a"]\\', {"tensor": 1}]},
        meta={"kind": "test"},
        encoder=0,
        writer_version="0.1.0",
    )
    return sink.getvalue()


def two_plane_file() -> bytes:
    """Two storages, words of 1, 2 and 8 bytes, two planes with an empty block, a prefix, a long label."""
    sink = io.BytesIO()
    writer = FileWriter(FileObjectSink(sink))
    bytes_part = raw_part(np.arange(13, dtype=np.uint8), 64)
    halves = raw_part(np.arange(100, dtype=np.uint16), 64)
    empty = np.zeros(0, np.uint8)
    two_planes = replace(
        halves,
        prefix=b"0123456789",
        blocks=(halves.blocks[0], (empty, np.arange(8, dtype=np.uint8))),
        block_sizes=np.vstack([halves.block_sizes, [[0, 8]]]),
        block_digests=np.vstack(
            [
                halves.block_digests,
                np.array([[digest(empty), digest(np.arange(8, dtype=np.uint8))]], np.uint64),
            ]
        ),
    )
    label = {"name": ["layer", "x" * 300], "dtype": "bfloat16", "shape": [100], "role": "gradient"}
    writer.add_part(two_planes, storage=0, start_bytes=0, dtype="bfloat16", role="gradient", label=label)
    writer.add_part(bytes_part, storage=1, start_bytes=3, dtype="bytes", role="other", label={})
    writer.add_part(
        raw_part(np.arange(9, dtype=np.uint64), 4),
        storage=1,
        start_bytes=16,
        dtype="int64",
        role="other",
        label={},
    )
    writer.finish(
        storages=[StorageEntry(bytes=200, device="cpu"), StorageEntry(bytes=88, device="cpu")],
        tensors=[TensorEntry(storage=0, dtype="bfloat16", shape=(10, 10), stride=(1, 10), offset=0)],
        tree=[{"tensor": 0}, 1.5, None, True, "\ud800"],
        meta={},
        encoder=0,
        writer_version="0.1.0",
        optional=["unknown"],
    )
    return sink.getvalue()


def open_bytes(data: bytes) -> FileReader:
    """A reader of a file in memory."""
    return FileReader(FileObjectSource(io.BytesIO(data)))


@dataclass
class Pieces:
    """A file taken apart. Change what you like; `seal` computes every digest anew.

    Attributes:
        header: without its digest.
        heads: each without its digest.
        bodies: as stored.
        index: the JSON value.
        raw_index: bytes to use in place of the JSON of `index`.
        frame: bytes to use in place of the zstd frame of the JSON.
        index_padding: bytes after the frame; None for the right number of zero bytes.
        trailer: values to use in place of the right ones; also "reserved".
        follow_heads: set each part's head_digest in the index to that of its head.
    """

    header: bytearray
    heads: list[bytearray]
    bodies: list[bytearray]
    index: Any
    raw_index: bytes | None = None
    frame: bytes | None = None
    index_padding: bytes | None = None
    trailer: dict[str, int] = field(default_factory=dict)
    follow_heads: bool = True

    def set_head(self, part: int, offset: int, value: int, size: int) -> None:
        """Overwrites an integer field of a head."""
        self.heads[part][offset : offset + size] = value.to_bytes(size, "little")

    def seal_blocks(self, part: int) -> None:
        """Sets the block digests in a head to those of its body, as far as the head's own sizes allow."""
        head, body = self.heads[part], self.bodies[part]
        fields = HEAD.unpack(bytes(head[:HEAD_FIXED_BYTES]))
        num_sizes = fields[10] * fields[12]
        sizes_at = HEAD_FIXED_BYTES + pad8(fields[14])
        digests_at = sizes_at + pad8(4 * num_sizes)
        if num_sizes > len(head) or digests_at + 8 * num_sizes > len(head):
            return
        position = 0
        for i in range(num_sizes):
            size = int.from_bytes(head[sizes_at + 4 * i : sizes_at + 4 * i + 4], "little")
            block = bytes(body[position : position + size])
            head[digests_at + 8 * i : digests_at + 8 * i + 8] = WORD.pack(digest(block) if block else 0)
            position += size

    def seal(self) -> bytes:
        """The whole file."""
        out = bytearray(self.header) + WORD.pack(digest(bytes(self.header)))
        for i, (head, body) in enumerate(zip(self.heads, self.bodies, strict=True)):
            seal = digest(bytes(head))
            if self.follow_heads:
                self._follow(i, seal)
            out += head + WORD.pack(seal) + body
        raw = self.raw_index
        if raw is None:
            raw = json.dumps(self.index, separators=(",", ":")).encode()
        frame = compress_index(raw) if self.frame is None else self.frame
        padding = bytes(pad8(len(frame)) - len(frame)) if self.index_padding is None else self.index_padding
        stored = frame + padding
        values = {
            "index_offset": len(out),
            "index_stored_bytes": len(frame),
            "index_raw_bytes": len(raw),
            "index_digest": digest(stored),
            "file_id": digest(raw) if raw else 0,
            "file_bytes": len(out) + len(stored) + TRAILER_BYTES,
            "num_parts": len(self.heads),
            **self.trailer,
        }
        reserved = values.pop("reserved", 0)
        trailer = bytearray(pack_trailer(Trailer(**values)))
        trailer[52:56] = reserved.to_bytes(4, "little")
        trailer[TRAILER_SEALED_BYTES : TRAILER_SEALED_BYTES + 8] = WORD.pack(
            digest(bytes(trailer[:TRAILER_SEALED_BYTES]))
        )
        return bytes(out + stored + trailer)

    def _follow(self, part: int, seal: int) -> None:
        try:
            self.index["parts"][part]["head_digest"] = f"{seal:016x}"
        except (TypeError, KeyError, IndexError):
            pass


def take_apart(data: bytes) -> Pieces:
    """The pieces of a valid file."""
    reader = open_bytes(data)
    heads, bodies = [], []
    for part in reader.index.parts:
        body_at = part.offset + part.head_bytes
        heads.append(bytearray(data[part.offset : body_at - WORD.size]))
        bodies.append(bytearray(data[body_at : body_at + part.body_bytes]))
    return Pieces(
        header=bytearray(data[: HEADER_BYTES - WORD.size]),
        heads=heads,
        bodies=bodies,
        index=json.loads(index_text(data)),
    )


def index_text(data: bytes) -> bytes:
    """The JSON of a valid file's index."""
    import zstandard

    trailer = open_bytes(data).trailer
    start = trailer.index_offset
    return zstandard.ZstdDecompressor().decompress(data[start : start + trailer.index_stored_bytes])
