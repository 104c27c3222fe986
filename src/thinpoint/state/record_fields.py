"""What a tensor record refers to: other tensors, and trees of its own. Torch-free; trusts nothing."""

from __future__ import annotations

from typing import Any

from thinpoint.state.tree import Node, Path, malformed
from thinpoint.state.tree_names import checked_tensor_id

TENSOR_TAGS = frozenset({"tensor", "untyped_storage", "typed_storage"})
"""The tags of a tree, and of a pickle's persistent ids, that hold a tensor id."""


def inner_ids(record: dict[str, Any], num_tensors: int, path: Path) -> dict[str, int]:
    """The ids of the tensors that a tensor is made of, by name.

    Raises:
        MalformedFileError: no object, or an id of no tensor.
    """
    inner = record.get("inner", {})
    if not isinstance(inner, dict):
        malformed(path, "the inner tensors of a tensor are no object")
    return {name: checked_tensor_id(value, num_tensors, path) for name, value in inner.items()}


def trees_of(record: dict[str, Any]) -> list[Node]:
    """The trees inside a record: its attributes, and the objects and the context of its subclass."""
    trees = [record["attrs"]] if "attrs" in record else []
    subclass = record.get("subclass")
    if not isinstance(subclass, dict):
        return trees
    return [*trees, *(subclass[key] for key in ("objects", "context") if key in subclass)]
