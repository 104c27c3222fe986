"""What four ranks check of saving in one way and loading in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_support import run_as_rank
from small_model import assert_same, bits, flat, full, state_of
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from thinpoint.dcp import ThinFolder, ThinReader, ThinWriter


def mesh_of(ranks: int) -> DeviceMesh:
    """The first ranks; made by all of them."""
    return DeviceMesh("cpu", list(range(ranks)))


def two_by_two(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def load_and_compare(folder: Path, mesh: DeviceMesh | None, way: str, expected: Any) -> None:
    """Called by all; those outside of the mesh only make the groups."""
    ranks = 1 if mesh is None else mesh.size()
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return
    state = state_of(mesh, way, seed=99)
    dcp.load(state, storage_reader=ThinReader(folder), process_group=group)
    assert_same(full(state), expected)


def saved(folder: Path, mesh: DeviceMesh, way: str) -> Any:
    """Saves a state of all ranks; returns it whole."""
    state = state_of(mesh, way, seed=1)
    dcp.save(state, storage_writer=ThinWriter(folder))
    return full(state)


def fsdp_of_4_to_2_3_1(folder: Path) -> None:
    expected = saved(folder, mesh_of(4), "fsdp")
    for ranks in (2, 3, 1):
        load_and_compare(folder, mesh_of(ranks), "fsdp", expected)
    load_and_compare(folder, None, "plain", expected)


def fsdp_to_tp_and_back(folder: Path) -> None:
    expected = saved(folder / "fsdp", mesh_of(4), "fsdp")
    load_and_compare(folder / "fsdp", mesh_of(4), "tp", expected)
    load_and_compare(folder / "fsdp", mesh_of(2), "tp", expected)
    expected = saved(folder / "tp", mesh_of(4), "tp")
    load_and_compare(folder / "tp", mesh_of(4), "fsdp", expected)


def two_dimensions_to_one(folder: Path) -> None:
    expected = saved(folder / "hsdp", two_by_two("replicate", "shard"), "fsdp")
    load_and_compare(folder / "hsdp", None, "plain", expected)
    load_and_compare(folder / "hsdp", mesh_of(3), "fsdp", expected)
    expected = saved(folder / "both", two_by_two("dp", "tp"), "fsdp+tp")
    load_and_compare(folder / "both", None, "plain", expected)
    load_and_compare(folder / "both", mesh_of(4), "fsdp", expected)


def uneven_and_empty_shards(folder: Path) -> None:
    mesh = mesh_of(4)
    wholes = {
        f"{rows}x{columns}": torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
        for rows, columns in ((10, 3), (2, 5), (1, 1), (0, 4), (7, 0), (9, 2))
    }
    wholes["vector"] = torch.randn(6, dtype=torch.float64)
    state = {name: distribute_tensor(whole, mesh, [Shard(0)]) for name, whole in wholes.items()}
    dcp.save(state, storage_writer=ThinWriter(folder))
    for placement in (Shard(0), Shard(-1), Replicate()):
        for ranks in (4, 3):
            other = mesh_of(ranks)
            group = dist.new_group(list(range(ranks)))
            if dist.get_rank() < ranks:
                target = {
                    name: distribute_tensor(torch.full_like(whole, 7), other, [placement])
                    for name, whole in wholes.items()
                }
                dcp.load(target, storage_reader=ThinReader(folder), process_group=group)
                assert_same(full(target), wholes)
    with ThinFolder(folder) as opened:
        for name, whole in wholes.items():
            assert bits(opened.read(name)) == bits(whole)
        assert bits(opened.read("10x3", (slice(2, 9), slice(1, 2)))) == bits(wholes["10x3"][2:9, 1:2])
        opened.verify(deep=True)


def full_state_on_one_rank(folder: Path) -> None:
    expected = saved(folder, mesh_of(4), "fsdp")
    if dist.get_rank() == 2:
        state = state_of(None, "plain", seed=98)
        dcp.load(state, storage_reader=ThinReader(folder), no_dist=True)
        assert_same(state, expected)


def subset_and_partial(folder: Path) -> None:
    expected = flat(saved(folder, mesh_of(4), "fsdp"))
    state = {"model": state_of(mesh_of(4), "fsdp", seed=97)["model"]}
    del state["model"]["head.bias"]
    dcp.load(state, storage_reader=ThinReader(folder))
    assert_same(
        full(state), {"model": {name: expected[f"model.{name}"] for name in flat(full(state["model"]))}}
    )
    state["model"]["adapter"] = torch.full((3,), 5.0)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=ThinReader(folder), planner=planner)
    assert state["model"]["adapter"].tolist() == [5.0] * 3
    assert_same(full(state["model"]["embedding.weight"]), expected["model.embedding.weight"])


class RenamingPlanner(DefaultLoadPlanner):
    """Loads into `student.*` what was saved as `model.*`."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.renamed = {f"model.{name}": tensor for name, tensor in state_dict["student"].items()}
        super().set_up_planner(self.renamed, metadata, is_coordinator)


def renamed_by_a_planner(folder: Path) -> None:
    expected = saved(folder, mesh_of(4), "fsdp")
    student = state_of(mesh_of(4), "fsdp", seed=96)["model"]
    dcp.load({"student": student}, storage_reader=ThinReader(folder), planner=RenamingPlanner())
    assert_same(full(student), expected["model"])


def replicated_tensors_are_written_once_and_evenly(folder: Path) -> None:
    state = {f"w{i}": torch.full((64,), float(i)) for i in range(8)}
    dcp.save(state, storage_writer=ThinWriter(folder))
    with ThinFolder(folder) as opened:
        counts = [len(opened.rank_file(rank)) for rank in range(4)]
        assert counts == [2] * 4, counts
        assert all(tensor.num_chunks == 1 for tensor in opened.tensors.values())
    mesh = two_by_two("replicate", "shard")
    hsdp = {"w": distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Replicate(), Shard(0)])}
    dcp.save(hsdp, storage_writer=ThinWriter(folder))
    with ThinFolder(folder) as opened:
        assert opened.tensors["w"].num_chunks == 2


def a_rank_reads_only_what_it_needs(folder: Path) -> None:
    mesh = mesh_of(4)
    whole = torch.randn(4 * 70_000)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, storage_writer=ThinWriter(folder))
    if dist.get_rank() == 0:
        # Other ranks' files are not even opened.
        with ThinFolder(folder) as opened:
            names = [file.name for file in opened.manifest.files]
        (folder / names[3]).rename(folder / "hidden")
    dist.barrier()
    with ThinFolder(folder) as opened:
        part = opened.read("w", (slice(10, 200_000),))
        assert bits(part) == bits(whole[10:200_000])


def metadata_is_small_and_stock_tools_list_it(folder: Path) -> None:
    state = state_of(mesh_of(4), "fsdp", seed=1)
    dcp.save(state, storage_writer=ThinWriter(folder))
    stock = dcp.FileSystemReader(folder).read_metadata()
    with ThinFolder(folder) as opened:
        assert set(stock.state_dict_metadata) == {*opened.tensors, *opened.objects}
        for name, tensor in opened.tensors.items():
            found = stock.state_dict_metadata[name]
            assert found.size == torch.Size(tensor.shape)
            assert [(c.offsets, c.sizes) for c in found.chunks] == [
                (torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks
            ]
    assert not stock.storage_data
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["world_size"] == 4 and len(manifest["files"]) == 4


def dtensors_of_any_dtype(folder: Path) -> None:
    mesh = mesh_of(4)
    wholes = {}
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.float64):
        patterns = torch.arange(64, dtype=torch.uint8).repeat(dtype.itemsize)
        wholes[str(dtype)] = (patterns % 2).bool() if dtype is torch.bool else patterns.view(dtype)
    state = {
        name: DTensor.from_local(whole.chunk(4)[dist.get_rank()].clone(), mesh, [Shard(0)], run_check=False)
        for name, whole in wholes.items()
    }
    dcp.save(state, storage_writer=ThinWriter(folder))
    with ThinFolder(folder) as opened:
        for name, whole in wholes.items():
            assert bits(opened.read(name)) == bits(whole), name


CHECKS = [
    fsdp_of_4_to_2_3_1,
    fsdp_to_tp_and_back,
    two_dimensions_to_one,
    uneven_and_empty_shards,
    full_state_on_one_rank,
    subset_and_partial,
    renamed_by_a_planner,
    replicated_tensors_are_written_once_and_evenly,
    a_rank_reads_only_what_it_needs,
    metadata_is_small_and_stock_tools_list_it,
    dtensors_of_any_dtype,
]

if __name__ == "__main__":
    run_as_rank(CHECKS)
