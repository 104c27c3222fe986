"""Names of a flat state back to nested containers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thinpoint.formats.leaves import Leaf
from thinpoint.state.tree import Path, display


def nested(leaves: Iterable[tuple[Path, Leaf]]) -> Any:
    """Dicts of the leaves, and lists where the keys are the positions 0 to n - 1.

    If the paths contradict each other (one leads through a leaf), all are taken as flat names instead.
    """
    given = list(leaves)
    root: dict[Any, Any] = {}
    for path, leaf in given:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                return {display(path): leaf for path, leaf in given}
        if path[-1] in node:
            return {display(path): leaf for path, leaf in given}
        node[path[-1]] = leaf
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if all(type(key) is int for key in node) and set(node) == set(range(len(node))):
        return [_with_lists(node[i]) for i in range(len(node))]
    return {key: _with_lists(value) for key, value in node.items()}
