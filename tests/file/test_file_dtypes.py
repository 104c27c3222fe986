"""The table of dtypes, against torch itself."""

from __future__ import annotations

import pytest

from thinpoint.file.dtypes import ITEM_BYTES, ITEMS_PER_BYTE, extent_bytes, is_known

torch = pytest.importorskip("torch", reason="compares with torch's own itemsize")


def torch_dtypes() -> list[str]:
    names = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(name.removeprefix("torch.") for name in names)


def test_every_dtype_of_torch_is_known():
    assert [name for name in torch_dtypes() if not is_known(name)] == []


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_bytes_per_element_are_those_of_torch(name):
    if name == "bytes":
        assert ITEM_BYTES[name] == 1
    elif not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    else:
        assert getattr(torch, name).itemsize == ITEM_BYTES[name]


def test_extent_of_packed_dtypes_rounds_up():
    assert [extent_bytes("quint4x2", n) for n in range(6)] == [0, 1, 1, 2, 2, 3]
    assert [extent_bytes("quint2x4", n) for n in range(6)] == [0, 1, 1, 1, 1, 2]
    assert extent_bytes("complex128", 3) == 48
    assert set(ITEMS_PER_BYTE) & set(ITEM_BYTES) == set()


def test_unknown_names_are_unknown():
    assert not is_known("float128")
    assert not is_known("torch.float32")
