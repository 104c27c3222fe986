"""`thinpoint convert` and `thinpoint diff`: from any kind to any kind, every bit."""

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from cli_support import Run
from formats_support import bits
from sharded import sharded_checkpoints
from sharded_process import full_state

import thinpoint
from thinpoint.checkpoint import Checkpointer
from thinpoint.dcp import ThinFolder, ThinWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SOURCES = ("a.pt", "a.thin", "stock", "thin", "a.safetensors", "hf")
TARGETS = {"thin": "out.thin", "folder": "out_thin", "dcp": "out_dcp", "pt": "out.pt"}
TARGETS |= {"safetensors": "out.safetensors", "hf": "out_hf"}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model.weight": torch.randn(200, 30, generator=generator),
        "model.bias": torch.randn(30, generator=generator).bfloat16(),
        "model.scale": torch.tensor(2.5),
        "model.empty": torch.empty(0, 3),
        "model.nan": torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
        "model.ids": torch.arange(9),
    }


def nested_state() -> dict[str, Any]:
    tensors = {name.partition(".")[2]: tensor for name, tensor in weights().items()}
    return {
        "model": collections.OrderedDict(tensors),
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(200, 30), "step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}],
        },
        "views": [weights()["model.weight"].t(), {"text": "x"}],
        "pair": (torch.ones(2), 3),
        "step": 7,
    }


def make(kind: str) -> None:
    """A checkpoint of the name `kind` in this folder: nested, or flat where the format has no nesting."""
    state = nested_state()
    if kind == "a.pt":
        torch.save(state, kind)
    elif kind == "a.thin":
        thinpoint.save(state, kind)
    elif kind == "stock":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(kind), no_dist=True)
    elif kind == "thin":
        dcp.save(state, storage_writer=ThinWriter(kind), no_dist=True)
    elif kind == "a.safetensors":
        safetensors.torch.save_file(weights(), kind)
    else:
        os.mkdir(kind)
        names = list(weights())
        files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
        for file, below in files.items():
            safetensors.torch.save_file({name: weights()[name] for name in below}, f"{kind}/{file}")
        index = {"metadata": {}, "weight_map": {n: file for file, below in files.items() for n in below}}
        Path(kind, "model.safetensors.index.json").write_text(json.dumps(index))


def kind_of(target: str) -> str:
    return "thin" if target == "folder" else target


@pytest.mark.parametrize("target", ["thin", "folder", "dcp", "pt"])
@pytest.mark.parametrize("source", SOURCES)
def test_everything_comes_over_bit_for_bit(run: Run, source: str, target: str) -> None:
    make(source)
    code, out, err = run("convert", source, TARGETS[target], "--to", kind_of(target))
    assert (code, err) == (0, ""), err
    assert "left out" not in out and f"{source} -> {TARGETS[target]}" in out
    code, out, err = run("diff", source, TARGETS[target])
    assert (code, err) == (0, "") and out.startswith("equal: ")
    if TARGETS[target].startswith("out_thin") or target == "thin":
        assert run("verify", TARGETS[target], "--deep")[0] == 0


@pytest.mark.parametrize("target", ["safetensors", "hf"])
@pytest.mark.parametrize("source", SOURCES)
def test_tensors_come_over_and_the_rest_is_listed(run: Run, source: str, target: str) -> None:
    make(source)
    code, out, err = run("convert", source, TARGETS[target], "--to", target)
    assert (code, err) == (0, "")
    is_flat = source in ("a.safetensors", "hf")
    listed = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert bool(listed) != is_flat
    if not is_flat:
        for name in ("step", "optimizer.param_groups.0.lr", "pair.1", "views.1.text"):
            assert any(line.startswith(f"left out: {name} ") for line in listed), name
    folder = Path(TARGETS[target])
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        loaded |= safetensors.torch.load_file(file)
    for name, tensor in weights().items():
        assert bits(loaded[name]) == bits(tensor), name
    code, out, _ = run("diff", source, TARGETS[target])
    assert code == (0 if is_flat else 1)
    assert "with other bits" not in out and "only in B" not in out
    code, out, err = run("convert", source, "strict", "--to", target, "--strict")
    assert code == (0 if is_flat else 7) and (is_flat or "cannot hold everything" in err)
    assert Path("strict").exists() == is_flat


def test_a_dcp_folder_loads_with_torch_alone(run: Run, tmp_path: Path) -> None:
    make("a.thin")
    assert run("convert", "a.thin", "out_dcp", "--to", "dcp")[0] == 0
    script = """if True:
        import sys, warnings
        sys.modules["thinpoint"] = None
        warnings.simplefilter("ignore")
        import torch, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        state = {"model": {"weight": torch.zeros(200, 30)}, "step": 0}
        dcp.load(state, storage_reader=dcp.FileSystemReader("out_dcp"), no_dist=True)
        torch.save(state, "loaded.pt")
        dcp_to_torch_save("out_dcp", "all.pt")
        meta = dcp.FileSystemReader("out_dcp").read_metadata().storage_meta
        assert str(meta.checkpoint_id) == "out_dcp", meta
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = torch.load("loaded.pt")
    assert loaded["step"] == 7 and bits(loaded["model"]["weight"]) == bits(weights()["model.weight"])
    assert run("diff", "a.thin", "all.pt")[0] == 0


def test_shards_of_two_ranks_become_one(run: Run) -> None:
    for source in ("stock", "thin"):
        path = sharded_checkpoints() / source
        for target, name in TARGETS.items():
            out = f"{source}_{name}"
            assert run("convert", path, out, "--to", kind_of(target))[0] == 0
            code, text, _ = run("diff", path, out, "--names", "model.*")
            assert code == 0, text
        loaded = torch.load(f"{source}_out.pt")
        for name, tensor in full_state().items():
            assert bits(loaded["model"][name]) == bits(tensor), name
        assert loaded["groups"] == [{"lr": 0.1, "betas": (0.9, 0.95)}]
    assert run("verify", "stock_out_thin", "--deep")[0] == 0
    with ThinFolder("stock_out_thin") as folder:
        assert folder.world_size == 1
        assert bits(folder.read("model.columns")) == bits(full_state()["columns"])


def test_tied_weights_stay_tied_where_the_format_can(run: Run) -> None:
    shared = torch.randn(50, 20)
    torch.save({"embed": shared, "head": shared, "half": shared[:25], "w": torch.ones(1)}, "a.pt")
    assert run("convert", "a.pt", "mid", "--to", "thin")[0] == 0
    code, out, _ = run("convert", "a.pt", "b.pt", "--to", "pt", "--names", "*")
    loaded = torch.load("b.pt")
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()
    assert "note: half shares memory" in out and "note: head" not in out
    code, out, _ = run("convert", "a.pt", "b.safetensors", "--to", "safetensors")
    assert code == 0 and "note: head shares memory" in out
    assert bits(safetensors.torch.load_file("b.safetensors")["head"]) == bits(shared)
    assert run("diff", "a.pt", "b.safetensors")[0] == 0
    sizes = os.path.getsize(next(Path("mid").glob("*.thin"))), os.path.getsize("b.safetensors")
    # 4,000 bytes of 10,000 are there twice in one and once in the other.
    assert sizes[0] < sizes[1] - 3000


@pytest.mark.parametrize("target", list(TARGETS))
def test_names_select_and_dtype_casts_and_says_so(run: Run, target: str) -> None:
    make("a.thin")
    options = ("--to", kind_of(target), "--names", "model.*", "--dtype", "bf16")
    code, out, err = run("convert", "a.thin", TARGETS[target], *options)
    assert (code, err) == (0, "")
    assert "cast: model.weight from float32 to bfloat16" in out and "cast: model.bias" not in out
    expected = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in weights().items()
    }
    safetensors.torch.save_file(expected, "expected.safetensors")
    code, out, _ = run("diff", "expected.safetensors", TARGETS[target])
    assert code == 0, out


def test_hf_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    from thinpoint.formats.leaves import OpenCheckpoint
    from thinpoint.formats.to_safetensors import fitting, write_shards
    from thinpoint.formats.torch_source import tree_of

    tensors = {f"w{i}": torch.randn(size) for i, size in enumerate((10, 20, 30, 400, 5))}
    checkpoint = OpenCheckpoint(name="memory", kind="pt", tree=tree_of(tensors), num_bytes=0)
    told: list[int] = []
    write_shards(list(fitting(checkpoint).tensors.items()), str(tmp_path), told.append, shard_bytes=200)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(told) == 465 * 4
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert bits(opened.get_tensor(name)) == bits(tensors[name])


def test_the_newest_intact_step_of_a_directory_is_taken(run: Run) -> None:
    with Checkpointer("run") as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save({"w": torch.full((50,), float(step))}, step)
    Path("run/step-0000000030/manifest.json").unlink()
    code, out, _ = run("convert", "run", "a.pt", "--to", "pt")
    assert code == 0 and out.startswith("newest checkpoint: run/step-0000000020\n")
    assert torch.load("a.pt")["w"][0] == 20
    assert run("convert", "run/step-0000000010", "b.safetensors", "--to", "safetensors")[0] == 0
    assert safetensors.torch.load_file("b.safetensors")["w"][0] == 10
    code, out, _ = run("diff", "run", "run/step-0000000010")
    assert code == 1 and "w" in out
    for step in (10, 20):
        Path(f"run/step-{step:010d}/manifest.json").write_text("{")
    code, _, err = run("convert", "run", "c.pt", "--to", "pt")
    assert code == 9 and "none of the checkpoints is intact" in err


def listing() -> list[str]:
    return sorted(str(path) for path in Path(".").rglob("*"))


@pytest.mark.parametrize("target", list(TARGETS))
def test_nothing_is_replaced_unless_asked_for(run: Run, target: str) -> None:
    make("a.thin")
    name = TARGETS[target]
    options = ("--to", kind_of(target))
    assert run("convert", "a.thin", name, *options)[0] == 0
    before = {path: Path(path).read_bytes() for path in listing() if Path(path).is_file()}
    code, _, err = run("convert", "a.thin", name, *options)
    assert code == 6 and "exists already" in err and "--overwrite" in err
    assert {path: Path(path).read_bytes() for path in listing() if Path(path).is_file()} == before
    torch.save({"other": torch.ones(3)}, "b.pt")
    assert run("convert", "b.pt", name, *options, "--overwrite")[0] == 0
    assert run("diff", "b.pt", name)[0] == 0
    assert not [path for path in listing() if path.endswith(".tmp")]


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_damaged_source_leaves_nothing_behind(run: Run, target: str) -> None:
    thinpoint.save({"a": torch.ones(10), "w": torch.randn(300, 300)}, "a.thin")
    data = bytearray(Path("a.thin").read_bytes())
    data[len(data) // 2] ^= 1
    Path("a.thin").write_bytes(data)
    torch.save({"before": torch.ones(3)}, "b.pt")
    name, options = TARGETS[target], ("--to", kind_of(target))
    assert run("convert", "b.pt", name, *options)[0] == 0
    before = {path: Path(path).read_bytes() for path in listing() if Path(path).is_file()}
    code, _, err = run("convert", "a.thin", name, *options, "--overwrite")
    assert code == 3 and "a.thin" in err
    assert {path: Path(path).read_bytes() for path in listing() if Path(path).is_file()} == before
    assert run("convert", "a.thin", f"new_{name}", *options)[0] == 3
    assert not Path(f"new_{name}").exists()
    assert not [path for path in listing() if path.endswith(".tmp")]


def test_a_folder_with_other_things_in_it_is_not_replaced(run: Run) -> None:
    make("a.thin")
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    for kind in ("dcp", "hf", "thin"):
        code, _, err = run("convert", "a.thin", "mine", "--to", kind, "--overwrite")
        assert code == 2 and "thesis.txt" in err
    assert Path("mine/thesis.txt").read_text() == "years of work"


def test_what_makes_no_sense_is_refused(run: Run) -> None:
    make("a.thin")
    Path("text.txt").write_text("this is no checkpoint")
    Path("empty").mkdir()
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("a.thin", "a.thin", "--to", "thin", "--overwrite"), 2, "replace the input"),
        (("text.txt", "b", "--to", "dcp"), 2, "no checkpoint"),
        (("empty", "b", "--to", "dcp"), 2, "no checkpoint"),
        (("nowhere", "b", "--to", "dcp"), 6, "nowhere"),
        (("a.thin", "no/such/folder", "--to", "dcp"), 6, "does not exist"),
        (("a.thin", "no/such/file.pt", "--to", "pt"), 6, "does not exist"),
        (("a.thin", "b.pt", "--to", "pt", "--names", "wrong.*"), 2, "wrong.*"),
        (("a.thin", "memory://somewhere", "--to", "dcp"), 2, "local disk only"),
        (("a.thin", "b.safetensors", "--to", "safetensors", "--names", "step"), 7, "no tensor"),
        (("a.thin", "b", "--to", "zip"), 2, "zip"),
    ]
    before = listing()
    for args, expected, message in cases:
        code, _, err = run("convert", *args)
        assert code == expected and message in err, (args, code, err)
    assert listing() == before
    torch.save([torch.ones(2)], "list.pt")
    code, _, err = run("convert", "list.pt", "b", "--to", "dcp")
    assert code == 7 and "holds a dict" in err


class Custom:
    pass


def test_pickled_objects_need_leave_and_may_be_left_out(run: Run) -> None:
    torch.save({"w": torch.ones(3), "custom": Custom()}, "a.pt")
    code, _, err = run("convert", "a.pt", "a.thin", "--to", "thin")
    assert code == 5 and "--allow-pickle" in err
    assert run("convert", "a.pt", "a.thin", "--to", "thin", "--allow-pickle")[0] == 0
    code, _, err = run("convert", "a.thin", "b", "--to", "dcp")
    assert code == 5 and "--allow-pickle" in err and not Path("b").exists()
    assert run("convert", "a.thin", "b", "--to", "dcp", "--names", "w")[0] == 0
    code, out, _ = run("convert", "a.thin", "b.safetensors", "--to", "safetensors")
    assert code == 0 and "left out: custom" in out
    code, _, err = run("diff", "a.thin", "b")
    assert code == 5
    assert run("diff", "a.thin", "b", "--names", "w")[0] == 0


def test_sources_may_be_urls(run: Run) -> None:
    pytest.importorskip("fsspec", reason="thinpoint[fsspec] is not installed")
    import fsspec

    memory = fsspec.filesystem("memory")
    for kind in ("a.thin", "stock", "thin", "hf"):
        make(kind)
        memory.put(kind, f"/convert/{kind}", recursive=True)
        assert run("convert", f"memory://convert/{kind}", f"{kind}.out.pt", "--to", "pt")[0] == 0
        assert run("diff", kind, f"{kind}.out.pt")[0] == 0
    assert run("convert", "stock", "memory://convert/new.thin", "--to", "thin")[0] == 0
    assert run("diff", "stock", "memory://convert/new.thin")[0] == 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
@pytest.mark.parametrize("target", ["thin", "folder", "dcp", "safetensors", "hf"])
def test_memory_does_not_grow_with_the_state(run: Run, target: str, tmp_path: Path) -> None:
    """Of states of 100 and of 400 MB, in tensors of 16 MB."""
    peaks = []
    for num_tensors in (6, 25):
        big = {f"w{i}": torch.full((4 << 20,), float(i)) for i in range(num_tensors)}
        dcp.save(big, storage_writer=dcp.FileSystemWriter(f"big{num_tensors}"), no_dist=True)
        script = f"""if True:
            import sys
            from thinpoint.cli.main import main
            import thinpoint.formats.to_dcp
            thinpoint.formats.to_dcp.FILE_BYTES = 50 << 20
            sys.argv = ["thinpoint", "convert", "big{num_tensors}", "{num_tensors}{TARGETS[target]}"]
            sys.argv += ["--to", {kind_of(target)!r}]
            try:
                main()
            except SystemExit as end:
                assert not end.code, end.code
            lines = dict(line.split(":") for line in open("/proc/self/status"))
            print("peak", int(lines["VmHWM"].split()[0]) // 1024)
        """
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
        shutil.rmtree(f"big{num_tensors}")
    assert peaks[1] - peaks[0] < 120, peaks
