import math
import struct
from fractions import Fraction

import pytest
import torch
from formats_support import bits

from thinpoint.formats.difference import compare
from thinpoint.formats.leaves import OpenCheckpoint
from thinpoint.formats.torch_source import tree_of
from thinpoint.formats.value_steps import largest


def opened(obj: object) -> OpenCheckpoint:
    return OpenCheckpoint(name="memory", kind="pt", tree=tree_of(obj), num_bytes=0)


def compared(a: object, b: object) -> object:
    return compare(opened(a), opened(b), lambda size: None)


def every_pair(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    patterns = torch.arange(256).to(torch.uint8)
    a, b = torch.meshgrid(patterns, patterns, indexing="ij")
    return a.reshape(-1).contiguous().view(dtype), b.reshape(-1).contiguous().view(dtype)


EIGHT_BITS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
]
if hasattr(torch, "float8_e8m0fnu"):
    EIGHT_BITS.append(torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_steps_count_the_values_between_two_for_every_pair_of_patterns(dtype: torch.dtype) -> None:
    patterns = torch.arange(256).to(torch.uint8).view(dtype)
    values = [float(value) for value in patterns.to(torch.float64)]
    # The order of the values, with -0.0 right before 0.0; two patterns of one value cannot be told apart otherwise.
    order = sorted(
        (p for p in range(256) if not math.isnan(values[p])),
        key=lambda p: (values[p], math.copysign(1, values[p])),
    )
    rank = {pattern: i for i, pattern in enumerate(order)}
    a, b = every_pair(dtype)
    for place in range(0, 65536, 61):
        p, q = divmod(place, 256)
        num_nan, steps, difference = largest(a, b, _places(place))
        if p in rank and q in rank:
            apart = abs(values[p] - values[q])
            expected = 0.0 if math.isnan(apart) else apart
            assert (num_nan, steps, difference) == (0, abs(rank[p] - rank[q]), expected), (p, q)
        else:
            assert (num_nan, steps, difference) == (1, None, None), (p, q)


def _places(*places: int) -> "object":
    import numpy as np

    return np.array(places, np.int64)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "steps", "difference"),
    [
        (torch.float32, 1.0, 1.0 + 2**-23, 1, 2.0**-23),
        (torch.float32, -0.0, 0.0, 1, 0.0),
        (torch.float32, -(2.0**-149), 2.0**-149, 3, 2.0**-148),
        (torch.float32, 3.4028234663852886e38, math.inf, 1, math.inf),
        (
            torch.float64,
            -1.7976931348623157e308,
            1.7976931348623157e308,
            2 * 0x7FEFFFFFFFFFFFFF + 1,
            math.inf,
        ),
        (torch.bfloat16, 1.0, 1.0078125, 1, 2.0**-7),
        (torch.float16, 2.0, 2.001953125, 1, 2.0**-9),
        (torch.int64, -(2**63), 2**63 - 1, 2**64 - 1, 2**64 - 1),
        (torch.int32, -5, 7, 12, 12),
        (torch.bool, False, True, 1, 1),
        (torch.complex64, 1 + 2j, 1 + (2 + 2**-22) * 1j, 1, 2.0**-22),
    ],
)
def test_steps_and_difference_of_known_values(
    dtype: torch.dtype, a: float, b: float, steps: int, difference: float
) -> None:
    for x, y in ((a, b), (b, a)):
        found = largest(torch.tensor([x], dtype=dtype), torch.tensor([y], dtype=dtype), _places(0))
        assert found == (0, steps, difference)


def test_steps_agree_with_nextafter() -> None:
    value = torch.tensor([0.1, -3.0, 1e-40, 65504.0])
    other = value.clone()
    for expected in range(1, 6):
        other = torch.nextafter(other, torch.tensor(math.inf))
        assert largest(value, other, _places(0, 1, 2, 3))[1] == expected
    exact = max(abs(Fraction(float(p)) - Fraction(float(q))) for p, q in zip(value, other, strict=True))
    assert Fraction(largest(value, other, _places(0, 1, 2, 3))[2]) == exact


def nan(payload: int) -> float:
    return struct.unpack("<f", struct.pack("<I", 0x7FC00000 | payload))[0]


def test_nan_counts_by_its_bits() -> None:
    a = torch.tensor([0x7FC00001, 0x7FC00002, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert compared({"w": a}, {"w": a.clone()}).is_equal
    b = torch.tensor([0x7FC00001, 0x7FC00003, 0x3F800001], dtype=torch.int32).view(torch.float32)
    (found,) = compared({"w": a}, {"w": b}).tensors
    assert (found.num_different, found.num_nan, found.first, found.steps) == (2, 1, (1,), 1)
    assert found.largest == 2.0**-23
    assert not compared({"x": nan(1)}, {"x": 1.0}).is_equal
    assert compared({"x": math.nan}, {"x": math.nan}).is_equal


@pytest.mark.parametrize("piece_bytes", [16, 100, 1 << 20])
def test_the_first_different_index_is_found_in_any_piece(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinpoint.formats.difference.PIECE_BYTES", piece_bytes)
    a = torch.randn(5, 7, 3)
    for place in (0, 1, 20, 21, 52, 104):
        b = a.clone()
        b.view(-1)[place:] += 1
        (found,) = compared({"w": a.clone()}, {"w": b}).tensors
        assert found.num_different == 105 - place == found.num_values - place
        assert torch.tensor(found.first).tolist() == [
            int(i) for i in torch.unravel_index(torch.tensor(place), a.shape)
        ]
    (scalar,) = compared({"w": torch.tensor(1)}, {"w": torch.tensor(2)}).tensors
    assert (scalar.first, scalar.num_different) == ((), 1)


def test_names_forms_and_objects_that_differ_are_told_apart() -> None:
    a = {
        "same": torch.ones(3),
        "dtype": torch.ones(3),
        "shape": torch.ones(3),
        "kind": torch.ones(1),
        "gone": 1,
    }
    b = {
        "same": torch.ones(3),
        "dtype": torch.ones(3).half(),
        "shape": torch.ones(3, 1),
        "kind": 1.0,
        "new": torch.ones(1),
    }
    a["lr"], b["lr"] = 0.1, 0.1 + 2**-56
    a["type"], b["type"] = 1, True
    a["zero"], b["zero"] = 0.0, -0.0
    a["big"], b["big"] = {"x": [1, (2, "y")]}, {"x": [1, (2, "z")]}
    found = compared(a, b)
    assert (found.only_a, found.only_b) == (["gone"], ["new"])
    assert [(form.name, form.a, form.b) for form in found.forms] == [
        ("dtype", "float32 3", "float16 3"),
        ("shape", "float32 3", "float32 3x1"),
        ("kind", "float32 1", "float"),
    ]
    assert [other.name for other in found.objects] == ["lr", "type", "zero", "big.x.1.1"]
    assert not found.tensors and (found.num_tensors, found.num_objects) == (3, 7)


def test_containers_count_by_what_they_hold() -> None:
    import collections

    weights = torch.randn(4)
    a = {"list": [weights, 1], "odict": collections.OrderedDict(x=2), 0: "zero"}
    b = {"list": (weights.clone(), 1), "odict": {"x": 2}, "0": "zero"}
    assert compared(a, b).is_equal


def test_dtypes_without_order_count_bits_only() -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4_e2m1fn_x2")
    a = torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    b = torch.tensor([1, 2, 4], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    (found,) = compared({"w": a}, {"w": b}).tensors
    assert (found.num_different, found.first, found.steps, found.largest) == (1, (2,), None, None)
    assert bits(a) != bits(b)
