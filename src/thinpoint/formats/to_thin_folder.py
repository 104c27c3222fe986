"""A tree of leaves as a folder with one rank's file, each tensor read when its turn comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from thinpoint.dcp.items import OBJECTS, TENSORS, file_meta
from thinpoint.dcp.record import record_of
from thinpoint.dcp.writer import ThinWriter
from thinpoint.engine.backends import choose_backends
from thinpoint.engine.save import Written, write_file
from thinpoint.engine.workers import Workers
from thinpoint.errors import UnsupportedObjectError
from thinpoint.folder.layout import chunk_key
from thinpoint.folder.names import data_name
from thinpoint.formats.leaves import ObjectLeaf, TensorLeaf
from thinpoint.formats.to_thin import flat_state
from thinpoint.formats.torch_source import tree_of


class LeafWriter(ThinWriter):
    """Writes leaves instead of the tensors that stand for them in the plan.

    Args:
        path: folder.
        leaves: by the names that DCP gives the tensors.
        progress: called with bytes encoded so far.
        threads: see `Workers`.
        allow_pickle: as for `thinpoint.save`.
    """

    def __init__(
        self,
        path: str,
        leaves: dict[str, TensorLeaf],
        *,
        progress: Callable[[int], None],
        threads: int | None = None,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(path, overwrite=False, thread_count=threads, allow_pickle=allow_pickle)
        self._leaves = leaves
        self._progress = progress

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As that of `ThinWriter`, without holding the tensors."""
        tree: dict[str, dict[str, Any]] = {TENSORS: {}, OBJECTS: {}}
        lookup: Any = planner
        for item in plan.items:
            fqn = item.index.fqn
            if fqn in self._leaves:
                tree[TENSORS][fqn] = {chunk_key(item.index.offset or ()): self._leaves[fqn]}
                continue
            value = lookup.lookup_object(item.index)
            if item.type == WriteItemType.BYTE_IO:
                tree[OBJECTS][fqn] = ObjectLeaf(load=partial(_itself, value))
            else:
                tree[TENSORS][fqn] = {chunk_key(item.index.offset or ()): _of_tensor(value)}
        results = [WriteResult(item.index, 0, self._rank) for item in plan.items]
        shapes = {fqn: leaf.shape for fqn, below in tree[TENSORS].items() for leaf in below.values()}
        state = flat_state(tree, allow_pickle=self._allow_pickle)
        name = data_name(self._save_id, self._rank)
        backend = choose_backends(self._backend, codec=self._codec).host
        with self._store().sink(name) as sink, Workers(self._thread_count) as workers:
            summary, entries = write_file(
                state,
                sink,
                backend,
                workers,
                meta=file_meta(self._rank, 1, shapes),
                progress=self._progress,
            )
        written = Written(summary=summary, entries=entries, name=name)
        record = record_of(written, rank=self._rank, name=name, way=self._way(), rank_states=[])
        results.append(WriteResult(MetadataIndex(""), record.file.num_bytes, record))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _itself(value: Any) -> Any:
    return value


def _of_tensor(tensor: Any) -> TensorLeaf:
    """The leaf of a tensor in an object that DCP takes apart itself."""
    leaf = tree_of(tensor)
    if not isinstance(leaf, TensorLeaf):
        raise UnsupportedObjectError("an object holds a tensor that is not plainly strided")
    return leaf
