"""Staging: what stands in for tensors, and the file that is written from it."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import thinpoint
from thinpoint import errors
from thinpoint.dcp import ThinStager, ThinWriter
from thinpoint.dcp.staged_file import plain, saving_of
from thinpoint.dcp.staged_tensor import StagedTensor, payload_of
from thinpoint.engine import encode as engine_encode
from thinpoint.engine import jobs as engine_jobs
from thinpoint.engine.backends import choose_backends
from thinpoint.engine.save import run
from thinpoint.engine.workers import Workers
from thinpoint.store import open_sink

StateDict = dict[str, Any]


def make_state() -> StateDict:
    torch.manual_seed(0)
    weight, flat = torch.randn(700, 513), torch.randn(10_000)
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint16)
    return {
        "model": {
            "w": weight,
            "tied": weight,
            "transposed": weight.t(),
            "every_other": torch.arange(1000)[::2],
            "a": flat[1000:2000].view(10, 100),
            "overlaps_a": flat[1500:2500],
            "b": flat[3000:9000],
            "scalar": torch.tensor(float("nan")),
            "empty": torch.empty(0, 3),
            "parameter": torch.nn.Parameter(torch.randn(33)),
            "conj": torch.randn(300, dtype=torch.complex64).conj(),
            **{str(dtype): torch.randint(0, 2, (257,)).to(dtype) for dtype in dtypes},
        },
        "optim": {
            "state": {
                0: {
                    "exp_avg": torch.randn(300, 300) * 1e-3,
                    "exp_avg_sq": torch.rand(300, 300) * 1e-8,
                    "step": torch.tensor(3.0),
                }
            },
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "list": [torch.ones(3), 2],
        "object": {"text": "x", "pair": (1, torch.ones(4)), "long": list(range(1000))},
    }


def planned(state: StateDict) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Chunks and objects as torch's own planner gives them to a storage writer."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    chunks: dict[str, dict[str, torch.Tensor]] = {}
    objects: dict[str, Any] = {}
    for item in planner.create_local_plan().items:
        if item.type == WriteItemType.BYTE_IO:
            objects[item.index.fqn] = planner.lookup_object(item.index)
        else:
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor) and item.index.offset is not None
            key = ",".join(map(str, item.index.offset))
            chunks.setdefault(item.index.fqn, {})[key] = data if payload_of(data) else plain(data)
    return chunks, objects


def written(target: Any, chunks: Any, objects: Any, codec: str = "thin", **options: Any) -> None:
    """Write a rank's file."""
    with Workers(2) as workers:
        saving = saving_of(chunks, objects, backends=choose_backends(codec=codec), **options)
        run(saving, open_sink(target, overwrite=True), workers)


def file_of(state: StateDict, names: list[str] | None = None, **options: Any) -> bytes:
    """The file that is written from a state, staged or not."""
    chunks, objects = planned(state)
    memory = io.BytesIO()
    written(memory, chunks if names is None else {name: chunks[name] for name in names}, objects, **options)
    return memory.getvalue()


def loaded(raw: bytes) -> Any:
    thinpoint.verify(io.BytesIO(raw), deep=True)
    return thinpoint.load(io.BytesIO(raw))


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in order, as bytes."""
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_equals(raw: bytes, expected: StateDict, names: list[str]) -> None:
    """The file holds those tensors of a state that was not staged, bit for bit."""
    chunks, _ = planned(expected)
    found = loaded(raw)["tensors"]
    assert list(found) == names
    for name in names:
        for key, chunk in chunks[name].items():
            assert found[name][key].dtype == chunk.dtype and found[name][key].shape == chunk.shape, name
            assert bits(found[name][key]) == bits(chunk.detach()), name


def payload_held_by(state: StateDict) -> Any:
    """What holds the encoded tensors of a staged state."""
    chunks, _ = planned(state)
    held = {id(p.staged): p.staged for c in chunks.values() for p in map(payload_of, c.values()) if p}
    (staged,) = held.values()
    return staged


def test_a_file_from_a_staged_state_has_the_bytes_of_one_from_the_state_itself() -> None:
    state = make_state()
    raw = file_of(ThinStager().stage(state))
    assert raw == file_of(state)
    assert_equals(raw, state, list(planned(state)[0]))
    assert loaded(raw)["tensors"]["optim.state.0.exp_avg"]["0,0"].stride() == (300, 1)
    roles = {t.name: t.role for t in map(thinpoint.open(io.BytesIO(raw)).__getitem__, names_of(raw))}
    assert [role for name, role in roles.items() if "exp_avg_sq" in name] == ["second_moment"]


def names_of(raw: bytes) -> list[str]:
    return thinpoint.open(io.BytesIO(raw)).keys()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_also_with_other_codecs(codec: str) -> None:
    state = make_state()
    staged = ThinStager(codec=codec).stage(state)
    payloads = [payload_of(chunk) for chunks in planned(staged)[0].values() for chunk in chunks.values()]
    assert {payload.codec for payload in payloads if payload} == {codec}
    raw = file_of(staged, codec=codec)
    assert raw == file_of(state, codec=codec) != file_of(state)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["model.tied"],
        ["model.transposed"],
        ["model.empty"],
        ["model.scalar", "optim.state.0.exp_avg"],
        ["model.b"],
        ["model.b", "model.a", "model.overlaps_a"],
        ["model.a"],
        ["model.w", "model.conj"],
    ],
    ids=" ".join,
)
def test_what_the_plan_gave_to_other_ranks_is_left_out(names: list[str]) -> None:
    state = make_state()
    raw = file_of(ThinStager().stage(state), names)
    assert_equals(raw, state, names)
    if names != ["model.a"]:
        # This one alone keeps the region that it shares with a tensor which overlaps it.
        assert raw == file_of(state, names)


def test_parts_are_called_by_a_name_that_is_in_the_file() -> None:
    state = make_state()
    for names in (["model.tied"], ["model.transposed"], ["model.a"]):
        raw = file_of(ThinStager().stage(state), names)
        assert names[0].encode() in raw and b"model.w" not in raw and b"overlaps_a" not in raw


def test_waves_and_regions_of_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_jobs, engine_encode):
        monkeypatch.setattr(module, "PART_BYTES", 1 << 16)
    state = make_state()
    staged = ThinStager().stage(state)
    assert len(payload_held_by(staged)._waves) > 10
    assert file_of(staged, host_bytes=1 << 16) == file_of(state)


def test_later_changes_of_the_state_do_not_reach_the_file() -> None:
    state = make_state()
    expected = file_of(state)
    staged = ThinStager().stage(state)
    with torch.no_grad():
        for chunk in (chunk for chunks in planned(state)[0].values() for chunk in chunks.values()):
            chunk.zero_()
    state["object"]["long"][3] = -1
    state["object"]["pair"][1].fill_(7)
    state["optim"]["param_groups"][0]["lr"] = 5.0
    assert file_of(staged) == expected


def test_what_is_no_tensor_is_copied_and_keeps_its_sharing() -> None:
    shared = [1, 2]
    state = {"a": {"x": (shared, torch.ones(2))}, "b": {"y": (shared,)}, "c": {"d": {}}, "empty": []}
    staged = ThinStager().stage(state)
    assert staged["a"]["x"][0] == shared and staged["a"]["x"][0] is not shared
    assert staged["a"]["x"][0] is staged["b"]["y"][0]
    assert staged["c"] == {"d": {}} and staged["empty"] == []


def test_an_object_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(errors.UnsupportedObjectError, match=r"loader\.lock is a lock that cannot be copied"):
        ThinStager().stage({"loader": {"lock": __import__("threading").Lock()}})


def test_tensors_that_are_not_plainly_strided_are_copied_as_they_are() -> None:
    values = torch.tensor([1.5, -0.0])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=False)
    state = {"sparse": sparse, "dense": torch.ones(3)}
    staged = ThinStager().stage(state)
    values.zero_()
    state["sparse"]._values().zero_()
    found = loaded(file_of(staged))["tensors"]["sparse"]["0"]
    assert found.is_sparse and bits(found._values()) == bits(torch.tensor([1.5, -0.0]))


@pytest.mark.parametrize("name", ["meta", "sub.meta"])
def test_tensors_without_elements_to_copy_are_named(name: str) -> None:
    with pytest.raises(errors.UnsupportedObjectError, match=rf"\(tensor {name}\)"):
        ThinStager().stage({name: torch.empty(3, device="meta")})


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(errors.UsageError, match="same name"):
        ThinStager().stage({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_a_state_that_does_not_fit_is_an_error_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_jobs, engine_encode):
        monkeypatch.setattr(module, "PART_BYTES", 1 << 16)
    state = {"w": torch.randn(1 << 20)}
    before = bits(state["w"])
    with pytest.raises(errors.NotEnoughMemoryError, match="host_memory= or THINPOINT_HOST_MEMORY") as caught:
        ThinStager(host_memory=1 << 21).stage(state)
    assert "expected at most 2,097,152 bytes" in str(caught.value)
    assert bits(state["w"]) == before
    staged = ThinStager(host_memory=4 << 20).stage(state)
    assert (3 << 20) < payload_held_by(staged).num_bytes < (4 << 20) == payload_held_by(staged).raw_bytes
    monkeypatch.setenv("THINPOINT_HOST_MEMORY", "100000")
    with pytest.raises(errors.NotEnoughMemoryError):
        ThinStager().stage(state)


def test_a_stager_with_another_codec_than_the_writers_is_refused(tmp_path: Path) -> None:
    planner, writer = DefaultSavePlanner(), ThinWriter(tmp_path)
    planner.set_up_planner(ThinStager(codec="raw").stage({"w": torch.randn(1000)}), is_coordinator=True)
    plan = planner.create_local_plan()
    plans, _ = planner.create_global_plan([plan])
    writer.set_up_storage_writer(True, rank=0)
    with pytest.raises(errors.UsageError, match=r"different codecs \(tensor w\): expected thin, found raw"):
        writer.write_data(planner.finish_plan(plans[0]), planner)
    assert [*tmp_path.iterdir()] == []


def test_a_staged_state_is_written_once_and_then_takes_no_memory() -> None:
    staged = ThinStager().stage(make_state())
    held = payload_held_by(staged)
    assert held.num_bytes > 1_000_000
    file_of(staged)
    assert held.num_bytes == 0
    with pytest.raises(errors.UsageError, match="was written, or given up, before"):
        file_of(staged)


def test_a_failed_write_raises_its_error_and_lets_go_of_the_state(tmp_path: Path) -> None:
    staged = ThinStager().stage(make_state())
    held = payload_held_by(staged)
    chunks, objects = planned(staged)
    with pytest.raises(errors.NotFoundError):
        written(tmp_path / "missing" / "x.thin", chunks, objects)
    assert held.num_bytes == 0


def test_states_that_were_staged_apart_do_not_mix() -> None:
    first, second = (planned(ThinStager().stage({"w": torch.ones(3)}))[0]["w"]["0"] for _ in range(2))
    with pytest.raises(errors.UsageError, match="staged together"):
        saving_of({"a": {"0": first}, "b": {"0": second}}, {}, backends=choose_backends())


def test_staged_and_other_tensors_go_into_one_file() -> None:
    state = {"w": torch.randn(1000), "v": torch.randn(1000)}
    chunks, _ = planned(ThinStager().stage(state))
    mixed = {"v": {"0": state["v"]}, "w": chunks["w"]}
    memory = io.BytesIO()
    written(memory, mixed, {})
    found = loaded(memory.getvalue())["tensors"]
    assert all(bits(found[name]["0"]) == bits(state[name]) for name in "vw")


def test_a_staged_tensor_has_shape_and_dtype_but_no_elements() -> None:
    staged = ThinStager().stage({"w": torch.ones(3, 5, dtype=torch.bfloat16)})["w"]
    assert isinstance(staged, StagedTensor)
    assert staged.shape == (3, 5) and staged.dtype == torch.bfloat16
    assert repr(staged) == "StagedTensor(shape=(3, 5), dtype=torch.bfloat16)"
    for use in (lambda: staged + 1, staged.clone, staged.detach):
        with pytest.raises(errors.UsageError, match="no elements"):
            use()
    assert copy.deepcopy(staged) is staged
    with pytest.raises(errors.UsageError, match="no chunk at"):
        staged.__get_tensor_shard__(
            type(staged.__create_write_items__("w", staged)[0].index)("w", torch.Size([1, 0]))
        )


@pytest.mark.parametrize("dump", [pickle.dumps, ForkingPickler.dumps, copy.copy])
def test_it_cannot_go_to_another_process(dump: Any) -> None:
    staged = ThinStager().stage({"w": torch.ones(3)})
    with pytest.raises(errors.UsageError, match=r"AsyncCheckpointerType\.THREAD"):
        dump(staged["w"])


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    with pytest.raises(errors.UnsupportedError, match=r"expected at least 2\.5.* 2\.4\.1"):
        ThinStager()
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    ThinStager()


def test_a_forked_process_may_not_write_it() -> None:
    staged = payload_held_by(ThinStager().stage({"w": torch.ones(3)}))
    pid = os.fork()
    if pid == 0:
        try:
            staged.take()
            os._exit(1)
        except errors.UsageError as error:
            os._exit(0 if "by the process that staged it" in str(error) else 2)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_planner_that_does_not_flatten_is_refused_where_tensors_are_nested() -> None:
    staged = ThinStager().stage({"model": {"w": torch.ones(3)}})
    with pytest.raises(errors.UsageError, match="planners that flatten"):
        saving_of({}, {"model": staged["model"]}, backends=choose_backends(), allow_pickle=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_writers_refuse_it(tmp_path: Path) -> None:
    staged = ThinStager().stage({"w": torch.ones(3)})
    with pytest.raises(dist.checkpoint.api.CheckpointException, match="ThinStager goes with ThinWriter"):
        dist.checkpoint.save(staged, storage_writer=FileSystemWriter(tmp_path))


@pytest.mark.parametrize(
    "options", [{"codec": "x"}, {"backend": "x"}, {"num_threads": 0}, {"host_memory": 0}]
)
def test_options_are_checked_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        ThinStager(**options)


def test_it_is_an_async_stager_that_needs_no_second_call() -> None:
    stager = ThinStager()
    assert isinstance(stager, dist.checkpoint.staging.AsyncStager)
    assert not stager.should_synchronize_after_execute
    stager.synchronize_staging()
    stager.close()
    stager.close()


@pytest.fixture(params=range(4))
def rank_of_four(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of four whose other ranks do not exist: enough to lay out shards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


def sharded(rank: int) -> StateDict:
    """DTensors whose local parts were made here, as in training."""
    row, grid = (
        dist.device_mesh.init_device_mesh("cpu", (4,)),
        dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    )
    torch.manual_seed(7)
    whole = torch.randn(10, 12)
    layouts: list[tuple[Any, list[Any]]] = [
        (row, [Shard(0)]),
        (row, [Shard(1)]),
        (row, [Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Shard(0), Shard(0)]),
    ]
    state: StateDict = {
        f"t{i}": distribute_tensor(whole, mesh, places, src_data_rank=None)
        for i, (mesh, places) in enumerate(layouts)
    }
    # Sharded like the first, but for what the name says.
    state["same"] = distribute_tensor(whole + 1, row, [Shard(0)], src_data_rank=None)
    state["dtype"] = distribute_tensor(whole.to(torch.bfloat16), row, [Shard(0)], src_data_rank=None)
    state["trained"] = distribute_tensor(whole, row, [Shard(0)], src_data_rank=None).requires_grad_()
    state["shape"] = distribute_tensor(whole[:9], row, [Shard(0)], src_data_rank=None)
    state["uneven"] = distribute_tensor(torch.randn(5, 3), row, [Shard(0)], src_data_rank=None)
    state["some_empty"] = distribute_tensor(torch.randn(2, 3), row, [Shard(0)], src_data_rank=None)
    state["scalar"] = distribute_tensor(torch.tensor(1.0), row, [Replicate()], src_data_rank=None)
    first_two = dist.device_mesh.DeviceMesh("cpu", [0, 1])
    if rank < 2:
        state["of_two"] = distribute_tensor(whole, first_two, [Shard(0)], src_data_rank=None)
    else:
        state["of_two"] = DTensor.from_local(
            torch.empty(0), first_two, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return {"model": state, "plain": torch.arange(7)}


def test_planners_learn_the_same_as_from_the_sharded_tensors(rank_of_four: int) -> None:
    state = sharded(rank_of_four)
    staged = ThinStager().stage(state)
    plans = []
    for each in (state, staged):
        planner = DefaultSavePlanner()
        planner.set_up_planner(each, is_coordinator=rank_of_four == 0)
        plans.append(planner.create_local_plan())
    assert plans[0].items == plans[1].items and plans[0].planner_data == plans[1].planner_data
    assert any(item.index.fqn == "model.of_two" for item in plans[1].items) == (rank_of_four < 2)
    for name, tensor in state["model"].items():
        assert staged["model"][name].shape == tensor.shape
        if name != "of_two" or rank_of_four < 2:
            assert staged["model"][name].__create_chunk_list__() == tensor.__create_chunk_list__()
    raw = file_of(staged)
    assert raw == file_of(state)
    assert_equals(raw, state, list(planned(state)[0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_a_gpu_are_encoded_there() -> None:
    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cuda()
        return {key: moved(item) for key, item in value.items()} if isinstance(value, dict) else value

    state = moved(make_state()["optim"])
    expected = file_of(state)
    staged = ThinStager().stage(state)
    state["state"][0]["exp_avg"].zero_()
    assert file_of(staged) == expected
