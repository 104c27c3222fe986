"""Tensors survive bit for bit: every dtype, every kind of view, every layout, every flag."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_memory import Memory, assert_same_tensor, bits, round_trip
from torch.testing._internal.two_tensor import TwoTensor

from thinpoint.errors import UnsupportedObjectError
from thinpoint.state.flatten import flatten
from thinpoint.state.torch_values import named

DTYPES = sorted(
    name for name, dtype in named("torch_dtype").items() if not name.startswith(("qint", "quint"))
)

# What torch says of the tensors that the tests make; none of it comes from thinpoint.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits of any dtype: NaN payloads, infinities and denormals among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype is torch.bool:
        raw &= 1
    storage = torch.from_numpy(raw.copy()).untyped_storage()
    stride = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 1, 65)])
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape, named("torch_dtype")[name])
    assert_same_tensor(round_trip(tensor), tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int16])
def test_all_patterns_of_a_16_bit_type(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same_tensor(round_trip(patterns), patterns)


VIEWS = {
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[2:5],
    "every other column": lambda x: x[:, ::2],
    "one column": lambda x: x[:, 3],
    "expanded": lambda x: x[0, 0].expand(5, 6),
    "partly expanded": lambda x: x[:, :1].expand(6, 9),
    "overlapping windows": lambda x: x.reshape(-1).unfold(0, 8, 3),
    "last element": lambda x: x.reshape(-1)[-1],
    "empty with an offset": lambda x: x[3:3],
    "as_strided": lambda x: x.as_strided((2, 2), (1, 7), 5),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_keep_shape_strides_and_bits(view: str) -> None:
    tensor = VIEWS[view](random_tensor((6, 8)))
    assert_same_tensor(round_trip(tensor), tensor)


def test_channels_last_stays_channels_last() -> None:
    image = random_tensor((2, 3, 4, 5)).to(memory_format=torch.channels_last)
    loaded = round_trip(image)
    assert loaded.is_contiguous(memory_format=torch.channels_last)
    assert_same_tensor(loaded, image)


def test_a_view_does_not_drag_its_whole_storage_along() -> None:
    tensor = random_tensor((1000, 100), torch.float64)[700:703]
    memory = Memory(flatten(tensor))
    assert memory.stored[0].size == 3 * 100 * 8
    assert_same_tensor(memory.load(), tensor)


def test_a_far_offset_that_is_no_multiple_of_16_bytes() -> None:
    tensor = random_tensor((1001,), torch.int8)[997:]
    memory = Memory(flatten(tensor))
    assert memory.stored[0].size < 16
    assert_same_tensor(memory.load(), tensor)


def test_the_gap_between_two_views_is_not_stored_and_loads_as_zeros() -> None:
    whole = random_tensor((300,))
    state = {"a": whole[:10], "b": whole[200:]}
    memory = Memory(flatten(state))
    assert sum(region.num_bytes for region in memory.regions[0]) == 4 * 110
    loaded = memory.load()
    assert_same_tensor(loaded["a"], state["a"])
    assert_same_tensor(loaded["b"], state["b"])
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()
    assert memory.ranges[0] == [(0, 40), (800, 1200)]


def test_conjugate_and_negative_views_stay_lazy() -> None:
    tensor = random_tensor((4, 3), torch.complex64)
    state = {"conj": tensor.conj(), "neg": tensor.conj().imag, "plain": tensor}
    assert state["conj"].is_conj() and state["neg"].is_neg()
    loaded = round_trip(state)
    for key, value in state.items():
        assert_same_tensor(loaded[key], value)
    assert loaded["conj"].untyped_storage().data_ptr() == loaded["plain"].untyped_storage().data_ptr()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_stay_parameters(requires_grad: bool) -> None:
    parameter = torch.nn.Parameter(random_tensor((3, 3)), requires_grad=requires_grad)
    assert_same_tensor(round_trip(parameter), parameter)


def test_requires_grad_of_leaves_and_results() -> None:
    leaf = torch.ones(3, requires_grad=True)
    loaded = round_trip([leaf, leaf * 2])
    assert [tensor.requires_grad for tensor in loaded] == [True, True]
    assert all(tensor.is_leaf for tensor in loaded)


def test_attributes_of_tensors_are_kept() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.sequence_parallel = True  # type: ignore[attr-defined]
    parameter.owner = {"grad": torch.full((2,), 3.0), "again": parameter}  # type: ignore[attr-defined]
    loaded = round_trip(parameter)
    assert loaded.sequence_parallel is True
    assert loaded.owner["again"] is loaded
    assert bits(loaded.owner["grad"]) == bits(torch.full((2,), 3.0))


@pytest.mark.skipif(not hasattr(torch.nn, "Buffer"), reason="this torch has no nn.Buffer")
def test_buffers_stay_buffers() -> None:
    loaded = round_trip(torch.nn.Buffer(torch.ones(2), persistent=False))
    assert isinstance(loaded, torch.nn.Buffer) and loaded.persistent is False


def test_meta_tensors_keep_shape_and_strides_without_bytes() -> None:
    tensor = torch.empty(10**6, 10**6, device="meta").t()
    memory = Memory(flatten(tensor))
    loaded = memory.load()
    assert memory.stored == [] and loaded.device.type == "meta"
    assert (loaded.shape, loaded.stride()) == (tensor.shape, tensor.stride())


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo(coalesced: bool) -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 0 if not coalesced else 1]])
    tensor = torch.sparse_coo_tensor(indices, random_tensor((3, 2)), (3, 4, 2))
    tensor = tensor.coalesce() if coalesced else tensor
    loaded = round_trip(tensor)
    assert (
        loaded.layout is torch.sparse_coo and loaded.is_coalesced() == coalesced and loaded.shape == (3, 4, 2)
    )
    assert_same_tensor(loaded._indices(), tensor._indices())
    assert_same_tensor(loaded._values(), tensor._values())


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_compressed_sparse_layouts(layout: str) -> None:
    dense = random_tensor((4, 6)).nan_to_num()
    dense[::2] = 0
    blocks = (2, 3) if layout in ("sparse_bsr", "sparse_bsc") else None
    tensor = dense.to_sparse(layout=getattr(torch, layout), blocksize=blocks)
    loaded = round_trip(tensor)
    assert loaded.layout is tensor.layout
    assert_same_tensor(loaded.values(), tensor.values())
    assert bits(loaded.to_dense()) == bits(tensor.to_dense())


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantised_per_tensor(dtype: torch.dtype) -> None:
    tensor = torch.quantize_per_tensor(torch.randn(3, 5), 0.1, 2, dtype)
    loaded = round_trip(tensor)
    assert (loaded.qscheme(), loaded.q_scale(), loaded.q_zero_point()) == (tensor.qscheme(), 0.1, 2)
    assert_same_tensor(loaded, tensor)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.quint4x2])
def test_quantised_per_channel(dtype: torch.dtype) -> None:
    zero_dtype = torch.float32 if dtype is torch.quint4x2 else torch.int64
    scales, zero_points = torch.rand(3) + 0.1, torch.tensor([0, 1, 2], dtype=zero_dtype)
    tensor = torch.quantize_per_channel(torch.randn(3, 5), scales, zero_points, 0, dtype)
    loaded = round_trip(tensor)
    assert loaded.qscheme() == tensor.qscheme() and loaded.q_per_channel_axis() == 0
    assert_same_tensor(loaded.q_per_channel_scales(), tensor.q_per_channel_scales())
    assert_same_tensor(loaded.q_per_channel_zero_points(), tensor.q_per_channel_zero_points())
    assert bits(loaded.dequantize()) == bits(tensor.dequantize())


def test_nested_tensors_of_the_strided_layout() -> None:
    parts = [random_tensor((2, 3)), random_tensor((4, 3), seed=1)]
    loaded = round_trip(torch.nested.as_nested_tensor(parts))
    assert loaded.is_nested
    for found, expected in zip(loaded.unbind(), parts, strict=True):
        assert bits(found) == bits(expected)


@pytest.mark.skipif(
    not hasattr(torch.nested, "nested_tensor_from_jagged"),
    reason="this torch has no nested_tensor_from_jagged",
)
def test_nested_tensors_of_the_jagged_layout() -> None:
    values, offsets = random_tensor((6, 3)), torch.tensor([0, 2, 6])
    tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    loaded = round_trip(tensor.requires_grad_())
    assert loaded.layout is torch.jagged and loaded.requires_grad
    assert bits(loaded.values()) == bits(values) and bits(loaded.offsets()) == bits(offsets)


def test_wrapper_subclasses_are_taken_apart() -> None:
    tensor = TwoTensor(random_tensor((3, 4)), random_tensor((3, 4), seed=1))
    loaded = round_trip({"x": tensor, "alias": tensor.a})
    assert type(loaded["x"]) is TwoTensor
    assert_same_tensor(loaded["x"].a, tensor.a)
    assert_same_tensor(loaded["x"].b, tensor.b)
    assert loaded["alias"] is loaded["x"].a


def test_parameters_of_wrapper_subclasses() -> None:
    tensor = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.zeros(3)))
    loaded = round_trip(tensor)
    assert type(loaded) is TwoTensor and isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad


class PlainSubclass(torch.Tensor):
    """A subclass that cannot be taken apart."""


def test_other_subclasses_are_pickled_with_their_bytes_outside() -> None:
    tensor = random_tensor((50, 50)).as_subclass(PlainSubclass)
    memory = Memory(flatten({"x": tensor, "base": tensor.as_subclass(torch.Tensor)}))
    loaded = memory.load(weights_only=False)
    assert type(loaded["x"]) is PlainSubclass
    assert bits(loaded["x"]) == bits(tensor)
    assert loaded["x"].untyped_storage().data_ptr() == loaded["base"].untyped_storage().data_ptr()
    assert "pickle" in memory.tree["dict"][1]


def test_other_subclasses_are_refused_without_pickle() -> None:
    with pytest.raises(UnsupportedObjectError, match=r"x is a .*PlainSubclass"):
        flatten({"x": torch.ones(2).as_subclass(PlainSubclass)}, allow_pickle=False)


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(UnsupportedObjectError, match="FakeTensor, which has no values"):
        flatten({"x": [fake]})


def test_tensors_inside_vmap_are_refused() -> None:
    def save(x: torch.Tensor) -> torch.Tensor:
        flatten(x)
        return x

    with pytest.raises(UnsupportedObjectError, match=r"torch\.func"):
        torch.func.vmap(save)(torch.ones(3))


def test_bare_storages_share_memory_with_their_tensors() -> None:
    tensor = random_tensor((10,))
    storage = tensor.untyped_storage()
    loaded = round_trip({"storage": storage, "tensor": tensor})
    assert isinstance(loaded["storage"], torch.UntypedStorage)
    assert loaded["storage"].data_ptr() == loaded["tensor"].untyped_storage().data_ptr()
    assert bits(loaded["tensor"]) == bits(tensor)


def test_typed_storages_keep_their_dtype() -> None:
    storage = torch.storage.TypedStorage(
        wrap_storage=random_tensor((10,)).untyped_storage(), dtype=torch.float32, _internal=True
    )
    loaded = round_trip(storage)
    assert isinstance(loaded, torch.storage.TypedStorage) and loaded.dtype is torch.float32
    assert bytes(loaded._untyped_storage) == bytes(storage._untyped_storage)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_arbitrary_strided_views(data: st.DataObject) -> None:
    base = random_tensor((512,), data.draw(st.sampled_from([torch.int8, torch.float32, torch.complex128])))
    shapes = st.lists(st.integers(0, 5), max_size=4)
    state = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = data.draw(shapes)
        stride = data.draw(st.lists(st.integers(0, 20), min_size=len(shape), max_size=len(shape)))
        state.append(base.as_strided(shape, stride, data.draw(st.integers(0, 100))))
    loaded = round_trip(state)
    for found, expected in zip(loaded, state, strict=True):
        assert_same_tensor(found, expected)
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded if tensor.numel()}) <= 1


@pytest.mark.skipif(not hasattr(torch.Tensor, "names"), reason="this torch has no named dimensions")
@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
def test_named_dimensions_are_refused() -> None:
    with pytest.raises(UnsupportedObjectError, match="named dimensions"):
        flatten({"x": torch.zeros(2, names=("n",))})
