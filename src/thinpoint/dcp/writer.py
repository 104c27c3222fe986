"""`ThinWriter`: what `dcp.save` and `dcp.async_save` write with."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from thinpoint.dcp.commit import Origin, commit
from thinpoint.dcp.contents import Contents
from thinpoint.dcp.items import file_meta
from thinpoint.dcp.leftovers import remove_leftovers
from thinpoint.dcp.rank_state import rank_and_size
from thinpoint.dcp.record import check_same_way, record_of, versions
from thinpoint.dcp.staged_file import saving_of
from thinpoint.engine.backends import choose_backends, codec_named
from thinpoint.engine.budget import host_memory_bytes
from thinpoint.engine.save import Written, run
from thinpoint.engine.workers import Workers, checked_threads
from thinpoint.errors import (
    AlreadyExistsError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from thinpoint.folder.manifest import Manifest, check_metadata
from thinpoint.folder.names import DCP_METADATA, MANIFEST, data_name, new_id, tag_of
from thinpoint.store import open_store
from thinpoint.store.contract import Store


class ThinWriter(StorageWriter):
    """Writes a checkpoint of many ranks: one `.thin` file a rank, tensors compressed on the device they are on.

    For `dcp.save(state, storage_writer=ThinWriter(path))`, with or without a process group, and for `dcp.async_save`.
    May be used for one save after the other, not for two at a time. Every byte is durable before the coordinator puts
    the manifest in place, which is what makes a checkpoint of the files; until then, and after any error, the folder
    holds what it held before.

    Args:
        path: folder or URL, the same for all ranks, or a store; None if `dcp.save` gets a `checkpoint_id`.
        overwrite: replace the checkpoint in the folder if there is one; its files go after the commit.
        single_file_per_rank, sync_files: as those of `FileSystemWriter`; only True.
        thread_count: threads that compute, and threads that write; None for the CPUs this process may use.
        codec, backend, prove, allow_pickle, host_memory: as for `thinpoint.save`.
        origin: what the manifest says of the training step and the run.

    Raises:
        UsageError: an option is not valid.
        BackendUnavailableError: the backend or codec asked for by name cannot run here.
    """

    def __init__(
        self,
        path: Any = None,
        *,
        overwrite: bool = True,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        codec: str = "thin",
        backend: str = "auto",
        prove: bool | None = None,
        allow_pickle: bool = True,
        host_memory: int | None = None,
        origin: Origin | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("single_file_per_rank", single_file_per_rank), ("sync_files", sync_files)):
            if not value:
                raise UsageError(f"{name}=False is not offered", hint="Leave it out")
        self._path = path
        self._overwrite = overwrite
        self._thread_count = thread_count
        self._codec = codec_named(codec)
        self._backend = backend
        self._prove = prove
        self._allow_pickle = allow_pickle
        self._host_memory = host_memory
        self._origin = Origin() if origin is None else origin
        self._rank = 0
        self._save_id = ""
        check_metadata(self._origin.metadata)
        checked_threads(thread_count)
        host_memory_bytes(host_memory)
        choose_backends(backend, codec=self._codec, prove=prove)

    # ---- what DCP calls, in this order ----------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another folder, if one is given."""
        if checkpoint_id:
            self._path = checkpoint_id

    def storage_meta(self) -> StorageMeta | None:
        """For DCP's own metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn which rank this is.

        Raises:
            AlreadyExistsError: there is a checkpoint, and `overwrite` is False.
            UnsupportedError: the ranks are to save without telling each other.
            UsageError: there is neither a path nor a checkpoint_id.
        """
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "use_collectives=False is not offered: one manifest commits the files of all ranks",
                hint="For a process of its own use no_dist=True and a folder of its own",
            )
        rank = kwargs.get("rank")
        self._rank = rank_and_size()[0] if rank is None else rank
        # Here, as DCP calls `reset` only if it has a checkpoint_id.
        self._save_id = new_id(None if self._origin.run_id is None else tag_of(self._origin.run_id))
        if is_coordinator:
            if not self._overwrite:
                self._refuse_existing()
            if self._origin.run_id is None:
                # In a directory of checkpoints that is the business of the run that holds it.
                remove_leftovers(self._store())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, with how this rank saves."""
        return replace(plan, storage_data={"rank": self._rank, "way": self._way()})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, with the number of ranks.

        Raises:
            UsageError: the ranks do not save in the same way; nothing was written.
        """
        told = [plan.storage_data for plan in plans if isinstance(plan.storage_data, dict)]
        check_same_way({data["rank"]: data["way"] for data in told if "way" in data})
        return [replace(plan, storage_data={"world_size": len(plans)}) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; blocks until it is durable.

        Raises:
            StorageError: the system refused; the file never was.
            StateChangedError: a tensor changed while it was being read.
            UnsupportedObjectError: something cannot be stored; the message names it.
        """
        store = self._store()
        contents = Contents(self._codec)
        results = []
        for item in plan.items:
            num_bytes = contents.take(item, planner)
            results.append(WriteResult(item.index, num_bytes, self._rank))
        told = plan.storage_data if isinstance(plan.storage_data, dict) else {}
        name = data_name(self._save_id, self._rank)
        written = self._write(store, name, contents, told.get("world_size"))
        record = record_of(
            written, rank=self._rank, name=name, way=self._way(), rank_states=contents.rank_states
        )
        results.append(WriteResult(MetadataIndex(""), record.file.num_bytes, record))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written; called on the coordinator.

        Raises:
            IncompleteSaveError: something that was planned is missing, or a rank's file is not as it was written.
            UsageError: the ranks do not save in the same way.
            AlreadyExistsError: there is a checkpoint by now, and `overwrite` is False.
            StorageError: the store refused.
        """
        commit(
            self._store(),
            metadata,
            results,
            origin=self._origin,
            storage_meta=self.storage_meta() or StorageMeta(),
            put_manifest=self.put_manifest,
        )

    # ---- the rest -------------------------------------------------------------------------------------------------

    def put_manifest(self, manifest: Manifest, raw: bytes) -> None:
        """The one step that commits; for those who have more to do with it."""
        self._store().put(MANIFEST, raw, if_absent=not self._overwrite)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The folder or URL."""
        path = self._path
        return path if path is None or isinstance(path, str | os.PathLike) else getattr(path, "url", None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be written there."""
        try:
            open_store(checkpoint_id)
        except UsageError:
            return False
        return bool(os.fspath(checkpoint_id))

    def _store(self) -> Store:
        if self._path is None:
            raise UsageError("ThinWriter has no folder", hint="Give it a path, or dcp.save a checkpoint_id")
        return open_store(self._path)

    def _refuse_existing(self) -> None:
        store = self._store()
        # The second name is that of PyTorch's own checkpoints.
        for name in (MANIFEST, DCP_METADATA):
            try:
                with closing(store.source(name)):
                    pass
            except NotFoundError:
                continue
            raise AlreadyExistsError(
                "there is a checkpoint in the folder", where=store.url, hint="overwrite=True replaces it"
            )

    def _way(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {**versions(), "codec": self._codec, "allow_pickle": str(self._allow_pickle)}

    def _write(self, store: Store, name: str, contents: Contents, world_size: int | None) -> Written:
        saving = saving_of(
            contents.tensors,
            contents.objects,
            backends=choose_backends(self._backend, codec=self._codec, prove=self._prove),
            allow_pickle=self._allow_pickle,
            host_bytes=host_memory_bytes(self._host_memory),
            meta=file_meta(self._rank, world_size, contents.shapes),
        )
        with Workers(self._thread_count) as workers:
            return run(saving, store.sink(name), workers)
