"""A `.safetensors` file becomes a flat state and comes back byte for byte, whatever its header looks like."""

import io
import json
import struct
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from formats_support import Gathering, bits, opened, thin_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpoint.codec.backend import get_backend
from thinpoint.engine.load import load_object
from thinpoint.errors import (
    LimitExceededError,
    MalformedFileError,
    ThinpointError,
    TruncatedFileError,
    UnsupportedFeatureError,
)
from thinpoint.formats import pieces
from thinpoint.formats.safetensors_file import read_safetensors, write_safetensors
from thinpoint.formats.safetensors_header import DTYPES, MAX_HEADER_BYTES
from thinpoint.formats.source import safetensors_note
from thinpoint.store import open_source


def file_of(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def to_thin(raw: bytes) -> tuple[bytes, str]:
    with open_source(io.BytesIO(raw)) as source:
        state, header = read_safetensors(source)
        return thin_bytes(state, safetensors_note(header)), header


def there_and_back(raw: bytes) -> bytes:
    thin, header = to_thin(raw)
    sink = Gathering()
    with opened(thin) as (restorer, workers):
        note = restorer.reader.index.meta["source"]["header"]
        assert note == header
        write_safetensors(restorer, workers, note, sink)
    return bytes(sink.data)


def loaded(raw: bytes) -> dict[str, torch.Tensor]:
    with opened(to_thin(raw)[0]) as (restorer, workers):
        return load_object(restorer.reader, get_backend(), workers)


def every_dtype() -> dict[str, torch.Tensor]:
    """Random bits of every dtype that safetensors and this torch both have, among them NaN payloads."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, _ in DTYPES.values():
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        raw = torch.randint(0, 256, (3, 1040), dtype=torch.uint8, generator=generator)
        tensors[f"t.{name}"] = (raw % 2).to(dtype) if name == "bool" else raw.view(dtype)
    return tensors


def test_every_dtype_comes_back_byte_for_byte_and_loads_to_the_same_bits() -> None:
    tensors = every_dtype()
    assert len(tensors) >= 15
    raw = safetensors.torch.save(tensors, metadata={"format": "pt", "ü": '"quoted"\n'})
    assert there_and_back(raw) == raw
    got = loaded(raw)
    assert list(got) == list(json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]))[1:]
    for name, tensor in tensors.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(got[name]) == bits(tensor)


def test_shapes_of_all_kinds_come_back() -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "one": torch.tensor([2], dtype=torch.int64),
        "odd": torch.arange(1001, dtype=torch.int16),
        "deep": torch.zeros(1, 2, 1, 3, 1, 4),
    }
    raw = safetensors.torch.save(tensors)
    assert there_and_back(raw) == raw
    assert {name: tuple(t.shape) for name, t in loaded(raw).items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }


def test_a_file_without_tensors_comes_back() -> None:
    for header in (b"{}", b"{}      ", b'{"__metadata__":{}}', b'{"__metadata__":{"a":"b"}}   '):
        raw = file_of(header, b"")
        assert there_and_back(raw) == raw


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("num_spaces", [0, 1, 7, 8, 100])
@pytest.mark.parametrize("is_spread", [False, True])
def test_odd_padding_key_order_and_white_space_of_the_header_come_back(
    num_spaces: int, is_spread: bool
) -> None:
    # Keys in another order than the data, a metadata entry in the middle, an F32 tensor at an odd offset.
    header = {
        "z": entry("F32", [2], 3, 11),
        "__metadata__": {"b": "1", "a": "2"},
        "a": {"shape": [3], "data_offsets": [0, 3], "dtype": "U8"},
        "empty": entry("I64", [0], 3, 3),
    }
    text = json.dumps(header, indent=3 if is_spread else None).encode() + b" " * num_spaces
    data = bytes([1, 2, 3]) + struct.pack("<2f", 1.5, -0.0)
    raw = file_of(text, data)
    assert there_and_back(raw) == raw
    got = loaded(raw)
    assert list(got) == ["z", "a", "empty"]
    assert bits(got["z"]) == data[3:]


def test_escapes_in_names_come_back_and_are_understood() -> None:
    text = b'{"\\u00e9\\n\\ud83d\\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    raw = file_of(text, b"\x07")
    assert there_and_back(raw) == raw
    assert list(loaded(raw)) == ["é\n\U0001f600"]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_valid_file_comes_back(data: st.DataObject) -> None:
    names = data.draw(
        st.lists(st.text(max_size=5).filter(lambda n: n != "__metadata__"), unique=True, max_size=5)
    )
    header: dict[str, Any] = {}
    body = b""
    for name in names:
        key = data.draw(
            st.sampled_from(sorted(k for k, (dtype, _) in DTYPES.items() if hasattr(torch, dtype)))
        )
        shape = data.draw(st.lists(st.integers(0, 6), max_size=3))
        bits_each = DTYPES[key][1]
        if key == "F4":
            shape = [*shape, 2]
        num_bytes = bits_each
        for size in shape:
            num_bytes *= size
        num_bytes //= 8
        header[name] = entry(key, shape, len(body), len(body) + num_bytes)
        body += data.draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    keys = data.draw(st.permutations(list(header)))
    text = json.dumps({k: header[k] for k in keys}, ensure_ascii=data.draw(st.booleans())).encode(
        "utf-8", "replace"
    )
    raw = file_of(text + b" " * data.draw(st.integers(0, 9)), body)
    try:
        with open_source(io.BytesIO(raw)) as source:
            read_safetensors(source)
    except MalformedFileError:
        # Lone surrogates in a name become question marks, and two names one.
        return
    assert there_and_back(raw) == raw


BAD = {
    "hole": (file_of({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123"), MalformedFileError),
    "overlap": (
        file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"),
        MalformedFileError,
    ),
    "same range": (
        file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"12"),
        MalformedFileError,
    ),
    "hole in front": (file_of({"a": entry("U8", [1], 1, 2)}, b"12"), MalformedFileError),
    "bytes after": (file_of({"a": entry("U8", [1], 0, 1)}, b"12"), MalformedFileError),
    "bytes missing": (file_of({"a": entry("U8", [2], 0, 2)}, b"1"), TruncatedFileError),
    "wrong length": (file_of({"a": entry("F32", [2], 0, 4)}, b"1234"), MalformedFileError),
    "end before start": (file_of({"a": entry("U8", [0], 2, 1)}, b""), MalformedFileError),
    "negative": (file_of({"a": entry("U8", [-1], 0, 1)}, b"1"), MalformedFileError),
    "huge shape": (file_of({"a": entry("U8", [2**62, 2**62], 0, 1)}, b"1"), MalformedFileError),
    "fraction": (file_of({"a": entry("U8", [1.0], 0, 1)}, b"1"), MalformedFileError),
    "boolean size": (file_of({"a": entry("U8", [True], 0, 1)}, b"1"), MalformedFileError),
    "half a byte": (file_of({"a": entry("F4", [1], 0, 1)}, b"1"), MalformedFileError),
    "unknown dtype": (file_of({"a": entry("F6_E2M3", [4], 0, 3)}, b"123"), UnsupportedFeatureError),
    "dtype no string": (
        file_of({"a": {"dtype": 1, "shape": [], "data_offsets": [0, 1]}}, b"1"),
        MalformedFileError,
    ),
    "missing key": (file_of({"a": {"dtype": "U8", "shape": [1]}}, b"1"), MalformedFileError),
    "more keys": (file_of({"a": {**entry("U8", [1], 0, 1), "x": 1}}, b"1"), MalformedFileError),
    "three offsets": (
        file_of({"a": {**entry("U8", [1], 0, 1), "data_offsets": [0, 1, 1]}}, b"1"),
        MalformedFileError,
    ),
    "entry a list": (file_of({"a": [1]}, b""), MalformedFileError),
    "metadata no strings": (file_of({"__metadata__": {"a": 1}}, b""), MalformedFileError),
    "metadata a list": (file_of({"__metadata__": []}, b""), MalformedFileError),
    "same key twice": (
        file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"1"),
        MalformedFileError,
    ),
    "no object": (file_of(b"[]", b""), MalformedFileError),
    "space in front": (file_of(b" {}", b""), MalformedFileError),
    "no JSON": (file_of(b"{", b""), MalformedFileError),
    "no UTF-8": (file_of(b'{"\xff":1}', b""), MalformedFileError),
    "empty header": (file_of(b"", b""), MalformedFileError),
    "header beyond the file": (struct.pack("<Q", 1000) + b"{}", TruncatedFileError),
    "header beyond the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", LimitExceededError),
    "text": (b"hello, this is a text file", LimitExceededError),
    "empty file": (b"", TruncatedFileError),
    "seven bytes": (b"\0" * 7, TruncatedFileError),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_own_error(name: str) -> None:
    raw, error = BAD[name]
    with open_source(io.BytesIO(raw)) as source, pytest.raises(ThinpointError) as caught:
        read_safetensors(source)
    assert type(caught.value) is error


# In the others we are stricter than the library, or torch has less than the format.
STRICTER = {"unknown dtype", "half a byte", "more keys", "space in front", "fraction"}


@pytest.mark.parametrize("name", sorted(set(BAD) - STRICTER))
def test_what_we_refuse_the_safetensors_library_refuses_too(name: str, tmp_path: Any) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD[name][0])
    with pytest.raises((safetensors.SafetensorError, OSError, ValueError)):
        safetensors.torch.load_file(path)


def test_truncation_at_every_byte_is_noticed() -> None:
    raw = safetensors.torch.save({"a": torch.arange(5), "b": torch.ones(3)})
    for size in range(len(raw)):
        with open_source(io.BytesIO(raw[:size])) as source, pytest.raises(ThinpointError):
            read_safetensors(source)


def test_a_note_that_does_not_describe_the_file_is_refused() -> None:
    thin, header = to_thin(safetensors.torch.save({"a": torch.ones(4), "b": torch.ones(2, 2)}))
    lies = [
        header.replace('"a"', '"c"'),
        header.replace("[4]", "[2,2]"),
        header.replace("F32", "I32"),
        header.replace('"shape":[2,2],"data_offsets":[16,32]', '"shape":[2],"data_offsets":[16,24]'),
        "{",
        '{"\ud800":1}',
    ]
    for lie in lies:
        assert lie != header
        with opened(thin) as (restorer, workers), pytest.raises(MalformedFileError):
            write_safetensors(restorer, workers, lie, Gathering())


def test_writing_back_holds_one_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 12)
    raw = safetensors.torch.save({"a": torch.randn(5000), "b": torch.arange(3000), "c": torch.ones(3)})
    thin, header = to_thin(raw)
    sink = Gathering()
    with opened(thin) as (restorer, workers):
        write_safetensors(restorer, workers, header, sink)
    assert bytes(sink.data) == raw
    assert sink.largest <= 1 << 12
