"""References to classes by name: what may be stored by one, and how a name is resolved without running anything."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import types
from typing import Any

from thinpoint.errors import UnsafeObjectError, UnsupportedObjectError
from thinpoint.state.tree import Path, display, malformed

_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class was made by a `class` statement (or a C extension), not built in."""

_POINTER_BYTES = object.__basicsize__ // 2

FACTORIES: dict[str, type] = {
    cls.__name__: cls for cls in (list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes)
}
"""The default factories that a tree can name."""


def reference(cls: type) -> tuple[str, str] | None:
    """Module and qualified name if they lead back to the class, else None (local classes, replaced ones)."""
    module, qualname = cls.__module__, cls.__qualname__
    return (module, qualname) if _find(module, qualname) is cls else None


def checked_reference(body: Any, path: Path) -> tuple[str, str]:
    """Module and qualified name if `body` is a list of such two.

    Raises:
        MalformedFileError: it is not.
    """
    if not isinstance(body, list) or len(body) != 2 or not all(isinstance(part, str) for part in body):
        malformed(path, "a class reference")
    return body[0], body[1]


def _find(module: str, qualname: str) -> Any:
    """What stands at that name in a module that is imported already; None if nothing does.

    Looks into `__dict__` only: a module's `__getattr__` (lazy packages) or a descriptor would run code.
    """
    scope: Any = sys.modules.get(module)
    for name in qualname.split("."):
        if not isinstance(scope, (types.ModuleType, type)):
            return None
        try:
            scope = scope.__dict__.get(name)
        except AttributeError:
            return None
    return scope


def resolve(module: str, qualname: str, kind: str, *, weights_only: bool, path: Path) -> type:
    """The class of that name.

    Args:
        kind: "enum", "dataclass", "namedtuple" or "tensor subclass"; what is found must be exactly that.
        weights_only: whether only modules that are imported already are looked at.

    Raises:
        UnsafeObjectError: with weights_only, no imported module has such a class, or it is of another kind.
        UnsupportedObjectError: without weights_only, the class cannot be imported.
    """
    if not weights_only and module not in sys.modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise UnsupportedObjectError(
                f"{display(path)} is a {module}.{qualname}, and importing {module} failed: {error}"
            ) from error
    found = _find(module, qualname)
    if isinstance(found, type) and _is_kind(found, kind) and not hasattr(found, "__del__"):
        return found
    if found is None:
        reason = "which is not imported" if module not in sys.modules else "which that module does not define"
    else:
        reason = f"which is no {kind} that can be rebuilt from data alone"
    if not weights_only:
        raise UnsupportedObjectError(f"{display(path)} is a {kind} {module}.{qualname}, {reason}")
    raise UnsafeObjectError(
        f"Weights only load failed: {display(path)} is a {kind} {module}.{qualname}, {reason}",
        hint="Import the module that defines it first, or pass weights_only=False if you trust the file's source",
    )


def _is_kind(cls: type, kind: str) -> bool:
    if kind == "enum":
        return issubclass(cls, enum.Enum)
    if kind == "dataclass":
        return is_plain_dataclass(cls)
    if kind == "namedtuple":
        return is_plain_namedtuple(cls)
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_unflatten__")


def is_plain_dataclass(cls: type) -> bool:
    """Whether instances are just their attributes: a dataclass on `object` with the usual pickling."""
    return (
        dataclasses.is_dataclass(cls)
        and _is_pure_python(cls)
        and cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
        and not hasattr(cls, "__getnewargs__")
        and not hasattr(cls, "__getnewargs_ex__")
        and all(_is_standard_state_hook(cls, name) for name in ("__getstate__", "__setstate__"))
    )


def _is_pure_python(cls: type) -> bool:
    """Whether instances have no C state of their own, so that `object.__new__` makes a complete one."""
    if cls.__itemsize__ or not all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__):
        return False
    # Beyond the slots there may be the pointers to `__dict__` and to weak references; C++ bindings have more.
    return cls.__basicsize__ <= object.__basicsize__ + _POINTER_BYTES * (2 + len(_slots(cls)))


def _is_standard_state_hook(cls: type, name: str) -> bool:
    hook = getattr(cls, name, None)
    # `dataclasses` gives these two to frozen classes with slots; `object` has __getstate__ since 3.11.
    return (
        hook is None
        or hook is getattr(object, name, None)
        or getattr(hook, "__module__", "") == "dataclasses"
    )


def is_plain_namedtuple(cls: type) -> bool:
    """Whether instances are just their items: a `collections.namedtuple` or `typing.NamedTuple` class."""
    fields = getattr(cls, "_fields", None)
    return (
        issubclass(cls, tuple)
        and isinstance(fields, tuple)
        and all(isinstance(name, str) for name in fields)
        and cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
    )


def _slots(cls: type) -> dict[str, types.MemberDescriptorType]:
    """The slots that hold values, of a class and its bases."""
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in base.__dict__.items()
        if isinstance(value, types.MemberDescriptorType)
    }


def get_fields(obj: Any) -> dict[str, Any]:
    """Every attribute stored in an instance, slots first; runs none of its code."""
    fields = {}
    for name, slot in _slots(type(obj)).items():
        try:
            fields[name] = slot.__get__(obj)
        except AttributeError:
            continue
    return {**fields, **instance_dict(obj)}


def instance_dict(obj: Any) -> dict[str, Any]:
    """The instance's own `__dict__` (live, not a copy), or an empty dict if it has none."""
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def set_fields(obj: Any, fields: dict[str, Any]) -> None:
    """Store attributes in a fresh instance; runs none of its code.

    Raises:
        AttributeError: a name is no slot, and the instance has no `__dict__`.
    """
    slots = _slots(type(obj))
    for name, value in fields.items():
        if name in slots:
            slots[name].__set__(obj, value)
        else:
            object.__getattribute__(obj, "__dict__")[name] = value
