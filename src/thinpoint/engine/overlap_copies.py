"""Copies of what is not read in place, made before the call returns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from thinpoint.state.leaves import StorageSource


def copied(storage: StorageSource) -> StorageSource:
    """The same bytes, where they are, in memory of its own.

    On a GPU behind what its current stream has by then, without waiting for it.
    """
    if storage.view is None:
        return _on_host(storage)
    flat = torch.empty(storage.num_bytes, dtype=torch.uint8, device=storage.device)
    for region in storage.regions:
        flat[region.start_bytes : region.end_bytes].copy_(storage.view(region.start_bytes, region.end_bytes))
    return replace(storage, read=lambda a, b: flat[a:b].cpu().numpy(), view=lambda a, b: flat[a:b])


def _on_host(storage: StorageSource) -> StorageSource:
    """Of bytes and arrays."""
    data = np.empty(storage.num_bytes, np.uint8)
    for region in storage.regions:
        data[region.start_bytes : region.end_bytes] = storage.read(region.start_bytes, region.end_bytes)
    return replace(storage, read=lambda a, b: data[a:b])
