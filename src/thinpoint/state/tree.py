"""The grammar of the tree (`spec/STATE.md`): tags, children, numbering. Torch-free; trusts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from thinpoint.errors import MalformedFileError

Node = Any
"""A JSON value that stands for an object."""

Path = tuple[Any, ...]
"""The keys that lead from the root to a node: dict keys, positions, field names."""

MAX_NESTING = 100
"""Containers inside each other. Each takes at most three JSON brackets and four Python frames, so that the index
stays below its limit of 512 brackets and reading stays within Python's default stack."""

MAX_TENSOR_NESTING = 32
"""Tensors made of tensors (sparse, nested, wrapper subclasses) inside each other."""

SEQUENCES = frozenset({"tuple", "set", "frozenset", "slice"})
FIELDS = frozenset({"namespace", "arg_namespace"})
CLASS_FIELDS = frozenset({"dataclass", "namedtuple"})
DICTS_WITH_ATTRS = frozenset({"ordered_dict", "counter"})
CONTAINERS = SEQUENCES | FIELDS | CLASS_FIELDS | DICTS_WITH_ATTRS | {"list", "dict", "default_dict", "deque"}
NUMBERED = CONTAINERS | {"bytes", "bytearray", "text", "array", "int_list", "float_list", "pickle"}
"""The tags whose nodes a `ref` can name."""


def display(path: Path) -> str:
    """The name of a path for people: its keys joined with dots."""
    return ".".join(str(key) for key in path)


def malformed(path: Path, reason: str) -> NoReturn:
    """Raise the error for a tree that breaks the grammar.

    Raises:
        MalformedFileError: always.
    """
    raise MalformedFileError(f"the state in the file is malformed at {display(path) or 'its root'}: {reason}")


class Parsed(NamedTuple):
    """A node taken apart, one level deep.

    Attributes:
        tag: "value" for null, booleans, numbers and strings, "list" for an array, else the object's only key.
        body: what the tag holds, not checked for a leaf.
        head: what a container holds besides its entries: class reference, default factory, maxlen.
        keys: the key nodes of a dict, else None.
        names: the field names of a record, else None.
        values: the nodes of the entries.
        attrs: names and nodes of instance attributes.
    """

    tag: str
    body: Any
    head: tuple[Any, ...] = ()
    keys: list[Node] | None = None
    names: list[str] | None = None
    values: list[Node] | tuple[()] = ()
    attrs: tuple[tuple[str, Node], ...] = ()

    def steps(self, path: Path) -> list[Any]:
        """The key of each value, in order, that extends `path`."""
        if self.keys is not None:
            return [key if type(key) is str else key_of(key, path) for key in self.keys]
        return list(self.names) if self.names is not None else list(range(len(self.values)))


def parse(node: Node, path: Path) -> Parsed:
    """`node` taken apart.

    Raises:
        MalformedFileError: not an object with one key, or a container's body has the wrong form.
    """
    if isinstance(node, list):
        return Parsed("list", node, values=node)
    if not isinstance(node, dict):
        if node is None or isinstance(node, (bool, int, float, str)):
            return Parsed("value", node)
        malformed(path, f"a {type(node).__name__}, which is no JSON value")
    if len(node) != 1:
        malformed(path, f"an object with {len(node)} keys instead of one")
    tag, body = next(iter(node.items()))
    if tag in SEQUENCES:
        return Parsed(tag, body, values=_list(body, path))
    if tag == "dict":
        keys, values = _pairs(body, path)
        return Parsed(tag, body, keys=keys, values=values)
    if tag in DICTS_WITH_ATTRS:
        pairs, attrs = _list(body, path, 2)
        keys, values = _pairs(pairs, path)
        return Parsed(
            tag, body, keys=keys, values=values, attrs=tuple(zip(*_named(attrs, path), strict=True))
        )
    if tag == "default_dict":
        factory, pairs = _list(body, path, 2)
        keys, values = _pairs(pairs, path)
        return Parsed(tag, body, head=(factory,), keys=keys, values=values)
    if tag == "deque":
        maxlen, values = _list(body, path, 2)
        return Parsed(tag, body, head=(maxlen,), values=_list(values, path))
    if tag in FIELDS:
        names, values = _named(body, path)
        return Parsed(tag, body, names=names, values=values)
    if tag in CLASS_FIELDS:
        module, qualname, fields = _list(body, path, 3)
        if not isinstance(module, str) or not isinstance(qualname, str):
            malformed(path, "a class reference that is not two strings")
        names, values = _named(fields, path)
        return Parsed(tag, body, head=(module, qualname), names=names, values=values)
    if tag in ("value", "list"):
        malformed(path, f"unknown tag {tag!r}")
    return Parsed(tag, body)


def key_of(node: Node, path: Path) -> Any:
    """What stands for a dict's key in a path: the key itself if it is plain data, else its JSON text.

    Raises:
        MalformedFileError: the node breaks the grammar or nests too deeply.
    """
    return _key_of(node, path, 0)


def _key_of(node: Node, path: Path, depth: int) -> Any:
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if depth > MAX_NESTING:
        malformed(path, f"nested more than {MAX_NESTING} deep")
    parsed = parse(node, path)
    if parsed.tag == "tuple":
        return tuple(_key_of(value, path, depth + 1) for value in parsed.values)
    try:
        return json.dumps(node, separators=(",", ":"))
    except (RecursionError, TypeError, ValueError):
        malformed(path, "a key nested too deeply")


def numbered_nodes(tree: Node) -> list[tuple[Path, Node]]:
    """The nodes that a `ref` can name, by number, with their paths. Keys of dicts are trees of their own.

    Raises:
        MalformedFileError: the tree breaks the grammar or nests too deeply.
    """
    return [
        (path, node) for path, node, parsed, in_key in traverse(tree) if parsed.tag in NUMBERED and not in_key
    ]


def traverse(tree: Node) -> Iterator[tuple[Path, Node, Parsed, bool]]:
    """Path, node, node parsed, whether inside a key: of every node in pre-order, keys before their values, attrs last.

    Keys that are plain data are left out.

    Raises:
        MalformedFileError: the tree breaks the grammar or nests more than `MAX_NESTING` deep.
    """
    stack: list[tuple[Path, Node, bool, int]] = [((), tree, False, 0)]
    while stack:
        path, node, in_key, depth = stack.pop()
        parsed = parse(node, path)
        if parsed.tag in CONTAINERS and depth >= MAX_NESTING:
            malformed(path, f"nested more than {MAX_NESTING} deep")
        yield path, node, parsed, in_key
        below: list[tuple[Path, Node, bool, int]] = []
        for i, (step, value) in enumerate(zip(parsed.steps(path), parsed.values, strict=True)):
            place = (*path, step)
            if parsed.keys is not None and isinstance(parsed.keys[i], (dict, list)):
                below.append((place, parsed.keys[i], True, depth + 1))
            below.append((place, value, in_key, depth + 1))
        below.extend(((*path, name), value, in_key, depth + 1) for name, value in parsed.attrs)
        stack.extend(reversed(below))


def _list(body: Any, path: Path, length: int | None = None) -> list[Any]:
    if not isinstance(body, list) or (length is not None and len(body) != length):
        malformed(path, "expected a list" + ("" if length is None else f" of {length}"))
    return body


def _pairs(body: Any, path: Path) -> tuple[list[Node], list[Node]]:
    flat = _list(body, path)
    if len(flat) % 2:
        malformed(path, "a key without a value")
    return flat[::2], flat[1::2]


def _named(body: Any, path: Path) -> tuple[list[str], list[Node]]:
    names, values = _pairs(body, path)
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        malformed(path, "field names must be distinct strings")
    return names, values
