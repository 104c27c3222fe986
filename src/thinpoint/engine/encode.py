"""Encodes the parts of a state in waves, where their bytes are, and hands each wave to the writer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES, EncodedPart, serial_map
from thinpoint.codec.plan import PART_BYTES
from thinpoint.device.contract import EncodeItem, PendingParts
from thinpoint.engine.backends import Devices, device_lock
from thinpoint.engine.flow import Flow
from thinpoint.engine.jobs import PartJob, device_backend_of, part_jobs
from thinpoint.engine.report import timed
from thinpoint.engine.workers import Workers
from thinpoint.file.writer import NewPart
from thinpoint.state.leaves import Region, StorageSource

if TYPE_CHECKING:
    import torch

DEVICE_WAVE_BYTES = 256 << 20
"""Raw bytes that a device encodes at once: enough to hide every launch, little beside a training step's memory."""

FIRST_WAVE_BYTES = PART_BYTES
"""And the first time, twice as many each time after: the link and storage begin early."""

LARGE_WAVES = 2
"""So many times more while the caller only waits for the device, which has no step to run meanwhile."""

TASK_BYTES = 256 << 10
"""Raw bytes that a thread encodes at least, unless fewer are left: a third of a millisecond's work."""

MakeParts = Callable[[], list[NewPart]]
"""Does what is left of the work on a wave, for which the state is not needed. Called once."""

Progress = Callable[[int], None]
"""Called with raw bytes done so far."""


def devices_used(storages: Iterable[StorageSource], devices: Devices) -> set[torch.device]:
    """The devices that encode something themselves."""
    backends = {id(on): on for on in (device_backend_of(storage, devices) for storage in storages) if on}
    return {on.device for on in backends.values()}


def enough_bytes(num_devices: int) -> int:
    """Raw bytes of so many waves that no stage waits for another: one encoded, one proven, one copied, one written.

    Args:
        num_devices: devices that encode.
    """
    return 2 * PART_BYTES + 4 * DEVICE_WAVE_BYTES * num_devices


def encode_waves(
    storages: list[StorageSource],
    flow: Flow[MakeParts],
    backend: HostBackend,
    workers: Workers,
    *,
    devices: Devices,
    seconds: dict[str, float],
    progress: Progress | None = None,
    wave_scale: int = 1,
) -> None:
    """Encode every part and put it into the flow, in order, waiting where that has no room.

    Once it returns, the storages are needed no more: what is in the flow is a copy. On a device one wave is encoded while
    the one before is proven and the one before that copied.

    Args:
        wave_scale: a device encodes so many times DEVICE_WAVE_BYTES at once.
        flow: gets for each wave what makes its parts; its limit also makes waves smaller, down to one part.
        seconds: of each stage; "encode" and "wait" are added to, and where devices encode "pin", the part of encoding that it
            took to page-lock host memory.
    """
    on_devices = bool(devices_used(storages, devices))
    # The CPU has nothing to prove or copy meanwhile: a wave is handed on when the next has begun.
    most_behind = 2 if on_devices else 1
    pinned_before = _pin_seconds() if on_devices else 0.0
    done = 0
    under_way: deque[_Wave] = deque()

    def finish() -> None:
        nonlocal done
        wave = under_way.popleft()
        with timed(seconds, "encode"):
            kept = wave.settle()
        flow.put(wave.new_parts, reserved=wave.raw_bytes, kept=kept)
        done += wave.raw_bytes
        if progress:
            progress(done)

    device_bytes = min(wave_scale * DEVICE_WAVE_BYTES, flow.limit_bytes // 2)
    for jobs in _waves(part_jobs(storages, devices), device_bytes):
        raw_bytes = sum(job.num_bytes for job in jobs)
        while under_way and not flow.has_room(raw_bytes):
            # The writer may need them to make room.
            finish()
        with timed(seconds, "wait"):
            flow.reserve(raw_bytes)
        with timed(seconds, "encode"):
            under_way.append(_Wave(jobs, raw_bytes, backend, workers))
            if len(under_way) > 1:
                under_way[-2].send()
        if len(under_way) > most_behind:
            finish()
    if under_way:
        with timed(seconds, "encode"):
            under_way[-1].send()
    while under_way:
        finish()
    if on_devices:
        seconds["pin"] = seconds.get("pin", 0.0) + _pin_seconds() - pinned_before
    flow.close()


def _pin_seconds() -> float:
    """Spent on page-locking host memory since the process began."""
    from thinpoint.device.pinned import slab_pool

    return slab_pool(is_pinned=True).seconds


def _label(region: Region) -> dict[str, Any]:
    """What salvage without an index needs to know."""
    return {
        "name": [key if isinstance(key, str | int) else str(key) for key in region.name],
        "dtype": region.dtype,
        "shape": list(region.shape),
        "role": region.role,
        **region.more,
    }


def _waves(jobs: Iterable[PartJob], device_bytes: int) -> Iterator[list[PartJob]]:
    """The jobs in order, in lists that grow to `device_bytes` on each device, and PART_BYTES on the CPU.

    Budgets are apart, so that the few bytes that an optimizer keeps on the CPU for each of its tensors on a GPU do not
    cut the GPU's waves short.
    """
    wave: list[PartJob] = []
    used: dict[torch.device | None, int] = {}
    now_bytes = min(FIRST_WAVE_BYTES, device_bytes)
    for job in jobs:
        device, num_bytes = job.device, job.num_bytes
        budget = min(PART_BYTES, now_bytes) if device is None else now_bytes
        if device in used and used[device] + num_bytes > budget:
            yield wave
            wave, used = [], {}
            now_bytes = min(2 * now_bytes, device_bytes)
        wave.append(job)
        used[device] = used.get(device, 0) + num_bytes
    if wave:
        yield wave


class _Wave:
    """A wave under way: each device has its parts in one batch, while the CPU's threads have theirs.

    What it encoded begins to be copied to the host with `send`.
    """

    def __init__(self, jobs: list[PartJob], raw_bytes: int, backend: HostBackend, workers: Workers) -> None:
        self.raw_bytes = raw_bytes
        # No jobs: they hold the state.
        self._wanted = [(job.storage_index, job.start, job.spec, job.region) for job in jobs]
        places: dict[torch.device | None, list[int]] = {}
        for place, job in enumerate(jobs):
            places.setdefault(job.device, []).append(place)
        self._host_places = places.pop(None, [])
        self._on_host = _encode_on_host([jobs[place] for place in self._host_places], backend, workers)
        self._on_devices = [
            (device, device_places, _begin_on_device([jobs[place] for place in device_places]))
            for device, device_places in places.items()
            if device is not None
        ]

    def send(self) -> None:
        """Let the devices copy what they have encoded; they have the next wave already."""
        for device, _, pending in self._on_devices:
            with device_lock(device):
                pending.send()

    def settle(self) -> int:
        """Wait until nothing of the state is needed any more; returns how many bytes of host memory the wave takes."""
        self.send()
        for _, _, pending in self._on_devices:
            pending.wait()
        self._on_host = list(self._on_host)
        on_devices = sum(pending.stored_bytes for _, _, pending in self._on_devices)
        return on_devices + sum(part.stored_bytes for part in self._on_host)

    def new_parts(self) -> list[NewPart]:
        """The parts in order. Only once: it keeps none of them."""
        parts: dict[int, EncodedPart] = {}
        for _, places, pending in self._on_devices:
            parts.update(zip(places, pending.parts(), strict=True))
        parts.update(zip(self._host_places, self._on_host, strict=True))
        self._on_host, self._on_devices = [], []
        return [
            NewPart(
                encoded=parts[place],
                storage=storage,
                start_bytes=start,
                dtype=spec.dtype,
                role=spec.role,
                label=_label(region),
            )
            for place, (storage, start, spec, region) in enumerate(self._wanted)
        ]


def _begin_on_device(jobs: list[PartJob]) -> PendingParts:
    """Parts of one device. On the caller's thread: behind its current stream the tensors' values are ready."""
    backend = jobs[0].on
    assert backend is not None
    items = []
    for job in jobs:
        assert job.storage.view is not None
        words = job.storage.view(job.start, job.end)
        items.append(EncodeItem(words=words, word_bytes=job.word_bytes, spec=job.spec))
    with device_lock(backend.device):
        return backend.begin_batch(items)


def _encode_on_host(jobs: list[PartJob], backend: HostBackend, workers: Workers) -> Iterable[EncodedPart]:
    """A single part block by block on all threads, several side by side; these are under way on return."""
    if len(jobs) == 1:
        return [_encode(jobs[0], backend, workers.map)]
    done = workers.map(lambda group: [_encode(job, backend, serial_map) for job in group], _groups(jobs))
    return chain.from_iterable(done)


def _groups(jobs: list[PartJob]) -> list[list[PartJob]]:
    """Jobs in order; many small ones are one task for a thread, as it takes longer to hand it over than to encode them."""
    groups: list[list[PartJob]] = []
    room = 0
    for job in jobs:
        if job.num_bytes > room:
            groups.append([])
            room = TASK_BYTES
        groups[-1].append(job)
        room -= job.num_bytes
    return groups


def _encode(job: PartJob, backend: HostBackend, map: Any) -> EncodedPart:
    data = job.storage.read(job.start, job.end)
    if not data.flags.writeable:
        # A read-only array is another type to Numba: every kernel would be compiled a second time.
        data = data.copy()
    return backend.encode(data.view(WORD_DTYPES[job.word_bytes]), job.spec, map=map)
