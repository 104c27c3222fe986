"""Checks the checkpoints of a directory: every file that their manifests name, or a sample of the parts. Torch-free."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from thinpoint.checkpoint.catalog import StepEntry, entries, read_manifest
from thinpoint.checkpoint.manifest import FileRecord
from thinpoint.checkpoint.names import step_folder
from thinpoint.cli.progress import progress_bar
from thinpoint.engine.backends import Backends, choose_backends
from thinpoint.engine.restore import Restorer, Target
from thinpoint.engine.verify import verify_file
from thinpoint.engine.workers import Workers
from thinpoint.errors import DigestMismatchError, ThinpointError
from thinpoint.file.layout import hex64
from thinpoint.file.reader import FileReader
from thinpoint.store import Store


@dataclass(kw_only=True)
class StepResult:
    """What was found in one save.

    Attributes:
        entry: the save; only one with a manifest is a checkpoint, and checked.
        num_parts: parts of its files.
        num_checked: parts that were checked.
        problems: all that is wrong.
    """

    entry: StepEntry
    num_parts: int = 0
    num_checked: int = 0
    problems: list[ThinpointError] = field(default_factory=list)

    @property
    def word(self) -> str:
        """OK, BAD, or why neither."""
        if self.problems:
            return "BAD"
        return "OK" if self.entry.state == "committed" else self.entry.state


def verify_steps(
    store: Store, *, deep: bool, sample: int | None, seed: int, threads: int | None
) -> Iterator[StepResult]:
    """The saves of a directory, newest step first, without the trash; each is checked when it is asked for.

    Args:
        deep: also decode.
        sample: parts to check of each checkpoint, chosen at random; None for all.
        seed: of the choice.
        threads: see `Workers`.

    Raises:
        StorageError: the store refused to list.
    """
    choice = random.Random(seed)
    for entry in entries(store):
        if entry.state == "trash":
            continue
        result = StepResult(entry=entry)
        if entry.error is not None:
            result.problems.append(entry.error)
        if entry.state == "committed" and entry.step is not None:
            try:
                _check_step(store, entry.step, result, deep, sample, choice, threads)
            except ThinpointError as error:
                error.where = error.where or step_folder(entry.step)
                result.problems.append(error)
        yield result


def _check_step(
    store: Store,
    step: int,
    result: StepResult,
    deep: bool,
    sample: int | None,
    choice: random.Random,
    threads: int | None,
) -> None:
    chosen = choose_backends()
    opened: list[FileReader] = []
    sources = []
    with Workers(threads) as workers:
        try:
            for record in read_manifest(store, step).files:
                source = store.source(f"{step_folder(step)}/{record.name}")
                sources.append(source)
                try:
                    reader = FileReader(source)
                    _check_identity(reader, record)
                except ThinpointError as error:
                    error.where = error.where or source.name
                    result.problems.append(error)
                    continue
                opened.append(reader)
            result.num_parts = sum(len(reader.index.parts) for reader in opened)
            if sample is None:
                _check_whole(opened, result, chosen, workers, deep)
            else:
                _check_sample(opened, result, chosen, workers, deep, sample, choice)
        finally:
            for source in sources:
                source.close()


def _check_identity(reader: FileReader, record: FileRecord) -> None:
    for what, expected, actual in (
        ("file id", record.file_id, reader.file_id),
        ("digest", record.digest, reader.trailer.index_digest),
    ):
        if expected != hex64(actual):
            raise DigestMismatchError(
                f"the {what} is not the one that the manifest names",
                where=reader.name,
                expected=expected,
                actual=hex64(actual),
            )


def _check_whole(
    readers: list[FileReader], result: StepResult, chosen: Backends, workers: Workers, deep: bool
) -> None:
    total = sum(reader.trailer.file_bytes for reader in readers)
    before = 0
    with progress_bar(f"step {result.entry.step}", total) as progress:
        for reader in readers:

            def advance(done: int, before: int = before) -> None:
                progress(before + done)

            report = verify_file(
                reader,
                chosen.host,
                workers,
                deep=deep,
                devices=chosen.devices,
                scratch=chosen.scratch,
                progress=advance,
            )
            result.problems += report.problems
            result.num_checked += report.num_parts
            before += reader.trailer.file_bytes


def _check_sample(
    readers: list[FileReader],
    result: StepResult,
    chosen: Backends,
    workers: Workers,
    deep: bool,
    sample: int,
    choice: random.Random,
) -> None:
    parts = [(reader, part) for reader in readers for part in range(len(reader.index.parts))]
    places = sorted(choice.sample(range(len(parts)), min(sample, len(parts))))
    total = sum(parts[place][0].index.parts[parts[place][1]].stored_bytes for place in places)
    done = 0
    with progress_bar(f"step {result.entry.step}", total) as progress:
        for place in places:
            reader, part = parts[place]
            entry = reader.index.parts[part]
            try:
                if deep:
                    out = np.empty(entry.raw_bytes, np.uint8)
                    target = Target(storage=entry.storage, start=entry.start, out=out)
                    Restorer(reader, chosen.host, workers).fill([target])
                else:
                    head = reader.read_head(part)
                    for plane in range(head.num_planes):
                        reader.read_blocks(part, head, plane, 0, head.num_blocks)
            except ThinpointError as error:
                result.problems.append(error)
            result.num_checked += 1
            done += entry.stored_bytes
            progress(done)
