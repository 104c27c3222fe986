"""How storages are cut into regions, and the role that each tensor gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinpoint.state.flatten import flatten
from thinpoint.state.leaves import Region
from thinpoint.state.roles import role_of
from thinpoint.state.storages import row_elems, storage_order


def regions(state: Any) -> list[Region]:
    return [region for source in flatten(state).storages for region in source.regions]


def test_disjoint_dense_views_are_cut_at_their_borders() -> None:
    flat = torch.zeros(1000)
    found = regions({"a": flat[:300].view(3, 100), "b": flat[300:900], "c": flat[900:]})
    assert [(r.name, r.start_bytes, r.num_bytes) for r in found] == [
        (("a",), 0, 1200),
        (("b",), 1200, 2400),
        (("c",), 3600, 400),
    ]
    assert [r.row_elems for r in found] == [100, 0, 0]


def test_a_tie_is_one_region_with_its_rows() -> None:
    weight = torch.zeros(4, 128)
    (region,) = regions({"a": weight, "b": weight.detach()})
    assert (region.name, region.row_elems, region.shape) == (("a",), 128, (4, 128))


def test_overlapping_views_are_one_region_of_the_largest() -> None:
    base = torch.zeros(100, dtype=torch.bfloat16)
    (region,) = regions({"small": base[:30], "large": base[20:].view(torch.int16)})
    assert (region.name, region.dtype, region.role, region.num_bytes) == (("large",), "int16", "other", 200)


def test_a_group_that_does_not_fit_the_items_of_its_largest_view_is_bytes() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    (region,) = regions({"large": base[16:48].view(torch.float64), "odd": base[40:51]})
    assert (region.dtype, region.num_bytes, region.row_elems) == ("bytes", 35, 0)


def test_interleaved_columns_share_a_region_without_rows() -> None:
    base = torch.zeros(10, 128)
    (region,) = regions([base[:, :64], base[:, 64:]])
    assert region.num_bytes == base.nbytes and region.row_elems == 0


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(1000), 0),
        (torch.zeros(10, 64), 64),
        (torch.zeros(10, 63), 0),
        (torch.zeros(10, 8, 8), 64),
        (torch.zeros(10, 3, 5, 5), 75),
        (torch.zeros(1, 100), 0),
        (torch.zeros(2, 1, 100), 100),
        (torch.zeros(100, 10).t(), 0),
        (torch.zeros(100, 70).t(), 70),
        (torch.zeros(10, 3, 8, 8).to(memory_format=torch.channels_last), 192),
        (torch.zeros(10, 64, dtype=torch.complex64), 128),
        (torch.zeros(10, 128)[:, ::2], 0),
        (torch.zeros(()), 0),
    ],
)
def test_row_elems(tensor: torch.Tensor, expected: int) -> None:
    (region,) = regions(tensor)
    assert region.row_elems == expected


def test_storage_order_ignores_sizes_of_one() -> None:
    assert storage_order((1, 4, 3), (999, 1, 4)) == (True, (3, 4))
    assert storage_order((2, 2), (2, 2)) == (False, ())
    assert row_elems((5, 64)) == 64 and row_elems(()) == 0


def test_reading_a_cpu_storage_makes_no_copy() -> None:
    tensor = torch.arange(1000.0)[100:]
    (source,) = flatten(tensor).storages
    assert source.read(0, 80).ctypes.data == tensor.untyped_storage().data_ptr() + 400
    assert source.read(8, 16).tobytes() == tensor.numpy().tobytes()[8:16]


def test_arrays_give_regions_of_their_dtype() -> None:
    found = regions(
        {"big": np.zeros((20, 100), ">f4"), "native": np.zeros((20, 100), "f4"), "blob": b"x" * 2000}
    )
    assert [(r.dtype, r.row_elems) for r in found] == [("bytes", 0), ("float32", 100), ("bytes", 0)]


def test_the_recorded_device_can_be_chosen() -> None:
    flat = flatten(
        [torch.zeros(1), torch.zeros(2)], device_of=lambda s: "cuda:1" if s.nbytes() == 8 else None
    )
    assert [source.device for source in flat.storages] == ["cpu", "cuda:1"]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "RMSprop", "Adadelta", "NAdam", "Adamax"])
def test_roles_in_the_state_of_real_optimizers(optimizer: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    options = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
    made = getattr(torch.optim, optimizer)([weight], lr=0.1, **options)
    weight.grad = torch.ones(3)
    made.step()
    roles = {str(r.name[-1]): r.role for r in regions({"optimizer": made.state_dict(), "w": weight})}
    expected = {
        "AdamW": {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "other"},
        "SGD": {"momentum_buffer": "first_moment"},
        "Adagrad": {"sum": "second_moment", "step": "other"},
        "RMSprop": {"square_avg": "second_moment", "momentum_buffer": "first_moment", "step": "other"},
        "Adadelta": {"square_avg": "second_moment", "acc_delta": "second_moment", "step": "other"},
        "NAdam": {
            "exp_avg": "first_moment",
            "exp_avg_sq": "second_moment",
            "step": "other",
            "mu_product": "other",
        },
        "Adamax": {"exp_avg": "first_moment", "exp_inf": "second_moment", "step": "other"},
    }
    assert roles == {"w": "weight", **expected[optimizer]}


@pytest.mark.parametrize(
    ("path", "dtype", "role"),
    [
        (("model", "decoder.weight"), "bfloat16", "weight"),
        (("optim.state.layers.0.weight.exp_avg",), "float32", "first_moment"),
        (("optim.state.layers.0.weight.exp_avg_sq",), "float32", "second_moment"),
        (("optimizer.state.exp_avg.decoder.layers.0.weight",), "float32", "first_moment"),
        (("optimizer.state.exp_avg_sq.decoder.layers.0.weight",), "float32", "second_moment"),
        (("optimizer.state.fp32_param.decoder.layers.0.weight",), "float32", "weight"),
        (("optim.state.layers.0.weight.step",), "float32", "other"),
        (("exp_avg.h.0.mlp.weight",), "float32", "first_moment"),
        (("exp_avg_sq.h.0.mlp.weight",), "float32", "second_moment"),
        (("master.h.0.mlp.weight",), "float32", "weight"),
        (("grad.h.0.mlp.weight",), "bfloat16", "gradient"),
        (("grads", "w"), "float32", "gradient"),
        (("opt", "mu", "w"), "float32", "weight"),
        (("optimizer", "mu", "w"), "float32", "first_moment"),
        (("optimizer", "nu", "w"), "float32", "second_moment"),
        (("exp_avg", "w"), "int8", "other"),
        (("tokens",), "int64", "other"),
        (("mask",), "bool", "other"),
        (("x",), "complex64", "weight"),
        (("x",), "float8_e4m3fn", "weight"),
    ],
)
def test_roles_by_name(path: tuple[str, ...], dtype: str, role: str) -> None:
    assert role_of(path, dtype) == role


def test_short_names_mean_moments_only_inside_an_optimizer() -> None:
    state = {
        "o": {"state": {0: {"m": torch.ones(1), "v": torch.ones(1)}}, "param_groups": []},
        "m": torch.ones(1),
    }
    assert [r.role for r in regions(state)] == ["first_moment", "second_moment", "weight"]
