"""Pairing what a file holds with a state that is already there, for loading in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinpoint.errors import StateMismatchError, UnsupportedObjectError
from thinpoint.state.tree import CONTAINERS, Node, Parsed, Path, display, numbered_nodes, parse, traverse
from thinpoint.state.tree_names import checked_tensor_id

_TENSOR_TAGS = frozenset({"tensor", "untyped_storage", "typed_storage"})
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class TensorPair:
    """A stored tensor and the live one to fill.

    Attributes:
        path: of the stored tensor.
        tensor_id: index of its record, which has a storage or no elements.
        target: live strided tensor of the same shape, on any device, perhaps with other strides; to be written
            under `torch.no_grad()`. Its dtype differs where `IntoPlan.dtypes` says so.
    """

    path: Path
    tensor_id: int
    target: Any


@dataclass(kw_only=True)
class IntoPlan:
    """How to fill a state in place.

    Attributes:
        pairs: tensors to write.
        value_paths: paths of everything else to set; give them to `unflatten` as `select`, and its result to
            `set_values`.
        missing: names in the state that the file does not hold.
        unexpected: names in the file for which the state has no place.
        shapes: "name: (stored shape) in the file, (live shape) in the state", and whatever else cannot be filled.
        dtypes: "name: stored dtype in the file, live dtype in the state"; these are among the pairs.
    """

    pairs: list[TensorPair] = field(default_factory=list)
    value_paths: set[Path] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    _setters: dict[Path, Callable[[Any], None]] = field(default_factory=dict)
    _reload: list[tuple[Path, Any, Any]] = field(default_factory=list)

    def check(self, *, strict: bool = True, cast: bool = False) -> None:
        """Refuse to go on if file and state differ.

        Args:
            strict: also where one has names that the other has not.
            cast: allow another dtype, to be converted.

        Raises:
            StateMismatchError: they differ; the lists are in its attributes.
        """
        missing, unexpected = (self.missing, self.unexpected) if strict else ([], [])
        mismatched = [*self.shapes, *([] if cast else self.dtypes)]
        if not (missing or unexpected or mismatched):
            return
        parts = [
            f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for names, what in ((missing, "missing"), (unexpected, "unexpected"), (mismatched, "mismatched"))
            if names
        ]
        only_dtypes = bool(self.dtypes) and not (missing or unexpected or self.shapes)
        raise StateMismatchError(
            f"the file does not fit the state: {'; '.join(parts)}",
            missing=list(missing),
            unexpected=list(unexpected),
            mismatched=mismatched,
            hint="Pass cast=True to convert dtypes" if only_dtypes else None,
        )

    def set_values(self, loaded: Any) -> None:
        """Set everything that is no tensor, then hand their state back to the objects it was taken from.

        Call it after the tensors are written.

        Args:
            loaded: what `unflatten` gave for `value_paths`.
        """
        for path, setter in self._setters.items():
            setter(_at(loaded, path))
        for prefix, owner, state in self._reload:
            if any(path[: len(prefix)] == prefix for path in self._setters):
                owner.load_state_dict(state)


def plan_into(tree: Node, tensors: list[dict[str, Any]], state: Any) -> IntoPlan:
    """What of a file goes where in `state`.

    Dicts are matched by key, lists and tuples by position. Modules, optimizers and whatever else has `state_dict`
    and `load_state_dict` stand for their state dict.

    Args:
        tree: the tree, untrusted.
        tensors: the tensor records, untrusted.
        state: nested dicts, lists and tuples with tensors; nothing is changed yet.

    Raises:
        MalformedFileError: the tree breaks the grammar.
    """
    for _ in traverse(tree):
        pass
    pairing = _Pairing(tree, tensors)
    pairing.visit(tree, (), state, None)
    return pairing.plan


class _Pairing:
    def __init__(self, tree: Node, tensors: list[dict[str, Any]]) -> None:
        self.plan = IntoPlan()
        self._tensors = tensors
        self._numbered = numbered_nodes(tree)
        # Where an optimizer has no state yet: nothing to fill, its load_state_dict takes what was loaded.
        self._fresh: set[Path] = set()

    def visit(self, node: Node, path: Path, live: Any, setter: Callable[[Any], None] | None) -> None:
        """Match a node with what stands at its path; `setter` replaces that, None if nothing can."""
        import torch

        if not isinstance(live, torch.Tensor) and is_stateful(live):
            owner, live = live, live.state_dict()
            self.plan._reload.append((path, owner, live))
            setter = None
            if isinstance(owner, torch.optim.Optimizer) and not live.get("state"):
                self._fresh.add((*path, "state"))
        parsed = parse(node, path)
        if path in self._fresh and setter is not None:
            self._set(path, setter)
        elif parsed.tag == "ref":
            self._visit_ref(parsed, path, live, setter)
        elif parsed.tag == "tensor":
            self._visit_tensor(checked_tensor_id(parsed.body, len(self._tensors), path), path, live, setter)
        elif isinstance(live, torch.Tensor):
            self.plan.shapes.append(f"{display(path)}: no tensor in the file, a tensor in the state")
        elif parsed.keys is not None and isinstance(live, Mapping):
            self._visit_dict(parsed, path, live)
        elif parsed.tag in ("list", "tuple") and isinstance(live, (list, tuple)):
            self._visit_sequence(parsed, path, live, setter)
        else:
            self._replace(node, path, setter)

    def _visit_ref(self, parsed: Parsed, path: Path, live: Any, setter: Callable[[Any], None] | None) -> None:
        # What it names is matched where it first stands, and tensors are filled there.
        target = (
            self._numbered[parsed.body][1]
            if type(parsed.body) is int and 0 <= parsed.body < len(self._numbered)
            else None
        )
        if target is None or not _holds_tensors(target):
            self._replace({"ref": parsed.body}, path, setter)

    def _visit_dict(self, parsed: Parsed, path: Path, live: Any) -> None:
        by_key = {_live_key(key): key for key in live}
        for step, node in zip(parsed.steps(path), parsed.values, strict=True):
            below = (*path, step)
            if step not in by_key:
                self._unexpected(node, below)
                continue
            key = by_key.pop(step)
            writable = isinstance(live, dict)
            self.visit(node, below, live[key], _item_setter(live, key) if writable else None)
        for key in by_key.values():
            self._missing(live[key], (*path, key))

    def _visit_sequence(
        self,
        parsed: Parsed,
        path: Path,
        live: list[Any] | tuple[Any, ...],
        setter: Callable[[Any], None] | None,
    ) -> None:
        same_kind = (parsed.tag == "list") == isinstance(live, list)
        tensors = any(_holds_tensors(node) for node in parsed.values) or _holds_live_tensors(live)
        if not tensors and (not same_kind or isinstance(live, tuple) or len(live) != len(parsed.values)):
            self._replace(parsed.body if parsed.tag == "list" else {parsed.tag: parsed.body}, path, setter)
        elif len(live) != len(parsed.values):
            self.plan.shapes.append(
                f"{display(path)}: {len(parsed.values)} items in the file, {len(live)} in the state"
            )
        else:
            for i, node in enumerate(parsed.values):
                self.visit(
                    node, (*path, i), live[i], _item_setter(live, i) if isinstance(live, list) else None
                )

    def _visit_tensor(
        self, tensor_id: int, path: Path, live: Any, setter: Callable[[Any], None] | None
    ) -> None:
        import torch

        record = self._tensors[tensor_id]
        if not isinstance(live, torch.Tensor):
            if live is None and setter is not None:
                self._set(path, setter)
            else:
                self.plan.shapes.append(
                    f"{display(path)}: a tensor in the file, {type(live).__name__} in the state"
                )
            return
        shape, dtype = tuple(record.get("shape") or ()), str(record.get("dtype"))
        if shape != tuple(live.shape):
            self.plan.shapes.append(f"{display(path)}: {shape} in the file, {tuple(live.shape)} in the state")
            return
        inner = record.get("inner")
        if "subclass" in record and isinstance(inner, dict) and hasattr(type(live), "__tensor_flatten__"):
            self._visit_inner(record["subclass"], inner, path, live)
            return
        plain = not {"layout", "subclass", "quantizer", "conj", "neg"} & set(record)
        if not plain or live.layout is not torch.strided or live.is_quantized or live.device.type == "meta":
            self.plan.shapes.append(f"{display(path)}: this kind of tensor cannot be filled in place")
            return
        live_dtype = str(live.dtype).rpartition(".")[2]
        if dtype != live_dtype:
            self.plan.dtypes.append(f"{display(path)}: {dtype} in the file, {live_dtype} in the state")
        self.plan.pairs.append(TensorPair(path=path, tensor_id=tensor_id, target=live))

    def _visit_inner(self, subclass: Any, inner: dict[str, Any], path: Path, live: Any) -> None:
        import torch

        parts, context = live.__tensor_flatten__()
        names = [name for name in parts if isinstance(getattr(live, name), torch.Tensor)]
        if not _is_same_subclass(subclass, type(live), context):
            self.plan.shapes.append(
                f"{display(path)}: of another class, or made in another way, in the state"
            )
            return
        if set(names) != set(inner):
            self.plan.shapes.append(
                f"{display(path)}: made of {sorted(inner)} in the file, of {sorted(names)} in the state"
            )
            return
        for name in names:
            tensor_id = checked_tensor_id(inner[name], len(self._tensors), path)
            self._visit_tensor(tensor_id, (*path, name), getattr(live, name), None)

    def _replace(self, node: Node, path: Path, setter: Callable[[Any], None] | None) -> None:
        if setter is None:
            self.plan.shapes.append(
                f"{display(path) or 'the state'}: of another kind in the state, and not replaceable"
            )
        elif _holds_tensors(node):
            self.plan.shapes.append(
                f"{display(path)}: tensors in the file, nothing that they could fill in the state"
            )
        else:
            self._set(path, setter)

    def _set(self, path: Path, setter: Callable[[Any], None]) -> None:
        self.plan.value_paths.add(path)
        self.plan._setters[path] = setter

    def _unexpected(self, node: Node, path: Path) -> None:
        leaves = [
            below
            for below, _, parsed, in_key in traverse(node)
            if not in_key and (parsed.tag not in CONTAINERS or not parsed.values)
        ]
        self.plan.unexpected.extend(display((*path, *below)) for below in leaves)

    def _missing(self, live: Any, path: Path) -> None:
        if isinstance(live, Mapping) and live:
            for key, value in live.items():
                self._missing(value, (*path, key))
        elif isinstance(live, (list, tuple)) and _holds_live_tensors(live):
            for i, value in enumerate(live):
                self._missing(value, (*path, i))
        else:
            self.plan.missing.append(display(path))


def _is_same_subclass(subclass: Any, cls: type, context: Any) -> bool:
    """Whether a record's subclass is `cls` with this context. Contexts that are no plain data are not compared."""
    from thinpoint.state.flatten import flatten

    if not isinstance(subclass, dict) or subclass.get("class") != [cls.__module__, cls.__qualname__]:
        return False
    try:
        flat = flatten(context, allow_pickle=False)
    except UnsupportedObjectError:
        return True
    return bool(flat.tensors) or flat.tree == subclass.get("context")


def is_stateful(live: Any) -> bool:
    """Whether an object gives its state by `state_dict` and takes it by `load_state_dict`, as modules and optimizers do."""
    if isinstance(live, type):
        return False
    return callable(getattr(live, "state_dict", None)) and callable(getattr(live, "load_state_dict", None))


def _item_setter(container: Any, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        container[key] = value

    return put


def _live_key(key: Any) -> Any:
    """What stands for a live dict's key in the paths of a tree."""
    if key is None or type(key) in (bool, int, float, str):
        return key
    from thinpoint.state.flatten import key_step

    return key_step(key)


def _holds_tensors(node: Node) -> bool:
    return any(
        parsed.tag in _TENSOR_TAGS or (parsed.tag == "pickle" and parsed.body.get("tensors"))
        for _, _, parsed, _ in traverse(node)
    )


def _holds_live_tensors(live: Any) -> bool:
    import torch

    if isinstance(live, torch.Tensor):
        return True
    if isinstance(live, Mapping):
        return any(_holds_live_tensors(value) for value in live.values())
    if isinstance(live, (list, tuple)):
        return any(_holds_live_tensors(value) for value in live)
    return is_stateful(live)


def _at(loaded: Any, path: Path) -> Any:
    """What stands at a path of a loaded object; keys that are no plain data are looked up by their step."""
    for step in path:
        if isinstance(loaded, Mapping):
            loaded = next(value for key, value in loaded.items() if _live_key(key) == step)
        else:
            loaded = loaded[step]
    return loaded
