"""Checks the checkpoints of a directory: every file that their manifests name, or a sample of the parts. Torch-free."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from thinpoint.checkpoint.catalog import StepEntry, entries, read_manifest
from thinpoint.checkpoint.names import step_folder
from thinpoint.cli.verify_files import Found, How, check_files
from thinpoint.errors import ThinpointError
from thinpoint.store import Store
from thinpoint.store.below import Below


@dataclass(kw_only=True)
class StepResult(Found):
    """What was found in one save.

    Attributes:
        entry: the save; only one with a manifest is a checkpoint, and checked.
    """

    entry: StepEntry

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
    how = How(deep=deep, sample=sample, choice=random.Random(seed), threads=threads)
    for entry in entries(store):
        if entry.state == "trash":
            continue
        result = StepResult(entry=entry)
        if entry.error is not None:
            result.problems.append(entry.error)
        if entry.state == "committed" and entry.step is not None:
            try:
                below = Below(store, step_folder(entry.step))
                check_files(below, read_manifest(store, entry.step), result, how, f"step {entry.step}")
            except ThinpointError as error:
                error.where = error.where or step_folder(entry.step)
                result.problems.append(error)
        yield result
