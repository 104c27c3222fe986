"""Salvages one file: finds what is left, proves every part, writes what is whole into a new file. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinpoint.cli.progress import progress_bar
from thinpoint.cli.reporting import shorten_middle
from thinpoint.cli.salvage_labels import rest_by_labels
from thinpoint.cli.salvage_tree import Rest, Row, intact_rest
from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES, EncodedPart
from thinpoint.digest import MASK
from thinpoint.engine.backends import choose_backends
from thinpoint.engine.restore import coded_part
from thinpoint.engine.workers import Workers
from thinpoint.errors import (
    DigestMismatchError,
    NotEnoughMemoryError,
    StorageError,
    ThinpointError,
    UnsupportedError,
)
from thinpoint.file.index import PartEntry
from thinpoint.file.layout import hex64
from thinpoint.file.salvage import find, read_part
from thinpoint.file.writer import FileWriter, NewPart
from thinpoint.store import open_sink, open_source
from thinpoint.store.contract import Sink, Source
from thinpoint.version import __version__

_LABEL_WIDTH = 28


@dataclass(frozen=True, kw_only=True)
class SalvageReport:
    """What became of one file.

    Attributes:
        path: the file.
        target: the new file; None if none was written, because the file is intact or nothing in it is.
        has_index: whether names, order and what is no tensor are known from the file's index; else from labels only.
        problems: what is wrong with header, trailer, index and heads.
        rows: every tensor and value with bytes of its own, saved or lost.
        num_parts, num_bad_parts: parts that were found; those of them that are damaged.
        num_undecoded: parts whose stored bytes are intact but which only other machines can decode.
        in_bytes, out_bytes: sizes of both files; 0 without a new one.
    """

    path: Path
    target: Path | None
    has_index: bool
    problems: tuple[ThinpointError, ...]
    rows: list[Row]
    num_parts: int
    num_bad_parts: int
    num_undecoded: int
    in_bytes: int
    out_bytes: int

    @property
    def is_intact(self) -> bool:
        """Whether nothing is wrong with the file."""
        return not self.problems and not self.num_bad_parts

    @property
    def lost(self) -> list[Row]:
        """The rows of what is lost."""
        return [row for row in self.rows if row.reason is not None]


def salvage_file(
    path: Path, target: Path, *, makes_folder: bool, overwrite: bool, threads: int | None
) -> SalvageReport:
    """Write what is intact of a file to a new one; if the file is intact, or nothing is, nothing is written.

    Reads the file twice. Memory: one part with its decoded bits, and the index. Blocks on I/O.

    Raises:
        DamagedFileError: neither index nor part is left.
        UnsupportedError: the file is of a newer version.
        StorageError: the system refused; the target is as it was.
    """
    with open_source(path) as source, Workers(threads) as workers:
        label = shorten_middle(path.name, _LABEL_WIDTH)
        with progress_bar(f"search {label}", source.size) as progress:
            findings = find(source, progress)
        index = findings.index
        entries = index.parts if index is not None else [part.entry for part in findings.found]
        with progress_bar(f"check {label}", source.size) as progress:
            check = _Check(source, choose_backends().host, workers)
            check.run(entries, progress)
        rest = rest_by_labels(findings.found, check.bad) if index is None else intact_rest(index, check.bad)
        is_intact = not findings.problems and not check.bad
        writes = not is_intact and not rest.is_empty
        if writes:
            if makes_folder:
                target.parent.mkdir(parents=True, exist_ok=True)
            with (
                open_sink(target, overwrite=overwrite) as sink,
                progress_bar(
                    f"write {label}", sum(entry.stored_bytes for entry in rest.index.parts)
                ) as progress,
            ):
                _write(source, sink, rest, progress)
        return SalvageReport(
            path=path,
            target=target if writes else None,
            has_index=index is not None,
            problems=findings.problems,
            rows=rest.rows,
            num_parts=len(entries),
            num_bad_parts=len(check.bad),
            num_undecoded=check.num_undecoded,
            in_bytes=source.size,
            out_bytes=target.stat().st_size if writes else 0,
        )


class _Check:
    """Reads and decodes parts, one after the other.

    Attributes:
        bad: what is wrong, by place.
        num_undecoded: parts that only their stored digests prove, since their codec does not run here.
    """

    def __init__(self, source: Source, backend: HostBackend, workers: Workers) -> None:
        self.bad: dict[int, ThinpointError] = {}
        self.num_undecoded = 0
        self._source = source
        self._backend = backend
        self._workers = workers

    def run(self, entries: Sequence[PartEntry], progress: Any) -> None:
        for place, entry in enumerate(entries):
            try:
                self._prove(entry)
            except MemoryError:
                self.bad[place] = NotEnoughMemoryError(
                    "there is not enough memory to decode a part", offset=entry.offset
                )
            except (UnsupportedError, StorageError) as error:
                # An unreadable sector is damage like any other.
                self.bad[place] = error
            except ThinpointError as error:
                error.offset = entry.offset if error.offset is None else error.offset
                self.bad[place] = error
            progress(entry.offset + entry.stored_bytes)

    def _prove(self, entry: PartEntry) -> None:
        """Raises unless the part is as it was written and decodes to the bits that it was made from."""
        head, planes = read_part(self._source, entry)
        out = np.empty(head.num_elems, WORD_DTYPES[head.word_bytes])
        try:
            actual = self._backend.decode(coded_part(head), 0, planes, out, map=self._workers.map) & MASK
        except UnsupportedError:
            self.num_undecoded += 1
            return
        if actual != head.raw_digest:
            raise DigestMismatchError(
                "the decoded bits do not match their checksum",
                where=self._source.name,
                tensor=head.name,
                offset=entry.offset,
                expected=hex64(head.raw_digest),
                actual=hex64(actual),
            )


def _write(source: Source, sink: Sink, rest: Rest, progress: Any) -> None:
    """The new file. Parts are read again and checked again, but not decoded."""
    writer = FileWriter(sink)
    done = 0
    for entry in rest.index.parts:
        writer.add_parts([_part(source, entry, rest.storage_numbers.get(entry.storage, entry.storage))])
        done += entry.stored_bytes
        progress(done)
    index = rest.index
    encoder = index.writer.get("encoder")
    writer.finish(
        storages=index.storages,
        tensors=index.tensors,
        tree=index.tree,
        meta=index.meta,
        encoder=encoder if type(encoder) is int else 0,
        writer_version=__version__,
        optional=index.optional,
    )


def _part(source: Source, entry: PartEntry, storage: int) -> NewPart:
    head, planes = read_part(source, entry)
    encoded = EncodedPart(
        **vars(coded_part(head)),
        blocks=tuple(map(tuple, planes)),
        block_digests=head.block_digests,
        raw_digest=head.raw_digest,
        chain=entry.chain,
    )
    return NewPart(
        encoded=encoded,
        storage=storage,
        start_bytes=entry.start,
        dtype=entry.dtype,
        role=entry.role,
        label=head.label,
    )
