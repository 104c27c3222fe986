"""NumPy arrays and scalars in a pickle, read without NumPy's own unpickling.

`torch.load(weights_only=True)` refuses them unless NumPy's `dtype.__setstate__` and friends are declared
safe, which they are not: a pickle could make an array of object pointers out of bytes of its choice. The
stand-ins here bear NumPy's names while a file is loaded, accept nothing but dtypes of plain numbers and
text, and check every size.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

_PLAIN_DTYPE = re.compile(r"(b1|[iu][1248]|f[248]|c8|c16|[US][0-9]{1,6})")


def _refuse(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"a NumPy array of an unsupported form: {what}")


class DtypeStandIn:
    """Stands for a `numpy.dtype` while a pickle is read."""

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        if not isinstance(code, str) or not _PLAIN_DTYPE.fullmatch(code):
            raise _refuse(f"dtype {str(code)[:40]!r}")
        self.value = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or state[2:5] != (None, None, None):
            raise _refuse("a dtype with fields")
        if state[1] not in ("<", ">", "|", "="):
            raise _refuse("the byte order of a dtype")
        self.value = self.value.newbyteorder(state[1])


class ArrayStandIn:
    """Stands for a `numpy.ndarray` while a pickle is read; `value` is the array once it is complete."""

    def __init__(self, *_: Any) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _refuse("its state")
        _, shape, dtype, is_fortran, data = state
        if type(dtype) is not DtypeStandIn or not isinstance(shape, tuple) or len(shape) > 32:
            raise _refuse("its shape or dtype")
        if not all(type(size) is int and size >= 0 for size in shape) or not isinstance(data, bytes):
            raise _refuse("its shape or data")
        if math.prod(shape) * dtype.value.itemsize != len(data):
            raise _refuse("its data have another size than its shape")
        order: Literal["C", "F"] = "F" if is_fortran else "C"
        flat = np.frombuffer(data, dtype.value) if data else np.empty(math.prod(shape), dtype.value)
        self.value = flat.reshape(shape, order=order).copy(order)


def _reconstruct(subtype: Any, shape: Any, code: Any) -> ArrayStandIn:
    if subtype is not ArrayStandIn:
        raise _refuse("a subclass of ndarray")
    return ArrayStandIn()


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if type(dtype) is not DtypeStandIn or not isinstance(data, bytes) or len(data) != dtype.value.itemsize:
        raise _refuse("a scalar")
    return np.frombuffer(data, dtype.value)[0] if data else dtype.value.type()


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise _refuse("its data are not encoded as latin1")
    return text.encode("latin-1")


def _empty_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise _refuse("its data are not encoded as latin1")
    return b""


def _named(name: str, function: Any) -> Any:
    """A function that torch takes for the global of that name."""

    def stand_in(*arguments: Any) -> Any:
        return function(*arguments)

    return _renamed(stand_in, name)


def _renamed(item: Any, name: str) -> Any:
    """A function or class that has taken on the name of another; torch 2.4 asks for `__name__`."""
    item.__module__, _, item.__name__ = name.rpartition(".")
    item.__qualname__ = item.__name__
    return item


_renamed(DtypeStandIn, "numpy.dtype")
_renamed(ArrayStandIn, "numpy.ndarray")

_STAND_INS = [
    DtypeStandIn,
    ArrayStandIn,
    _named("_codecs.encode", _encode),
    _named("__builtin__.bytes", _empty_bytes),
    _named("builtins.bytes", _empty_bytes),
    *(
        _named(f"numpy.{core}.multiarray.{name}", function)
        for core in ("core", "_core")
        for name, function in (("_reconstruct", _reconstruct), ("scalar", _scalar))
    ),
]


@contextmanager
def stand_ins() -> Iterator[None]:
    """While the block runs, `torch.load(weights_only=True)` reads NumPy's arrays and scalars as stand-ins.

    Changes torch's list of safe globals, so no other thread should load meanwhile.
    """
    from torch import serialization

    before = list(serialization.get_safe_globals())
    ours = {_global_name(stand_in) for stand_in in _STAND_INS}
    serialization.clear_safe_globals()
    # Where the caller has declared NumPy's own functions safe, the stand-ins still take their place.
    serialization.add_safe_globals(
        [*_STAND_INS, *(item for item in before if _global_name(item) not in ours)]
    )
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def _global_name(item: Any) -> str:
    """The name by which torch knows an entry of its list: an object, or a pair of one and its name."""
    return str(item[1]) if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}"


def resolve(obj: Any) -> Any:
    """The object with stand-ins replaced by what they stand for; dicts and lists are changed in place.

    Raises:
        pickle.UnpicklingError: an array was begun and never completed.
    """
    return _resolve(obj, {}, [])


def _resolve(obj: Any, done: dict[int, Any], kept: list[Any]) -> Any:
    cls = type(obj)
    if cls is DtypeStandIn or cls is ArrayStandIn:
        if obj.value is None:
            raise _refuse("it has no data")
        return obj.value
    if cls not in (dict, OrderedDict, list, tuple):
        return obj
    if id(obj) in done:
        return done[id(obj)]
    # An object's address may be used again once it is gone.
    kept.append(obj)
    done[id(obj)] = obj
    if cls is list:
        for i, value in enumerate(obj):
            obj[i] = _resolve(value, done, kept)
    elif cls is tuple:
        values = [_resolve(value, done, kept) for value in obj]
        if any(new is not old for new, old in zip(values, obj, strict=True)):
            done[id(obj)] = tuple(values)
    else:
        for key, value in obj.items():
            obj[key] = _resolve(value, done, kept)
    return done[id(obj)]
