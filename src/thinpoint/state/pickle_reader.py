"""Pickles of a tree back to objects: refused unless the file is trusted, and read in the order of their stream."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from thinpoint.errors import ThinpointError, UnsafeObjectError, UnsupportedObjectError
from thinpoint.state.pickles import PICKLE_ERRORS, StateUnpickler
from thinpoint.state.record_fields import TENSOR_TAGS
from thinpoint.state.tree import Node, Path, display, malformed, traverse

_TRUST_HINT = (
    "Re-running with `weights_only=False` will likely succeed, but it can result in arbitrary code execution: "
    "do it only if you trust the source of the file"
)


class PlacedPickle(NamedTuple):
    """A pickle (the checked body of its node) and where it stands in its tree."""

    body: dict[str, Any]
    path: Path


def checked_pickle(body: Any, path: Path) -> dict[str, Any]:
    """`body` if it has the form of a pickle; its tensor ids and data are not checked.

    Raises:
        MalformedFileError: it has not.
    """
    if not isinstance(body, dict) or set(body) != {"index", "type", "classes", "tensors", "data"}:
        malformed(path, "a pickle has a number, a type, classes, tensors and data")
    strings = [body["type"], *body["classes"]] if isinstance(body["classes"], list) else [None]
    if not all(isinstance(text, str) for text in strings) or not isinstance(body["tensors"], list):
        malformed(path, "type, classes and tensors of a pickle")
    if type(body["index"]) is not int or body["index"] < 0:
        malformed(path, "the number of a pickle")
    return body


def placed_pickles(trees: Iterable[Node]) -> dict[int, PlacedPickle]:
    """Every pickle in all trees of a file, by its number in the stream.

    Raises:
        MalformedFileError: a tree breaks the grammar.
    """
    return {
        checked_pickle(parsed.body, path)["index"]: PlacedPickle(parsed.body, path)
        for tree in trees
        for path, _, parsed, _ in traverse(tree)
        if parsed.tag == "pickle"
    }


class PickleReader:
    """Reads the pickles of a file. Runs whatever they contain, unless `weights_only`.

    Args:
        pickles: all that the stream consists of, by number.
        weights_only: refuse every pickle.
        data_of: gives the bytes of a pickle's `data` at a path.
        tensor_of: gives the tensor or storage that a tag and a tensor id stand for.
    """

    def __init__(
        self,
        pickles: dict[int, PlacedPickle],
        weights_only: bool,
        data_of: Callable[[Any, Path], bytes | bytearray | memoryview],
        tensor_of: Callable[[str, Any, Path], Any],
    ) -> None:
        self._pickles = pickles
        self._weights_only = weights_only
        self._data_of = data_of
        self._tensor_of = tensor_of
        self._unpickler = StateUnpickler()
        self._objects: list[Any] = []

    def object(self, body: Any, path: Path) -> Any:
        """The object of the pickle at a path.

        Raises:
            MalformedFileError: no pickle, or one that does not belong to the stream.
            UnsafeObjectError: pickles are refused.
            UnsupportedObjectError: it cannot be read here.
        """
        number = checked_pickle(body, path)["index"]
        if self._weights_only:
            _refuse(body, path)
        if number not in self._pickles or self._pickles[number].body is not body:
            malformed(path, "two pickles with one number")
        # The pieces share one memo, so each is read after those before it.
        for index in range(len(self._objects), number + 1):
            if index not in self._pickles:
                malformed(path, f"pickle {index} is missing")
            self._objects.append(self._read(self._pickles[index]))
        return self._objects[number]

    def _read(self, placed: PlacedPickle) -> Any:
        body, path = placed
        data = bytes(self._data_of(body["data"], path))
        try:
            return self._unpickler.load(data, self._put_back)
        except ThinpointError:
            raise
        except (*PICKLE_ERRORS, EOFError, IndexError, KeyError, OSError) as error:
            raise UnsupportedObjectError(
                f"{display(path)}, a {body['type']}, cannot be unpickled: {type(error).__name__}: {error}",
                hint="The classes it needs must be importable, in versions that fit the file",
            ) from error

    def _put_back(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) != 2 or pid[0] not in TENSOR_TAGS:
            raise pickle.UnpicklingError("a persistent id that names no tensor")
        return self._tensor_of(pid[0], pid[1], ())


def _refuse(body: dict[str, Any], path: Path) -> NoReturn:
    classes = [name for name in body["classes"] if name != body["type"]]
    needs = f" (it needs {', '.join(classes[:8])})" if classes else ""
    raise UnsafeObjectError(
        f"Weights only load failed: {display(path) or 'the state'} is a pickled {body['type']}{needs}",
        hint=_TRUST_HINT,
    )
