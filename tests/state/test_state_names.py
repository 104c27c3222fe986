"""Paths, patterns, and loading a part of a state."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from state_memory import Memory, bits

from thinpoint.errors import UnknownNameError, UsageError
from thinpoint.state.flatten import flatten
from thinpoint.state.tree_names import display, match, tensor_names, walk


def state() -> dict[Any, Any]:
    return {
        "model": {"layer.weight": torch.ones(2), "layer": {"weight": torch.zeros(3)}},
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0)}, 1: {"step": torch.tensor(2.0)}},
            "param_groups": [{"lr": 1}],
        },
        1: torch.ones(1),
        "1": torch.ones(1),
        ("pair", 2): [torch.ones(1), "text", torch.full((4,), 2.0)],
        "epoch": 7,
    }


PATHS = {
    ("model", "layer.weight"): 0,
    ("model", "layer", "weight"): 1,
    ("optimizer", "state", 0, "step"): 2,
    ("optimizer", "state", 1, "step"): 3,
    (1,): 4,
    ("1",): 5,
    (("pair", 2), 0): 6,
    (("pair", 2), 2): 7,
}


def test_every_tensor_has_the_path_of_its_keys() -> None:
    memory = Memory(flatten(state()))
    assert tensor_names(memory.tree, len(memory.tensors)) == PATHS


def test_a_tensor_in_two_places_has_two_paths() -> None:
    tensor = torch.ones(1)
    memory = Memory(flatten({"a": tensor, "b": [tensor]}))
    assert tensor_names(memory.tree, 1) == {("a",): 0, ("b", 0): 0}


def test_leaves_include_values_and_empty_containers() -> None:
    memory = Memory(flatten({"a": [], "b": {"c": 1}, "d": (2, {})}))
    assert [path for path, _ in walk(memory.tree)] == [("a",), ("b", "c"), ("d", 0), ("d", 1)]


def test_tensors_of_a_pickle_are_numbered_below_its_path() -> None:
    model = torch.nn.Linear(2, 2)
    memory = Memory(flatten({"m": model}))
    assert set(tensor_names(memory.tree, 2)) == {("m", 0), ("m", 1)}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layer.weight", {("model", "layer.weight"), ("model", "layer", "weight")}),
        (("model", "layer"), {("model", "layer", "weight")}),
        (("model", "layer.weight"), {("model", "layer.weight")}),
        ("optimizer.state.1", {("optimizer", "state", 1, "step")}),
        ("optimizer.*.step", {("optimizer", "state", 0, "step"), ("optimizer", "state", 1, "step")}),
        ((1,), {(1,)}),
        ("1", {(1,), ("1",)}),
        ([("1",), (1,)], {(1,), ("1",)}),
        ((), set(PATHS)),
        ("*", set(PATHS)),
    ],
)
def test_patterns(pattern: Any, expected: set[Any]) -> None:
    assert match(PATHS, pattern) == expected


def test_a_name_that_holds_the_characters_of_a_glob_matches_itself() -> None:
    assert match([("w[0]",), ("w0",)], "w[0]") >= {("w[0]",)}


def test_prefixes_end_at_the_border_of_a_key() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean model\.layer"):
        match(PATHS, "model.lay")


def test_unknown_names_are_reported_even_beside_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="'nothing'"):
        match(PATHS, ["1", "nothing"])
    with pytest.raises(UsageError, match="not int"):
        match(PATHS, [5])  # type: ignore[list-item]


def test_display() -> None:
    assert display(("a", 0, "b.c")) == "a.0.b.c"


def test_a_selection_keeps_its_place_and_nothing_else() -> None:
    memory = Memory(flatten(state()))
    loaded = memory.load(
        select={("model", "layer", "weight"), ("optimizer", "state", 1, "step"), (("pair", 2), 2)}
    )
    assert list(loaded) == ["model", "optimizer", ("pair", 2)]
    assert list(loaded["model"]) == ["layer"] and loaded["model"]["layer"]["weight"].tolist() == [0, 0, 0]
    assert list(loaded["optimizer"]) == ["state"] and list(loaded["optimizer"]["state"]) == [1]
    assert loaded[("pair", 2)][:2] == [None, None] and loaded[("pair", 2)][2].tolist() == [2.0] * 4
    assert len(memory.fetched) == 3


def test_only_the_bytes_of_the_selection_are_asked_for() -> None:
    base = torch.arange(100.0)
    memory = Memory(flatten({"a": base[:10], "b": base[50:60], "c": base[5:20]}))
    loaded = memory.load(select={("b",), ("c",)})
    assert memory.ranges == {0: [(20, 80), (200, 240)]}
    assert bits(loaded["b"]) == bits(base[50:60]) and bits(loaded["c"]) == bits(base[5:20])


def test_all_ranges_are_announced_before_anything_is_fetched() -> None:
    base = torch.arange(100.0)
    memory = Memory(flatten({"a": base[:10], "b": base[50:60], "c": torch.ones(4), "d": b"x" * 2000}))
    announced: list[dict[int, list[tuple[int, int]]]] = []

    def prepare(ranges: dict[int, list[tuple[int, int]]]) -> None:
        assert memory.fetched == []
        announced.append(ranges)

    memory.load(select={("b",), ("c",), ("d",)}, prepare=prepare)
    assert announced == [{0: [(200, 240)], 1: [(0, 16)]}] and announced[0] == memory.ranges


def test_a_selected_container_is_whole() -> None:
    memory = Memory(flatten(state()))
    loaded = memory.load(select={("optimizer",)})
    assert loaded["optimizer"]["param_groups"] == [{"lr": 1}] and list(loaded) == ["optimizer"]


def test_the_root_selects_everything() -> None:
    memory = Memory(flatten(state()))
    assert memory.load(select={()})["epoch"] == 7


def test_a_selected_reference_brings_what_it_refers_to() -> None:
    shared = {"x": torch.ones(3), "y": 2}
    memory = Memory(flatten({"a": shared, "b": shared, "c": torch.ones(1)}))
    loaded = memory.load(select={("b",)})
    assert list(loaded) == ["b"] and loaded["b"]["x"].tolist() == [1, 1, 1] and loaded["b"]["y"] == 2


def test_a_selection_inside_and_a_reference_to_the_whole() -> None:
    shared = {"x": torch.ones(3), "y": torch.zeros(2)}
    memory = Memory(flatten({"a": shared, "b": shared}))
    loaded = memory.load(select={("a", "x"), ("b",)})
    assert list(loaded["a"]) == ["x"] and set(loaded["b"]) == {"x", "y"}
    assert loaded["b"]["x"] is loaded["a"]["x"]


def test_a_selection_in_a_cycle() -> None:
    cyclic: dict[str, Any] = {"w": torch.ones(2), "other": torch.zeros(2)}
    cyclic["inner"] = {"top": cyclic, "v": torch.ones(1)}
    memory = Memory(flatten(cyclic))
    loaded = memory.load(select={("inner",)})
    assert set(loaded) == {"inner"} and loaded["inner"]["top"]["w"].tolist() == [1, 1]


def test_attributes_of_a_partly_selected_dict_may_hold_tensors() -> None:
    model = torch.nn.Linear(2, 2).state_dict()
    model._metadata["extra"] = torch.ones(5)  # type: ignore[attr-defined]
    memory = Memory(flatten(model))
    loaded = memory.load(select={("bias",)})
    assert list(loaded) == ["bias"] and loaded._metadata["extra"].tolist() == [1] * 5


def test_a_selection_below_a_pickle_or_a_tensor_brings_all_of_it() -> None:
    memory = Memory(flatten({"m": torch.nn.Linear(2, 2), "x": torch.ones(1)}))
    loaded = memory.load(weights_only=False, select={("m", 1), ("x", "inner")})
    assert isinstance(loaded["m"], torch.nn.Linear) and loaded["x"].item() == 1


def test_names_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import thinpoint.state.tree_names, thinpoint.state.roles"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plain_states_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from thinpoint.state.flatten import flatten\n"
        "from thinpoint.state.unflatten import unflatten\n"
        "del sys.modules['torch']\n"
        "flat = flatten({'a': [1, b'x', {2}]})\n"
        "none = lambda *args: None\n"
        "back = unflatten(flat.tree, flat.tensors, num_storages=0, fetch_storage=none, fetch_blob=none)\n"
        "assert back == {'a': [1, b'x', {2}]} and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
