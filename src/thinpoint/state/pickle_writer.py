"""Objects that only pickle can take, for the tree: one stream for a whole state, its tensors stored outside."""

from __future__ import annotations

from typing import Any

from thinpoint.errors import UnsupportedObjectError
from thinpoint.state.byte_writer import ByteWriter
from thinpoint.state.pickles import PICKLE_ERRORS, StatePickler
from thinpoint.state.tensor_writer import TensorWriter
from thinpoint.state.tree import Node, Path, display

MAX_CLASS_NAMES = 64
_MAX_NAME_CHARS = 256


class PickleWriter:
    """Makes the nodes of objects that have no plain form.

    Args:
        bytes_to: takes the pickles.
        tensors: takes the tensors and storages inside.
        allow: if False, every object is refused.
    """

    def __init__(self, bytes_to: ByteWriter, tensors: TensorWriter, allow: bool) -> None:
        self._bytes_to = bytes_to
        self._tensors = tensors
        self._pickler = StatePickler() if allow else None
        self._num_pickles = 0
        self._path: Path = ()
        self._nesting = 0

    def node(self, obj: Any, path: Path, nesting: int) -> Node:
        """The `pickle` node of an object that is inside of `nesting` tensors.

        Raises:
            UnsupportedObjectError: pickles are not allowed, or the object refuses.
        """
        type_name = f"{type(obj).__module__}.{type(obj).__qualname__}"
        if self._pickler is None:
            raise UnsupportedObjectError(
                f"{display(path) or 'the state'} is a {type_name}, which can only be stored by pickle",
                hint="Convert it to plain data or a dataclass, or allow pickle",
            )
        self._path, self._nesting = path, nesting
        try:
            data, tensor_ids, classes = self._pickler.piece(obj, self._take_out)
        except PICKLE_ERRORS as error:
            raise UnsupportedObjectError(
                f"{display(path) or 'the state'} is a {type_name}, which cannot be pickled: {error}",
                hint="Leave it out, or save its state_dict() or its plain data instead",
            ) from error
        index = self._num_pickles
        self._num_pickles += 1
        return {
            "pickle": {
                "index": index,
                "type": type_name[:_MAX_NAME_CHARS],
                "classes": [name[:_MAX_NAME_CHARS] for name in classes[:MAX_CLASS_NAMES]],
                "tensors": tensor_ids,
                "data": self._bytes_to.data(data, path),
            }
        }

    def _take_out(self, obj: Any) -> tuple[str, int] | None:
        if self._pickler is None:
            return None
        return self._tensors.take(
            obj, (*self._path, self._pickler.num_taken), self._nesting, only_without_pickle=True
        )
