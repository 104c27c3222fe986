"""The comparison that the demo's verdict rests on sees every bit."""

import math
import struct

import pytest
import torch

from thinpoint.demo.compare import count, differences


def state() -> dict:
    return {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "empty": torch.empty(0, 3),
        "half": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "losses": [1.5, math.nan, -0.0],
        "rng": (3, (1, 2, 3), None),
    }


def test_equal_states_have_no_differences() -> None:
    assert differences(state(), state()) == []


def test_one_flipped_bit_of_a_tensor_is_found() -> None:
    other = state()
    other["w"].view(torch.int32)[1, 2] ^= 1
    assert differences(state(), other) == ["state.w: 1 of 48 bytes"]


def test_a_nan_payload_is_found() -> None:
    other = state()
    other["half"].view(torch.int16)[1] ^= 1
    assert differences(state(), other) == ["state.half: 1 of 4 bytes"]


def test_negative_zero_is_not_zero() -> None:
    other = state()
    other["losses"][2] = 0.0
    assert differences(state(), other) == ["state.losses.2: -0.0 and 0.0"]
    other = state()
    other["scalar"].neg_()
    assert len(differences(state(), other)) == 1


def test_a_float_nan_payload_is_found() -> None:
    other = state()
    other["losses"][1] = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    assert len(differences(state(), other)) == 1


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("w", torch.arange(12, dtype=torch.float64).reshape(3, 4), "dtype"),
        ("w", torch.arange(12, dtype=torch.float32).reshape(4, 3), "shape"),
        ("w", torch.empty_strided((3, 4), (1, 3)), "stride"),
        ("losses", (1.5, math.nan, -0.0), "tuple"),
        ("losses", [1.5, math.nan], "items"),
        ("rng", (3, (1, 2, 4), None), "3 and 4"),
    ],
)
def test_types_shapes_strides_and_lengths_count(key: str, value: object, word: str) -> None:
    found = differences(state(), {**state(), key: value})
    assert len(found) == 1
    assert word in found[0]


def test_key_order_counts() -> None:
    assert differences({"a": 1, "b": 2}, {"b": 2, "a": 1}) == ["state: keys ['a', 'b'] and ['b', 'a']"]


def test_count_adds_up_tensors_in_any_container() -> None:
    assert count({"a": torch.zeros(3), "b": [(torch.zeros(2, 2),), 5, None]}) == (2, 28)
