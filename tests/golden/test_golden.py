"""Files that earlier versions wrote are decoded for ever, and this encoder version still writes the same bytes."""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "api"))
from bits import assert_same
from golden_states import FILES, on

import thinpoint
from thinpoint.codec.plan import ENCODER_VERSION

FOLDER = Path(__file__).parent
SHA256 = {
    "floats-v0.thin": "ed77f5df35a7766659529e996c5674ed522fcb25f5bc3aff605896625cdb73c5",
    "others-v0.thin": "6af6798153e7d704d878dbc726f757bed66b45e480740295813cfe6b841e8e46",
    "floats-v1.thin": "8783bb2d364d855e076437b823c8b6a0463a3554a759a5255c14950bd7f2d1f9",
    "others-v1.thin": "10f2598a89edf54f8814c1eb6722c53f3db6d253c7df43e78f5900607cb4e0ae",
    "segments-v1.thin": "f1bb9e0850e707a2b421cb54f75ff348e35db3420cae2ab1c357083a801d5caf",
    "floats-v1-h200.thin": "52d399cd97998e68cbaf26b21905c76f9b290d852202ebfc2a635453fdda2f00",
    "segments-v1-h200.thin": "91cbdab1f5cd0ff0461b685b828c7526761c1778f7dbecc88347fa6fceaf898f",
}
"""Of the committed files. A file that is lost or changed is a failure, never a reason to make it anew."""


@pytest.mark.parametrize("name", SHA256)
def test_golden_file_is_the_one_that_was_committed(name: str) -> None:
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == SHA256[name]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", FILES)
def test_golden_file_decodes_to_the_state_it_was_made_of(name: str, backend: str) -> None:
    thinpoint.verify(FOLDER / name, deep=True, backend=backend)
    loaded, state = thinpoint.load(FOLDER / name, backend=backend), FILES[name]()
    array, expected = loaded.pop("array", None), state.pop("array", None)
    assert_same(loaded, state)
    if expected is not None:
        assert (array.dtype, array.tobytes()) == (expected.dtype, expected.tobytes())


@pytest.mark.parametrize("version", [0, 1])
def test_golden_file_has_every_chain_for_floats(version: int) -> None:
    chains = {part.chain for part in parts_of(FOLDER / f"floats-v{version}.thin")}
    steps = {step for chain in chains for step in chain.split("+")}
    assert steps == {"raw", "const", "single", "rans", "zero", "group", "column", "tz7", "tz16"}


def parts_of(file: Any) -> Any:
    """Index entries of the parts of a file."""
    with thinpoint.open(file) as opened:
        return opened._reader.index.parts


def body_of(file: Any) -> bytes:
    """Header and parts; the index is compressed by a library whose versions may differ, and names devices."""
    with thinpoint.open(file) as opened:
        end = opened._reader.trailer.index_offset
    return file.read_bytes()[:end] if isinstance(file, Path) else file.getvalue()[:end]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["floats-v1.thin", "segments-v1.thin"])
def test_encoder_version_1_writes_the_same_bytes(name: str, backend: str) -> None:
    assert ENCODER_VERSION == 1
    memory = io.BytesIO()
    thinpoint.save(FILES[name](), memory, backend=backend)
    memory.seek(0)
    assert body_of(FOLDER / name) == body_of(memory)


@pytest.mark.parametrize("name", [name for name in FILES if "h200" in name])
def test_a_gpu_wrote_the_same_bytes(name: str) -> None:
    assert body_of(FOLDER / name) == body_of(FOLDER / name.replace("-h200", ""))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["floats-v1.thin", "segments-v1.thin"])
def test_this_gpu_writes_the_same_bytes_and_reads_them(name: str) -> None:
    memory = io.BytesIO()
    thinpoint.save(on("cuda", FILES[name]()), memory, backend="triton")
    memory.seek(0)
    assert body_of(FOLDER / name) == body_of(memory)
    assert_same(
        thinpoint.load(FOLDER / name, map_location="cuda", backend="triton"), on("cuda", FILES[name]())
    )
