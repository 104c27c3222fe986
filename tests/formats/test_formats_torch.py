"""Files of torch.save: torch.load reads from the file that comes back what it read from the original."""

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats_support import Gathering, bits, opened, thin_bytes

from thinpoint.codec.backend import get_backend
from thinpoint.engine.load import load_object
from thinpoint.errors import (
    MalformedFileError,
    NoSpaceError,
    NotFoundError,
    TruncatedFileError,
    UnsafeObjectError,
    UnsupportedError,
    UsageError,
)
from thinpoint.formats.compare import compare_with_state
from thinpoint.formats.torch_file import Devices, read_torch, write_torch
from thinpoint.state.flatten import flatten

DTYPES = sorted(
    {str(v)[6:] for v in vars(torch).values() if isinstance(v, torch.dtype)}
    - {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
)
KINDS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


def save(obj: Any, path: Path, is_zip: bool = True) -> Path:
    torch.save(obj, path, _use_new_zipfile_serialization=is_zip)
    return path


def through_thin(path: Path, target: Path, *, allow_pickle: bool = False) -> Path:
    """The file that decompress would make of the file that compress would make."""
    found = read_torch(path, allow_pickle=allow_pickle)
    state = flatten(found.obj, allow_pickle=allow_pickle, device_of=found.devices)
    data = thin_bytes(state)
    devices = Devices()
    with opened(data) as (restorer, workers):
        compare_with_state(restorer, state)
        obj = load_object(
            restorer.reader, get_backend(), workers, map_location=devices.keep, weights_only=not allow_pickle
        )
    sink = Gathering()
    write_torch(obj, sink, devices, is_zip=found.is_zip)
    target.write_bytes(sink.data)
    return target


def locations(path: Path) -> list[str]:
    found: list[str] = []
    torch.load(
        path, map_location=lambda storage, location: found.append(location) or storage, weights_only=False
    )
    return found


@pytest.fixture
def tag_as() -> Any:
    """Makes torch.save write a device of our choice, as if the tensors had been there."""
    device: list[str] = []
    package = (-7, lambda storage: device[-1] if device else None, lambda storage, location: None)
    torch.serialization.register_package(*package)
    yield device.append
    torch.serialization._package_registry.remove(package)


@pytest.mark.filterwarnings("ignore::UserWarning")
@KINDS
def test_every_dtype_comes_back_with_its_bits(tmp_path: Path, is_zip: bool) -> None:
    state: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(2)
    for name in DTYPES:
        raw = torch.randint(0, 256, (16, 48), dtype=torch.uint8, generator=generator)
        try:
            state[name] = (raw % 2).bool() if name == "bool" else raw.view(getattr(torch, name))
            torch.save(state[name], io.BytesIO(), _use_new_zipfile_serialization=is_zip)
            torch.load(save(state[name], tmp_path / "one.pt", is_zip), weights_only=True)
        except (
            RuntimeError,
            KeyError,
            TypeError,
            AttributeError,
            NotImplementedError,
            pickle.UnpicklingError,
        ):
            # torch itself cannot store it.
            state.pop(name, None)
    assert {"float32", "bfloat16", "complex64", "int64", "bool"} <= set(state)
    assert "float8_e4m3fn" in state or not is_zip
    path = save(state, tmp_path / "in.pt", is_zip)
    got = torch.load(through_thin(path, tmp_path / "out.pt"), weights_only=True)
    assert list(got) == list(state)
    for name, tensor in state.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(got[name]) == bits(tensor)


@pytest.mark.filterwarnings("ignore::UserWarning")
@KINDS
def test_views_ties_strides_and_flags_come_back(tmp_path: Path, is_zip: bool) -> None:
    base = torch.randn(64, 48)
    state = OrderedDict(
        tied_a=base,
        tied_b=base,
        view=base[3:9, 5:].t(),
        overlapping=base.flatten()[10:500],
        channels_last=torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        expanded=torch.randn(1, 7).expand(5, 7),
        scalar=torch.tensor(-0.0),
        empty=torch.empty(0, 4),
        empty_view=base[:0],
        parameter=torch.nn.Parameter(torch.ones(3)),
        grad=torch.ones(2, requires_grad=True),
        sparse=torch.eye(4).to_sparse(),
        quantised=torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.qint8),
        nested={1: [torch.arange(3), {"a.b": (torch.ones(1), None, 2.5, "text")}]},
        size=torch.Size([1, 2]),
        dtype=torch.bfloat16,
        device=torch.device("cuda:1"),
    )
    state._metadata = {"": {"version": 1}}
    path = save(state, tmp_path / "in.pt", is_zip)
    got = torch.load(through_thin(path, tmp_path / "out.pt"), weights_only=False)
    expected = torch.load(path, weights_only=False)
    assert list(got) == list(expected)
    assert got._metadata == expected._metadata
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_quantized:
            assert (got[name].stride(), got[name].requires_grad, type(got[name])) == (
                tensor.stride(),
                tensor.requires_grad,
                type(tensor),
            )
            assert bits(got[name]) == bits(tensor)
    assert bits(got["quantised"].int_repr()) == bits(expected["quantised"].int_repr())
    assert bits(got["sparse"].to_dense()) == bits(expected["sparse"].to_dense())
    assert (got["size"], got["dtype"], got["device"]) == (state["size"], state["dtype"], state["device"])
    assert got["nested"][1][1]["a.b"][1:] == (None, 2.5, "text")
    one = got["tied_a"].untyped_storage()._cdata
    assert {got[n].untyped_storage()._cdata for n in ("tied_b", "view", "overlapping")} == {one}


@KINDS
def test_the_devices_of_the_storages_come_back_on_a_machine_without_them(
    tmp_path: Path, is_zip: bool, tag_as: Any
) -> None:
    tied = torch.ones(6)
    tag_as("cuda:0")
    path = save({"a": tied, "b": tied[2:], "c": torch.arange(3)}, tmp_path / "in.pt", is_zip)
    assert set(locations(path)) == {"cuda:0"}
    before = list(torch.serialization._package_registry)
    out = through_thin(path, tmp_path / "out.pt")
    assert locations(out) == locations(path)
    assert torch.serialization._package_registry == before
    assert bits(torch.load(out, map_location="cpu", weights_only=True)["b"]) == bits(tied[2:])
    if not torch.cuda.is_available():
        messages = []
        for file in (path, out):
            with pytest.raises((RuntimeError, pickle.UnpicklingError), match="CUDA") as caught:
                torch.load(file, weights_only=True)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_devices_differ_storage_by_storage(tmp_path: Path) -> None:
    a, b, c = torch.ones(3), torch.zeros(0), torch.ones(4)
    devices = Devices()
    devices.keep(a.untyped_storage(), "cuda:3")
    devices.keep(b.untyped_storage(), "mps")
    sink = Gathering()
    write_torch([a, b, c], sink, devices)
    (tmp_path / "x.pt").write_bytes(sink.data)
    assert locations(tmp_path / "x.pt") == ["cuda:3", "mps", "cpu"]
    assert locations(save([a], tmp_path / "y.pt")) == ["cpu"]


def test_globals_that_torch_allows_stay_allowed_and_numpys_own_do_not(tmp_path: Path) -> None:
    from torch import serialization

    before = list(serialization.get_safe_globals())
    rebuild = np.zeros(0).__reduce__()[0]
    serialization.add_safe_globals([Config, rebuild, np.ndarray, np.dtype])
    try:
        path = save({"a": Config(x=1), "b": np.array(["x"], dtype=object)}, tmp_path / "x.pt")
        with pytest.raises(UnsafeObjectError, match="NumPy"):
            read_torch(path)
        found = read_torch(save({"a": Config(x=1), "b": np.arange(3)}, tmp_path / "x.pt"))
        assert (type(found.obj["a"]), found.obj["a"].x) == (Config, 1)
        assert type(found.obj["b"]) is np.ndarray
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def test_torchs_lists_are_as_before_when_saving_or_loading_fails(tmp_path: Path) -> None:
    from torch import serialization

    packages, allowed = list(serialization._package_registry), set(serialization.get_safe_globals())
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        write_torch({"a": lambda: 0}, Gathering(), Devices())
    with pytest.raises(UnsafeObjectError):
        read_torch(save({"a": io.StringIO}, tmp_path / "x.pt"))
    assert serialization._package_registry == packages
    assert set(serialization.get_safe_globals()) == allowed


@KINDS
def test_a_refusing_sink_is_reported_as_itself(is_zip: bool) -> None:
    class Full(Gathering):
        def write(self, buffer: Any) -> None:
            if len(self.data) + memoryview(buffer).nbytes > 10_000:
                raise NoSpaceError("no space left")
            super().write(buffer)

    with pytest.raises(NoSpaceError):
        write_torch({"a": torch.ones(100_000), "b": torch.ones(10)}, Full(), Devices(), is_zip=is_zip)


def test_a_zip_archive_is_mapped_not_read(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(40_000_000, dtype=torch.uint8)}, tmp_path / "x.pt")
    found = read_torch(path)
    address = found.obj["a"].data_ptr()
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(n, 16) for n in line.split()[0].split("-")] for line in lines if line.endswith("x.pt")]
    assert any(start <= address < end for start, end in ranges)


class Config:
    """A class that no pickle may name by default."""

    def __init__(self, **fields: int) -> None:
        self.__dict__.update(fields)


class Evil:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@KINDS
def test_code_in_a_pickle_is_never_run_unless_allowed(tmp_path: Path, is_zip: bool) -> None:
    mark = tmp_path / "mark"
    path = save({"a": torch.ones(2), "evil": Evil(mark)}, tmp_path / "evil.pt", is_zip)
    with pytest.raises(UnsafeObjectError, match="mkdir"):
        read_torch(path)
    assert not mark.exists()
    assert bits(read_torch(path, allow_pickle=True).obj["a"]) == bits(torch.ones(2))
    assert mark.exists()


def test_an_object_that_needs_pickle_comes_back_where_that_is_allowed(tmp_path: Path) -> None:
    path = save({"a": torch.ones(2), "f": os.path.join, "c": complex}, tmp_path / "in.pt")
    with pytest.raises(UnsafeObjectError):
        read_torch(path)
    out = through_thin(path, tmp_path / "out.pt", allow_pickle=True)
    got = torch.load(out, weights_only=False)
    assert got["f"] is os.path.join
    assert got["c"] is complex


NUMPY_VALUES = {
    "rng": np.random.RandomState(3).get_state(),
    "fortran": np.asfortranarray(np.arange(12, dtype="<i2").reshape(3, 4)),
    "big_endian": np.arange(5, dtype=">f8"),
    "text": np.array(["ab", "cde", ""]),
    "raw_text": np.array([b"ab", b"\xff"]),
    "empty": np.zeros((0, 3), "f4"),
    "zero_d": np.array(2.5),
    "complex": np.array([1 + 2j, complex(np.nan, -0.0)]),
    "bool": np.array([True, False]),
    "float_scalar": np.float64(-0.0),
    "int_scalar": np.int32(7),
    "bool_scalar": np.bool_(True),
    "text_scalar": np.str_("ü"),
    "dtype": np.dtype("<f4"),
}


@KINDS
@pytest.mark.parametrize("name", NUMPY_VALUES)
def test_numpy_values_come_back_without_pickle(tmp_path: Path, is_zip: bool, name: str) -> None:
    value = NUMPY_VALUES[name]
    # Twice, in places of all kinds: what was one object stays one.
    path = save({"x": value, "l": [(value, 1)]}, tmp_path / "in.pt", is_zip)
    got = torch.load(through_thin(path, tmp_path / "out.pt"), weights_only=False)
    expected = torch.load(path, weights_only=False)
    assert pickle.dumps(got["x"]) == pickle.dumps(expected["x"])
    assert pickle.dumps(got["l"]) == pickle.dumps(expected["l"])
    if isinstance(value, np.ndarray):
        assert got["l"][0][0] is got["x"]


def numpy_pickle(state: Any, dtype_state: Any, code: str = "f4") -> bytes:
    """A pickle of an array whose dtype and state are ours to choose."""

    class Dtype:
        def __reduce__(self) -> Any:
            return np.dtype, (code, False, True), dtype_state

    class Array:
        def __reduce__(self) -> Any:
            return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, *state[:1], Dtype(), *state[1:])

    class Pickler(pickle._Pickler):
        """Pickles by `__reduce__` even where the state is no dict."""

    target = io.BytesIO()
    Pickler(target, protocol=2).dump(Array())
    return target.getvalue()


PLAIN_STATE = (3, "<", None, None, None, -1, -1, 0)
HOSTILE = {
    "object pointers": (((1,), False, b"\x41" * 8), (3, "|", None, None, None, -1, -1, 0), "O8"),
    "fields": (((1,), False, b"\x41" * 8), (3, "|", None, ("a",), {"a": 1}, 8, 1, 16), "V8"),
    "void": (((1,), False, b"\x41" * 8), PLAIN_STATE, "V8"),
    "fewer bytes than the shape": (((10**12,), False, b"\x41" * 8), PLAIN_STATE, "f4"),
    "negative shape": (((-1,), False, b"\x41" * 4), PLAIN_STATE, "f4"),
    "a list for the data": (((1,), False, [b"x"]), PLAIN_STATE, "f4"),
    "fields in the state": (((1,), False, b"\x41" * 4), (3, "<", None, ("a",), {}, 4, 1, 0), "f4"),
    "unknown byte order": (((1,), False, b"\x41" * 4), (3, "x", None, None, None, -1, -1, 0), "f4"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_numpy_pickles_that_could_forge_memory_are_refused(tmp_path: Path, name: str) -> None:
    data = numpy_pickle(*HOSTILE[name])
    good = save({"a": 1}, tmp_path / "good.pt")
    path = tmp_path / "hostile.pt"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
        for item in source.infolist():
            target.writestr(item, data if item.filename.endswith("data.pkl") else source.read(item))
    with pytest.raises((UnsafeObjectError, MalformedFileError)):
        read_torch(path)


def test_the_forger_above_makes_arrays_that_are_read_if_they_are_plain(tmp_path: Path) -> None:
    data = numpy_pickle(((2,), False, struct.pack("<2f", 1.5, -2.0)), PLAIN_STATE, "f4")
    good = save({"a": 1}, tmp_path / "good.pt")
    path = tmp_path / "plain.pt"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
        for item in source.infolist():
            target.writestr(item, data if item.filename.endswith("data.pkl") else source.read(item))
    assert read_torch(path).obj.tolist() == [1.5, -2.0]


def bad_file(kind: str, folder: Path) -> Path:
    path = folder / "bad.pt"
    good = save({"a": torch.arange(1000)}, folder / "good.pt")
    old = save({"a": torch.arange(1000)}, folder / "old.pt", False)
    if kind == "text":
        path.write_text("hello\n" * 20)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "truncated zip":
        path.write_bytes(good.read_bytes()[:-30])
    elif kind == "truncated legacy":
        path.write_bytes(old.read_bytes()[:-30])
    elif kind == "other zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/readme.txt", "hello")
    elif kind == "compressed zip":
        with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
    elif kind == "torchscript":
        with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
            target.writestr("good/constants.pkl", b"")
    elif kind == "broken pickle":
        data = good.read_bytes()
        path.write_bytes(data.replace(b"torch._utils", b"torch_\xff\xff\xff\xff\xff\xff"))
    elif kind == "missing":
        pass
    elif kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("text", MalformedFileError),
        ("empty", TruncatedFileError),
        ("plain pickle", MalformedFileError),
        ("truncated zip", TruncatedFileError),
        ("truncated legacy", MalformedFileError),
        ("other zip", MalformedFileError),
        ("compressed zip", UnsupportedError),
        ("torchscript", UnsupportedError),
        ("broken pickle", MalformedFileError),
        ("missing", NotFoundError),
        ("folder", UsageError),
    ],
)
def test_a_bad_file_has_its_own_error(kind: str, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        read_torch(bad_file(kind, tmp_path))
    assert type(caught.value) is error
    assert "bad.pt" in str(caught.value)


def test_a_record_that_claims_more_than_the_file_is_refused(tmp_path: Path) -> None:
    good = save({"a": torch.arange(1000, dtype=torch.uint8)}, tmp_path / "good.pt")
    path = tmp_path / "lies.pt"
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
        for item in source.infolist():
            data = source.read(item)
            if item.filename.endswith("data.pkl"):
                assert b"M\xe8\x03" in data
                data = data.replace(b"M\xe8\x03", b"J\xff\xff\xff\x7f")
            target.writestr(item, data)
    with pytest.raises(MalformedFileError):
        read_torch(path)
