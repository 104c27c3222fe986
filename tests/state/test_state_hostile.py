"""Trees and records that nobody wrote give an error of ours, never another, nor memory on the word of a number."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_classes import Color, Frozen, Plain, Point
from state_memory import Memory
from state_tensors import Scaled
from torch.testing._internal.two_tensor import TwoTensor

from thinpoint.errors import MalformedFileError, ThinpointError, UnsafeObjectError
from thinpoint.state.flatten import flatten
from thinpoint.state.into import plan_into
from thinpoint.state.tree import CONTAINERS, MAX_NESTING, NUMBERED
from thinpoint.state.tree_names import tensor_names, walk
from thinpoint.state.unflatten import unflatten

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]

STORAGE_BYTES = 64
TAGS = sorted(
    CONTAINERS
    | NUMBERED
    | {
        "ref",
        "tensor",
        "untyped_storage",
        "typed_storage",
        "enum",
        "flag",
        "int",
        "float",
        "complex",
        "range",
    }
    | {
        "ellipsis",
        "decimal",
        "fraction",
        "timedelta",
        "timezone",
        "zoneinfo",
        "date",
        "time",
        "datetime",
        "uuid",
        "path",
    }
    | {"torch_dtype", "layout", "memory_format", "qscheme", "device", "size"}
    | {"numpy_dtype", "numpy_scalar", "numpy_str", "numpy_bytes", "no_such_tag"}
)


def load(tree: Any, tensors: Any = (), **options: Any) -> Any:
    return unflatten(
        tree,
        list(tensors) if isinstance(tensors, tuple) else tensors,
        num_storages=2,
        fetch_storage=lambda storage_id, needed: torch.UntypedStorage(STORAGE_BYTES),
        fetch_blob=lambda storage_id: bytes(STORAGE_BYTES),
        **options,
    )


def attempt(tree: Any, tensors: Any = ()) -> None:
    """Only our own errors may come out of any way to read a tree."""
    for read in (
        lambda: load(tree, tensors),
        lambda: load(tree, tensors, select={("a",), (0, 1)}),
        lambda: list(walk(tree)),
        lambda: tensor_names(tree, len(tensors)),
        lambda: plan_into(tree, list(tensors), {"a": torch.zeros(2), "b": [1, {"c": torch.zeros(1)}]}),
    ):
        try:
            read()
        except ThinpointError:
            continue


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(
        ["a", "AAAA", "<f4", "|O", "float32", "builtins", "dict", "0x1f", "list", "state_classes", "Frozen"]
    ),
)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(st.sampled_from(TAGS), inner).map(lambda pair: {pair[0]: pair[1]})
        | st.tuples(st.sampled_from(TAGS), st.lists(inner, max_size=6)).map(lambda pair: {pair[0]: pair[1]})
    ),
    max_leaves=12,
)
RECORD_KEYS = [
    "storage",
    "dtype",
    "shape",
    "stride",
    "offset",
    "layout",
    "inner",
    "subclass",
    "attrs",
    "quantizer",
]
RECORD_KEYS += ["kind", "requires_grad", "conj", "neg", "coalesced", "ragged_dim"]
record_values = st.one_of(
    json_values,
    st.lists(st.integers(-1, 2**64), max_size=3),
    st.sampled_from(
        [
            "float32",
            "int64",
            "quint8",
            "quint4x2",
            "sparse_coo",
            "sparse_csr",
            "nested",
            "jagged",
            "parameter",
        ]
    ),
    st.dictionaries(st.sampled_from(["indices", "values", "a", "b", "sizes", "offsets"]), st.integers(0, 2)),
)
records = st.dictionaries(st.sampled_from(RECORD_KEYS), record_values, max_size=8)


@settings(max_examples=600, deadline=None)
@given(json_values)
def test_arbitrary_trees(tree: Any) -> None:
    attempt(json.loads(json.dumps(tree)))


@settings(max_examples=400, deadline=None)
@given(st.lists(records, max_size=3))
def test_arbitrary_records(tensors: list[Any]) -> None:
    attempt({"tuple": [{"tensor": i} for i in range(len(tensors))]}, json.loads(json.dumps(tensors)))


def valid_state() -> Any:
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    parameter.note = [1]  # type: ignore[attr-defined]
    quantised = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    return {
        "tensors": [
            parameter,
            torch.eye(3).to_sparse(),
            torch.eye(3).to_sparse_csr(),
            quantised,
            torch.ones(2).t().conj(),
        ],
        "two": TwoTensor(torch.ones(2), torch.zeros(2)),
        "scaled": Scaled(torch.ones(2), {"by": [2]}, context=(1,)),
        "nested": torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
        "classes": (Color.RED, Frozen(1, Point(2, [3]))),
        "blobs": [b"x" * 3000, "y" * 70_000, list(range(500))],
        "shared": [shared := {"k": {1, 2}}, shared],
    }


def positions(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [place]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += positions(item, (*place, key))
    return found


REPLACEMENTS = [None, True, -1, 2**62, 2**80, 1.5, "", "x", [], {}, [0], {"ref": 0}, {"tensor": 0}]


def test_every_place_of_a_valid_state_replaced_by_something_else() -> None:
    memory = Memory(flatten(valid_state()))
    whole = {"tree": memory.tree, "tensors": memory.tensors}
    num_changed = 0
    for place in positions(whole):
        if len(place) < 2:
            continue
        for replacement in REPLACEMENTS[num_changed % 3 :: 3]:
            changed = copy.deepcopy(whole)
            target = changed
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = copy.deepcopy(replacement)
            fresh = Memory.__new__(Memory)
            fresh.__dict__.update(memory.__dict__, fetched=[], ranges={}, **changed)
            try:
                fresh.load()
            except ThinpointError:
                pass
            num_changed += 1
    assert num_changed > 1000


def strided(**changes: Any) -> dict[str, Any]:
    record = {"storage": 0, "dtype": "float32", "shape": [4], "stride": [1], "offset": 0}
    return {**record, **changes}


@pytest.mark.parametrize(
    "record",
    [
        strided(shape=[17]),
        strided(offset=13),
        strided(stride=[6]),
        strided(shape=[2**40, 2**40], stride=[0, 0]),
        strided(shape=[2**62], stride=[2**62]),
        strided(shape=[-1]),
        strided(stride=[-1]),
        strided(offset=-1),
        strided(shape=[4, 1]),
        strided(shape=[1] * 65, stride=[1] * 65),
        strided(shape=[True]),
        strided(shape=[4.0]),
        strided(dtype="float33"),
        strided(dtype="Tensor"),
        strided(dtype=None),
        strided(storage=2),
        strided(storage=-1),
        strided(storage="0"),
        strided(storage=True),
        strided(kind="module"),
        strided(requires_grad=1),
        strided(dtype="int64", requires_grad=True),
        strided(dtype="quint4x2", shape=[3, 43], stride=[43, 1]),
        strided(dtype="quint4x2", shape=[2, 2], stride=[1, 2]),
        strided(layout="sparse_coo"),
        {
            "layout": "sparse_coo",
            "dtype": "float32",
            "shape": [2],
            "stride": [],
            "offset": 0,
            "storage": None,
        },
        {"storage": None, "inner": {"a": 0}, "layout": "sparse_coo", "shape": [2]},
        {},
    ],
)
def test_records_that_lie(record: dict[str, Any]) -> None:
    with pytest.raises(MalformedFileError):
        load({"tensor": 0}, [record])


def test_views_that_reach_the_very_end_are_fine() -> None:
    assert load({"tensor": 0}, [strided(shape=[16])]).numel() == 16
    assert load({"tensor": 0}, [strided(shape=[2**40, 4], stride=[0, 1])]).shape == (2**40, 4)


@pytest.mark.parametrize("indices", [[[0, 9]], [[-1, 0]], [[1, 1]], [[1, 0]]])
def test_sparse_indices_that_lie(indices: list[list[int]]) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (4,), is_coalesced=True)
    memory = Memory(flatten(tensor))
    memory.stored[memory.tensors[1]["storage"]][:] = memoryview(torch.tensor(indices).numpy()).cast("B")
    with pytest.raises(MalformedFileError):
        memory.load()


@pytest.mark.parametrize("field", ["sizes", "strides", "offsets"])
def test_nested_tensors_that_reach_beyond_their_values(field: str) -> None:
    memory = Memory(flatten(torch.nested.as_nested_tensor([torch.ones(2, 2), torch.ones(3, 2)])))
    record = memory.tensors[memory.tensors[0]["inner"][field]]
    memory.stored[record["storage"]].view("i8")[-1] = 7
    with pytest.raises(MalformedFileError, match="beyond its values"):
        memory.load()


def test_a_blob_is_used_once() -> None:
    with pytest.raises(MalformedFileError, match="used twice"):
        load([{"bytearray": 0}, {"bytearray": 0}])


@pytest.mark.parametrize("tag", ["bytes", "bytearray", "text", "int_list"])
@pytest.mark.parametrize("data", [5, -1, True, None, 1.0, "???", "A", [0]])
def test_bytes_that_are_nowhere(tag: str, data: object) -> None:
    with pytest.raises(MalformedFileError):
        load({tag: data})


@pytest.mark.parametrize(
    "array",
    [
        ["|O", [8], "C", 0],
        ["<f4", [17], "C", 0],
        ["<f4", [2**62, 2**62], "C", 0],
        ["<f4", [-16], "C", 0],
        ["<f4", [16], "X", 0],
        ["f4,f4", [8], "C", 0],
        [["struct", [["a", "|O", 0]], 8, False], [8], "C", 0],
        [["struct", [["a", "<f8", 4]], 8, False], [8], "C", 0],
        [["struct", [["a", "<f8", -8]], 8, False], [8], "C", 0],
        [["array", "<f4", [2**62]], [], "C", 0],
        ["<M8[years]", [8], "C", 0],
        ["<U99999999999999", [1], "C", 0],
    ],
)
def test_arrays_that_lie(array: list[Any]) -> None:
    with pytest.raises(MalformedFileError):
        load({"array": array})


def test_deep_trees_are_refused_without_recursion() -> None:
    for wrap in (
        lambda x: [x],
        lambda x: {"tuple": [x]},
        lambda x: {"dict": [x, 1]},
        lambda x: {"dict": [1, x]},
    ):
        tree: Any = 1
        for _ in range(MAX_NESTING + 1):
            tree = wrap(tree)
        with pytest.raises(MalformedFileError, match="deep"):
            load(tree)
        for _ in range(20_000):
            tree = wrap(tree)
        with pytest.raises(MalformedFileError, match="deep"):
            load(tree)
        while isinstance(tree, (list, dict)):
            tree = tree[0] if isinstance(tree, list) else next(iter(tree.values()))
            tree = next((item for item in tree if item != 1), 1) if isinstance(tree, list) else tree


def test_tensors_inside_tensors_without_end() -> None:
    endless = {
        "storage": None,
        "dtype": "float32",
        "shape": [1],
        "layout": "sparse_coo",
        "inner": {"values": 0},
    }
    with pytest.raises(MalformedFileError, match="part of itself"):
        load({"tensor": 0}, [endless])
    chain = [{**endless, "inner": {"values": i + 1}} for i in range(5000)]
    with pytest.raises(MalformedFileError, match="inside more than"):
        load({"tensor": 0}, [*chain, strided()])


@pytest.mark.parametrize("target", [0, 1, 2, -1, True, None, "0", 10**30])
def test_references_to_nothing_or_to_themselves(target: object) -> None:
    with pytest.raises(MalformedFileError, match="reference"):
        load({"tuple": [{"tuple": [{"ref": target}]}, []]})


@pytest.mark.parametrize(
    "tree",
    [{"set": [[]]}, {"dict": [[], 1]}, {"frozenset": [{"set": []}]}, {"dict": [{"slice": [1, 2, 3]}, 1]}],
)
def test_keys_and_elements_that_cannot_be_hashed(tree: Any) -> None:
    try:
        loaded = load(tree)
    except MalformedFileError as error:
        assert "hashed" in str(error)
    else:
        # Python 3.12 hashes slices.
        assert isinstance(next(iter(loaded)), slice)


@pytest.mark.parametrize("attrs", [[1], {"dict": [1, 2]}, {"ref": 0}, None])
def test_attributes_that_are_no_dict_of_names(attrs: Any) -> None:
    with pytest.raises(MalformedFileError):
        load({"tensor": 0}, [strided(attrs=attrs)])


def test_attributes_cannot_change_what_a_tensor_is() -> None:
    attrs = {"dict": ["__class__", 1, "requires_grad", True, "shape", 5]}
    tensor = load({"tensor": 0}, [strided(attrs=attrs)])
    assert type(tensor) is torch.Tensor and tensor.requires_grad is False and tensor.shape == (4,)


def test_pickles_in_attributes_are_refused_too() -> None:
    memory = Memory(flatten([Plain(1)]))
    with pytest.raises(UnsafeObjectError, match="weights_only=False"):
        load({"tensor": 0}, [strided(attrs={"dict": ["a", memory.tree[0]]})])
