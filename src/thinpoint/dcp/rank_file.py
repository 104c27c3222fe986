"""The file of one rank, checked against what manifest and layout say of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from thinpoint.dcp.items import TENSORS, chunk_path, object_path, rank_state_of
from thinpoint.engine.load import load_paths
from thinpoint.engine.verify import verify_file
from thinpoint.engine.views import StridedView, read_views
from thinpoint.errors import DigestMismatchError, MalformedFileError
from thinpoint.file.layout import hex64
from thinpoint.folder.layout import Chunk, TensorLayout
from thinpoint.folder.manifest import FileRecord
from thinpoint.opened import StoredTensor, ThinFile
from thinpoint.state.tree_names import walk
from thinpoint.store.contract import Store

if TYPE_CHECKING:
    import torch


class RankFile(ThinFile):
    """A rank's file, open. Not to be shared between threads.

    Args:
        store, record, rank: which file.
        backend, num_threads: as for `ThinFile`.

    Raises:
        DigestMismatchError: it is intact, but not the file that the manifest names.
        And what opening a `.thin` file raises.
    """

    def __init__(
        self, store: Store, record: FileRecord, rank: int, *, backend: str, num_threads: int | None
    ) -> None:
        self.rank = rank
        self._source = store.source(record.name)
        try:
            super().__init__(self._source, backend=backend, num_threads=num_threads)
            self._check(record)
        except BaseException:
            self._source.close()
            raise

    def close(self) -> None:
        """As that of `ThinFile`."""
        super().close()
        self._source.close()

    def chunk(self, fqn: str, chunk: Chunk, dtype: str) -> StoredTensor:
        """A chunk, not read yet.

        Raises:
            MalformedFileError: the file has no such chunk, or another than the layout says.
        """
        path = chunk_path(fqn, chunk.offsets)
        if path not in self._paths:
            raise self._contradiction(fqn, f"chunk [{chunk.key}]", "nothing")
        stored = StoredTensor(self, path, self._paths[path])
        expected, actual = (dtype, chunk.sizes), (stored.dtype_name, stored.shape)
        if actual != expected:
            raise self._contradiction(
                fqn, f"{dtype} of shape {chunk.sizes} at [{chunk.key}]", f"{actual[0]} of shape {actual[1]}"
            )
        return stored

    def read_parts(self, parts: Iterable[tuple[StoredTensor, tuple[slice, ...], torch.Tensor]]) -> None:
        """Copy parts of chunks into tensors of their shapes, on any device; all together, each block decoded once.

        A target that is laid out as the stored elements are is decoded in place.

        Args:
            parts: chunk, what to take of it, target.
        """
        pairs: list[tuple[StridedView, torch.Tensor]] = []
        for stored, index, out in parts:
            if stored.is_plain:
                pairs.append((stored.view(index), out))
            else:
                out.copy_(stored.load("cpu")[index])
        read_views(self._restorer, pairs)

    def load_objects(
        self, fqns: Collection[str], rank_states: Collection[str], *, weights_only: bool
    ) -> dict[str, Any]:
        """Objects by their names; tensors in them on the CPU.

        Args:
            rank_states: those of the names that are the state of one rank.

        Raises:
            MalformedFileError: the file does not hold one of them.
            UnsafeObjectError: one holds a pickled object and `weights_only` is True.
        """
        paths = {fqn: object_path(fqn, is_rank_state=fqn in rank_states) for fqn in fqns}
        found = load_paths(self._restorer, set(paths.values()), map_location="cpu", weights_only=weights_only)
        objects = {}
        for fqn, (kind, _) in paths.items():
            below = found.get(kind) if isinstance(found, dict) else None
            if not isinstance(below, dict) or fqn not in below:
                raise self._contradiction(fqn, "an object", "nothing")
            value = below[fqn]
            if fqn in rank_states:
                value = rank_state_of(value, self.rank, name=fqn, where=self.name)
            objects[fqn] = value
        return objects

    def check_chunks(self, chunks: Iterable[tuple[str, TensorLayout, Chunk]]) -> None:
        """Raises MalformedFileError unless the file holds these chunks and no other."""
        wanted = set()
        for fqn, tensor, chunk in chunks:
            self.chunk(fqn, chunk, tensor.dtype)
            wanted.add(chunk_path(fqn, chunk.offsets))
        for path in self._paths:
            if path[0] == TENSORS and path not in wanted:
                raise self._contradiction(str(path[1]), "nothing", f"chunk [{path[-1]}]")

    def check_objects(self, fqns: Iterable[str], rank_states: Collection[str]) -> None:
        """Raises MalformedFileError unless the file holds these objects and no other."""
        there = {
            path[:2] for path, _ in walk(self._reader.index.tree) if path[0] != TENSORS and len(path) > 1
        }
        wanted = {object_path(fqn, is_rank_state=fqn in rank_states): fqn for fqn in fqns}
        for path, fqn in wanted.items():
            if path not in there:
                raise self._contradiction(fqn, "an object", "nothing")
        for path in there - wanted.keys():
            raise self._contradiction(str(path[1]), "nothing", "an object")

    def verify(self, *, deep: bool, progress: Any = None) -> None:
        """Raises the first damage; all of it is in the error's attribute `problems`."""
        backends = self._backends
        report = verify_file(
            self._reader,
            backends.host,
            self._workers,
            deep=deep,
            devices=backends.devices,
            scratch=backends.scratch,
            progress=progress,
        )
        report.raise_if_damaged()

    def _check(self, record: FileRecord) -> None:
        trailer = self._reader.trailer
        for what, expected, actual in (
            ("size", record.num_bytes, trailer.file_bytes),
            ("file id", record.file_id, self.file_id),
            ("digest of the index", record.digest, hex64(trailer.index_digest)),
        ):
            if expected != actual:
                raise DigestMismatchError(
                    f"the file of rank {self.rank} is not the one that the manifest names: {what}",
                    where=self.name,
                    expected=expected,
                    actual=actual,
                )

    def _contradiction(self, fqn: str, expected: str, actual: str) -> MalformedFileError:
        return MalformedFileError(
            f"the file of rank {self.rank} contradicts the layout",
            where=self.name,
            tensor=fqn,
            expected=expected,
            actual=actual,
        )
