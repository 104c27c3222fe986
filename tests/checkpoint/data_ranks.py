"""A data loader over one stream that many ranks share, and what the ranks of the test do with it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from group_ranks import group_checkpointer, outcome_of
from torch.utils.data import IterableDataset

from thinpoint.dcp.rank_state import PerRank

NUM_SAMPLES = 101
BATCH_SIZE = 4
BATCHES_BEFORE = 3


class Turns(IterableDataset[int]):
    """Samples 0, 1, 2, ... of a stream that the ranks take in turns; its state is the sample that this rank takes next."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.next_sample = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[int]:
        while self.next_sample < NUM_SAMPLES:
            sample = self.next_sample
            self.next_sample += self.world_size
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"next_sample": self.next_sample}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.next_sample = state_dict["next_sample"]


def loader_of_this_rank(num_workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = Turns(dist.get_rank(), dist.get_world_size())
    return StatefulDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=num_workers)


def merge_loaders(values: list[Any], rank: int, world_size: int) -> Any:
    """The state of a loader that goes on in turns with the other new ranks, from where the old ones stopped together.

    Args:
        values: states of the StatefulDataLoaders of the old ranks, all after the same number of samples.
        rank, world_size: of the new ranks.
    """
    old = sorted(dataset_state(value)["next_sample"] for value in values)
    assert old == list(range(old[0], old[0] + len(values))), f"the ranks did not stop together: {old}"
    merged = deepcopy(values[0])
    dataset_state(merged)["next_sample"] = old[0] + rank
    return merged


def dataset_state(loader_state: dict[str, Any]) -> dict[str, Any]:
    """The dataset's part in the state of a StatefulDataLoader with one worker or none."""
    if "_snapshot" in loader_state:
        (loader_state,) = loader_state["_snapshot"]["_worker_snapshots"].values()
    return loader_state["dataset_state"]


def save_amid_the_data(rank: int, folder: Path, num_workers: int) -> list[int]:
    """The samples that this rank had yielded when it saved."""
    loader = loader_of_this_rank(num_workers)
    batches = iter(loader)
    yielded = [sample for _ in range(BATCHES_BEFORE) for sample in next(batches).tolist()]
    with group_checkpointer(folder) as checkpointer:
        checkpointer.save({"w": torch.ones(3), "loader": PerRank(loader)}, 1)
    return yielded


def go_on_with_the_data(
    rank: int, folder: Path, num_workers: int
) -> tuple[tuple[str, str, float], int, list[int]]:
    """What a restore without a merge function says, the sample that would come next after it, and those after one with it."""
    loader = loader_of_this_rank(num_workers)
    with group_checkpointer(folder) as checkpointer:
        refused = outcome_of(lambda: checkpointer.restore({"w": torch.zeros(3), "loader": PerRank(loader)}))
        next_sample = dataset_state(loader.state_dict())["next_sample"]
        checkpointer.restore({"w": torch.zeros(3), "loader": PerRank(loader, merge=merge_loaders)})
    return refused, next_sample, [sample for batch in loader for sample in batch.tolist()]
