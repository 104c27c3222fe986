"""Encodes a flattened state part by part while the part before is being written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES, EncodedPart, PartSpec, serial_map
from thinpoint.codec.plan import ENCODER_VERSION, PART_BYTES
from thinpoint.engine.workers import Workers
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.index import PartEntry, StorageEntry, TensorEntry
from thinpoint.file.writer import FileSummary, FileWriter
from thinpoint.state.leaves import FlatState, Region, StorageSource
from thinpoint.version import __version__

Progress = Callable[[int], None]
"""Called with raw bytes done so far."""


@dataclass(frozen=True, kw_only=True)
class PartJob:
    """One part to encode.

    Attributes:
        storage_index: index of the storage.
        storage: where its bytes come from.
        region: the region that the part is cut from.
        start, end: byte range in the storage.
        word_bytes: bytes of a word.
        spec: what the codec may know.
    """

    storage_index: int
    storage: StorageSource
    region: Region
    start: int
    end: int
    word_bytes: int
    spec: PartSpec


_COMPONENTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def words_of(dtype: str) -> tuple[str, int]:
    """(dtype of the words, bytes of a word) that a dtype is coded as; complex numbers as their components."""
    dtype = _COMPONENTS.get(dtype, dtype)
    return dtype, ITEM_BYTES.get(dtype, 1)


def part_jobs(storages: list[StorageSource]) -> Iterator[PartJob]:
    """The parts of all storages in order: regions cut to at most PART_BYTES, at rows where a row fits."""
    for storage_index, storage in enumerate(storages):
        for region in storage.regions:
            dtype, word_bytes = words_of(region.dtype)
            row_bytes = region.row_elems * word_bytes
            row_fits = 0 < row_bytes <= PART_BYTES
            step = PART_BYTES // row_bytes * row_bytes if row_fits else PART_BYTES
            spec = PartSpec(dtype=dtype, role=region.role, row_elems=region.row_elems if row_fits else 0)
            end = region.start_bytes + region.num_bytes
            for start in range(region.start_bytes, end, step):
                yield PartJob(
                    storage_index=storage_index,
                    storage=storage,
                    region=region,
                    start=start,
                    end=min(start + step, end),
                    word_bytes=word_bytes,
                    spec=spec,
                )


def write_file(
    state: FlatState,
    sink: Any,
    backend: HostBackend,
    workers: Workers,
    *,
    meta: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[FileSummary, list[PartEntry]]:
    """Write a flattened state to a sink as one file; returns its summary and the index entries of its parts.

    Blocks until every byte is with the sink. Memory besides the state: three times PART_BYTES, encoded.
    """
    writer = FileWriter(sink)
    entries = write_parts(state.storages, writer, backend, workers, progress)
    summary = writer.finish(
        storages=[StorageEntry(bytes=s.num_bytes, device=s.device) for s in state.storages],
        tensors=[tensor_entry(record) for record in state.tensors],
        tree=state.tree,
        meta=meta or {},
        encoder=ENCODER_VERSION,
        writer_version=__version__,
    )
    return summary, entries


def tensor_entry(record: dict[str, Any]) -> TensorEntry:
    """A tensor record of the state as an entry of the index."""
    own = {"storage", "dtype", "shape", "stride", "offset"}
    return TensorEntry(
        storage=record["storage"],
        dtype=record["dtype"],
        shape=tuple(record["shape"]),
        stride=tuple(record["stride"]),
        offset=record["offset"],
        extra={key: value for key, value in record.items() if key not in own},
    )


def write_parts(
    storages: list[StorageSource],
    writer: FileWriter,
    backend: HostBackend,
    workers: Workers,
    progress: Progress | None = None,
) -> list[PartEntry]:
    """Encode and write every part; returns their index entries. Holds at most three times PART_BYTES encoded."""
    entries: list[PartEntry] = []
    done = 0
    pending: deque[tuple[Future[PartEntry], int]] = deque()
    pending_bytes = 0

    def write(job: PartJob, part: EncodedPart) -> PartEntry:
        return writer.add_part(
            part,
            storage=job.storage_index,
            start_bytes=job.start,
            dtype=job.spec.dtype,
            role=job.spec.role,
            label=_label(job.region),
        )

    for job, part in _encoded(storages, backend, workers):
        pending.append((workers.in_background(write, job, part), part.stored_bytes))
        pending_bytes += part.stored_bytes
        while pending_bytes > PART_BYTES:
            future, size = pending.popleft()
            entries.append(future.result())
            pending_bytes -= size
        done += job.end - job.start
        if progress:
            progress(done)
    entries += [future.result() for future, _ in pending]
    return entries


def _label(region: Region) -> dict[str, Any]:
    """What salvage without an index needs to know."""
    return {
        "name": [key if isinstance(key, str | int) else str(key) for key in region.name],
        "dtype": region.dtype,
        "shape": list(region.shape),
        "role": region.role,
    }


def _encoded(
    storages: list[StorageSource], backend: HostBackend, workers: Workers
) -> Iterator[tuple[PartJob, EncodedPart]]:
    """Parts in order: large ones block by block on all threads, small ones side by side."""
    wave: list[PartJob] = []
    wave_bytes = 0
    for job in part_jobs(storages):
        size = job.end - job.start
        if wave and wave_bytes + size > PART_BYTES:
            yield from _encode_wave(wave, backend, workers)
            wave, wave_bytes = [], 0
        wave.append(job)
        wave_bytes += size
    if wave:
        yield from _encode_wave(wave, backend, workers)


def _encode_wave(
    wave: list[PartJob], backend: HostBackend, workers: Workers
) -> Iterator[tuple[PartJob, EncodedPart]]:
    if len(wave) == 1:
        yield wave[0], _encode(wave[0], backend, workers.map)
    else:
        yield from zip(wave, workers.map(lambda job: _encode(job, backend, serial_map), wave), strict=True)


def _encode(job: PartJob, backend: HostBackend, map: Any) -> EncodedPart:
    data = job.storage.read(job.start, job.end)
    if not data.flags.writeable:
        # A read-only array is another type to Numba: every kernel would be compiled a second time.
        data = data.copy()
    return backend.encode(data.view(WORD_DTYPES[job.word_bytes]), job.spec, map=map)
