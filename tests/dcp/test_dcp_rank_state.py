"""State that each rank has for itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from thinpoint.dcp import PerRank, RankState, ThinReader, ThinWriter
from thinpoint.dcp.rank_state import rank_in, rank_name
from thinpoint.errors import StateMismatchError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


class Generators:
    """The random numbers of a process."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])


def saved_by_three(path: Path) -> None:
    """The steps of `dcp.save` for three ranks, one after the other in this process."""
    writers = [ThinWriter(path) for _ in range(3)]
    planners = [DefaultSavePlanner() for _ in range(3)]
    plans = []
    for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
        own = {rank_name(rank): RankState([{"seen": 10 + rank}], 3, rank)}
        state = {"w": torch.ones(2), "data": {"loader": own}}
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    parts = zip(writers, planners, plans, strict=True)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait() for writer, planner, plan in parts
    ]
    writers[0].finish(metadata, results)


def load_alone(path: Path, state: PerRank) -> None:
    target = {"w": torch.zeros(2), "data": {"loader": state.state_dict()}}
    dcp.load(target, storage_reader=ThinReader(path), no_dist=True)
    state.load_state_dict(target["data"]["loader"])


def test_the_state_of_one_rank_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(3)
    dcp.save({"rng": PerRank(Generators())}, storage_writer=ThinWriter(tmp_path), no_dist=True)
    drawn = torch.rand(5), random.random()
    dcp.load({"rng": PerRank(Generators())}, storage_reader=ThinReader(tmp_path), no_dist=True)
    again = torch.rand(5), random.random()
    assert again[0].view(torch.uint8).tolist() == drawn[0].view(torch.uint8).tolist()
    assert again[1] == drawn[1]


def test_a_dict_is_filled_in_place(tmp_path: Path) -> None:
    dcp.save({"own": PerRank({"a": 1, "t": (1, 2)})}, storage_writer=ThinWriter(tmp_path), no_dist=True)
    target = {"b": 2}
    dcp.load({"own": PerRank(target)}, storage_reader=ThinReader(tmp_path), no_dist=True)
    assert target == {"a": 1, "t": (1, 2)}


def test_another_number_of_ranks_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    saved_by_three(tmp_path)
    with pytest.raises(StateMismatchError, match=r"'data\.loader' was saved by 3 ranks .* by 1.*merge"):
        load_alone(tmp_path, PerRank({}))


def test_merge_gets_the_values_of_all_ranks(tmp_path: Path) -> None:
    saved_by_three(tmp_path)
    told: list[Any] = []

    def merge(values: list[Any], rank: int, world_size: int) -> Any:
        told.append((values, rank, world_size))
        return {"seen": sum(value["seen"] for value in values)}

    target: dict[str, Any] = {}
    load_alone(tmp_path, PerRank(target, merge=merge))
    assert told == [([{"seen": 10}, {"seen": 11}, {"seen": 12}], 0, 1)]
    assert target == {"seen": 33}


def test_a_missing_state_is_an_error() -> None:
    with pytest.raises(StateMismatchError, match="no state of rank00000"):
        PerRank({}).load_state_dict({"rank00001": RankState([1], 2, 1)})


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(UsageError, match="list"):
        PerRank([1, 2])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rank00002", ("", 2)),
        ("a.rank12345", ("a", 12345)),
        ("a.b.rank00000", ("a.b", 0)),
        ("rank2", None),
        ("rank000002", None),
        ("arank00002", None),
        ("a.rank00002.b", None),
        ("rank123456", ("", 123456)),
    ],
)
def test_names_of_ranks_are_told_from_others(name: str, found: Any) -> None:
    assert rank_in(name) == found
