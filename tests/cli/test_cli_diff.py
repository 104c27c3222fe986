"""`thinpoint diff`: what it prints, and what its exit code says."""

import json
from pathlib import Path

import torch
from cli_support import Run

import thinpoint
from thinpoint.cli import diff as diff_command


def make(run: Run) -> None:
    a = torch.arange(12.0).reshape(3, 4)
    b = a.clone()
    b[1, 2] = torch.nextafter(b[1, 2], torch.tensor(100.0))
    b[2, 3] = float("nan")
    thinpoint.save({"w": a, "same": torch.ones(3), "lr": 0.1, "gone": 1, "k": torch.ones(2)}, "a.thin")
    torch.save({"w": b, "same": torch.ones(3), "lr": 0.2, "new": 1, "k": torch.ones(2).half()}, "b.pt")


def test_a_table_says_which_values_differ_and_how_far(run: Run) -> None:
    make(run)
    code, out, err = run("diff", "a.thin", "b.pt")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].split()[:6] == ["tensor", "dtype", "shape", "different", "of", "steps"]
    assert lines[2].split() == [
        "w",
        "float32",
        "3x4",
        "2",
        "(1",
        "NaN)",
        "12",
        "1",
        "4.76837e-07",
        "[1,",
        "2]",
    ]
    assert "form of k: float32 2 in A, float16 2 in B" in lines
    assert "value of lr: 0.1 in A, 0.2 in B" in lines
    assert "only in A: gone" in lines and "only in B: new" in lines
    assert lines[-1].startswith("different: a.thin and b.pt  1 with other bits, 1 of another dtype")
    code, out, _ = run("diff", "a.thin", "b.pt", "--names", "same")
    assert (code, out) == (0, "equal: a.thin and b.pt  1 tensor, 0 other values, bit for bit\n")


def test_json_holds_everything(run: Run) -> None:
    make(run)
    code, out, _ = run("diff", "a.thin", "b.pt", "--json")
    report = json.loads(out)
    assert (code, report["format"], report["version"]) == (1, "thinpoint-diff", 1)
    assert report["equal"] is False
    assert (report["only_a"], report["only_b"]) == (["gone"], ["new"])
    assert report["forms"] == [{"name": "k", "a": "float32 2", "b": "float16 2"}]
    assert report["objects"] == [{"name": "lr", "a": "0.1", "b": "0.2"}]
    (tensor,) = report["tensors"]
    assert tensor == {
        "name": "w",
        "dtype": "float32",
        "shape": [3, 4],
        "num_values": 12,
        "num_different": 2,
        "num_nan": 1,
        "first": [1, 2],
        "steps": 1,
        "largest": 2.0**-21,
    }
    torch.save({"w": torch.tensor([float("inf")])}, "i.pt")
    torch.save({"w": torch.tensor([1.0])}, "f.pt")
    (tensor,) = json.loads(run("diff", "i.pt", "f.pt", "--json")[1])["tensors"]
    assert tensor["largest"] == "inf"


def test_errors_are_no_differences(run: Run) -> None:
    make(run)
    assert run("diff", "a.thin", "nowhere")[0] == 6
    data = bytearray(Path("a.thin").read_bytes())
    data[600] ^= 1
    Path("damaged.thin").write_bytes(data)
    assert run("diff", "a.thin", "damaged.thin")[0] == 3
    assert run("diff", "a.thin", "b.pt", "--names", "nothing")[0] == 2


def test_a_bug_has_a_code_of_its_own(run: Run, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    make(run)

    def broken(*arguments: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(diff_command, "_compare", broken)
    code, _, err = run("diff", "a.thin", "b.pt")
    assert code == 70 and "a bug" in err
