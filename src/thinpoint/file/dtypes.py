"""Bytes per element of every dtype that torch can store, by torch's name without `torch.`; needs no torch."""

from __future__ import annotations

_ONE_BYTE = (
    "bool uint8 int8 qint8 quint8 bits8 bits1x8 bits2x4 bits4x2 bytes float4_e2m1fn_x2 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
)

ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(_ONE_BYTE.split(), 1),
    **dict.fromkeys("float16 bfloat16 int16 uint16 bits16".split(), 2),
    **dict.fromkeys("float32 int32 uint32 qint32 complex32".split(), 4),
    **dict.fromkeys("float64 int64 uint64 complex64".split(), 8),
    "complex128": 16,
}
"""Every dtype whose elements are whole bytes."""

ITEMS_PER_BYTE: dict[str, int] = {"quint4x2": 2, "quint2x4": 4}
"""The dtypes whose elements share a byte."""


def is_known(dtype: str) -> bool:
    """Whether `dtype` is a name that this version of the format knows."""
    return dtype in ITEM_BYTES or dtype in ITEMS_PER_BYTE


def extent_bytes(dtype: str, num_elems: int) -> int:
    """The least bytes that hold elements [0, num_elems) of a known dtype.

    Rows of the packed dtypes may be padded by torch, so for these it is a lower bound.
    """
    if dtype in ITEMS_PER_BYTE:
        return -(-num_elems // ITEMS_PER_BYTE[dtype])
    return num_elems * ITEM_BYTES[dtype]
