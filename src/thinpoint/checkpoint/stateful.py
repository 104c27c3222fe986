"""The state of a training run whose models and optimizers are given as they are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from thinpoint.state.into import is_stateful


def state_of(value: Any) -> Any:
    """The same state with a state dict in the place of each module, optimizer and whatever else has `load_state_dict`.

    Looks into dicts, lists and tuples; what has nothing to replace stays the same object. `restore` takes the objects
    themselves: so does a save, which would pickle them otherwise.
    """
    return _replaced(value, ())


def _replaced(value: Any, above: tuple[int, ...]) -> Any:
    if is_stateful(value):
        return value.state_dict()
    if id(value) in above:
        return value
    above = (*above, id(value))
    if type(value) in (dict, OrderedDict):
        new = {key: _replaced(child, above) for key, child in value.items()}
        return value if all(new[key] is child for key, child in value.items()) else type(value)(new)
    if type(value) in (list, tuple):
        items = [_replaced(child, above) for child in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value


def give_back(value: Any, loaded: Any) -> None:
    """After `loaded`, which `state_of(value)` gave, was filled: puts its values where `value` has them.

    Objects get their state back through `load_state_dict`; what is no tensor is replaced in its dict or list.
    """
    if is_stateful(value):
        value.load_state_dict(loaded)
        return
    keys = list(value) if type(value) in (dict, OrderedDict) else range(len(value))
    for key in keys:
        old, new = value[key], loaded[key]
        if new is old:
            continue
        if _has_inside(old) and type(old) is type(new) and len(old) == len(new):
            give_back(old, new)
        elif is_stateful(old):
            old.load_state_dict(new)
        elif type(value) is not tuple:
            value[key] = new


def _has_inside(value: Any) -> bool:
    """Whether a container is one that a planner goes through, or that holds an object which takes its own state."""
    if type(value) in (dict, OrderedDict):
        return True
    return type(value) in (list, tuple) and any(
        is_stateful(item) or hasattr(item, "dtype") or _has_inside(item) for item in value
    )
