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
