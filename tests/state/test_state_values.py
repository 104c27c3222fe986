"""Everything that is no tensor survives with its type, its value and its place."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import math
import pathlib
import struct
import types
import uuid
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_memory import Memory, round_trip

from thinpoint.state.flatten import flatten

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**53,
    2**53 + 1,
    -(2**64),
    10**4000,
    0.0,
    1.5,
    5e-324,
    math.inf,
    -math.inf,
    1e308,
    1 + 2j,
    complex(math.inf, -0.0),
    "",
    "a.b",
    "lone \ud800 surrogate",
    "\x00 and é",
    "long" * 20_000,
    "\ud800" * 70_000,
    b"",
    b"short",
    b"long" * 1000,
    bytearray(b"abc"),
    bytearray(5000),
    ...,
    range(0, 10, 3),
    range(10**30, 0, -1),
    slice(None, 3, -1),
    [],
    (),
    {},
    set(),
    frozenset(),
    [1, [2, (3, {4})]],
    {1, "a", (2, 3), frozenset({4})},
    collections.deque([1, 2], maxlen=5),
    collections.deque(),
    collections.Counter("abracadabra"),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"x": [1]}),
    collections.defaultdict(None, {"x": 1}),
    types.SimpleNamespace(a=1, b=[2]),
    argparse.Namespace(lr=0.1, **{"odd name": 3}),
    decimal.Decimal("1.10"),
    decimal.Decimal("-Infinity"),
    fractions.Fraction(10**30, 7),
    dt.date(2024, 2, 29),
    dt.time(1, 2, 3, 4, fold=1),
    dt.time(1, tzinfo=dt.timezone.utc),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
    dt.datetime(1, 1, 1, microsecond=999_999),
    dt.timedelta(days=-1, microseconds=1),
    dt.timezone.utc,
    dt.timezone(dt.timedelta(hours=5, minutes=30), "IST"),
    BERLIN,
    uuid.UUID(int=2**127 + 5),
    pathlib.Path("a/b"),
    pathlib.PurePosixPath("/x"),
    pathlib.PureWindowsPath("c:\\x"),
    torch.float32,
    torch.float8_e4m3fn,
    torch.device("cuda", 3),
    torch.device("cpu"),
    torch.Size([1, 2, 3]),
    torch.Size([]),
    torch.strided,
    torch.sparse_csr,
    torch.channels_last,
    torch.contiguous_format,
    torch.per_channel_affine,
    list(range(1000)),
    [0.5] * 1000,
    [1] * 999 + [2**70],
    [True] * 1000,
    [1] * 999 + [1.0],
]


def same(found: Any, expected: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        pairs = zip(found.items(), expected.items(), strict=True)
        return len(found) == len(expected) and all(same(list(a), list(b)) for a, b in pairs)
    if isinstance(expected, (list, tuple, collections.deque)):
        return len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True))
    if isinstance(expected, float):
        return struct.pack("<d", found) == struct.pack("<d", expected)
    return bool(found == expected)


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{i} {type(value).__name__}" for i, value in enumerate(VALUES)]
)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"k": [value]}, allow_pickle=False), {"k": [value]})


def test_details_that_equality_does_not_see() -> None:
    assert struct.pack(">d", round_trip(-0.0)) == struct.pack(">d", -0.0)
    fold = round_trip(dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN))
    assert fold.fold == 1 and fold.tzinfo is BERLIN
    assert round_trip(dt.timezone(dt.timedelta(hours=1), "X")).tzname(None) == "X"
    assert round_trip(collections.deque([1], maxlen=3)).maxlen == 3
    assert round_trip(collections.defaultdict(list)).default_factory is list
    assert str(round_trip(decimal.Decimal("sNaN5"))) == "sNaN5"


def test_nan_payloads_are_kept() -> None:
    pattern = 0x7FF8_0000_DEAD_BEEF
    nan = struct.unpack(">d", struct.pack(">Q", pattern))[0]
    for state, get in (
        (nan, lambda x: x),
        ([nan], lambda x: x[0]),
        ([1.0] * 500 + [nan], lambda x: x[-1]),
        (complex(0, nan), lambda x: x.imag),
    ):
        assert struct.unpack(">Q", struct.pack(">d", get(round_trip(state))))[0] == pattern


def test_keys_keep_type_and_order() -> None:
    state = {
        "b": 1,
        "a": 2,
        1: "int",
        "1": "str",
        2.5: "float",
        None: 0,
        (1, "x"): 5,
        b"k": 6,
        -0.0: 7,
        10**30: 8,
    }
    loaded = round_trip(state)
    assert same(list(loaded), list(state)) and same(list(loaded.values()), list(state.values()))
    assert same(round_trip({True: 1}), {True: 1}) and same(round_trip({1.0: 1}), {1.0: 1})


def test_dotted_keys_are_not_nested_keys() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    loaded = round_trip(state)
    assert loaded["a.b"].item() == 0 and loaded["a"]["b"].item() == 1


def test_order_of_an_ordered_dict_after_moves() -> None:
    state = collections.OrderedDict.fromkeys("abc")
    state.move_to_end("a")
    assert list(round_trip(state)) == ["b", "c", "a"]


def test_attributes_of_a_state_dict_are_kept() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    assert round_trip(state)._metadata == state._metadata  # type: ignore[attr-defined]


@pytest.mark.skipif(pathlib.Path is pathlib.WindowsPath, reason="this is Windows")
def test_a_windows_path_loads_on_posix_as_a_pure_path() -> None:
    memory = Memory(flatten(pathlib.Path("x")))
    memory.tree = {"path": ["WindowsPath", "c:\\x"]}
    assert memory.load() == pathlib.PureWindowsPath("c:\\x")


ARRAYS = {
    "float32": np.arange(12, dtype="f4").reshape(3, 4),
    "big endian": np.arange(5, dtype=">i8"),
    "fortran": np.asfortranarray(np.arange(600, dtype="f8").reshape(20, 30)),
    "strided": np.arange(2000)[::3],
    "reversed": np.arange(10)[::-1],
    "0-dim": np.array(5),
    "empty": np.zeros((3, 0), "u2"),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "datetime": np.array(["2024-01-01", "NaT"], "M8[25s]"),
    "timedelta": np.array([1, 2], "m8[ns]"),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "longdouble": np.zeros(3, np.longdouble),
    "void": np.zeros(3, "V5"),
    "structured": np.array([(1, 2.0, [1, 2])], [("a", "<i4"), ("b", ">f8"), ("c", "u1", (2,))]),
    "aligned": np.zeros(2, np.dtype([("a", "u1"), ("b", "f8")], align=True)),
    "titled": np.zeros(2, [(("title", "a"), "i4")]),
    "overlapping fields": np.zeros(
        2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0], "itemsize": 7}
    ),
    "nested": np.zeros(2, [("a", [("b", "M8[D]"), ("c", "U3")])]),
    "large": np.arange(10_000, dtype="i2"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_keep_dtype_shape_order_and_bytes(name: str) -> None:
    array = ARRAYS[name]
    loaded = round_trip(array, allow_pickle=False)
    assert type(loaded) is np.ndarray and loaded.dtype == array.dtype and loaded.shape == array.shape
    assert loaded.dtype.isalignedstruct == array.dtype.isalignedstruct
    assert loaded.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
    assert loaded.tobytes() == array.tobytes()
    assert loaded.flags.writeable


def test_fortran_order_is_kept() -> None:
    assert (
        round_trip(ARRAYS["fortran"]).flags.f_contiguous
        and not round_trip(ARRAYS["fortran"]).flags.c_contiguous
    )


SCALARS = [
    np.float32(1.1),
    np.float16("nan"),
    np.int64(-5),
    np.uint8(255),
    np.bool_(True),
    np.complex64(1j),
    np.str_(""),
    np.str_("aé"),
    np.bytes_(b"a\0"),
    np.datetime64("2024-01-01T00:00:01", "ms"),
    np.datetime64("NaT", "us"),
    np.timedelta64(5, "D"),
    np.void(b"abc"),
    ARRAYS["structured"][0],
]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda scalar: f"{type(scalar).__name__}-{scalar.dtype}")
def test_numpy_scalars_keep_type_and_bits(scalar: Any) -> None:
    loaded = round_trip(scalar, allow_pickle=False)
    assert (
        type(loaded) is type(scalar) and loaded.dtype == scalar.dtype and loaded.tobytes() == scalar.tobytes()
    )


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_dtypes(name: str) -> None:
    dtype = ARRAYS[name].dtype
    loaded = round_trip(dtype, allow_pickle=False)
    assert loaded == dtype and loaded.isalignedstruct == dtype.isalignedstruct


def test_object_arrays_need_pickle() -> None:
    array = np.array([{"a": 1}, None], object)
    assert round_trip(array, weights_only=False).tolist() == array.tolist()


keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.binary())
leaves = st.one_of(
    keys,
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.datetimes(timezones=st.none() | st.timezones()),
    st.timedeltas(),
    st.uuids(),
)
objects = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.lists(inner).map(tuple)
        | st.sets(keys)
        | st.dictionaries(st.tuples(keys, keys), inner).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(objects)
def test_arbitrary_objects(obj: Any) -> None:
    assert same(round_trip(obj, allow_pickle=False), obj)


def test_the_order_of_a_set_does_not_depend_on_the_process() -> None:
    assert flatten({"b", 2, "a", b"x", 1}).tree == {"set": [flatten(b"x").tree, 1, 2, "a", "b"]}
