"""Encodes a flattened state in waves of parts: while one is written, the next is encoded, where its bytes are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES, EncodedPart, PartSpec, serial_map
from thinpoint.codec.plan import ENCODER_VERSION, PART_BYTES
from thinpoint.device.contract import DeviceBackend, EncodeItem
from thinpoint.engine.backends import Devices, device_lock
from thinpoint.engine.workers import Workers
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.index import PartEntry, StorageEntry, TensorEntry
from thinpoint.file.writer import FileSummary, FileWriter, NewPart
from thinpoint.state.leaves import FlatState, Region, StorageSource
from thinpoint.version import __version__

if TYPE_CHECKING:
    import torch

DEVICE_WAVE_BYTES = 256 << 20
"""Raw bytes that a device encodes at once: enough to hide every launch, little beside a training step's memory."""

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
        on: what codes it on the device where it is; None for the CPU.
    """

    storage_index: int
    storage: StorageSource
    region: Region
    start: int
    end: int
    word_bytes: int
    spec: PartSpec
    on: DeviceBackend | None = None

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def device(self) -> torch.device | None:
        """The device that codes it; None for the CPU."""
        return None if self.on is None else self.on.device


_COMPONENTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def words_of(dtype: str) -> tuple[str, int]:
    """(dtype of the words, bytes of a word) that a dtype is coded as; complex numbers as their components."""
    dtype = _COMPONENTS.get(dtype, dtype)
    return dtype, ITEM_BYTES.get(dtype, 1)


def device_backend_of(storage: StorageSource, devices: Devices) -> DeviceBackend | None:
    """What codes a storage on the device where it is; None for the CPU.

    Raises:
        BackendUnavailableError: one was asked for by name and cannot run there.
    """
    if storage.view is None or not storage.regions:
        return None
    return devices.get(storage.view(0, 0).device)


def backend_names(storages: list[StorageSource], backend: HostBackend, devices: Devices) -> str:
    """What codes these storages, for people: "cpu", "triton", "triton+cpu"."""
    used = {}
    for storage in storages:
        on_device = device_backend_of(storage, devices)
        if on_device is not None:
            used[on_device.name] = 0
        elif storage.regions:
            used[backend.name] = 1
    return "+".join(sorted(used, key=lambda name: used[name])) or backend.name


def part_jobs(storages: list[StorageSource], devices: Devices) -> Iterator[PartJob]:
    """The parts of all storages in order: regions cut to at most PART_BYTES, at rows where a row fits."""
    for storage_index, storage in enumerate(storages):
        on_device = device_backend_of(storage, devices)
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
                    on=on_device,
                )


def write_file(
    state: FlatState,
    sink: Any,
    backend: HostBackend,
    workers: Workers,
    *,
    devices: Devices | None = None,
    meta: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[FileSummary, list[PartEntry]]:
    """Write a flattened state to a sink as one file; returns its summary and the index entries of its parts.

    Blocks until every byte is with the sink. Host memory besides the state: two waves, each encoded from at most
    DEVICE_WAVE_BYTES on every device with a backend and PART_BYTES on the CPU.

    Args:
        sink: see `store.contract.Sink`.
        devices: what codes storages on accelerators; by default they are read and coded on the CPU.
    """
    writer = FileWriter(sink, partial(sink.write_all, map=workers.copy_map))
    entries = write_parts(state.storages, writer, backend, workers, devices=devices, progress=progress)
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
    *,
    devices: Devices | None = None,
    progress: Progress | None = None,
) -> list[PartEntry]:
    """Encode and write every part; returns their index entries. Memory as `write_file`."""
    devices = Devices() if devices is None else devices
    entries: list[PartEntry] = []
    pending: Future[list[PartEntry]] | None = None
    done = 0
    for wave in _waves(part_jobs(storages, devices)):
        parts = _encode_wave(wave, backend, workers)
        if pending is not None:
            entries += pending.result()
        pending = workers.in_background(_write, writer, wave, parts)
        # Only the writing thread holds it now, or this wave would stay in memory while the next one is encoded.
        del parts
        done += sum(job.num_bytes for job in wave)
        if progress:
            progress(done)
    if pending is not None:
        entries += pending.result()
    return entries


def _write(writer: FileWriter, wave: list[PartJob], parts: list[EncodedPart]) -> list[PartEntry]:
    return writer.add_parts(
        NewPart(
            encoded=part,
            storage=job.storage_index,
            start_bytes=job.start,
            dtype=job.spec.dtype,
            role=job.spec.role,
            label=_label(job.region),
        )
        for job, part in zip(wave, parts, strict=True)
    )


def _label(region: Region) -> dict[str, Any]:
    """What salvage without an index needs to know."""
    return {
        "name": [key if isinstance(key, str | int) else str(key) for key in region.name],
        "dtype": region.dtype,
        "shape": list(region.shape),
        "role": region.role,
    }


def _waves(jobs: Iterable[PartJob]) -> Iterator[list[PartJob]]:
    """The jobs in order, in lists that no device's budget is too small for.

    Budgets are apart, so that the few bytes that an optimizer keeps on the CPU for each of its tensors on a GPU do not
    cut the GPU's waves short.
    """
    wave: list[PartJob] = []
    used: dict[torch.device | None, int] = {}
    for job in jobs:
        budget = PART_BYTES if job.on is None else DEVICE_WAVE_BYTES
        if job.device in used and used[job.device] + job.num_bytes > budget:
            yield wave
            wave, used = [], {}
        wave.append(job)
        used[job.device] = used.get(job.device, 0) + job.num_bytes
    if wave:
        yield wave


def _encode_wave(wave: list[PartJob], backend: HostBackend, workers: Workers) -> list[EncodedPart]:
    """The parts of a wave in order: each device's in one batch, while the CPU's threads have theirs."""
    places: dict[torch.device | None, list[int]] = {}
    for place, job in enumerate(wave):
        places.setdefault(job.device, []).append(place)
    host_places = places.pop(None, [])
    on_host = _encode_on_host([wave[place] for place in host_places], backend, workers)
    parts: dict[int, EncodedPart] = {}
    for device_places in places.values():
        encoded = _encode_on_device([wave[place] for place in device_places])
        parts.update(zip(device_places, encoded, strict=True))
    parts.update(zip(host_places, on_host, strict=True))
    return [parts[place] for place in range(len(wave))]


def _encode_on_device(jobs: list[PartJob]) -> list[EncodedPart]:
    """Parts of one device. On the caller's thread: behind its current stream the tensors' values are ready."""
    backend = jobs[0].on
    assert backend is not None
    items = []
    for job in jobs:
        assert job.storage.view is not None
        words = job.storage.view(job.start, job.end)
        items.append(EncodeItem(words=words, word_bytes=job.word_bytes, spec=job.spec))
    with device_lock(backend.device):
        return backend.encode_batch(items)


def _encode_on_host(jobs: list[PartJob], backend: HostBackend, workers: Workers) -> Iterable[EncodedPart]:
    """A single part block by block on all threads, several side by side; these are under way on return."""
    if len(jobs) == 1:
        return [_encode(jobs[0], backend, workers.map)]
    return workers.map(lambda job: _encode(job, backend, serial_map), jobs)


def _encode(job: PartJob, backend: HostBackend, map: Any) -> EncodedPart:
    data = job.storage.read(job.start, job.end)
    if not data.flags.writeable:
        # A read-only array is another type to Numba: every kernel would be compiled a second time.
        data = data.copy()
    return backend.encode(data.view(WORD_DTYPES[job.word_bytes]), job.spec, map=map)
