"""What flattening gives: the tree, the tensors as views of storages, and the storages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinpoint.state.tree import Node, Path

if TYPE_CHECKING:
    import torch


class Region(NamedTuple):
    """A run of bytes of one storage that belong together: one tensor, or tensors that overlap.

    Attributes:
        start_bytes: where it begins in its storage.
        num_bytes: length, at least 1.
        dtype: torch's name without `torch.`, or "bytes". Start and length are multiples of its item.
        role: one of `thinpoint.state.roles`; decides size only.
        row_elems: words in a row in storage order, 0 without rows; words of complex dtypes are the components.
        name: path of the tensor that gave the region its dtype.
        shape: shape of that tensor.
        more: what else salvage must know of it: its `stride` if it is not contiguous, `conj` and `neg` if they are true.
    """

    start_bytes: int
    num_bytes: int
    dtype: str
    role: str
    row_elems: int
    name: Path
    shape: tuple[int, ...]
    more: dict[str, Any]

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.num_bytes


@dataclass(frozen=True, kw_only=True)
class StorageSource:
    """Bytes to store. Bytes that no region covers are not needed and load as zeros.

    Attributes:
        num_bytes: length of the storage, trimmed to what its tensors cover.
        device: the device that the file records: "cpu", "cuda:0", ...
        regions: sorted by start, disjoint.
        read: `read(start, end)` gives those bytes as a flat uint8 array in host memory. On the CPU it is a view of
            the user's memory: only to be read, and valid while this object lives. On an accelerator it is a copy
            of that range, and the call waits for the device. May be called from several threads.
        view: `view(start, end)` gives the live bytes where they are, as a flat contiguous uint8 tensor: only to be read,
            no copy. None for bytes that are in no torch storage.
    """

    num_bytes: int
    device: str
    regions: tuple[Region, ...]
    read: Callable[[int, int], np.ndarray]
    view: Callable[[int, int], torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """An object taken apart.

    Attributes:
        tree: the object without the bytes of its tensors, a JSON value (`spec/STATE.md`).
        tensors: one record for each tensor object, JSON values.
        storages: what the records' `storage` and the tree's blobs index.
    """

    tree: Node
    tensors: list[dict[str, Any]]
    storages: list[StorageSource]
