"""Names of what a tree holds: paths of leaves and tensors, and patterns that select some. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

from thinpoint.errors import UnknownNameError, UsageError
from thinpoint.state.tree import CONTAINERS, Node, Path, display, malformed, traverse

__all__ = ["display", "match", "tensor_names", "walk"]

_NUM_SUGGESTIONS = 3


def walk(tree: Node) -> Iterator[tuple[Path, Node]]:
    """The leaves in order, each with its path: whatever is no container, and containers without entries.

    What a container shares with an earlier one appears as a `ref` leaf and is not entered again.

    Raises:
        MalformedFileError: the tree breaks the grammar.
    """
    for path, node, parsed, in_key in traverse(tree):
        if not in_key and (parsed.tag not in CONTAINERS or not (parsed.values or parsed.attrs)):
            yield path, node


def tensor_names(tree: Node, num_tensors: int) -> dict[Path, int]:
    """The id of the tensor at every path that holds one; those of a pickled object get its path and a number.

    Raises:
        MalformedFileError: the tree breaks the grammar, or names a tensor that does not exist.
    """
    names: dict[Path, int] = {}
    for path, node in walk(tree):
        if not isinstance(node, dict):
            continue
        tag, body = next(iter(node.items()))
        if tag in ("tensor", "untyped_storage", "typed_storage"):
            names[path] = checked_tensor_id(body, num_tensors, path)
        elif tag == "pickle":
            ids = body.get("tensors") if isinstance(body, dict) else None
            if not isinstance(ids, list):
                malformed(path, "a pickle without its list of tensors")
            for i, tensor_id in enumerate(ids):
                below = (*path, i)
                names[below] = checked_tensor_id(tensor_id, num_tensors, path)
    return names


def checked_tensor_id(value: object, num_tensors: int, path: Path) -> int:
    """`value` if it is the id of a tensor.

    Raises:
        MalformedFileError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tensors:
        malformed(path, f"tensor {str(value)[:40]} of {num_tensors}")
    return value


def match(paths: Iterable[Path], patterns: str | Path | Collection[str | Path]) -> set[Path]:
    """The paths that at least one pattern selects.

    Args:
        paths: of leaves, as `walk` and `tensor_names` give them.
        patterns: a tuple of keys selects the path it equals and every path it begins; a string does the same with
            the displayed name (at the border of a key), or is a glob (`*`, `?`, `[...]`) for all of it. A list or
            set holds several; a single string or tuple is one pattern.

    Raises:
        UnknownNameError: a pattern selects nothing.
        UsageError: a pattern is neither a string nor a tuple.
    """
    all_patterns = [patterns] if isinstance(patterns, (str, tuple)) else list(patterns)
    shown = {path: display(path) for path in paths}
    selected: set[Path] = set()
    for pattern in all_patterns:
        if isinstance(pattern, tuple):
            found = {path for path in shown if path[: len(pattern)] == pattern}
        elif isinstance(pattern, str):
            found = {path for path, name in shown.items() if _selects(pattern, name)}
        else:
            raise UsageError(f"a name is a string or a tuple of keys, not {type(pattern).__name__}")
        if not found:
            raise _unknown(pattern, shown.values())
        selected |= found
    return selected


def _selects(pattern: str, name: str) -> bool:
    # Exact names come first: a name may itself hold the characters of a glob.
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _unknown(pattern: str | Path, names: Iterable[str]) -> UnknownNameError:
    wanted = pattern if isinstance(pattern, str) else display(pattern)
    close = difflib.get_close_matches(wanted, list(names), n=_NUM_SUGGESTIONS, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else "`thinpoint inspect` lists the names"
    return UnknownNameError(f"the file holds nothing named {wanted!r}", hint=hint)
