"""Enums, dataclasses and namedtuples are rebuilt from data alone, and only if their class is imported already."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import state_classes
import torch
from state_classes import (
    Color,
    Config,
    Finalised,
    Frozen,
    Guarded,
    Level,
    MyDict,
    Option,
    Pair,
    Plain,
    Point,
    Slotted,
)
from state_memory import Memory, round_trip

from thinpoint.errors import UnsafeObjectError, UnsupportedObjectError
from thinpoint.state.flatten import flatten


@pytest.mark.parametrize(
    "member", [Color.RED, Color.GREEN, Level.LOW, Option.A, Option.A | Option.B, Option(0)]
)
def test_enum_members_are_the_members(member: Any) -> None:
    assert round_trip(member, allow_pickle=False) is member
    assert round_trip({member: 1}, allow_pickle=False) == {member: 1}


@pytest.mark.parametrize("value", [Frozen(1, [2]), Slotted(3, (4,)), Point(1, [2]), Pair("a", None)])
def test_dataclasses_and_namedtuples(value: Any) -> None:
    loaded = round_trip(value, allow_pickle=False)
    assert type(loaded) is type(value) and loaded == value


def test_no_constructor_runs() -> None:
    state = Config(0.1, tags=["x"])
    state_classes.created.clear()
    assert round_trip(state, allow_pickle=False) == state
    assert state_classes.created == []


def test_additional_attributes_of_a_dataclass_are_kept() -> None:
    state = Config(0.1)
    state.extra = torch.ones(2)  # type: ignore[attr-defined]
    assert round_trip(state).extra.tolist() == [1, 1]


def test_an_attribute_that_was_never_set_stays_unset() -> None:
    state = Slotted.__new__(Slotted)
    object.__setattr__(state, "a", 1)
    loaded = round_trip(state, allow_pickle=False)
    assert loaded.a == 1 and not hasattr(loaded, "b")


def test_a_frozen_dataclass_in_a_cycle() -> None:
    state = Frozen(1, [])
    state.b.append(state)
    loaded = round_trip(state, allow_pickle=False)
    assert loaded.b[0] is loaded


def test_a_dataclass_with_its_own_pickling_is_pickled() -> None:
    memory = Memory(flatten(state_classes.Reduced(1)))
    assert "pickle" in memory.tree
    assert memory.load(weights_only=False).a == 2


def test_no_setter_or_property_of_the_class_runs() -> None:
    memory = Memory(flatten(Guarded(1)))
    state_classes.created.clear()
    memory.tree["dataclass"][2] += ["doubled", 5, "__class__", 7]
    loaded = memory.load()
    assert state_classes.created == []
    assert type(loaded) is Guarded and loaded.doubled == 2 and vars(loaded)["doubled"] == 5


def test_a_class_with_a_finaliser_is_not_made() -> None:
    memory = Memory(flatten(Finalised("x")))
    state_classes.created.clear()
    with pytest.raises(UnsafeObjectError, match="Finalised"):
        memory.load()
    assert state_classes.created == []


@pytest.mark.parametrize(
    ("tag", "module", "qualname"),
    [
        ("dataclass", "os", "system"),
        ("dataclass", "subprocess", "Popen"),
        ("dataclass", "builtins", "dict"),
        ("dataclass", "state_classes", "Plain"),
        ("dataclass", "state_classes", "Color"),
        ("dataclass", "state_classes", "Config.lr"),
        ("dataclass", "state_classes", ""),
        ("namedtuple", "builtins", "tuple"),
        ("namedtuple", "state_classes", "Frozen"),
        ("dataclass", "no.such.module", "X"),
    ],
)
def test_only_the_expected_kind_of_class_is_accepted(tag: str, module: str, qualname: str) -> None:
    memory = Memory(flatten(None))
    memory.tree = {tag: [module, qualname, ["a", 1]]}
    with pytest.raises(UnsafeObjectError, match="Weights only load failed"):
        memory.load()


def test_enum_reference_to_something_else_is_refused() -> None:
    memory = Memory(flatten(None))
    memory.tree = {"enum": ["os", "environ", "PATH"]}
    with pytest.raises(UnsafeObjectError, match="weights_only=False"):
        memory.load()


@pytest.fixture
def unimported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A state with a class of a module that can be imported but is not."""
    source = "import dataclasses\n@dataclasses.dataclass\nclass C:\n    a: int\n"
    (tmp_path / "state_unimported.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import state_unimported

    memory = Memory(flatten({"config": state_unimported.C(5)}))
    monkeypatch.delitem(sys.modules, "state_unimported")
    yield memory
    sys.modules.pop("state_unimported", None)


def test_a_module_that_is_not_imported_is_not_imported(unimported: Memory) -> None:
    with pytest.raises(UnsafeObjectError, match="Import the module that defines it first") as caught:
        unimported.load()
    assert "config is a dataclass state_unimported.C" in str(caught.value)
    assert "state_unimported" not in sys.modules


def test_without_weights_only_the_module_is_imported(unimported: Memory) -> None:
    assert unimported.load(weights_only=False)["config"].a == 5


def test_a_lazy_module_is_not_triggered(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was looked up")

    monkeypatch.setitem(sys.modules, "state_lazy", Lazy("state_lazy"))
    memory = Memory(flatten(None))
    memory.tree = {"dataclass": ["state_lazy", "Config", []]}
    with pytest.raises(UnsafeObjectError):
        memory.load()


def test_changed_fields_of_a_namedtuple_are_reported() -> None:
    memory = Memory(flatten(Point(1, 2)))
    memory.tree["namedtuple"][2] = ["x", 1, "z", 2]
    with pytest.raises(UnsupportedObjectError, match=r"fields x, z; the class has x, y"):
        memory.load()


def test_local_classes_and_subclasses_of_builtins_are_no_plain_data() -> None:
    @dataclasses.dataclass
    class Local:
        a: int

    with pytest.raises(UnsupportedObjectError, match=r"a\.b is a .*Local"):
        flatten({"a": {"b": Local(1)}})
    for value in (MyDict(a=1), Plain(1)):
        with pytest.raises(UnsupportedObjectError, match="only be stored by pickle"):
            flatten([value], allow_pickle=False)
        assert type(round_trip([value], weights_only=False)[0]) is type(value)
