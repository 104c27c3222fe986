"""One save: a data file, a look at what is now in the store, then the manifest that makes it a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from thinpoint.api import SaveReport
from thinpoint.checkpoint.catalog import names_in, read_manifest
from thinpoint.checkpoint.guard import DataFile
from thinpoint.checkpoint.lane import Lane, is_transient
from thinpoint.checkpoint.log import log, rank
from thinpoint.checkpoint.names import data_name, manifest_name, new_id, step_folder, tag_of
from thinpoint.checkpoint.runs import Claim
from thinpoint.engine.workers import default_threads
from thinpoint.errors import (
    AlreadyExistsError,
    DamagedFileError,
    DigestMismatchError,
    NotFoundError,
    StaleStateError,
    StorageError,
    ThinpointError,
)
from thinpoint.file.layout import WRITE_VERSION, hex64
from thinpoint.file.reader import FileReader
from thinpoint.folder.manifest import FileRecord, Manifest, dump_manifest
from thinpoint.folder.trainable import trainable_digest
from thinpoint.store.contract import Store
from thinpoint.version import __version__

Stale = Literal["warn", "fail", "ignore"]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The newest checkpoint that this process knows: what a stale state is told by.

    Attributes:
        step: its training step.
        trainable: see `Manifest`.
    """

    step: int
    trainable: str | None


@dataclass(kw_only=True)
class SaveJob:
    """One save of one step.

    Attributes:
        store, lane, claim: where, by what, in whose name.
        step: training step.
        metadata: see `Manifest`; checked.
        overwrite: replace the step's checkpoint if there is one.
        stale: what to do if no weight has changed since `before`.
        before: the checkpoint before.
        replaced: after the commit, files of the checkpoint that was replaced, as names in the store.
        may_be_named: a manifest in place may name the files of this save, even if `commit` has failed.
    """

    store: Store
    lane: Lane
    claim: Claim
    step: int
    metadata: dict[str, Any]
    overwrite: bool
    stale: Stale
    before: Saved | None
    replaced: list[str] = field(default_factory=list)
    may_be_named: bool = False

    def refuse_existing(self) -> None:
        """Raises AlreadyExistsError if the step has a manifest that is not to be replaced."""
        if not self.overwrite and self.lane.call(lambda: self.store.files(manifest_name(self.step))):
            raise self._exists()

    def open(self) -> DataFile:
        """A new data file of this save: to be written, finished and given to `commit`, or discarded."""
        save_id = new_id(tag_of(self.claim.run.run_id))
        name = f"{step_folder(self.step)}/{data_name(save_id, rank())}"
        return DataFile(self.store, self.lane, name, num_threads=default_threads())

    def write(self, save: Callable[[DataFile], SaveReport]) -> tuple[DataFile, SaveReport]:
        """A data file in place; begun anew if the store fails in a way that may pass."""

        def attempt() -> tuple[DataFile, SaveReport]:
            data = self.open()
            try:
                report = save(data)
                data.finish()
                return data, report
            except BaseException as error:
                data.discard(error)
                # Not instead of what interrupts the caller.
                if isinstance(error, Exception) and data.error is not None and data.error is not error:
                    raise data.error from error
                raise

        return self.lane.again(attempt)

    def commit(self, data: DataFile, report: SaveReport) -> Manifest:
        """Puts the manifest of a data file in place; returns it when it is durable.

        Raises:
            SupersededError: another run owns the directory by now.
            StaleStateError: see `stale`.
            AlreadyExistsError: the step has a checkpoint by now.
            DigestMismatchError: the data file does not read as it was written.
            StorageError, SaveTimeoutError: the store refused, or did not answer.
        """
        try:
            manifest = self._manifest(data, report)
            self.place(manifest, dump_manifest(manifest))
        except (StorageError, StaleStateError, DamagedFileError) as error:
            # A superseded run deletes nothing, and what a manifest may name stays.
            if not self.may_be_named:
                data.discard(error)
            raise
        return manifest

    def place(self, manifest: Manifest, raw: bytes) -> None:
        """Puts a manifest, as `raw`, in place; returns when it is durable. Raises as `commit` does."""
        self._refuse_stale(manifest)
        self.lane.call(self.claim.check, self.store)
        old = self._old_files() if self.overwrite else set()
        self._put(manifest, raw)
        self.replaced = sorted(f"{step_folder(self.step)}/{name}" for name in old - names_in(manifest))

    def _manifest(self, data: DataFile, report: SaveReport) -> Manifest:
        """The manifest for a data file in place, after its header, trailer and index were read back."""
        record, trainable, encoder = self.lane.call(_read_back, self.store, data.name, report)
        return Manifest(
            step=self.step,
            save_id=record.name.partition("-")[0],
            run_id=self.claim.run.run_id,
            generation=self.claim.run.generation,
            time_s=time.time(),
            files=(record,),
            roles=report.roles,
            trainable=trainable,
            versions={"thinpoint": __version__, "format": str(WRITE_VERSION), "encoder": encoder},
            metadata=self.metadata,
        )

    def _refuse_stale(self, manifest: Manifest) -> None:
        before = self.before
        if self.stale == "ignore" or before is None or manifest.trainable is None:
            return
        if manifest.training_step > before.step and manifest.trainable == before.trainable:
            error = StaleStateError(
                f"no weight has changed since training step {before.step}",
                where=f"{self.store.url}/{step_folder(self.step)}",
            )
            if self.stale == "fail":
                raise error
            log.warning("%s", error)

    def _old_files(self) -> set[str]:
        try:
            old = self.lane.call(read_manifest, self.store, self.step)
        except NotFoundError:
            return set()
        except StorageError:
            raise
        except ThinpointError as error:
            log.warning("replacing a checkpoint whose manifest does not count: %s", error)
            return set()
        return names_in(old)

    def _put(self, manifest: Manifest, raw: bytes) -> None:
        """The commit. If it failed and the manifest is there all the same, it is put once more: to be durable for certain."""
        name = manifest_name(self.step)
        self.may_be_named = True
        try:
            self.lane.call(lambda: self.store.put(name, raw, if_absent=not self.overwrite))
            return
        except StorageError as error:
            there = None if self.lane.abandoned else self._is_there(manifest)
            if there is False:
                # What had no answer may still arrive.
                self.may_be_named = is_transient(error)
            if not there:
                if isinstance(error, AlreadyExistsError):
                    raise self._exists() from error
                raise
        self.lane.call(self.claim.check, self.store)
        self.lane.call(self.store.put, name, raw)

    def _is_there(self, manifest: Manifest) -> bool | None:
        """Whether this save's manifest is in place; None if the store does not say."""
        try:
            return self.lane.call(read_manifest, self.store, self.step).save_id == manifest.save_id
        except (NotFoundError, DamagedFileError):
            return False
        except ThinpointError:
            return None

    def _exists(self) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"training step {self.step} has a checkpoint already",
            where=self.store.url,
            hint="truncate_after(step) takes back what lies behind a step; overwrite=True replaces one step",
        )


def _read_back(store: Store, name: str, report: SaveReport) -> tuple[FileRecord, str | None, str]:
    """(record, digest of all weights, encoder version) of a data file as the store gives it back."""
    source = store.source(name)
    try:
        reader = FileReader(source)
    finally:
        source.close()
    if hex64(reader.file_id) != report.file_id:
        raise DigestMismatchError(
            "the store gives back another file than was written",
            where=name,
            expected=report.file_id,
            actual=hex64(reader.file_id),
        )
    record = FileRecord(
        name=name.rpartition("/")[2],
        num_bytes=reader.trailer.file_bytes,
        file_id=report.file_id,
        digest=hex64(reader.trailer.index_digest),
    )
    encoder = str(reader.index.writer.get("encoder", ""))
    return record, trainable_digest(reader.index.parts), encoder
