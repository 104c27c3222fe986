"""Proof that what was read in place did not change from the call until it had been read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thinpoint.digest import MASK, digest
from thinpoint.engine.backends import Devices, device_lock
from thinpoint.engine.encode import MakeParts
from thinpoint.engine.flow import Flow
from thinpoint.engine.jobs import PartJob, part_jobs
from thinpoint.engine.workers import Workers
from thinpoint.errors import StateChangedError
from thinpoint.file.writer import NewPart
from thinpoint.state.leaves import StorageSource
from thinpoint.state.tree import display

if TYPE_CHECKING:
    from thinpoint.device.launch import Launcher

SAMPLE_BYTES = 512
"""Of each storage, compared with what it was at the call: enough for what writes past torch, as a replayed CUDA graph does."""

Place = tuple[int, int]
"""A part: index of its storage, first byte."""


class InPlace:
    """Storages that are read where they are, beside training. Made when the values are those to be saved.

    Tells of a change by any of: the version counters that torch keeps of writes, from the call on; the first bytes of each
    storage, from the call on; the digest of all bytes, from reading on; address and size of each storage.

    Args:
        storages: of the state; all of them, as parts are numbered by their place in this list.
        places: which of them are read in place; each has a view.
        tensors: the tensors in each, in the order of `places`.
    """

    def __init__(
        self, storages: list[StorageSource], places: list[int], tensors: Iterable[Iterable[torch.Tensor]]
    ) -> None:
        self.places = frozenset(places)
        self._live = {place: _Live(storages[place]) for place in places}
        self._versions = [
            (place, tensor, tensor._version)
            for place, own in zip(places, tensors, strict=True)
            for tensor in own
            if not tensor.is_inference()
        ]
        self._samples = self._sampled()

    def sources(self) -> Mapping[int, StorageSource]:
        """For each place what to encode, which raises StateChangedError if the storage is no longer where it was."""
        return {place: live.source() for place, live in self._live.items()}

    def check(self, workers: Workers, devices: Devices, launched: Callable[[], None]) -> dict[Place, int]:
        """The digests of all parts as they are now, after they have been read.

        Args:
            launched: called when everything is done but what devices still have to do; on them, behind that.

        Raises:
            StateChangedError: something has changed since the call.
        """
        jobs = [job for job in part_jobs(self._all_sources(), devices) if job.storage_index in self.places]
        on_device = [job for job in jobs if _has_kernels(torch.device(job.storage.device).type)]
        on_host = [job for job in jobs if not _has_kernels(torch.device(job.storage.device).type)]
        found = dict(zip(map(_place, on_host), workers.map(_host_digest, on_host), strict=True))
        self._check_versions()
        pending = [_begin_digests(device, own) for device, own in _by_device(on_device).items()]
        samples = self._sampled()
        launched()
        for settle in pending:
            found.update(settle())
        self._check_samples(samples)
        return found

    def name(self, place: int) -> str:
        """A tensor in a storage, for messages."""
        return display(self._live[place].storage.regions[0].name)

    def _all_sources(self) -> list[StorageSource]:
        nothing = StorageSource(num_bytes=0, device="cpu", regions=(), read=_nothing)
        own = self.sources()
        return [own.get(place, nothing) for place in range(max(own, default=-1) + 1)]

    def _check_versions(self) -> None:
        for place, tensor, version in self._versions:
            if tensor._version != version:
                raise changed(self.name(place))

    def _sampled(self) -> dict[torch.device, torch.Tensor]:
        samples: dict[torch.device, list[torch.Tensor]] = {}
        for live in self._live.values():
            samples.setdefault(live.first.device, []).append(live.first_bytes())
        return {device: torch.cat(views) for device, views in samples.items()}

    def _check_samples(self, now: dict[torch.device, torch.Tensor]) -> None:
        for device, before in self._samples.items():
            differs = (before != now[device]).nonzero()
            if not differs.numel():
                continue
            first = int(differs[0])
            for place, live in self._live.items():
                if live.first.device == device:
                    first -= live.first.numel()
                    if first < 0:
                        raise changed(self.name(place))


class CheckedFlow(Flow[MakeParts]):
    """A flow whose reader learns at its end whether what was encoded in place is what was there after it had been read.

    Args:
        in_place: what is read in place; not kept.

    Attributes:
        check_read: gives the digests of the parts that were read in place; called once everything has been read.
    """

    def __init__(self, limit_bytes: int, in_place: InPlace) -> None:
        # An optimizer's step waits for encoding, and nobody for writing.
        super().__init__(limit_bytes, drains_late=True)
        self.check_read: Callable[[], dict[Place, int]] = dict
        self._names = {place: in_place.name(place) for place in in_place.places}
        self._encoded: dict[Place, int] = {}
        self._found: dict[Place, int] = {}

    def put(self, item: MakeParts, *, reserved: int, kept: int) -> None:
        """See `Flow.put`."""
        super().put(partial(self._noted, item), reserved=reserved, kept=kept)

    def close(self) -> None:
        """Look at what was read once more, before the other side can end."""
        self._found = self.check_read()
        super().close()

    def drain(self, use: Callable[[MakeParts], Any], settle: Callable[[], Any] = lambda: None) -> None:
        """See `Flow.drain`.

        Raises:
            StateChangedError: something changed while it was being read.
        """
        super().drain(use, settle)
        for place, expected in self._encoded.items():
            if self._found[place] != expected:
                raise changed(self._names[place[0]])

    def _noted(self, make_parts: MakeParts) -> list[NewPart]:
        parts = make_parts()
        for part in parts:
            if part.storage in self._names:
                self._encoded[part.storage, part.start_bytes] = part.encoded.raw_digest
        return parts


def changed(tensor: str) -> StateChangedError:
    """A tensor changed although no optimizer's step did it."""
    return StateChangedError(
        "a tensor changed while it was being read in place",
        tensor=tensor,
        hint="Change parameters only in an optimizer's step, wait for staging_completion, or save without overlap",
    )


class _Live:
    """A storage that is read in place, with the address and size that it had at first."""

    def __init__(self, storage: StorageSource) -> None:
        assert storage.view is not None
        self.storage = storage
        self.first = storage.view(0, min(SAMPLE_BYTES, storage.num_bytes))
        self._owner = self.first.untyped_storage()
        self._at = self._owner.data_ptr(), self._owner.nbytes()

    def source(self) -> StorageSource:
        return StorageSource(
            num_bytes=self.storage.num_bytes,
            device=self.storage.device,
            regions=self.storage.regions,
            read=self.read,
            view=self.view,
        )

    def read(self, start: int, end: int) -> np.ndarray:
        self._check()
        return self.storage.read(start, end)

    def view(self, start: int, end: int) -> torch.Tensor:
        self._check()
        assert self.storage.view is not None
        return self.storage.view(start, end)

    def first_bytes(self) -> torch.Tensor:
        self._check()
        return self.first

    def _check(self) -> None:
        """Before every access: a view of a storage that was freed would make that grow again."""
        if (self._owner.data_ptr(), self._owner.nbytes()) != self._at:
            raise StateChangedError(
                "a tensor's storage was freed or moved while it was being read in place",
                tensor=display(self.storage.regions[0].name),
                hint="Parameters that are gathered and freed again are saved without overlap",
            )


def _place(job: PartJob) -> Place:
    return job.storage_index, job.start


@cache
def _has_kernels(device_type: str) -> bool:
    """Whether devices of this type digest what they hold."""
    from thinpoint.device.select import why_not

    return device_type == "cuda" and why_not("cuda") is None


def _host_digest(job: PartJob) -> int:
    return digest(job.storage.read(job.start, job.end))


def _by_device(jobs: list[PartJob]) -> dict[torch.device, list[PartJob]]:
    found: dict[torch.device, list[PartJob]] = {}
    for job in jobs:
        assert job.storage.view is not None
        found.setdefault(torch.device(job.storage.device), []).append(job)
    return found


def _begin_digests(device: torch.device, jobs: list[PartJob]) -> Callable[[], Iterator[tuple[Place, int]]]:
    """Launch the digests of parts on the device's current stream; what it returns waits for them."""
    from thinpoint.device.ranges import digest_ranges
    from thinpoint.device.transfers import HostCopies, on_device

    views = [job.storage.view(job.start, job.end) for job in jobs if job.storage.view is not None]
    sizes = np.array([view.numel() for view in views], np.int64)
    addresses = np.array([view.data_ptr() for view in views], np.int64)
    copies = HostCopies(device)
    with device_lock(device), on_device(device):
        sums = copies.add(digest_ranges(_launcher(device), addresses, sizes, np.zeros_like(sizes)))
        copies.begin()

    def settle() -> Iterator[tuple[Place, int]]:
        copies.wait()
        return zip(map(_place, jobs), (value & MASK for value in sums.tolist()), strict=True)

    return settle


@cache
def _launcher(device: torch.device) -> Launcher:
    """Kept, as it knows which kernels are compiled."""
    from thinpoint.device.launch import Launcher

    return Launcher(device)


def _nothing(start: int, end: int) -> np.ndarray:
    return np.zeros(end - start, np.uint8)
