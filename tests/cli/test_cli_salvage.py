"""`thinpoint salvage`: what it saves is what was saved before, bit for bit, and it says what is lost and why."""

import json
import os
import random
import subprocess
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import NO_TORCH, Run

import thinpoint
from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import PartSpec
from thinpoint.file.layout import HEADER_BYTES, TRAILER_BYTES
from thinpoint.file.reader import FileReader
from thinpoint.file.writer import FileWriter
from thinpoint.store import FileObjectSink, open_source


class Plain:
    """Something that only pickle can store."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def random_tensor(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_state() -> dict[Any, Any]:
    weight = random_tensor(60, 50)
    shared_list = [1, random_tensor(700, seed=2), "x"]
    parameter = torch.nn.Parameter(random_tensor(40, 30, seed=3))
    parameter.note = {"of": random_tensor(600, seed=4)}
    meta = OrderedDict(a=random_tensor(500, seed=5), b=torch.tensor(float("nan")))
    meta._metadata = {"version": 1}
    return {
        "model": {"w": weight, "tied": weight, "row": weight[3], "turned": random_tensor(30, 40, seed=6).t()},
        "optimizer": {
            "state": {0: {"exp_avg": weight * 0.1, "exp_avg_sq": weight**2}},
            "lr": [0.1, (0.9, 0.99)],
        },
        ("a", 1): random_tensor(512, seed=7).bfloat16(),
        "first": shared_list,
        "again": shared_list,
        "set": {"p", "q"},
        "parameter": parameter,
        "ordered": meta,
        "sparse": torch.eye(200).to_sparse(),
        "history": np.arange(3000),
        "text": "ü" * 70_000,
        "numbers": list(range(999)),
        "empty": torch.empty(0, 3),
        "int8": torch.arange(5000).to(torch.int8),
    }


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


def check_part_of(found: Any, whole: Any) -> int:
    """Asserts that `found` is `whole` without some entries, None where order counts; the number of tensors and arrays in it."""
    if found is None:
        return 0
    assert type(found) is type(whole)
    if isinstance(whole, dict):
        assert set(found) <= set(whole)
        assert vars(found) == vars(whole) if isinstance(whole, OrderedDict) else True
        return sum(check_part_of(found[key], whole[key]) for key in found)
    if isinstance(whole, list | tuple):
        assert len(found) == len(whole)
        return sum(map(check_part_of, found, whole))
    if isinstance(whole, torch.Tensor):
        if whole.is_sparse:
            assert bits(found._values()) == bits(whole._values())
            assert bits(found._indices()) == bits(whole._indices())
            return 1
        assert bits(found) == bits(whole) and found.stride() == whole.stride()
        attributes = check_part_of(vars(found), vars(whole)) if vars(whole) else 0
        return 1 + attributes
    if isinstance(whole, np.ndarray):
        assert found.dtype == whole.dtype and found.tobytes() == whole.tobytes()
        return 1
    assert found == whole
    return 0


def flip(path: str, *positions: int) -> None:
    data = bytearray(Path(path).read_bytes())
    for position in positions:
        data[position] ^= 1
    Path(path).write_bytes(data)


def report_of(run: Run, path: str, out: str = "out.thin", code: int | None = None) -> dict[str, Any]:
    actual, text, err = run("salvage", path, "-o", out, "--overwrite", "--json")
    assert err == ""
    report = json.loads(text)
    assert (report["format"], report["version"]) == ("thinpoint-salvage", 1)
    (file,) = report["files"]
    has_lost = any(not value["saved"] for value in file["values"])
    assert actual == (code if code is not None else 3 if has_lost else 0)
    return file


def test_an_intact_file_is_left_alone(run: Run) -> None:
    thinpoint.save(make_state(), "m.thin")
    code, out, err = run("salvage", "m.thin", "-o", "out.thin")
    assert (code, out, err) == (0, "intact m.thin: nothing to salvage\n", "")
    assert not Path("out.thin").exists()


@pytest.mark.parametrize("place", [5, HEADER_BYTES - 1, -1, -TRAILER_BYTES, -TRAILER_BYTES + 30, -10])
def test_damage_to_header_or_trailer_costs_nothing(run: Run, place: int) -> None:
    state = make_state()
    thinpoint.save(state, "m.thin")
    flip("m.thin", place)
    file = report_of(run, "m.thin", code=0)
    assert (file["state"], file["index"], len(file["problems"])) == ("salvaged", "intact", 1)
    back = thinpoint.load("out.thin", weights_only=False)
    assert set(back) == set(state)
    assert check_part_of(back, state) == check_part_of(state, state) == 17
    assert back["first"] is back["again"] and back["model"]["w"] is back["model"]["tied"]
    thinpoint.verify("out.thin", deep=True)


def test_each_part_costs_what_is_in_it_and_nothing_else(run: Run) -> None:
    state = make_state()
    thinpoint.save(state, "whole.thin")
    data = Path("whole.thin").read_bytes()
    with open_source("whole.thin") as source:
        reader = FileReader(source)
        parts = reader.index.parts
        names = [reader.read_head(i).label["name"] for i in range(len(parts))]
    assert len(parts) >= 15
    for part, name in zip(parts, names, strict=True):
        for at in (part.offset + 24, part.offset + part.stored_bytes - 9):
            Path("m.thin").write_bytes(data)
            flip("m.thin", at)
            file = report_of(run, "m.thin", code=3)
            lost = {value["name"] for value in file["values"] if not value["saved"]}
            assert lost, name
            back = thinpoint.load("out.thin", weights_only=False)
            check_part_of(back, state)
            thinpoint.verify("out.thin", deep=True)
            assert {thing.split(".")[0] for thing in lost} <= {str(name[0]), "model", "('a', 1)", "first"}
            if name[0] == "model" and name[1] != "turned":
                assert lost == {"model.w", "model.tied", "model.row"}
                assert set(back["model"]) == {"turned"}
            if name[0] == "first":
                assert back["first"] == [1, None, "x"] and back["again"] is back["first"]
            if name[0] == "text":
                assert "text" not in back
            if name[0] == "parameter":
                # An attribute is part of the tensor.
                assert lost == {"parameter"}


def test_a_file_cut_or_changed_anywhere_never_gives_a_wrong_tensor(run: Run) -> None:
    state = make_state()
    thinpoint.save(state, "whole.thin")
    data = Path("whole.thin").read_bytes()
    with open_source("whole.thin") as source:
        parts = FileReader(source).index.parts
    rng = random.Random(7)
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(rng.choice([0, 1, 3])):
            start = rng.randrange(len(data))
            end = min(start + rng.choice([1, 8, 600]), len(data))
            changed[start:end] = rng.randbytes(end - start)
        size = rng.choice([len(data), rng.randrange(parts[1].offset, len(data))])
        Path("m.thin").write_bytes(changed[:size])
        Path("out.thin").unlink(missing_ok=True)
        code, text, _ = run("salvage", "m.thin", "-o", "out.thin", "--json")
        assert code in (0, 3)
        files = json.loads(text)["files"]
        if not files or files[0]["output"] is None:
            assert not Path("out.thin").exists()
            continue
        thinpoint.verify("out.thin", deep=True)
        back = thinpoint.load("out.thin", weights_only=False)
        if files[0]["index"] == "intact":
            check_part_of(back, state)
        else:
            for value in files[0]["values"]:
                if value["saved"] and value["name"].startswith(("model.w", "optimizer.", "ordered.")):
                    keys = [int(key) if key.isdigit() else key for key in value["name"].split(".")]
                    found, whole = back, state
                    for key in keys:
                        found, whole = found[key], whole[key]
                    assert bits(found) == bits(whole)


def test_without_the_index_tensors_come_back_by_their_labels(run: Run) -> None:
    state = make_state()
    thinpoint.save(state, "m.thin")
    with open_source("m.thin") as source:
        end = FileReader(source).trailer.index_offset
    Path("cut.thin").write_bytes(Path("m.thin").read_bytes()[: end + 10])
    file = report_of(run, "cut.thin", code=3)
    assert file["index"] == "lost"
    reasons = {value["name"]: value["reason"] for value in file["values"]}
    assert reasons["text"] == "no tensor: what it was stood in the index"
    assert reasons["optimizer.state.0.exp_avg"] is None
    back = thinpoint.load("out.thin")
    for key in ("exp_avg", "exp_avg_sq"):
        assert bits(back["optimizer"]["state"][0][key]) == bits(state["optimizer"]["state"][0][key])
    assert bits(back["model"]["w"]) == bits(state["model"]["w"])
    assert torch.equal(back["history"], torch.arange(3000))
    assert set(back) <= set(state) | {"('a', 1)"}
    code, out, _ = run("salvage", "cut.thin", "-o", "again.thin")
    assert code == 3 and "The index is lost." in out and "no tensor: what it was" in out


def labelled_file(pieces: list[tuple[int, int, np.ndarray, dict[str, Any]]]) -> bytes:
    """A file without its index: (storage, start, words, label) of each part."""
    import io

    sink = io.BytesIO()
    writer = FileWriter(FileObjectSink(sink))
    backend = get_backend()
    for storage, start, words, label in pieces:
        encoded = backend.encode(words.view(np.uint32), PartSpec(dtype="float32"))
        writer.add_part(
            encoded, storage=storage, start_bytes=start, dtype="float32", role="weight", label=label
        )
    return sink.getvalue()


def label(name: list[Any], shape: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "shape": shape, "role": "weight", **more}


def test_a_tensor_of_several_parts_is_saved_only_if_all_are_there(run: Run) -> None:
    values = random_tensor(3000).numpy()
    parts = [(4, 4000 * i, values[1000 * i : 1000 * (i + 1)], label(["a", 0], [3000])) for i in range(3)]
    whole = labelled_file([*parts, (9, 0, values[:10], label(["b"], [2, 5]))])
    Path("m.thin").write_bytes(whole)
    assert report_of(run, "m.thin", code=0)["state"] == "salvaged"
    back = thinpoint.load("out.thin")
    assert bits(back["a"][0]) == bits(torch.from_numpy(values))
    assert bits(back["b"]) == bits(torch.from_numpy(values[:10].reshape(2, 5)))
    for missing in range(3):
        Path("m.thin").write_bytes(labelled_file([p for i, p in enumerate(parts) if i != missing]))
        file = report_of(run, "m.thin", out="none.thin", code=3)
        assert file["output"] is None and file["state"] == "lost" and not Path("none.thin").exists()
        assert file["values"][0]["reason"] == "only 8,000 of its 12,000 bytes are left"


def test_labels_that_do_not_describe_their_parts_give_no_tensor(run: Run) -> None:
    values = random_tensor(600).numpy()
    bad = [
        {},
        label(["x"], [599]),
        label(["x"], [601]),
        label(["x"], [-600]),
        label(["x"], [600], dtype="qint32"),
        label(["x"], [600], dtype="no such"),
        label(["x"], [600], stride=[1, 1]),
        label([None], [600]),
        {"name": ["x"], "shape": [600]},
    ]
    pieces = [(i, 0, values, one) for i, one in enumerate(bad)]
    Path("m.thin").write_bytes(labelled_file([*pieces, (20, 0, values, label(["good"], [600]))]))
    file = report_of(run, "m.thin", code=3)
    assert [value["saved"] for value in file["values"]] == [False] * len(bad) + [True]
    back = thinpoint.load("out.thin")
    assert set(back) == {"good"} and bits(back["good"]) == bits(torch.from_numpy(values))


def test_a_label_with_strides_gives_the_tensor_in_its_order(run: Run) -> None:
    values = random_tensor(600).numpy()
    Path("m.thin").write_bytes(labelled_file([(0, 0, values, label(["t"], [20, 30], stride=[1, 20]))]))
    report_of(run, "m.thin", code=0)
    assert torch.equal(thinpoint.load("out.thin")["t"], torch.from_numpy(values.reshape(30, 20).T))


def test_a_label_with_a_lazy_negation_gives_the_negated_tensor(run: Run) -> None:
    values = random_tensor(600).numpy()
    Path("m.thin").write_bytes(labelled_file([(0, 0, values, label(["t"], [600], neg=True))]))
    report_of(run, "m.thin", code=0)
    assert torch.equal(thinpoint.load("out.thin")["t"], -torch.from_numpy(values))


def test_memory_is_that_of_a_part_not_of_the_file(run: Run) -> None:
    part_bytes, num_parts = 4 << 20, 12
    thinpoint.save({f"w{i}": random_tensor(part_bytes // 4, seed=i) for i in range(num_parts)}, "m.thin")
    flip("m.thin", os.path.getsize("m.thin") // 2, -1)
    report_of(run, "m.thin", code=3)
    tracemalloc.start()
    try:
        report_of(run, "m.thin", code=3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * part_bytes


def test_two_tensors_of_one_name_are_not_mixed_up(run: Run) -> None:
    values = random_tensor(600).numpy()
    names = [["a", "b"], ["a"], ["a", "b", "c"], ["a", "b"]]
    Path("m.thin").write_bytes(
        labelled_file([(i, 0, values, label(name, [600])) for i, name in enumerate(names)])
    )
    file = report_of(run, "m.thin", code=3)
    assert [value["saved"] for value in file["values"]] == [True, False, False, False]


def test_pickled_objects_go_with_their_tensors_and_all_after_them(run: Run) -> None:
    objects = [Plain(t=random_tensor(600, seed=i), i=i) for i in range(3)]
    state = {"a": objects[0], "b": objects[1], "c": objects[2], "w": random_tensor(900)}
    thinpoint.save(state, "whole.thin")
    with open_source("whole.thin") as source:
        reader = FileReader(source)
        parts = reader.index.parts
        at = {tuple(reader.read_head(i).label["name"]): part for i, part in enumerate(parts)}
    place = next(part for name, part in at.items() if name[0] == "b")
    data = bytearray(Path("whole.thin").read_bytes())
    data[place.offset + place.stored_bytes - 9] ^= 1
    Path("m.thin").write_bytes(data)
    report_of(run, "m.thin", code=3)
    back = thinpoint.load("out.thin", weights_only=False)
    assert set(back) == {"a", "w"}
    assert back["a"].i == 0 and bits(back["a"].t) == bits(objects[0].t)
    thinpoint.verify("out.thin", deep=True)


def test_a_damaged_file_made_of_another_kind_is_not_made_that_file_again(run: Run) -> None:
    import safetensors.torch

    safetensors.torch.save_file({"a": random_tensor(900), "b": random_tensor(800, seed=2)}, "m.safetensors")
    assert run("compress", "m.safetensors")[0] == 0
    with open_source("m.safetensors.thin") as source:
        part = FileReader(source).index.parts[0]
    flip("m.safetensors.thin", part.offset + part.stored_bytes - 9)
    report_of(run, "m.safetensors.thin", code=3)
    assert run("decompress", "out.thin")[0] == 2
    assert run("decompress", "out.thin", "--to", "safetensors", "-o", "back.safetensors")[0] == 0
    assert len(safetensors.torch.load_file("back.safetensors")) == 1


def test_folders_are_mirrored_and_only_damaged_files_written(run: Run) -> None:
    Path("runs/a").mkdir(parents=True)
    for name in ("runs/x.thin", "runs/a/y.thin", "runs/a/z.thin"):
        thinpoint.save({"w": random_tensor(900), "v": random_tensor(800, seed=2)}, name)
    Path("runs/a/notes.txt").write_text("x")
    flip("runs/a/y.thin", os.path.getsize("runs/a/y.thin") // 2)
    Path("runs/a/z.thin").write_bytes(b"nothing left")
    code, out, err = run("salvage", "runs", "-o", "saved")
    assert code == 3
    assert [str(path) for path in Path("saved").rglob("*.thin")] == ["saved/a/y.thin"]
    assert "1 of 2 values saved" in out and "do not match their digest" in out
    assert out.splitlines()[-1] == "3 files: 1 intact, 1 salvaged, 1 failed"
    assert err.startswith("failed: no .thin file in runs/a/z.thin")


def test_wrong_input_is_named(run: Run) -> None:
    thinpoint.save({"w": random_tensor(900)}, "m.thin")
    torch.save({"w": random_tensor(900)}, "m.pt")
    Path("empty").mkdir()
    cases = [
        (["nowhere", "-o", "x"], 6, "no such file or folder"),
        (["empty", "-o", "x"], 2, "no .thin file to salvage"),
        (["m.pt", "-o", "x"], 3, "`thinpoint compress` makes a .thin file of it"),
        (["m.thin", "-o", "no/x"], 6, "Create the folder first"),
        (["m.thin", "-o", "m.thin"], 2, "would replace the input"),
    ]
    for args, code, message in cases:
        actual, out, err = run("salvage", *args)
        assert (actual, out) == (code, "") and message in err
    flip("m.thin", 3)
    Path("x").write_text("mine")
    code, _, err = run("salvage", "m.thin", "-o", "x")
    assert code == 6 and "--overwrite" in err and Path("x").read_text() == "mine"


def test_salvage_needs_no_torch(tmp_path: Path) -> None:
    thinpoint.save(make_state(), tmp_path / "m.thin")
    flip(str(tmp_path / "m.thin"), 3, 2000)
    done = subprocess.run(
        [*NO_TORCH, "salvage", "m.thin", "-o", "out.thin"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert "values saved" in done.stdout
    assert check_part_of(thinpoint.load(tmp_path / "out.thin", weights_only=False), make_state()) > 5
