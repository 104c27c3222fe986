"""Host memory in slabs: nothing straddles two, and a slab is used again once nobody looks at it any more."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from thinpoint.device.pinned import Arena, SlabPool
from thinpoint.device.transfers import HostCopies

SLAB = 1 << 12


@pytest.fixture
def pool() -> SlabPool:
    return SlabPool(is_pinned=torch.cuda.is_available(), slab_bytes=SLAB)


def random_bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def test_pieces_are_copies_and_none_is_split(pool: SlabPool, device: torch.device) -> None:
    copies = HostCopies(device, None, Arena(pool))
    sizes = [[1000] * 9, [SLAB], [5 * SLAB + 3], [7], [], [SLAB - 1, 0, 1, 64]]
    tensors = [random_bytes(sum(own), device) for own in sizes]
    pieces = [
        copies.add_pieces(tensor, np.array(own)).cut() for tensor, own in zip(tensors, sizes, strict=True)
    ]
    copies.wait()
    for tensor, own, found in zip(tensors, sizes, pieces, strict=True):
        assert [piece.size for piece in found] == own
        assert np.array_equal(np.concatenate([*found, np.zeros(0, np.uint8)]), tensor.cpu().numpy())


def test_slabs_come_back_when_the_last_view_is_gone(pool: SlabPool, device: torch.device) -> None:
    def copied() -> tuple[Any, ...]:
        copies = HostCopies(device, None, arena)
        pieces = copies.add_pieces(random_bytes(4 * SLAB, device), np.full(4, SLAB)).cut()
        copies.wait()
        return tuple(pieces)

    arena = Arena(pool)
    pieces = copied()
    assert pool.num_free == 0
    words = pieces[0].view(np.uint32)[5:]
    view = memoryview(pieces[1])[3:]
    del pieces
    gc.collect()
    # The last one stays with the arena, which goes on there.
    assert pool.num_free == 1
    del words, view
    assert pool.num_free == 3
    seconds = pool.seconds
    again = copied()
    assert len(again) == 4 and pool.num_free == 0
    assert pool.seconds == seconds
    copied()
    assert pool.seconds > seconds and pool.num_free == 3


def test_more_than_a_slab_does_not_stay(pool: SlabPool, device: torch.device) -> None:
    copies = HostCopies(device, None, Arena(pool))
    pieces = copies.add_pieces(random_bytes(2 * SLAB, device), np.array([2 * SLAB])).cut()
    copies.wait()
    del pieces
    assert pool.num_free == 0


def test_a_slab_is_not_given_to_others_while_something_is_copied_into_it(pool: SlabPool) -> None:
    waited: list[object] = []

    class Event:
        def synchronize(self) -> None:
            waited.append(self)

    slab, array = pool.borrow()
    slab.copied = event = Event()  # type: ignore[assignment]
    del array
    assert pool.num_free == 1 and not waited
    assert pool.borrow()[0] is slab and waited == [event]
