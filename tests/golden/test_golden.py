"""Files that earlier versions wrote are decoded for ever, and this encoder version still writes the same bytes."""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "api"))
from bits import assert_same
from golden_states import FILES, float_state

import thinpoint
from thinpoint.codec.plan import ENCODER_VERSION

FOLDER = Path(__file__).parent
SHA256 = {
    "floats-v0.thin": "ed77f5df35a7766659529e996c5674ed522fcb25f5bc3aff605896625cdb73c5",
    "others-v0.thin": "6af6798153e7d704d878dbc726f757bed66b45e480740295813cfe6b841e8e46",
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


def test_golden_file_has_every_chain_for_floats() -> None:
    with thinpoint.open(FOLDER / "floats-v0.thin") as file:
        chains = {part.chain for part in file._reader.index.parts}
    steps = {step for chain in chains for step in chain.split("+")}
    assert steps == {"raw", "const", "single", "rans", "zero", "group", "column", "tz7", "tz16"}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_encoder_version_0_writes_the_same_bytes(backend: str) -> None:
    assert ENCODER_VERSION == 0
    golden = (FOLDER / "floats-v0.thin").read_bytes()
    memory = io.BytesIO()
    thinpoint.save(float_state(), memory, backend=backend)
    memory.seek(0)
    with thinpoint.open(io.BytesIO(golden)) as a, thinpoint.open(memory) as b:
        ends = [f._reader.trailer.index_offset for f in (a, b)]
    # Header and parts; the index is compressed by a library whose versions may differ.
    assert golden[: ends[0]] == memory.getvalue()[: ends[1]]
