"""An open `.thin` file: what it holds at once, tensors and slices of them when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from thinpoint.engine.backends import choose_backends
from thinpoint.engine.load import load_object
from thinpoint.engine.restore import Restorer
from thinpoint.engine.views import StridedView, read_view
from thinpoint.engine.workers import Workers
from thinpoint.errors import UnknownNameError, UnsupportedError, UsageError
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.reader import FileReader
from thinpoint.state.tree_names import display, match, tensor_names
from thinpoint.store import open_source

if TYPE_CHECKING:
    import torch

Path = tuple[Any, ...]


class ThinFile:
    """Names, dtypes, shapes and sizes of a file; `file[name]` is a tensor that is read when it is indexed. A context manager.

    Names are the keys that lead to a tensor, joined by dots; a tuple of keys is always exact. May be shared between threads.

    Args:
        path: str, PathLike or a seekable binary file object.
        backend: as for `thinpoint.load`.
        num_threads: as for `thinpoint.load`.

    Attributes:
        name: the file.
        file_bytes: its size.
        file_id: digest of its index, 16 hex digits.
        meta: what its writer noted, JSON.
    """

    def __init__(self, path: Any, *, backend: str = "auto", num_threads: int | None = None) -> None:
        with ExitStack() as stack:
            self._backends = choose_backends(backend)
            self._reader = FileReader(stack.enter_context(open_source(path)))
            self._workers = stack.enter_context(Workers(num_threads))
            self._paths = tensor_names(self._reader.index.tree, len(self._reader.index.tensors))
            self._stack = stack.pop_all()
        self._restorer = Restorer(
            self._reader, self._backends.host, self._workers, devices=self._backends.devices
        )
        self.name = self._reader.name
        self.file_bytes = self._reader.trailer.file_bytes
        self.file_id = f"{self._reader.file_id:016x}"
        self.meta = self._reader.index.meta

    def __enter__(self) -> ThinFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors that were read stay valid. Closing twice is no error."""
        self._stack.close()

    @property
    def raw_bytes(self) -> int:
        """Bytes of everything stored, before coding; shared bytes count once."""
        return sum(part.raw_bytes for part in self._reader.index.parts)

    @property
    def paths(self) -> list[Path]:
        """The keys that lead to each tensor, in the order of the state."""
        return list(self._paths)

    def keys(self) -> list[str]:
        """The tensors' names, in the order of the state."""
        return [display(path) for path in self._paths]

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._paths if isinstance(name, tuple) else name in self.keys()

    def __getitem__(self, name: str | Path) -> StoredTensor:
        """The tensor of that name (or at that path), not read yet.

        Raises:
            UnknownNameError: there is none; the message names close ones.
            UsageError: several tensors have that name; give the tuple of keys.
        """
        found = [path for path in self._paths if (path if isinstance(name, tuple) else display(path)) == name]
        if len(found) > 1:
            raise UsageError(
                f"{len(found)} tensors are called {name!r}",
                where=self.name,
                hint=f"Give the keys: {found[0]!r}",
            )
        if not found:
            close = match(self._paths, name) if self._paths else set()
            hint = f"It holds tensors: {', '.join(sorted(map(display, close))[:3])}" if close else None
            raise UnknownNameError(f"{name!r} is no tensor", where=self.name, hint=hint)
        return StoredTensor(self, found[0], self._paths[found[0]])

    def load(self, names: Any = None, *, map_location: Any = None, weights_only: bool = True) -> Any:
        """The object, or a part of it, as `thinpoint.load` gives it."""
        return load_object(
            self._reader,
            self._backends.host,
            self._workers,
            devices=self._backends.devices,
            map_location=map_location,
            weights_only=weights_only,
            names=names,
        )


class StoredTensor:
    """A tensor in an open file. `tensor[...]`, `tensor[10:20, :5]` and so on read it, or the part asked for.

    Attributes:
        path: the keys that lead to it.
        name: the keys joined by dots.
        shape: tuple of ints.
        stride: tuple of ints, in elements.
        dtype_name: torch's name without `torch.`.
        device: where it was saved from.
        role: what it was taken for ("weight", "first_moment", ...).
    """

    def __init__(self, file: ThinFile, path: Path, tensor_id: int) -> None:
        self._file = file
        self._entry = file._reader.index.tensors[tensor_id]
        index = file._reader.index
        self.path = path
        self.name = display(path)
        self.shape = self._entry.shape
        self.stride = self._entry.stride
        self.dtype_name = self._entry.dtype
        self.device = "meta" if self._entry.storage is None else index.storages[self._entry.storage].device
        self.role = self._entry.extra.get("role", "other")

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, shape={self.shape}, dtype={self.dtype_name}, device={self.device!r})"

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype.

        Raises:
            UnsupportedError: this version of torch has no such dtype.
        """
        import torch

        dtype = getattr(torch, self.dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(
                f"this version of torch has no dtype {self.dtype_name}",
                tensor=self.name,
                where=self._file.name,
            )
        return dtype

    @property
    def num_bytes(self) -> int:
        """Elements times bytes of an element."""
        num_elems = 1
        for size in self.shape:
            num_elems *= size
        return num_elems * ITEM_BYTES.get(self.dtype_name, 1)

    def load(self, map_location: Any = None) -> torch.Tensor:
        """The whole tensor as `thinpoint.load` gives it: strides, subclass, `requires_grad` and all."""
        obj = self._file.load(names=[self.path], map_location=map_location)
        for key in self.path:
            obj = obj[key]
        return obj

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A new contiguous CPU tensor with the elements that basic indexing selects; other blocks are not read.

        Raises:
            IndexError, TypeError, ValueError: the index is not valid, as for a tensor.
            UnsupportedError: the tensor is not plainly strided (sparse, quantised, a subclass, packed): use `load`.
            DigestMismatchError, MalformedFileError: the bytes read are damaged.
        """
        import torch

        view = self.view(index)
        out = torch.empty(view.shape, dtype=view.dtype)
        read_view(self._file._restorer, view, out)
        return out

    @property
    def is_plain(self) -> bool:
        """Whether it is plainly strided, so that it can be read in part."""
        entry = self._entry
        special = {"layout", "subclass", "quantizer", "conj", "neg"} & set(entry.extra)
        return entry.storage is not None and not special and self.dtype_name in ITEM_BYTES

    def view(self, index: Any) -> StridedView:
        """Where the elements that basic indexing selects lie in their storage.

        Raises: as indexing.
        """
        entry = self._entry
        if entry.storage is None or not self.is_plain:
            raise UnsupportedError(
                "only plainly strided tensors can be read in part", tensor=self.name, hint="Use .load()"
            )
        return StridedView(
            storage=entry.storage,
            dtype=self.dtype,
            shape=entry.shape,
            stride=entry.stride,
            offset=entry.offset,
        ).index(index)
