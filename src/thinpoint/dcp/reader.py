"""`ThinReader`: what `dcp.load` reads with."""

from __future__ import annotations

import io
import logging
import os
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.torch_version import TorchVersion

from thinpoint.collector import collector_paused
from thinpoint.dcp.folder import ThinFolder
from thinpoint.dcp.metadata import metadata_of
from thinpoint.dcp.rank_state import RankState, rank_and_size, rank_in, rank_name
from thinpoint.engine.backends import choose_backends
from thinpoint.engine.workers import checked_threads
from thinpoint.errors import StateMismatchError, ThinpointError, UnknownNameError, UsageError
from thinpoint.folder.layout import Chunk, Layout, TensorLayout
from thinpoint.folder.names import new_id
from thinpoint.store import open_store

log = logging.getLogger("thinpoint")

_DCP_HIDES_ERRORS = TorchVersion(torch.__version__) < "2.13"
"""Of `read_metadata`: `dcp.load` then only says "metadata is None"."""


class ThinReader(StorageReader):
    """Reads a checkpoint of many ranks: for `dcp.load(state, storage_reader=ThinReader(path))`.

    Any number of ranks, any mesh and sharding: a rank fetches and decodes only the blocks that its slices touch, into
    its tensors where these are laid out as what was stored. Nothing in the folder that is a pickle is opened.

    Args:
        path: folder or URL, or a store; None if `dcp.load` gets a `checkpoint_id`.
        backend: as for `thinpoint.load`.
        thread_count: threads that decode, and threads that read; None for the CPUs this process may use.
        cast: convert where dtypes differ, as `Tensor.copy_` does; otherwise a difference is an error.
        weights_only: refuse pickled objects, and classes of modules that are not imported.

    Raises:
        UsageError: an option is not valid.
        BackendUnavailableError: the backend asked for by name cannot run here.
    """

    def __init__(
        self,
        path: Any = None,
        *,
        backend: str = "auto",
        thread_count: int | None = None,
        cast: bool = False,
        weights_only: bool = True,
    ) -> None:
        super().__init__()
        self._path = path
        self._backend = backend
        self._thread_count = thread_count
        self._cast = cast
        self._weights_only = weights_only
        self._opened: ThinFolder | None = None
        checked_threads(thread_count)
        choose_backends(backend)

    # ---- what DCP calls, in this order ----------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another folder, if one is given."""
        if checkpoint_id:
            self._path = checkpoint_id
        self._opened = None

    @collector_paused()
    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """What is in the folder, from manifest and layout.

        Raises:
            NotFoundError: there is no checkpoint.
            DamagedFileError (and its classes): manifest or layout is damaged.
            UnsupportedError: the folder holds a checkpoint of a single file, or one of a newer version.
        """
        # No parameter is called `kwargs`: DCP would take an error for a folder without a common manifest, and leave out
        # the collectives on this rank alone.
        try:
            self._opened = ThinFolder(
                self._folder_path(), backend=self._backend, num_threads=self._thread_count
            )
        except ThinpointError as error:
            if _DCP_HIDES_ERRORS:
                log.error("the checkpoint cannot be read: %s", error)
            raise
        metadata = metadata_of(self._opened.layout)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self._opened.manifest.save_id, load_id=new_id()
        )
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Learn which rank this is, and add names for its own state where another number of ranks has saved."""
        rank = kwargs.get("rank")
        rank = rank_and_size()[0] if rank is None else rank
        for base in {rank_base(fqn) for fqn in self._folder().layout.rank_states} - {None}:
            metadata.state_dict_metadata.setdefault(own_name(base or "", rank), BytesStorageMetadata())

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, with the number of ranks."""
        return [replace(plan, storage_data={"world_size": len(plans)}) for plan in plans]

    @collector_paused()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for; blocks until done.

        Raises:
            StateMismatchError: dtypes differ and `cast` is False, or shapes do; nothing was touched.
            DamagedFileError (and its classes): what was read is damaged, or a rank's file contradicts the layout; targets
                may be partly written.
            UnsafeObjectError: an object is a pickle and `weights_only` is True.
            StorageError: the store refused.
        """
        told = plan.storage_data if isinstance(plan.storage_data, dict) else {}
        with self._folder() as folder, torch.no_grad():
            tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            _read_tensors(folder, tensors, planner, cast=self._cast)
            objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
            ranks_now = told.get("world_size", rank_and_size()[1])
            _read_objects(folder, objects, planner, ranks_now, weights_only=self._weights_only)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # ---- the rest -------------------------------------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The folder or URL."""
        path = self._path
        return path if path is None or isinstance(path, str | os.PathLike) else getattr(path, "url", None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be read there."""
        try:
            open_store(checkpoint_id)
        except UsageError:
            return False
        return bool(os.fspath(checkpoint_id))

    def _folder_path(self) -> Any:
        if self._path is None:
            raise UsageError("ThinReader has no folder", hint="Give it a path, or dcp.load a checkpoint_id")
        return self._path

    def _folder(self) -> ThinFolder:
        if self._opened is None:
            self._opened = ThinFolder(
                self._folder_path(), backend=self._backend, num_threads=self._thread_count
            )
        return self._opened


@dataclass(frozen=True)
class _Slice:
    """A part of a chunk that goes into a tensor."""

    item: ReadItem
    tensor: TensorLayout
    chunk: Chunk
    target: torch.Tensor

    @property
    def index(self) -> tuple[slice, ...]:
        pairs = zip(self.item.storage_offsets, self.item.lengths, strict=True)
        return tuple(slice(start, start + length) for start, length in pairs)


def _read_tensors(folder: ThinFolder, items: list[ReadItem], planner: LoadPlanner, *, cast: bool) -> None:
    wanted: dict[int, list[_Slice]] = defaultdict(list)
    mismatched = []
    for item in items:
        tensor = folder.tensor(item.storage_index.fqn)
        part = _Slice(item, tensor, _chunk_of(item, tensor), planner.resolve_tensor(item).detach())
        mismatched += _mismatches(part, cast)
        wanted[part.chunk.rank].append(part)
    if mismatched:
        raise StateMismatchError(
            f"tensors differ from those in the checkpoint: {'; '.join(mismatched[:3])}",
            where=folder.store.url,
            mismatched=mismatched,
            hint="ThinReader(cast=True) converts dtypes",
        )
    for rank, file in folder.files(sorted(wanted)):
        parts = wanted.pop(rank)
        file.read_parts(
            (file.chunk(part.item.storage_index.fqn, part.chunk, part.tensor.dtype), part.index, part.target)
            for part in parts
        )
        for part in parts:
            planner.commit_tensor(part.item, part.target)


def _chunk_of(item: ReadItem, tensor: TensorLayout) -> Chunk:
    """The chunk that an item reads from."""
    index = item.storage_index
    offset = np.asarray(index.offset or (), np.int64)
    row = index.index
    if row is None or not 0 <= row < tensor.num_chunks or (tensor.offsets[row] != offset).any():
        rows = np.flatnonzero((tensor.offsets == offset).all(axis=1) & (tensor.sizes > 0).all(axis=1))
        if not len(rows):
            raise UnknownNameError(f"there is no chunk at {tuple(offset.tolist())}", tensor=index.fqn)
        row = int(rows[0])
    chunk = tensor.chunk(row)
    ends = zip(item.storage_offsets, item.lengths, chunk.sizes, strict=True)
    if any(start < 0 or length < 0 or start + length > size for start, length, size in ends):
        raise UsageError(
            "the plan reads beyond a chunk",
            tensor=index.fqn,
            expected=f"within {chunk.sizes}",
            actual=f"{tuple(item.lengths)} at {tuple(item.storage_offsets)}",
        )
    return chunk


def _mismatches(part: _Slice, cast: bool) -> list[str]:
    fqn, target = part.item.storage_index.fqn, part.target
    dtype = str(target.dtype).removeprefix("torch.")
    if tuple(target.shape) != tuple(part.item.lengths):
        return [f"{fqn}: shape {tuple(part.item.lengths)} in the plan, {tuple(target.shape)} in the state"]
    if dtype != part.tensor.dtype and not cast:
        return [f"{fqn}: {part.tensor.dtype} in the checkpoint, {dtype} in the state"]
    return []


def _read_objects(
    folder: ThinFolder, items: list[ReadItem], planner: LoadPlanner, ranks_now: int, *, weights_only: bool
) -> None:
    of_all_ranks = _states_of_all_ranks(folder.layout, ranks_now)
    names = {}
    for item in items:
        fqn = item.storage_index.fqn
        names[fqn] = of_all_ranks.get(rank_base(fqn), [fqn])
    wanted = sorted({name for below in names.values() for name in below})
    values = folder.load_objects(wanted, weights_only=weights_only)
    for item in items:
        fqn = item.storage_index.fqn
        value, base = values.get(fqn), rank_base(fqn)
        if base in of_all_ranks:
            value = RankState(
                [values[name].values[0] for name in names[fqn]], folder.world_size, None, base or ""
            )
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)


def _states_of_all_ranks(layout: Layout, ranks_now: int) -> dict[str | None, list[str]]:
    """For each state of which every rank has its own the names of all ranks', if another number of ranks has saved."""
    if ranks_now == layout.world_size:
        return {}
    bases = {rank_base(fqn) for fqn in layout.rank_states} - {None}
    names = {base: [own_name(base or "", rank) for rank in range(layout.world_size)] for base in bases}
    return {base: of_ranks for base, of_ranks in names.items() if layout.rank_states.issuperset(of_ranks)}


def own_name(base: str, rank: int) -> str:
    """The name of a rank's own state."""
    return f"{base}.{rank_name(rank)}" if base else rank_name(rank)


def rank_base(fqn: str) -> str | None:
    """The name of a state of which each rank has its own, from that of one; None for any other name."""
    found = rank_in(fqn)
    return None if found is None else found[0]
