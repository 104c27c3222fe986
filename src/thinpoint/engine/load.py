"""A file to the object that was saved: storages are filled where they belong, then the object is built over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from thinpoint.codec.backend import HostBackend
from thinpoint.engine.backends import Devices
from thinpoint.engine.restore import DeviceTarget, Restorer, Target
from thinpoint.engine.views import SPAN_BYTES, target_of
from thinpoint.engine.workers import Workers
from thinpoint.errors import LimitExceededError, NotEnoughMemoryError
from thinpoint.file.index import tensor_record
from thinpoint.file.reader import FileReader
from thinpoint.state.devices import place, resolve_device
from thinpoint.state.tree_names import match, walk
from thinpoint.state.unflatten import unflatten

if TYPE_CHECKING:
    import torch

Ranges = dict[int, list[tuple[int, int]]]


def load_object(
    reader: FileReader,
    backend: HostBackend,
    workers: Workers,
    *,
    devices: Devices | None = None,
    map_location: Any = None,
    weights_only: bool = True,
    names: Any = None,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """The object, or the part of it that `names` selects. See `thinpoint.load`."""
    select = None if names is None else match((path for path, _ in walk(reader.index.tree)), names)
    restorer = Restorer(reader, backend, workers, progress, devices)
    return load_paths(restorer, select, map_location=map_location, weights_only=weights_only)


def load_paths(
    restorer: Restorer,
    select: Collection[tuple[Any, ...]] | None,
    *,
    map_location: Any = None,
    weights_only: bool = True,
) -> Any:
    """The object with only what is at, or below, these paths; None for all of it. Paths that lead nowhere are ignored."""
    index = restorer.reader.index
    storages = StorageLoader(restorer, map_location)
    return unflatten(
        index.tree,
        [tensor_record(tensor) for tensor in index.tensors],
        num_storages=len(index.storages),
        prepare=storages.prepare,
        fetch_storage=storages.storage,
        fetch_blob=storages.blob,
        weights_only=weights_only,
        select=select,
    )


class StorageLoader:
    """Makes torch storages of the storages of a file, on the devices that `map_location` asks for."""

    def __init__(self, restorer: Restorer, map_location: Any) -> None:
        self._restorer = restorer
        self._entries = restorer.reader.index.storages
        self._map_location = map_location
        self._ready: dict[int, torch.UntypedStorage] = {}

    def prepare(self, needed: Ranges) -> None:
        """Fill all storages at once, so that small ones are decoded side by side.

        Args:
            needed: for each storage the byte ranges that tensors cover, sorted and disjoint.
        """
        import torch

        recorded = {storage: self._entries[storage].device for storage in needed}
        # Resolved once, as it tries whether the device is there.
        resolved = {
            name: resolve_device(name, self._map_location) for name in dict.fromkeys(recorded.values())
        }
        where = {storage: resolved[name] for storage, name in recorded.items()}
        self._check_memory(sum(self._entries[s].bytes for s, device in where.items() if device.type == "cpu"))
        targets: list[Target | DeviceTarget] = []
        for storage, ranges in needed.items():
            num_bytes, device = self._entries[storage].bytes, where[storage]
            if device.type == "meta":
                self._ready[storage] = torch.UntypedStorage(num_bytes, device="meta")
                continue
            made = self._ready[storage] = self._allocate(num_bytes, device)
            if made.device.type == "cpu" or self._restorer.devices.get(made.device) is not None:
                targets += self._targets(storage, ranges, made)
            else:
                self._fill_through_host(storage, ranges, made)
        self._restorer.fill(targets)
        for storage, name in recorded.items():
            self._ready[storage] = place(self._ready[storage], name, self._map_location)

    def storage(self, storage: int, ranges: list[tuple[int, int]]) -> torch.UntypedStorage:
        """A storage that was prepared, or filled now."""
        if storage not in self._ready:
            self.prepare({storage: ranges})
        return self._ready[storage]

    def blob(self, storage: int) -> memoryview:
        """All bytes of a storage that is no tensor's."""
        num_bytes = self._entries[storage].bytes
        self._check_memory(num_bytes)
        try:
            memory = np.empty(num_bytes, np.uint8)
        except MemoryError as error:
            raise self._no_memory(num_bytes) from error
        self._restorer.fill([Target(storage=storage, start=0, out=memory)])
        return memory.data

    def _targets(
        self, storage: int, ranges: list[tuple[int, int]], made: torch.UntypedStorage
    ) -> Iterator[Target | DeviceTarget]:
        """Targets for the ranges of a storage; the bytes between them are set to zero."""
        memory = storage_bytes(made)
        covered = 0
        for start, end in [*ranges, (made.nbytes(), made.nbytes())]:
            if covered < start:
                memory[covered:start] = 0
            if start < end:
                yield target_of(self._restorer, storage, start, memory[start:end])
            covered = end

    def _fill_through_host(
        self, storage: int, ranges: list[tuple[int, int]], made: torch.UntypedStorage
    ) -> None:
        """For devices without a backend; through a bounce buffer of four times SPAN_BYTES."""
        import torch

        on_device = storage_bytes(made).zero_()
        for range_start, range_end in ranges:
            for start in range(range_start, range_end, 4 * SPAN_BYTES):
                piece = np.empty(min(4 * SPAN_BYTES, range_end - start), np.uint8)
                self._restorer.fill([Target(storage=storage, start=start, out=piece)])
                on_device[start : start + piece.size].copy_(torch.from_numpy(piece))

    def _allocate(self, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
        import torch

        try:
            return torch.UntypedStorage(num_bytes, device=device)
        except RuntimeError as error:
            raise self._no_memory(num_bytes) from error

    def _no_memory(self, num_bytes: int) -> NotEnoughMemoryError:
        return NotEnoughMemoryError(
            "there is not enough memory for a tensor's storage",
            where=self._restorer.reader.name,
            actual=f"{num_bytes:,} bytes",
            hint="`names=` loads a part of the file",
        )

    def _check_memory(self, num_bytes: int) -> None:
        """Refuse what host memory could not hold: a file of a few bytes may ask for any amount of constants."""
        most = physical_memory_bytes()
        if num_bytes > most:
            raise LimitExceededError(
                "the file asks for more memory than this machine has",
                where=self._restorer.reader.name,
                expected=f"at most {most:,} bytes",
                actual=f"{num_bytes:,}",
                hint="`names=` loads a part of it; `thinpoint inspect` shows what it claims to hold",
            )


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The memory of a storage as a flat uint8 tensor; no copy."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def physical_memory_bytes() -> int:
    """Memory and swap of this machine."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            swap = next((line for line in lines if line.startswith("SwapTotal:")), "SwapTotal: 0 kB")
    except OSError:
        return total
    return total + 1024 * int(swap.split()[1])
