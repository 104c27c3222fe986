"""Checks what a manifest names: the files of all ranks, one open at a time, and their layout. Torch-free."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from thinpoint.cli.progress import Advance, progress_bar
from thinpoint.dcp.rank_file import RankFile
from thinpoint.engine.backends import choose_backends
from thinpoint.engine.restore import Restorer, Target
from thinpoint.engine.verify import verify_file
from thinpoint.engine.workers import Workers
from thinpoint.errors import DigestMismatchError, ThinpointError
from thinpoint.file.layout import hex64
from thinpoint.file.reader import FileReader
from thinpoint.folder.layout import Layout
from thinpoint.folder.layout_file import MAX_LAYOUT_BYTES, parse_layout
from thinpoint.folder.manifest import FileRecord, Manifest
from thinpoint.store.contract import Store


@dataclass(kw_only=True)
class Found:
    """What was found in a checkpoint.

    Attributes:
        num_parts: parts of its files.
        num_checked: parts that were checked.
        problems: all that is wrong; with several ranks each says whose file it is about.
    """

    num_parts: int = 0
    num_checked: int = 0
    problems: list[ThinpointError] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class How:
    """How to check.

    Attributes:
        deep: also decode.
        sample: parts to check of each checkpoint, chosen by `choice`; None for all.
        threads: see `Workers`.
    """

    deep: bool
    sample: int | None
    choice: random.Random
    threads: int | None


def check_files(store: Store, manifest: Manifest, found: Found, how: How, label: str) -> None:
    """Check the files that a manifest names, in the store that is their folder; adds to `found`.

    Args:
        label: of the progress bar.
    """
    layout = _layout(store, manifest, found)
    if how.sample is None:
        total = sum(record.num_bytes for record in manifest.files)
        before = 0
        with progress_bar(label, total) as progress:
            for rank, record in enumerate(manifest.files):
                use = partial(_whole, found=found, how=how, progress=_from(before, progress))
                _each(found, manifest, rank, store, how, use)
                before += record.num_bytes
    else:
        _sample(store, manifest, found, how, label)
    if layout is not None:
        _check_layout(store, manifest, layout, found)


def _from(before: int, progress: Advance) -> Advance:
    return lambda done: progress(before + done)


def _each(
    found: Found,
    manifest: Manifest,
    rank: int,
    store: Store,
    how: How,
    use: Callable[[FileReader, Workers], list[ThinpointError]],
) -> None:
    """Open a rank's file, make sure it is the one that is meant, and use it; what is wrong is noted."""
    record = manifest.files[rank]
    try:
        with closing(store.source(record.name)) as source, Workers(how.threads) as workers:
            reader = FileReader(source)
            _check_identity(reader, record)
            problems = use(reader, workers)
    except ThinpointError as error:
        error.where = error.where or f"{store.url}/{record.name}"
        problems = [error]
    found.problems += [_of_rank(problem, manifest, rank) for problem in problems]


def _of_rank(problem: ThinpointError, manifest: Manifest, rank: int) -> ThinpointError:
    if manifest.world_size is not None:
        problem.what = f"rank {rank}: {problem.what}"
    return problem


def _layout(store: Store, manifest: Manifest, found: Found) -> Layout | None:
    record = manifest.layout
    if record is None:
        return None
    where = f"{store.url}/{record.name}"
    try:
        return parse_layout(store.get(record.name, MAX_LAYOUT_BYTES), record, where=where)
    except ThinpointError as error:
        error.where = error.where or where
        found.problems.append(error)
        return None


def _check_layout(store: Store, manifest: Manifest, layout: Layout, found: Found) -> None:
    """That every rank's file holds what the layout says, and nothing else. Files with other problems are left out."""
    chunks = defaultdict(list)
    for name, tensor in layout.tensors.items():
        for chunk in tensor.chunks:
            chunks[chunk.rank].append((name, tensor, chunk))
    objects: dict[int, list[str]] = defaultdict(list)
    for name, rank in layout.objects.items():
        objects[rank].append(name)
    bad = {str(problem.where) for problem in found.problems}
    for rank, record in enumerate(manifest.files):
        if any(where.endswith(record.name) for where in bad):
            continue
        try:
            with closing(RankFile(store, record, rank, backend="auto", num_threads=1)) as file:
                file.check_chunks(chunks[rank])
                file.check_objects(objects[rank], layout.rank_states)
        except ThinpointError as error:
            error.where = error.where or f"{store.url}/{record.name}"
            found.problems.append(error)


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


def _whole(
    reader: FileReader, workers: Workers, found: Found, how: How, progress: Advance
) -> list[ThinpointError]:
    chosen = choose_backends()
    report = verify_file(
        reader,
        chosen.host,
        workers,
        deep=how.deep,
        devices=chosen.devices,
        scratch=chosen.scratch,
        progress=progress,
    )
    found.num_parts += len(reader.index.parts)
    found.num_checked += report.num_parts
    return list(report.problems)


def _sample(store: Store, manifest: Manifest, found: Found, how: How, label: str) -> None:
    """Check parts chosen from all files together: first the files are counted, then those that are needed opened again."""
    assert how.sample is not None
    parts: list[tuple[int, int, int]] = []

    def count(rank: int) -> Callable[[FileReader, Workers], list[ThinpointError]]:
        def use(reader: FileReader, workers: Workers) -> list[ThinpointError]:
            parts.extend((rank, part, entry.stored_bytes) for part, entry in enumerate(reader.index.parts))
            return []

        return use

    for rank in range(len(manifest.files)):
        _each(found, manifest, rank, store, how, count(rank))
    found.num_parts = len(parts)
    wanted: dict[int, list[int]] = defaultdict(list)
    places = sorted(how.choice.sample(range(len(parts)), min(how.sample, len(parts))))
    for place in places:
        wanted[parts[place][0]].append(parts[place][1])
    before = 0
    with progress_bar(label, sum(parts[place][2] for place in places)) as progress:
        for rank, chosen in wanted.items():
            use = partial(_parts, parts=chosen, found=found, how=how, progress=_from(before, progress))
            _each(found, manifest, rank, store, how, use)
            before += sum(parts[place][2] for place in places if parts[place][0] == rank)


def _parts(
    reader: FileReader, workers: Workers, parts: list[int], found: Found, how: How, progress: Advance
) -> list[ThinpointError]:
    problems: list[ThinpointError] = []
    done = 0
    for part in parts:
        entry = reader.index.parts[part]
        try:
            if how.deep:
                out = np.empty(entry.raw_bytes, np.uint8)
                target = Target(storage=entry.storage, start=entry.start, out=out)
                Restorer(reader, choose_backends().host, workers).fill([target])
            else:
                head = reader.read_head(part)
                for plane in range(head.num_planes):
                    reader.read_blocks(part, head, plane, 0, head.num_blocks)
        except ThinpointError as error:
            problems.append(error)
        found.num_checked += 1
        done += entry.stored_bytes
        progress(done)
    return problems
