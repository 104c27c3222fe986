import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinpoint.errors import LimitExceededError, UnknownNameError
from thinpoint.formats.chunks import assemble
from thinpoint.formats.leaves import (
    ObjectLeaf,
    OpenCheckpoint,
    TensorLeaf,
    boxes,
    materialized,
    read_pieces,
    sharing,
    unique_names,
    walk,
)
from thinpoint.formats.nesting import nested
from thinpoint.formats.torch_source import tree_of

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def leaf_of(tensor: torch.Tensor) -> TensorLeaf:
    leaf = tree_of(tensor)
    assert isinstance(leaf, TensorLeaf)
    return leaf


def opened(obj: object) -> OpenCheckpoint:
    return OpenCheckpoint(name="memory", kind="pt", tree=tree_of(obj), num_bytes=0)


@given(SHAPES, st.data())
def test_boxes_hold_a_range_of_the_row_major_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    whole = torch.arange(size).reshape(shape)
    found = list(boxes(shape, start, end))
    assert len(found) <= 2 * len(shape) + 1
    assert [value for box in found for value in whole[box].reshape(-1).tolist()] == list(range(start, end))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.data())
def test_a_box_is_assembled_from_chunks_of_any_grid(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    cuts = [sorted({0, size, *data.draw(st.sets(st.integers(1, size)))}) for size in shape]
    chunks = []
    for corner in itertools.product(*(range(len(cut) - 1) for cut in cuts)):
        offsets = tuple(cut[i] for cut, i in zip(cuts, corner, strict=True))
        ends = tuple(cut[i + 1] for cut, i in zip(cuts, corner, strict=True))
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        part = whole[tuple(map(slice, offsets, ends))]
        chunks.append((offsets, sizes, leaf_of(part).read))
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    box = tuple(slice(a, data.draw(st.integers(a + 1, size))) for a, size in zip(low, shape, strict=True))
    assert torch.equal(assemble(chunks, box, whole.dtype), whole[box])


def test_pieces_are_bounded_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinpoint.formats.leaves.PIECE_BYTES", 100)
    tensor = torch.arange(7 * 11 * 3, dtype=torch.int32).reshape(7, 11, 3)
    pieces = list(read_pieces(leaf_of(tensor)))
    assert max(piece.numel() for piece in pieces) <= 25
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.reshape(-1))
    assert not list(read_pieces(leaf_of(torch.empty(3, 0))))
    assert [piece.tolist() for piece in read_pieces(leaf_of(torch.tensor(5)))] == [5]


def test_names_select_and_keep_containers() -> None:
    state = {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "list": [1, torch.zeros(1)], "step": 4}
    chosen = opened(state).selected(["model.a", "list.1"])
    assert [path for path, _ in walk(chosen.tree)] == [("model", "a"), ("list", 0), ("list", 1)]
    loaded = materialized(chosen.tree)
    assert loaded["list"][0] is None and "step" not in loaded
    assert opened(state).selected(None).tree is not None
    with pytest.raises(UnknownNameError):
        opened(state).selected(["nothing*"])


def test_casting_changes_floats_of_16_bits_and_more_only() -> None:
    state = {
        "f32": torch.randn(3),
        "bf16": torch.randn(3).bfloat16(),
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "int": torch.arange(3),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    state["tied"] = state["f32"]
    cast, names = opened(state).cast(torch.bfloat16)
    assert names == ["f32", "tied"]
    loaded = materialized(cast.tree)
    assert torch.equal(loaded["f32"], state["f32"].bfloat16()) and loaded["tied"] is loaded["f32"]
    assert loaded["f8"].dtype == torch.float8_e4m3fn and loaded["complex"].dtype == torch.complex64


def test_tensors_that_share_memory_are_found() -> None:
    base = torch.arange(10.0)
    state = {"a": base[:5], "b": base[5:], "c": base[4:6], "d": base.clone(), "e": base[:5]}
    assert sharing(opened(state).tensors()) == [("b",), ("c",), ("e",)]
    tree = opened(state).tree
    assert tree["a"] is tree["e"]


def test_values_that_contain_themselves_or_each_other_end() -> None:
    cyclic: list[object] = [torch.ones(1)]
    cyclic.append(cyclic)
    leaves = dict(walk(tree_of(cyclic)))
    assert isinstance(leaves[(1,)], ObjectLeaf)
    bomb: object = [1]
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(LimitExceededError):
        tree_of(bomb)


def test_names_that_look_alike_stay_apart() -> None:
    names = unique_names([("a", "b"), ("a.b",), ("c",)])
    assert names == {("a", "b"): "a.b", ("a.b",): "('a.b',)", ("c",): "c"}


def test_paths_become_containers_and_contradictions_flat_names() -> None:
    leaf = ObjectLeaf(load=lambda: 1)
    paths = [("a", 0, "x"), ("a", 1), ("b", 5), ("c", "d")]
    assert nested((path, leaf) for path in paths) == {
        "a": [{"x": leaf}, leaf],
        "b": {5: leaf},
        "c": {"d": leaf},
    }
    assert nested([(("a",), leaf), (("a", "b"), leaf)]) == {"a": leaf, "a.b": leaf}
    assert nested([(("a", "b"), leaf), (("a",), leaf)]) == {"a": leaf, "a.b": leaf}
    huge = nested([(("a", 10**15), leaf)])
    assert huge == {"a": {10**15: leaf}}
