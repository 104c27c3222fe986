"""The header of a `.safetensors` file, parsed strictly and written as its library does. Torch-free.

A file is 8 bytes N (little-endian), N bytes of JSON that may end in spaces, and the data. Each entry of the
JSON is a tensor's name with dtype, shape and its range in the data; `__metadata__` maps strings to strings.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from thinpoint.errors import (
    LimitExceededError,
    MalformedFileError,
    TruncatedFileError,
    UnsupportedFeatureError,
)
from thinpoint.file.json_text import dump_json, parse_json

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

METADATA_KEY = "__metadata__"
DATA_ALIGNMENT = 8

DTYPES = {
    "BOOL": ("bool", 8),
    "F4": ("float4_e2m1fn_x2", 4),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "F32": ("float32", 32),
    "C64": ("complex64", 64),
    "F64": ("float64", 64),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
}
"""safetensors' name to torch's name and the bits of an element. An F4 element is half of torch's."""

NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}
"""torch's name to safetensors' name."""

_PAIRED = "F4"
_MAX_DIMS = 64
_MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class HeaderTensor:
    """One tensor of a header.

    Attributes:
        name: its key.
        dtype: torch's name without `torch.`.
        shape: in elements of that dtype.
        start, end: bytes in the data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(raw: bytes, where: object) -> list[HeaderTensor]:
    """The tensors of an untrusted header, in the order of its keys; their ranges have no holes.

    Raises:
        MalformedFileError: no JSON of that form; ranges with holes or overlap, or of the wrong length.
        UnsupportedFeatureError: a dtype that torch does not have.
    """
    if not raw.startswith(b"{"):
        raise MalformedFileError(
            "the header does not begin as one of a .safetensors file",
            where=where,
            offset=LENGTH.size,
            expected="{",
            actual=ascii(raw[:1].decode("latin-1")),
        )
    value = parse_json(raw, what="the header", where=where, offset=LENGTH.size)
    metadata = value.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise MalformedFileError(f"{METADATA_KEY} is no object of strings", where=where, offset=LENGTH.size)
    tensors = [_tensor(name, entry, where) for name, entry in value.items()]
    position = 0
    for tensor in sorted(tensors, key=lambda t: (t.start, t.end)):
        if tensor.start != position:
            raise MalformedFileError(
                "the tensors do not cover the data without holes and overlap",
                where=where,
                tensor=tensor.name,
                expected=f"a range that begins at byte {position:,} of the data",
                actual=f"{tensor.start:,}",
            )
        position = tensor.end
    return tensors


def _tensor(name: str, entry: Any, where: object) -> HeaderTensor:
    def malformed(what: str, expected: object = None, actual: object = None) -> MalformedFileError:
        return MalformedFileError(
            f"header: {what}", where=where, tensor=name, expected=expected, actual=actual
        )

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise malformed("the entry of a tensor has not exactly the keys dtype, shape and data_offsets")
    shape, offsets, key = entry["shape"], entry["data_offsets"], entry["dtype"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(
            type(n) is not int or not 0 <= n <= _MAX_SIZE for n in numbers
        ):
            raise malformed("shape or data_offsets is not made of integers from 0 to 2^63 - 1")
    if len(offsets) != 2 or len(shape) > _MAX_DIMS:
        raise malformed("data_offsets has not two numbers, or shape more than 64")
    if not isinstance(key, str):
        raise malformed("the dtype is no string")
    if key not in DTYPES:
        raise UnsupportedFeatureError(
            f"the dtype {key[:40]!a} has no counterpart in torch",
            where=where,
            tensor=name,
            hint="Leave this file as it is",
        )
    dtype, bits = DTYPES[key]
    num_elems = math.prod(shape)
    num_bytes, rest = divmod(num_elems * bits, 8)
    if num_elems > _MAX_SIZE or rest or num_bytes != offsets[1] - offsets[0]:
        raise malformed(
            "data_offsets do not fit dtype and shape", f"{num_bytes:,} bytes", f"{offsets[1] - offsets[0]:,}"
        )
    if key == _PAIRED:
        if not shape or shape[-1] % 2:
            raise malformed("F4 with an odd last dimension, which torch does not have")
        shape = [*shape[:-1], shape[-1] // 2]
    return HeaderTensor(name=name, dtype=dtype, shape=tuple(shape), start=offsets[0], end=offsets[1])


def header_bytes(first: bytes, file_bytes: int, where: object) -> int:
    """The length of the header, from the first 8 bytes of a file.

    Raises:
        LimitExceededError: more than MAX_HEADER_BYTES.
        TruncatedFileError: the file is too short for it.
    """
    if len(first) < LENGTH.size:
        raise TruncatedFileError(
            "the file is empty" if not first else "the file ends inside the length of its header",
            where=where,
            expected=f"at least {LENGTH.size} bytes",
            actual=len(first),
        )
    (size,) = LENGTH.unpack(first)
    if size > MAX_HEADER_BYTES:
        raise LimitExceededError(
            "the first 8 bytes are no length of a header: this is no .safetensors file",
            where=where,
            offset=0,
            expected=f"at most {MAX_HEADER_BYTES:,}",
            actual=f"{size:,}",
        )
    if LENGTH.size + size > file_bytes:
        raise TruncatedFileError(
            "the header reaches beyond the end of the file",
            where=where,
            offset=0,
            expected=f"at most {file_bytes - LENGTH.size:,} bytes",
            actual=f"{size:,}",
        )
    return int(size)


def make_header(
    tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str] | None = None
) -> bytes:
    """A header with its length, padded to DATA_ALIGNMENT, for tensors whose data follow in this order.

    Args:
        tensors: name, torch's name of the dtype, shape, bytes. The dtype must be in NAMES.
        metadata: what `__metadata__` is to hold.
    """
    entries: dict[str, Any] = {} if metadata is None else {METADATA_KEY: metadata}
    position = 0
    for name, dtype, shape, num_bytes in tensors:
        key = NAMES[dtype]
        sizes = [*shape[:-1], 2 * shape[-1]] if key == _PAIRED else list(shape)
        entries[name] = {"dtype": key, "shape": sizes, "data_offsets": [position, position + num_bytes]}
        position += num_bytes
    text = dump_json(entries)
    text += b" " * (-len(text) % DATA_ALIGNMENT)
    return LENGTH.pack(len(text)) + text
