"""What the writer writes, the reader reads; what breaks a rule, the writer refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from thin_pieces import (
    index_text,
    open_bytes,
    planeless_part,
    raw_part,
    small_file,
    take_apart,
    two_plane_file,
)

from thinpoint.digest import digest
from thinpoint.errors import DigestMismatchError, StorageError, ThinpointError, UsageError
from thinpoint.file import limits
from thinpoint.file.index import StorageEntry, TensorEntry
from thinpoint.file.verify import verify_stored
from thinpoint.file.writer import FileSummary, FileWriter, compress_index
from thinpoint.store.fileobj import FileObjectSink


def write(parts=(), *, storages=None, tensors=(), tree=None, **more) -> tuple[bytes, FileSummary]:
    sink = io.BytesIO()
    writer = FileWriter(FileObjectSink(sink))
    for encoded, storage, start in parts:
        writer.add_part(encoded, storage=storage, start_bytes=start, dtype="uint8", role="other", label={})
    if storages is None:
        ends = [0] * (1 + max((storage for _, storage, _ in parts), default=-1))
        for encoded, storage, start in parts:
            ends[storage] = start + encoded.num_elems * encoded.word_bytes
        storages = [StorageEntry(bytes=end, device="cpu") for end in ends]
    options = {"meta": {}, "encoder": 0, "writer_version": "0.1.0", **more}
    summary = writer.finish(storages=storages, tensors=tensors, tree=tree, **options)
    return sink.getvalue(), summary


def read_raw_part(data: bytes, part: int) -> np.ndarray:
    """The words of a part of codec 0."""
    reader = open_bytes(data)
    head = reader.read_head(part)
    blocks = reader.read_blocks(part, head, 0, 0, head.num_blocks)
    ends = [min(head.block_elems * (b + 1), head.num_elems) for b in range(head.num_blocks)]
    used = [(end - head.block_elems * b) * head.word_bytes for b, end in enumerate(ends)]
    pieces = [block[:size].tobytes() for block, size in zip(blocks, used, strict=True)]
    return np.frombuffer(b"".join(pieces), f"<u{head.word_bytes}")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(1, 130), st.integers(0, 9)),
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_parts_come_back_bit_for_bit(shapes, rng):
    parts = []
    start = 0
    for word_bytes, num_elems, block_elems, gap in shapes:
        words = np.frombuffer(rng.randbytes(word_bytes * num_elems), f"<u{word_bytes}")
        parts.append((words, raw_part(words, block_elems), start + gap))
        start += gap + words.nbytes
    data, summary = write([(encoded, 0, at) for _, encoded, at in parts])
    reader = open_bytes(data)
    assert verify_stored(reader) == []
    assert (summary.file_bytes, summary.num_parts, summary.file_id) == (len(data), len(parts), reader.file_id)
    for i, (words, _, at) in enumerate(parts):
        assert read_raw_part(data, i).tobytes() == words.tobytes()
        assert reader.index.parts[i].start == at
        assert reader.index.parts[i].raw_digest == digest(words)


def test_file_without_parts_is_header_index_trailer():
    data, summary = write(tree={"dict": []})
    reader = open_bytes(data)
    assert reader.index.tree == {"dict": []}
    assert summary.num_parts == 0
    assert reader.trailer.index_offset == 32
    assert verify_stored(reader) == []


def test_same_calls_give_the_same_bytes():
    assert small_file() == small_file()
    assert two_plane_file() == two_plane_file()


def test_index_is_canonical_json_in_the_order_of_the_specification():
    text = index_text(two_plane_file())
    value = json.loads(text)
    assert list(value) == ["writer", "required", "optional", "meta", "storages", "parts", "tensors", "tree"]
    assert json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode() == text
    keys = "storage start elems word_bytes dtype role codec chain offset head_bytes body_bytes"
    assert list(value["parts"][0]) == [*keys.split(), "raw_digest", "head_digest"]
    assert value["optional"] == ["unknown"]


def test_index_keeps_extra_keys_and_informative_values():
    index = open_bytes(small_file()).index
    assert index.writer == {"thinpoint": "0.1.0", "encoder": 0}
    assert index.meta == {"kind": "test"}
    assert index.tensors[1] == TensorEntry(
        storage=1, dtype="bool", shape=(0, 3), stride=(3, 1), offset=9, extra={"note": [1]}
    )
    assert index.tensors[2].storage is None
    assert index.parts[1].chain == "const"


def test_regions_tile_the_file_at_multiples_of_8():
    data = two_plane_file()
    reader = open_bytes(data)
    borders = [32]
    for part in reader.index.parts:
        borders += [part.offset + part.head_bytes, part.offset + part.stored_bytes]
    borders += [len(data) - 72, len(data)]
    assert all(border % 8 == 0 for border in borders)
    assert all(a <= b for a, b in pairwise(borders))
    assert borders[-3] == reader.trailer.index_offset


def test_read_blocks_gives_aligned_views_of_just_the_blocks_asked_for():
    reader = open_bytes(small_file())
    head = reader.read_head(0)
    assert head.name == "w.0"
    blocks = reader.read_blocks(0, head, 0, 1, 3)
    assert [block.size for block in blocks] == [64, 32]
    assert all(block.dtype == np.uint8 and block.ctypes.data % 8 == 0 for block in blocks)
    words = np.arange(40, dtype=np.uint32) * np.uint32(0x9E3779B9)
    assert b"".join(block.tobytes() for block in blocks) == words[16:].tobytes()
    assert reader.read_blocks(0, head, 0, 2, 2) == []


def test_empty_blocks_are_read():
    reader = open_bytes(two_plane_file())
    head = reader.read_head(0)
    blocks = reader.read_blocks(0, head, 1, 0, 2)
    assert [block.size for block in blocks] == [0, 8]


def test_a_part_is_read_with_its_head_and_all_blocks():
    reader = open_bytes(two_plane_file())
    head, planes = reader.read_part(0)
    assert head.head_digest == reader.index.parts[0].head_digest
    expected = [reader.read_blocks(0, head, plane, 0, head.num_blocks) for plane in range(2)]
    assert [[b.tobytes() for b in plane] for plane in planes] == [[b.tobytes() for b in p] for p in expected]
    assert all(block.dtype == np.uint8 and block.ctypes.data % 8 == 0 for plane in planes for block in plane)


@pytest.mark.parametrize(
    ("plane", "first", "last"), [(1, 0, 1), (0, 0, 4), (0, 2, 1), (0, -1, 1), (-1, 0, 1)]
)
def test_blocks_that_do_not_exist_cannot_be_asked_for(plane, first, last):
    reader = open_bytes(small_file())
    with pytest.raises(UsageError):
        reader.read_blocks(0, reader.read_head(0), plane, first, last)


@pytest.mark.parametrize("part", [-1, 2])
def test_parts_that_do_not_exist_cannot_be_asked_for(part):
    with pytest.raises(UsageError):
        open_bytes(small_file()).read_head(part)
    with pytest.raises(UsageError):
        open_bytes(small_file()).read_part(part)


def test_head_of_another_part_is_refused():
    reader = open_bytes(two_plane_file())
    with pytest.raises(UsageError):
        reader.read_blocks(1, reader.read_head(0), 0, 0, 1)


def test_damaged_block_is_named_with_part_tensor_and_offset():
    data = bytearray(small_file())
    reader = open_bytes(bytes(data))
    entry = reader.index.parts[0]
    offset = entry.offset + entry.head_bytes + 64
    data[offset + 5] ^= 0x10
    reader = open_bytes(bytes(data))
    head = reader.read_head(0)
    reader.read_blocks(0, head, 0, 0, 1)
    with pytest.raises(DigestMismatchError) as caught:
        reader.read_blocks(0, head, 0, 0, 3)
    error = caught.value
    assert (error.offset, error.tensor, error.where) == (offset, "w.0", "<BytesIO>")
    assert "part 0, plane 0, block 1" in str(error)
    assert error.expected == f"{int(head.block_digests[0, 1]):016x}"
    assert reader.read_blocks(0, head, 0, 1, 2, check=False)[0].tobytes() == bytes(data[offset : offset + 64])


def test_verify_reports_every_problem_and_goes_on():
    data = bytearray(two_plane_file())
    parts = open_bytes(bytes(data)).index.parts
    data[parts[0].offset + parts[0].head_bytes] ^= 1
    data[parts[0].offset + parts[0].head_bytes + 200] ^= 1
    data[parts[1].offset + 33] ^= 1
    data[parts[2].offset + parts[2].head_bytes + 64] ^= 1
    problems = verify_stored(open_bytes(bytes(data)))
    assert [type(problem) for problem in problems] == [DigestMismatchError] * 4
    offsets = [problem.offset for problem in problems]
    assert offsets == [
        parts[0].offset + parts[0].head_bytes,
        parts[0].offset + parts[0].head_bytes + 200,
        parts[1].offset,
        parts[2].offset + parts[2].head_bytes + 64,
    ]


def test_verify_tells_its_progress_up_to_the_size_of_the_file():
    data = two_plane_file()
    seen: list[int] = []
    verify_stored(open_bytes(data), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(data)


@pytest.mark.parametrize(
    "change",
    [
        {"num_elems": 0},
        {"num_elems": 41 + 16},
        {"word_bytes": 3},
        {"codec_id": 1 << 16},
        {"block_elems": 0},
        {"block_elems": limits.MAX_BLOCK_ELEMS + 1},
        {"block_sizes": np.array([[64, 64, 40]])},
        {"block_sizes": np.array([[64, 64, 33]])},
        {"block_sizes": np.array([[64, 64, 32 + (1 << 32)]])},
        {"block_sizes": np.array([[64, 64]])},
        {"block_digests": np.zeros((1, 2), np.uint64)},
        {"blocks": ()},
        {"raw_digest": 1 << 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_part_that_contradicts_itself_is_not_written(change):
    sink = io.BytesIO()
    writer = FileWriter(FileObjectSink(sink))
    good = raw_part(np.arange(40, dtype=np.uint32), 16)
    with pytest.raises(UsageError):
        writer.add_part(
            replace(good, **change), storage=0, start_bytes=0, dtype="int32", role="other", label={}
        )
    assert len(sink.getvalue()) == 32
    writer.add_part(good, storage=0, start_bytes=0, dtype="int32", role="other", label={})
    writer.finish(
        storages=[StorageEntry(bytes=160, device="cpu")],
        tensors=[],
        tree=None,
        meta={},
        encoder=0,
        writer_version="0.1.0",
    )
    assert verify_stored(open_bytes(sink.getvalue())) == []


def test_parts_that_overlap_or_go_backwards_are_not_written():
    part = raw_part(np.zeros(10, np.uint8), 16)
    with pytest.raises(UsageError, match="overlaps"):
        write([(part, 0, 0), (part, 0, 9)])
    with pytest.raises(UsageError, match="precedes"):
        write([(part, 0, 10), (part, 0, 0)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"storages": []},
        {"storages": [StorageEntry(bytes=9, device="cpu")]},
        {"storages": [StorageEntry(bytes=10, device="x" * 300)]},
        {"tensors": [TensorEntry(storage=0, dtype="uint8", shape=(11,), stride=(1,), offset=0)]},
        {"tensors": [TensorEntry(storage=0, dtype="uint8", shape=(1,), stride=(1,), offset=-1)]},
        {"tensors": [TensorEntry(storage=0, dtype="uint9", shape=(1,), stride=(1,), offset=0)]},
        {"tree": float("nan")},
        {"tree": {1: "a", "1": "b"}},
        {"tree": 10**30},
        {"meta": {"x": {1, 2}}},
        {"required": ["unknown"]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_index_that_breaks_a_rule_is_not_written(wrong):
    part = raw_part(np.zeros(10, np.uint8), 16)
    with pytest.raises(ThinpointError):
        write([(part, 0, 0)], **{"storages": [StorageEntry(bytes=10, device="cpu")], **wrong})


def test_index_that_is_too_large_is_not_written():
    with pytest.raises(UsageError, match="too large"):
        write(tree="x" * limits.MAX_INDEX_RAW_BYTES)


def test_index_that_compresses_like_a_bomb_is_stored_uncompressed():
    tree = [0] * 1_000_000
    data, summary = write(tree=tree)
    assert summary.file_bytes > 2_000_000
    assert open_bytes(data).index.tree == tree


@pytest.mark.parametrize("size", [(1 << 20) + 1000, 2 << 20, (2 << 20) + 1, (9 << 17) - 1])
def test_uncompressed_frame_is_a_zstd_frame(size):
    raw = b"[" + b" " * (size - 2) + b"]"
    frame = compress_index(raw)
    assert len(frame) > size - (1 << 20) - 64 * 100
    assert zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False) == raw
    assert zstandard.get_frame_parameters(frame).content_size == size


def test_finished_file_takes_nothing_more():
    sink = io.BytesIO()
    writer = FileWriter(FileObjectSink(sink))
    done = {"storages": [], "tensors": [], "tree": 0, "meta": {}, "encoder": 0, "writer_version": ""}
    writer.finish(**done)
    size = len(sink.getvalue())
    with pytest.raises(UsageError):
        writer.finish(**done)
    with pytest.raises(UsageError):
        writer.add_part(planeless_part(1, b""), storage=0, start_bytes=0, dtype="", role="", label={})
    assert len(sink.getvalue()) == size == writer.offset


def test_writer_whose_sink_failed_cannot_finish():
    class FullAfter:
        def __init__(self, room: int) -> None:
            self.room = room

        def write(self, buffer) -> None:
            self.room -= memoryview(buffer).nbytes
            if self.room < 0:
                raise StorageError("full")

    writer = FileWriter(FullAfter(300))
    part = raw_part(np.zeros(400, np.uint8), 64)
    with pytest.raises(StorageError):
        writer.add_part(part, storage=0, start_bytes=0, dtype="uint8", role="other", label={})
    with pytest.raises(UsageError, match="failed"):
        writer.finish(storages=[], tensors=[], tree=0, meta={}, encoder=0, writer_version="")


def test_taking_apart_and_sealing_gives_the_same_file():
    for data in (small_file(), two_plane_file()):
        assert take_apart(data).seal() == data


def test_reading_a_file_needs_no_torch():
    code = "import sys, thinpoint.file.verify, thinpoint.file.writer, thinpoint.store.local; "
    code += "import thinpoint.store.fileobj; "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'numba', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
