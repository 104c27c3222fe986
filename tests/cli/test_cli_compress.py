"""`thinpoint compress` and `decompress`, run as users run them."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from cli_support import Run
from formats_support import bits

import thinpoint
from thinpoint.cli.compress import refusal
from thinpoint.errors import UsageError
from thinpoint.formats import compare
from thinpoint.store import open_source


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(200, 100, generator=generator)
    return {"model": {"w": weight, "tied": weight, "t": weight[:7].t()}, "step": 7, "rng": np.arange(5)}


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_torch_file_there_and_back(run: Run) -> None:
    torch.save(state(), "m.pt")
    original = Path("m.pt").read_bytes()
    code, out, err = run("compress", "m.pt", "--verify")
    assert (code, err) == (0, "")
    assert out.startswith("m.pt -> m.pt.thin  ")
    assert Path("m.pt").read_bytes() == original
    Path("m.pt").unlink()
    assert run("decompress", "m.pt.thin")[0] == 0
    got = torch.load("m.pt", weights_only=False)
    assert bits(got["model"]["w"]) == bits(state()["model"]["w"])
    assert got["model"]["w"] is not None and got["model"]["tied"].data_ptr() == got["model"]["w"].data_ptr()
    assert (got["step"], got["rng"].tolist()) == (7, [0, 1, 2, 3, 4])
    assert files_below(Path()) == ["m.pt", "m.pt.thin"]


def test_a_legacy_torch_file_comes_back_as_one(run: Run) -> None:
    torch.save(state(), "m.bin", _use_new_zipfile_serialization=False)
    assert run("compress", "m.bin", "-o", "x.thin")[0] == 0
    assert run("decompress", "x.thin", "-o", "back.bin")[0] == 0
    assert Path("back.bin").read_bytes()[:2] == b"\x80\x02"
    assert bits(torch.load("back.bin", weights_only=False)["model"]["t"]) == bits(state()["model"]["t"])
    # Without a name to go by, the note says what it was.
    assert run("decompress", "x.thin")[0] == 0
    assert Path("x.pt").exists()


@pytest.mark.parametrize("codec", ["thin", "zstd"])
def test_a_safetensors_file_comes_back_byte_for_byte(run: Run, codec: str) -> None:
    safetensors.torch.save_file(
        {"a": torch.randn(300, 70), "b": torch.arange(5)}, "m.safetensors", {"k": "v"}
    )
    original = Path("m.safetensors").read_bytes()
    assert run("compress", "m.safetensors", "--codec", codec, "--threads", 1, "--verify")[0] == 0
    assert run("decompress", "m.safetensors.thin", "-o", "back.safetensors")[0] == 0
    assert Path("back.safetensors").read_bytes() == original
    chains = {
        t["chains"][0] for t in thinpoint_json(run, "m.safetensors.thin")["tensors"] if t["num_values"] > 100
    }
    assert chains == ({"zstd"} if codec == "zstd" else {"rans"})


def thinpoint_json(run: Run, path: str) -> Any:
    import json

    return json.loads(run("inspect", path, "--json")[1])


def make_folder() -> None:
    Path("in/sub").mkdir(parents=True)
    torch.save({"a": torch.ones(5)}, "in/a.pt")
    torch.save({"a": torch.zeros(5)}, "in/sub/b.pth")
    torch.save({"a": torch.zeros(5)}, "in/sub/pytorch_model.bin")
    safetensors.torch.save_file({"a": torch.ones(2)}, "in/sub/c.safetensors")
    Path("in/config.json").write_text("{}")
    Path("in/tokens.bin").write_bytes(b"\0" * 100)


def test_a_folder_is_compressed_in_place_or_mirrored(run: Run) -> None:
    make_folder()
    before = files_below(Path("in"))
    code, out, err = run("compress", "in", "-o", "out")
    assert (code, err) == (0, "")
    thin = ["a.pt.thin", "sub/b.pth.thin", "sub/c.safetensors.thin", "sub/pytorch_model.bin.thin"]
    assert files_below(Path("out")) == thin
    assert files_below(Path("in")) == before
    assert "skipped in/config.json: no checkpoint" in out
    assert "skipped in/tokens.bin: no file of torch.save" in out
    assert out.splitlines()[-1].startswith("4 files, 2 skipped  ")
    assert run("compress", "in")[0] == 0
    assert files_below(Path("in")) == sorted(before + thin)
    assert run("decompress", "out", "-o", "back")[0] == 0
    assert files_below(Path("back")) == [name.removesuffix(".thin") for name in thin]
    assert Path("back/sub/c.safetensors").read_bytes() == Path("in/sub/c.safetensors").read_bytes()


def test_one_bad_file_of_a_folder_does_not_stop_the_others(run: Run) -> None:
    make_folder()
    Path("in/bad.pt").write_text("hello")
    Path("in/cut.safetensors").write_bytes(b"\x08")
    code, out, err = run("compress", "in", "-o", "out")
    assert code == 3
    assert len(files_below(Path("out"))) == 4
    assert err.count("failed: ") == 2
    assert "bad.pt" in err and "cut.safetensors" in err
    assert out.splitlines()[-1].startswith("4 files, 2 skipped, 2 failed")


def test_several_inputs_go_into_folders_of_their_own(run: Run) -> None:
    for folder in ("x", "y"):
        Path(folder).mkdir()
        torch.save([torch.ones(2)], f"{folder}/m.pt")
    torch.save([torch.ones(3)], "m.pt")
    assert run("compress", "x", "y", "m.pt", "-o", "out")[0] == 0
    assert files_below(Path("out")) == ["m.pt.thin", "x/m.pt.thin", "y/m.pt.thin"]
    code, _, err = run("compress", "x/m.pt", "y/m.pt", "-o", "out")
    assert code == 2
    assert "both become" in err


def test_nothing_is_replaced_without_being_asked(run: Run) -> None:
    torch.save([torch.ones(2)], "m.pt")
    Path("m.pt.thin").write_text("precious")
    code, _, err = run("compress", "m.pt")
    assert code == 6
    assert "--overwrite" in err
    assert Path("m.pt.thin").read_text() == "precious"
    assert run("compress", "m.pt", "--overwrite")[0] == 0
    code, _, err = run("decompress", "m.pt.thin")
    assert code == 6 and "m.pt" in err
    assert run("decompress", "m.pt.thin", "--overwrite")[0] == 0
    assert files_below(Path()) == ["m.pt", "m.pt.thin"]


class Evil:
    """Its pickle makes a folder when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("mark",)


def test_code_in_a_pickle_needs_permission_both_ways(run: Run) -> None:
    torch.save({"e": Evil(), "f": os.path.join, "a": torch.ones(2)}, "evil.pt")
    code, _, err = run("compress", "evil.pt")
    assert code == 5
    assert "--allow-pickle" in err
    assert not Path("mark").exists()
    assert files_below(Path()) == ["evil.pt"]
    assert run("compress", "evil.pt", "--allow-pickle")[0] == 0
    assert Path("mark").exists()
    code, _, err = run("decompress", "evil.pt.thin", "-o", "back.pt")
    assert code == 5
    assert "--allow-pickle" in err
    assert run("decompress", "evil.pt.thin", "-o", "back.pt", "--allow-pickle")[0] == 0
    assert torch.load("back.pt", weights_only=False)["f"] is os.path.join


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["compress", "missing.pt"], 6, "missing.pt"),
        (["compress", "empty"], 2, "there is no"),
        (["compress", "text.pt"], 3, "text.pt"),
        (["compress", "notes.txt"], 2, "no checkpoint"),
        (["compress", "x.thin"], 2, "already"),
        (["compress", "good.pt", "-o", "missing/out.thin"], 6, "Create the folder"),
        (["compress", "good.pt", "good2.pt", "-o", "missing/out"], 6, "Create the folder"),
        (["compress", "good.pt", "good2.pt", "-o", "text.pt"], 2, "folder"),
        (["compress", "good.pt", "--codec", "lzma"], 2, "lzma"),
        (["compress", "good.pt", "--threads", "0"], 2, "threads"),
        (["compress"], 2, "IN"),
        (["decompress", "good.pt"], 3, "good.pt"),
        (["decompress", "empty"], 2, "there is no .thin file"),
        (["decompress", "x.thin"], 3, "x.thin"),
        (["inspect", "good.pt"], 3, "thinpoint compress"),
        (["inspect", "missing.thin"], 6, "missing.thin"),
        (["inspect", "empty"], 2, "folder"),
        (["verify", "missing.thin"], 6, "missing.thin"),
        (["verify", "empty"], 2, "there is no .thin file"),
        (["nothing"], 2, "nothing"),
    ],
)
def test_wrong_input_has_its_exit_code_and_a_readable_message(
    run: Run, args: list[str], code: int, words: str
) -> None:
    Path("empty").mkdir()
    Path("text.pt").write_text("hello")
    Path("notes.txt").write_text("hello")
    Path("x.thin").write_text("hello")
    for name in ("good.pt", "good2.pt"):
        torch.save([torch.ones(2)], name)
    before = files_below(Path())
    got, out, err = run(*args)
    assert got == code
    assert words in out + err
    assert "Traceback" not in out + err
    assert files_below(Path()) == before


def test_traceback_shows_where(run: Run) -> None:
    Path("text.pt").write_text("hello")
    assert "Traceback" in run("compress", "text.pt", "--traceback")[2]
    assert "Traceback" in run("inspect", "text.pt", "--traceback")[2]


@pytest.mark.parametrize(("name", "value"), [("THINPOINT_CODEC", "lzma"), ("THINPOINT_THREADS", "0")])
def test_an_invalid_setting_is_a_usage_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    torch.save([torch.ones(2)], "m.pt")
    monkeypatch.setenv(name, value)
    code, _, err = run("compress", "m.pt")
    assert code == 2
    assert value in err
    assert files_below(Path()) == ["m.pt"]


def test_the_codec_of_the_environment_counts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save([torch.randn(5000)], "m.pt")
    monkeypatch.setenv("THINPOINT_CODEC", "raw")
    assert run("compress", "m.pt")[0] == 0
    assert list(thinpoint_json(run, "m.pt.thin")["codecs"]) == ["raw"]


def test_a_file_born_as_thin_needs_a_kind(run: Run) -> None:
    weight = torch.randn(20, 10)
    thinpoint.save({"a": {"b": weight.t()}}, "m.thin")
    code, _, err = run("decompress", "m.thin")
    assert code == 2 and "--to" in err
    assert run("decompress", "m.thin", "--to", "pt")[0] == 0
    assert run("decompress", "m.thin", "--to", "safetensors")[0] == 0
    assert torch.load("m.pt", weights_only=True)["a"]["b"].stride() == (1, 10)
    assert bits(safetensors.torch.load_file("m.safetensors")["a.b"]) == bits(weight.t())
    thinpoint.save({"a": weight, "lr": 0.1, "tied": weight}, "mixed.thin")
    code, _, err = run("decompress", "mixed.thin", "--to", "safetensors")
    assert code == 7
    assert "lr is no tensor" in err and "tied shares memory with a" in err
    assert not Path("mixed.safetensors").exists()


def test_a_thin_file_of_any_name_is_decompressed_but_never_replaced(run: Run) -> None:
    for name in ("checkpoint", "model.pt"):
        thinpoint.save([torch.ones(2)], name)
    original = Path("model.pt").read_bytes()
    assert run("decompress", "checkpoint", "--to", "pt")[0] == 0
    assert torch.load("checkpoint.pt", weights_only=True)[0].tolist() == [1, 1]
    code, _, err = run("decompress", "model.pt", "--to", "pt", "--overwrite")
    assert code == 2 and "replace the input" in err
    assert Path("model.pt").read_bytes() == original
    torch.save([torch.ones(2)], "t.pt")
    code, _, err = run("compress", "t.pt", "-o", "./t.pt", "--overwrite")
    assert code == 2 and "replace the input" in err
    Path("link.thin").symlink_to("t.pt")
    assert run("compress", "t.pt", "-o", "link.thin", "--overwrite")[0] == 2


def test_kinds_can_be_converted(run: Run) -> None:
    tensors = {"a": torch.randn(30, 10), "b": torch.arange(4)}
    torch.save(tensors, "m.pt")
    safetensors.torch.save_file(tensors, "s.safetensors")
    assert run("compress", "m.pt", "s.safetensors")[0] == 0
    assert run("decompress", "m.pt.thin", "--to", "safetensors")[0] == 0
    assert run("decompress", "s.safetensors.thin", "--to", "pt")[0] == 0
    for got in (safetensors.torch.load_file("m.safetensors"), torch.load("s.pt", weights_only=True)):
        assert {name: bits(t) for name, t in got.items()} == {name: bits(t) for name, t in tensors.items()}


def test_a_file_that_fails_its_comparison_does_not_stay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save([torch.randn(5000)], "m.pt")
    real = compare.decoded

    def flipped(*args: Any) -> Any:
        for targets in real(*args):
            targets[0].out[-1] ^= 1
            yield targets

    monkeypatch.setattr(compare, "decoded", flipped)
    code, _, err = run("compress", "m.pt", "--verify")
    assert code == 8
    assert "does not decode to its input" in err
    assert files_below(Path()) == ["m.pt"]


def test_damage_is_found_on_the_way_back_and_leaves_nothing(run: Run) -> None:
    safetensors.torch.save_file({"a": torch.randn(5000)}, "m.safetensors")
    torch.save([torch.randn(5000)], "m.pt")
    assert run("compress", "m.safetensors", "m.pt")[0] == 0
    for name in ("m.safetensors", "m.pt"):
        data = bytearray(Path(f"{name}.thin").read_bytes())
        data[len(data) // 2] ^= 1
        Path(f"{name}.thin").write_bytes(data)
        assert run("decompress", f"{name}.thin", "-o", "back")[0] == 3
        assert not Path("back").exists()
    assert not [name for name in files_below(Path()) if name.endswith(".tmp")]


def test_a_full_disk_is_reported_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.randn(100_000)}, "m.safetensors")
    torch.save([torch.randn(100_000)], "m.pt")
    assert run("compress", "m.safetensors", "m.pt")[0] == 0
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from thinpoint.cli.main import app\n"
        "app(sys.argv[1:])\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for args in (
        ["compress", "m.pt", "-o", "x"],
        ["decompress", "m.pt.thin", "-o", "x"],
        ["decompress", "m.safetensors.thin", "-o", "x"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *args],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert done.returncode == 6, done.stderr
        assert "File too large" in done.stderr
        assert "Traceback" not in done.stderr
        assert not Path("x").exists()
    assert not list(Path().glob(".*.tmp"))


def test_interrupted_it_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    torch.save([torch.randn(30_000_000)], tmp_path / "m.pt")
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from thinpoint.cli.main import main; main()",
            "compress",
            "m.pt",
            "--threads",
            "1",
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while (
        not list(tmp_path.glob(".m.pt.thin.*.tmp")) and time.monotonic() < deadline and process.poll() is None
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_files_are_taken_by_name_and_ambiguous_ones_by_content(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "model.bin")
    torch.save([1], tmp_path / "any.name")
    (tmp_path / "other.bin").write_bytes(b"\0" * 50)
    (tmp_path / "old.bin").write_bytes(pickle.dumps([1]))
    taken = {
        (name, named): refusal(tmp_path / name, named) is None
        for name in (
            "model.bin",
            "other.bin",
            "old.bin",
            "any.name",
            "x.pt",
            "x.SAFETENSORS",
            "x.json",
            "x.pt.thin",
        )
        for named in (True, False)
    }
    assert [key for key, value in taken.items() if value] == [
        ("model.bin", True),
        ("model.bin", False),
        ("other.bin", True),
        ("old.bin", True),
        ("any.name", True),
        ("x.pt", True),
        ("x.pt", False),
        ("x.SAFETENSORS", True),
        ("x.SAFETENSORS", False),
        # Not there: reading it says so.
        ("x.json", True),
    ]
    with pytest.raises(UsageError), open_source(tmp_path):
        pass
