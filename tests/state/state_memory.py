"""Round trip of a state through JSON, with storages that live in memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from thinpoint.state.flatten import flatten
from thinpoint.state.leaves import FlatState
from thinpoint.state.unflatten import unflatten

POISON = 0xA5


class Memory:
    """A `FlatState` as a file would hold it: JSON, and the bytes of the regions only."""

    def __init__(self, flat: FlatState) -> None:
        text = json.dumps({"tree": flat.tree, "tensors": flat.tensors}, ensure_ascii=True, allow_nan=False)
        parsed = json.loads(text)
        self.tree: Any = parsed["tree"]
        self.tensors: list[dict[str, Any]] = parsed["tensors"]
        self.devices = [source.device for source in flat.storages]
        self.regions = [source.regions for source in flat.storages]
        self.stored: list[np.ndarray] = []
        for source in flat.storages:
            data = np.zeros(source.num_bytes, np.uint8)
            end = 0
            for region in source.regions:
                assert region.start_bytes >= end and region.num_bytes > 0
                end = region.end_bytes
                piece = source.read(region.start_bytes, end)
                assert piece.dtype == np.uint8 and piece.shape == (region.num_bytes,)
                data[region.start_bytes : end] = piece
            assert end <= source.num_bytes
            self.stored.append(data)
        self.fetched: list[int] = []
        self.ranges: dict[int, list[tuple[int, int]]] = {}

    def fetch_storage(self, storage_id: int, needed: list[tuple[int, int]]) -> torch.UntypedStorage:
        """A storage that holds poison wherever nothing was asked for."""
        assert storage_id not in self.fetched
        self.fetched.append(storage_id)
        self.ranges[storage_id] = needed
        stored = self.stored[storage_id]
        data = np.full(stored.size, POISON, np.uint8)
        for start, end in needed:
            data[start:end] = stored[start:end]
        storage = torch.UntypedStorage(stored.size)
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (stored.size,), (1,)).copy_(torch.from_numpy(data))
        return storage

    def fetch_blob(self, storage_id: int) -> bytes:
        """All bytes of a storage that is no tensor's."""
        assert storage_id not in self.fetched
        self.fetched.append(storage_id)
        return self.stored[storage_id].tobytes()

    def load(self, **options: Any) -> Any:
        """The object again."""
        return unflatten(
            self.tree,
            self.tensors,
            num_storages=len(self.stored),
            fetch_storage=self.fetch_storage,
            fetch_blob=self.fetch_blob,
            **options,
        )


def round_trip(obj: Any, *, weights_only: bool = True, **options: Any) -> Any:
    """The object, saved and loaded."""
    return Memory(flatten(obj, **options)).load(weights_only=weights_only)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor, in row-major order, as stored: neither conjugated nor negated."""
    tensor = tensor.detach()
    item = tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    raw.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))
    index = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        index = index + (torch.arange(size) * step).reshape(
            [-1 if d == dim else 1 for d in range(tensor.ndim)]
        )
    starts = (index.reshape(-1, 1) + tensor.storage_offset()) * item + torch.arange(item)
    return raw.cpu()[starts.reshape(-1)].numpy().tobytes()


def assert_same_tensor(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in class, dtype, shape, strides, flags and every bit."""
    assert type(found) is type(expected)
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert found.requires_grad == expected.requires_grad
    assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert bits(found) == bits(expected)
