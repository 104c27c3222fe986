"""What a save has to encode: the storages of a state, cut into parts, each with what codes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import PartSpec
from thinpoint.codec.plan import PART_BYTES
from thinpoint.device.contract import DeviceBackend
from thinpoint.engine.backends import Devices
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.state.leaves import Region, StorageSource

if TYPE_CHECKING:
    import torch


class PartJob(NamedTuple):
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
    return devices.named(storage.device)


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
