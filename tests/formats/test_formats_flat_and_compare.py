"""Any state to flat safetensors, and the comparison that `compress --verify` makes."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from formats_support import Gathering, bits, opened, thin_bytes

from thinpoint.errors import EncodeProofError, MalformedFileError, UnsupportedObjectError
from thinpoint.formats import pieces
from thinpoint.formats.compare import compare_with_state
from thinpoint.formats.flat_tensors import write_flat_tensors
from thinpoint.formats.source import META_KEY, safetensors_note, source_of, torch_note
from thinpoint.state.flatten import flatten


def flat_file(obj: Any) -> bytes:
    sink = Gathering()
    with opened(thin_bytes(flatten(obj))) as (restorer, workers):
        write_flat_tensors(restorer, workers, sink)
    return bytes(sink.data)


def test_nested_dicts_of_tensors_become_flat_names_with_the_same_bits() -> None:
    base = torch.randn(40, 30)
    state = {
        "model": OrderedDict(a=base[:, 3:20], b=torch.nn.Parameter(torch.randn(5))),
        "i": {0: torch.arange(7, dtype=torch.int8), 1: torch.tensor(True)},
        "t": torch.randn(6, 4).t(),
        "e": torch.empty(0, 2, dtype=torch.float16),
        "c": torch.randn(3, dtype=torch.complex64),
        "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "none": {},
    }
    state["model"]._metadata = {"": {"version": 1}}
    del state["none"]
    got = safetensors.torch.load(flat_file(state))
    expected = {
        "model.a": state["model"]["a"],
        "model.b": state["model"]["b"],
        "i.0": state["i"][0],
        "i.1": state["i"][1],
        "t": state["t"],
        "e": state["e"],
        "c": state["c"],
        "f8": state["f8"],
    }
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(got[name]) == bits(tensor)


def test_the_file_is_the_one_that_the_safetensors_library_writes() -> None:
    state = {
        "b": torch.randn(7),
        "a": torch.arange(3),
        "z": torch.ones(2, dtype=torch.bfloat16),
        "y": torch.ones(5),
    }
    assert flat_file(state) == safetensors.torch.save(state)


def test_disjoint_views_of_one_storage_are_no_shared_memory() -> None:
    base = torch.arange(10.0)
    got = safetensors.torch.load(flat_file({"a": base[:4], "b": base[4:]}))
    assert bits(got["b"]) == bits(base[4:])


def test_everything_that_does_not_fit_is_listed() -> None:
    base = torch.ones(10)
    tagged = torch.ones(2)
    tagged.note = "x"
    state = {
        "tied": base,
        "tied_too": base[2:5],
        "rate": 0.1,
        "list": [torch.ones(1)],
        "wide": torch.ones(2, dtype=torch.complex128),
        "sparse": torch.eye(3).to_sparse(),
        "dotted": {"x": torch.ones(1)},
        "dotted.x": torch.ones(1),
        "meta": torch.empty(3, device="meta"),
        "tagged": tagged,
        "nothing": {},
        "fine": torch.ones(1),
    }
    with pytest.raises(UnsupportedObjectError) as caught:
        flat_file(state)
    text = caught.value.what
    for name in set(state) - {"tied", "dotted", "fine"}:
        assert name in text
    assert "tied_too shares memory with tied" in text
    assert "fine" not in text


@pytest.mark.parametrize("obj", [torch.ones(3), [torch.ones(3)], 5])
def test_a_state_that_is_no_dict_does_not_fit(obj: Any) -> None:
    with pytest.raises(UnsupportedObjectError):
        flat_file(obj)


@pytest.mark.parametrize("piece_bytes", [1 << 10, 64 << 20])
def test_a_file_equals_the_state_it_was_made_from_and_no_other(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
    weights = torch.randn(3000)
    state = {"a": weights, "b": [torch.arange(50), 1.5], "v": weights[5:9]}
    with opened(thin_bytes(flatten(state))) as (restorer, _):
        compare_with_state(restorer, flatten(state))
        for change in (
            {**state, "b": [torch.arange(50), 1.25]},
            {**state, "b": [torch.arange(50), True]},
            {**state, "v": weights[4:8]},
            {**state, "b": [torch.arange(50).int(), 1.5]},
        ):
            with pytest.raises(EncodeProofError, match="index"):
                compare_with_state(restorer, flatten(change))
        weights.view(torch.int32)[2999] ^= 1
        with pytest.raises(EncodeProofError) as caught:
            compare_with_state(restorer, flatten(state))
        assert caught.value.tensor == "a"


def test_negative_zero_is_not_zero_for_the_comparison() -> None:
    values = torch.zeros(600)
    with opened(thin_bytes(flatten({"a": values}))) as (restorer, _):
        values[7] = -0.0
        with pytest.raises(EncodeProofError):
            compare_with_state(restorer, flatten({"a": values}))


def test_ranges_are_cut_where_parts_begin() -> None:
    base = torch.arange(3000, dtype=torch.float32)
    obj = {"a": base[:1000], "b": base[1000:2000], "c": base[2500:]}
    with opened(thin_bytes(flatten(obj))) as (restorer, _):
        found = list(pieces.cut(restorer.reader, [(0, 0, 12000)]))
        assert found == [(0, 0, 4000), (0, 4000, 10000), (0, 10000, 12000)]
        whole = np.concatenate([t.out for batch in pieces.decoded(restorer, [(0, 0, 12000)]) for t in batch])
    expected = base.clone()
    expected[2000:2500] = 0
    assert whole.tobytes() == bits(expected)


def test_notes_are_read_back_and_foreign_ones_refused() -> None:
    assert source_of(torch_note(is_zip=True), "x") == {"kind": "torch", "zip": True}
    assert source_of(safetensors_note("{}"), "x") == {"kind": "safetensors", "header": "{}"}
    assert source_of({"other": 1}, "x") is None
    for note in ({"kind": "torch"}, {"kind": "safetensors", "header": 3}, {"kind": "gguf"}, [], "torch"):
        with pytest.raises(MalformedFileError):
            source_of({META_KEY: note}, "x")
