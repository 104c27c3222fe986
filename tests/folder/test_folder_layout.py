"""Layouts come back as they were; broken and hostile ones are errors, in bounded memory and time."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from folder_layouts import NAME, grid, parsed, record_for, some_layout, tensor_layout

from thinpoint.errors import (
    DamagedFileError,
    DigestMismatchError,
    LimitExceededError,
    MalformedFileError,
    TruncatedFileError,
    UnsupportedVersionError,
)
from thinpoint.folder.coverage import check_coverage
from thinpoint.folder.layout import Layout
from thinpoint.folder.layout_file import dump_layout, parse_layout


def stored(layout: Layout) -> bytes:
    return dump_layout(layout, name=NAME)[0]


def fields_of(layout: Layout) -> dict[str, Any]:
    return json.loads(zstandard.decompress(stored(layout)))


def compressed(fields: Any) -> bytes:
    return zstandard.compress(json.dumps(fields).encode())


def test_a_layout_comes_back_as_it_was() -> None:
    layout = some_layout()
    found = parsed(stored(layout))
    assert found.world_size == layout.world_size
    assert found.objects == layout.objects and found.rank_states == layout.rank_states
    assert found.planner_data == layout.planner_data
    assert list(found.tensors) == list(layout.tensors)
    for name, tensor in layout.tensors.items():
        other = found.tensors[name]
        assert (other.dtype, other.shape, other.chunks) == (tensor.dtype, tensor.shape, tensor.chunks)


def test_the_same_layout_gives_the_same_bytes() -> None:
    assert stored(some_layout()) == stored(some_layout())
    assert stored(parsed(stored(some_layout()))) == stored(some_layout())


def test_what_overlaps_a_box() -> None:
    tensor = grid((40, 6), (3, 2))
    assert [chunk.rank for chunk in tensor.overlapping((13, 0), (15, 3))] == [0, 2]
    assert [chunk.rank for chunk in tensor.overlapping((0, 0), (40, 6))] == [0, 1, 2, 3, 4, 5]
    assert list(tensor.overlapping((5, 2), (5, 4))) == []


def test_two_million_chunks_are_small_and_quick() -> None:
    ways = [grid((4096 + i, 64), (1024, 1)) for i in range(3)]
    sharded = {f"layers.{i}.weight": ways[i % 3] for i in range(2000)}
    layout = Layout(world_size=1024, tensors=sharded, objects={})
    data = stored(layout)
    begin = time.perf_counter()
    found = parsed(data)
    seconds = time.perf_counter() - begin
    assert found.num_chunks == 2_048_000
    assert len(data) < 1 << 20
    # No figure to be proud of, but a bound on what is wrong by an order of magnitude.
    assert seconds < 30


# ---- coverage ------------------------------------------------------------------------------------------------------

PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


def coverage(shape: tuple[int, ...], boxes: list[tuple[Any, Any]]) -> str | None:
    tensor = tensor_layout(shape, [(offsets, sizes, 0) for offsets, sizes in boxes])
    return check_coverage(shape, tensor.offsets, tensor.sizes)


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [((), ())]),
        ((0,), []),
        ((0,), [((0,), (0,))]),
        ((5,), [((3,), (2,)), ((0,), (3,))]),
        ((5,), [((0,), (5,)), ((5,), (0,)), ((2,), (0,))]),
        ((3, 3), PINWHEEL),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (2, 2)), ((2, 2), (2, 1)), ((2, 3), (2, 1))]),
        ((1 << 62, 2), [((0, 0), (1 << 62, 1)), ((0, 1), (1 << 62, 1))]),
    ],
)
def test_boxes_that_fill_a_shape(shape: tuple[int, ...], boxes: list[tuple[Any, Any]]) -> None:
    assert coverage(shape, boxes) is None


@pytest.mark.parametrize(
    ("shape", "boxes", "reason"),
    [
        ((), [], "0 of 1"),
        ((), [((), ()), ((), ())], "overlap"),
        ((5,), [((0,), (4,))], "4 of 5"),
        ((5,), [((0,), (6,))], "outside"),
        ((5,), [((-1,), (6,))], "outside"),
        ((5,), [((0,), (-1,)), ((0,), (6,))], "outside"),
        ((5,), [((6,), (0,)), ((0,), (5,))], "outside"),
        ((5,), [((1 << 62,), (1 << 62,)), ((0,), (5,))], "outside"),
        ((4,), [((0,), (3,)), ((0,), (1,))], "overlap"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "overlap"),
        ((4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))], "overlap"),
        ((3, 3), [*PINWHEEL[:4], ((0, 1), (1, 1))], "overlap"),
        ((2, 2, 2), [((0, 0, 0), (2, 2, 1)), ((0, 0, 0), (2, 1, 2))], "overlap"),
    ],
)
def test_boxes_that_do_not(shape: tuple[int, ...], boxes: list[tuple[Any, Any]], reason: str) -> None:
    found = coverage(shape, boxes)
    assert found is not None and reason in found


def test_random_boxes_are_judged_as_by_counting_every_element() -> None:
    random = np.random.default_rng(0)
    verdicts = set()
    for _ in range(400):
        shape = tuple(random.integers(1, 5, 2).tolist())
        boxes = []
        for _ in range(random.integers(1, 5)):
            start = [int(random.integers(0, size)) for size in shape]
            boxes.append(
                (
                    start,
                    [int(random.integers(1, size - low + 1)) for low, size in zip(start, shape, strict=True)],
                )
            )
        counts = np.zeros(shape, int)
        for (row, column), (rows, columns) in boxes:
            counts[row : row + rows, column : column + columns] += 1
        is_filled = bool((counts == 1).all())
        assert (coverage(shape, boxes) is None) == is_filled
        verdicts.add(is_filled)
    assert verdicts == {True, False}


def test_boxes_that_no_cut_separates_are_limited() -> None:
    count = 5000
    boxes = [((i, i), (1, 2)) for i in range(count)]
    found = coverage((2 * count, count + 1), [*boxes, ((count, 0), (1, 0))])
    # Too few elements is told first: what matters is that it ends.
    assert found is not None


# ---- hostile files -------------------------------------------------------------------------------------------------


def test_a_layout_cut_anywhere_is_an_error() -> None:
    data = stored(some_layout())
    record = record_for(data)
    for size in range(len(data)):
        with pytest.raises(TruncatedFileError):
            parse_layout(data[:size], record, where="a test")
        with pytest.raises(DamagedFileError):
            parsed(data[:size])


def test_a_flipped_bit_is_an_error() -> None:
    data = stored(some_layout())
    for place in range(0, len(data), 7):
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        with pytest.raises(DigestMismatchError):
            parse_layout(bytes(broken), record_for(data), where="a test")


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Replaces a field, by its keys joined with slashes."""

    def apply(fields: dict[str, Any]) -> None:
        *above, last = path.split("/")
        for key in above:
            fields = fields[key]
        if value is ...:
            del fields[last]
        else:
            fields[last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "error", "reason"),
    [
        ("layout", 2, UnsupportedVersionError, "newer version"),
        ("layout", "1", MalformedFileError, "layout"),
        ("world_size", ..., MalformedFileError, "world_size"),
        ("world_size", 10**9, LimitExceededError, "world_size"),
        ("world_size", 5, MalformedFileError, "rank"),
        ("world_size", 2, MalformedFileError, "rank"),
        ("tensors", [], MalformedFileError, "tensors"),
        ("tensors/uneven", 3, MalformedFileError, "uneven"),
        ("tensors/uneven/dtype", 7, MalformedFileError, "dtype"),
        ("tensors/uneven/dtype", "x" * 2000, LimitExceededError, "dtype"),
        ("tensors/uneven/shape", [11], MalformedFileError, "10 of 11"),
        ("tensors/uneven/shape", [9], MalformedFileError, "outside"),
        ("tensors/uneven/shape", [-10], MalformedFileError, "shape"),
        ("tensors/uneven/shape", [10.0], MalformedFileError, "shape"),
        ("tensors/uneven/shape", [2**64], LimitExceededError, "shape"),
        ("tensors/uneven/shape", [True], MalformedFileError, "shape"),
        ("tensors/uneven/shape", [1] * 65, LimitExceededError, "shape"),
        ("tensors/uneven/shape", [10, 1], MalformedFileError, "2 columns"),
        ("tensors/uneven/chunks", 3, MalformedFileError, "column of 3"),
        ("tensors/uneven/chunks", -1, MalformedFileError, "chunks"),
        ("tensors/uneven/chunks", 10**15, LimitExceededError, "chunks"),
        ("tensors/uneven/offsets", [[99]], MalformedFileError, "place of a column"),
        ("tensors/uneven/offsets", [[-1]], MalformedFileError, "place of a column"),
        ("tensors/uneven/offsets", [[0, 0]], MalformedFileError, "place of a column"),
        ("tensors/uneven/offsets", ["0"], MalformedFileError, "place of a column"),
        ("tensors/uneven/offsets", [-1], MalformedFileError, "from 0"),
        ("tensors/uneven/offsets", [0], MalformedFileError, "overlap"),
        ("tensors/uneven/offsets", [True], MalformedFileError, "place of a column"),
        ("tensors/uneven/sizes", [2**63], MalformedFileError, "from 0"),
        ("tensors/uneven/sizes", [1], MalformedFileError, "4 of 10"),
        ("tensors/uneven/rank", 6, MalformedFileError, "less than 6"),
        ("tensors/uneven/rank", None, MalformedFileError, "rank"),
        ("columns", [[0, -3]], MalformedFileError, "columns"),
        ("columns", [["a"]], MalformedFileError, "columns"),
        ("columns", [[1.5]], MalformedFileError, "columns"),
        ("columns", {}, MalformedFileError, "columns"),
        ("objects", {"step": 6}, MalformedFileError, "rank of step"),
        ("objects", {"step": -1}, MalformedFileError, "step"),
        ("objects", {"scalar": 0}, MalformedFileError, "either a tensor or an object"),
        ("rank_states", ["nobody"], MalformedFileError, "names of objects"),
        ("rank_states", [["step"]], MalformedFileError, "rank_states"),
        ("rank_states", ..., MalformedFileError, "rank_states"),
        ("planner_data", {"x": "text"}, MalformedFileError, "planner_data"),
        ("planner_data", {"x": [None]}, MalformedFileError, "planner_data"),
        ("planner_data", {"x": [{"a": 1}]}, MalformedFileError, "planner_data"),
    ],
)
def test_what_contradicts_itself_is_an_error(path: str, value: Any, error: type, reason: str) -> None:
    fields = fields_of(some_layout())
    change(path, value)(fields)
    with pytest.raises(error) as caught:
        parsed(compressed(fields))
    assert reason in str(caught.value)


def test_constant_columns_of_many_chunks_take_no_memory() -> None:
    fields = fields_of(some_layout())
    entry = {"dtype": "float32", "shape": [1] * 60, "chunks": 1 << 24, "rank": 0}
    fields["tensors"]["bomb"] = {**entry, "offsets": [0] * 60, "sizes": [0] * 60}
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError, match="chunks times dimensions"):
            parsed(compressed(fields))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_unpacks_to_gigabytes_takes_no_memory() -> None:
    bomb = zstandard.compress(bytes(300 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError, match="size of its content"):
            parsed(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frames_without_a_size_or_with_more_behind_them_are_errors() -> None:
    raw = zstandard.decompress(stored(some_layout()))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    for data in (unsized, stored(some_layout()) + b"x", b"", b"{}", compressed([]), compressed("layout")):
        with pytest.raises(DamagedFileError):
            parsed(data)


def test_a_layout_with_a_gap_is_not_written() -> None:
    layout = some_layout()
    layout.tensors["gap"] = tensor_layout((4,), [((0,), (3,), 0)])
    with pytest.raises(MalformedFileError, match="3 of 4"):
        stored(layout)


def test_a_layout_may_name_nothing() -> None:
    layout = replace(some_layout(), tensors={}, objects={}, rank_states=frozenset(), planner_data=None)
    assert parsed(stored(layout)).planner_data is None
