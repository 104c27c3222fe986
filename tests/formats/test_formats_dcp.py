"""Stock DCP folders: every bit, in parts, and none of the pickle is run."""

import io
import os
import pickle
import pickletools
import subprocess
import sys
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats_support import bits
from sharded import sharded_checkpoints
from sharded_process import full_state
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from thinpoint.errors import (
    MalformedFileError,
    NotFoundError,
    ThinpointError,
    UnsafeObjectError,
    UnsupportedError,
)
from thinpoint.formats.dcp_metadata import parse_metadata
from thinpoint.formats.dcp_source import open_dcp
from thinpoint.formats.leaves import ObjectLeaf, TensorLeaf, materialized, walk
from thinpoint.store import LocalStore, open_store

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def dtypes() -> dict[str, torch.Tensor]:
    found = {}
    raw = torch.arange(512, dtype=torch.int32).to(torch.uint8)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
        *(
            "complex64",
            "complex128",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
        ),
        "float4_e2m1fn_x2",
    ):
        dtype = getattr(torch, name, None)
        if dtype is not None:
            found[name] = raw.clone().view(dtype)
    found["bool"] = raw > 100
    return found


def state() -> dict[str, Any]:
    base = torch.randn(40, 30)
    return {
        "dtypes": dtypes(),
        "shapes": {
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "one": torch.tensor([7]),
            "transposed": base.t(),
            "strided": base[::3, 1:20:2],
            "slice": base[5:9],
            "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        },
        "nan": torch.tensor([0x7FC00001, -0x400000 + 5, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "list": [torch.ones(2), {"deep": torch.zeros(1), "text": "x"}],
        "objects": {"lr": 0.1, "betas": (0.9, 0.95), "tensor_in": (torch.ones(3), 1), "none": None},
    }


def save(folder: Path, obj: Any, **options: Any) -> str:
    writer = dcp.FileSystemWriter(str(folder), **options)
    dcp.save(obj, storage_writer=writer, no_dist=True)
    return str(folder)


def leaves_of(folder: Any, stack: ExitStack, **options: Any) -> dict[tuple[Any, ...], Any]:
    return dict(walk(open_dcp(open_store(str(folder)), stack, **options).tree))


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = state()
    save(tmp_path / "ck", saved)
    with ExitStack() as stack:
        opened = open_dcp(open_store(str(tmp_path / "ck")), stack)
        loaded = materialized(opened.tree)
    assert opened.kind == "dcp"
    for group in ("dtypes", "shapes"):
        assert saved[group].keys() == loaded[group].keys()
        for name, tensor in saved[group].items():
            assert loaded[group][name].dtype == tensor.dtype and loaded[group][name].shape == tensor.shape
            assert bits(loaded[group][name]) == bits(tensor), name
    assert bits(loaded["nan"]) == bits(saved["nan"])
    assert loaded["list"][1]["text"] == "x" and loaded["list"][0].tolist() == [1, 1]
    assert loaded["objects"]["betas"] == (0.9, 0.95) and loaded["objects"]["none"] is None
    assert loaded["objects"]["tensor_in"][0].tolist() == [1, 1, 1]


def test_shards_of_two_ranks_are_put_together() -> None:
    with ExitStack() as stack:
        loaded = materialized(open_dcp(open_store(str(sharded_checkpoints() / "stock")), stack).tree)
    for name, tensor in full_state().items():
        assert bits(loaded["model"][name]) == bits(tensor), name
    assert loaded["groups"] == [{"lr": 0.1, "betas": (0.9, 0.95)}]


def test_a_box_reads_little_more_than_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(2000, 500)
    save(tmp_path / "ck", {"w": tensor})
    reads: list[int] = []
    original = LocalStore.source

    def source(store: LocalStore, name: str) -> Any:
        opened = original(store, name)
        read_into = opened.read_into

        def counted(offset: int, buffer: Any) -> None:
            reads.append(memoryview(buffer).nbytes)
            read_into(offset, buffer)

        monkeypatch.setattr(opened, "read_into", counted)
        return opened

    monkeypatch.setattr(LocalStore, "source", source)
    with ExitStack() as stack:
        (leaf,) = leaves_of(tmp_path / "ck", stack).values()
        reads.clear()
        part = leaf.read((slice(100, 110), slice(0, 500)))
    assert torch.equal(part, tensor[100:110])
    assert 10 * 500 * 4 <= sum(reads) < 10 * 500 * 4 + 40_000


def test_items_of_the_zstandard_extension_are_read(tmp_path: Path) -> None:
    saved = state()
    try:
        save(tmp_path / "ck", saved, _extensions=[ZStandard()])
    except ModuleNotFoundError as error:
        pytest.skip(f"PyTorch's extension needs another module: {error}")
    with ExitStack() as stack:
        loaded = materialized(open_dcp(open_store(str(tmp_path / "ck")), stack).tree)
    for name, tensor in saved["dtypes"].items():
        assert bits(loaded["dtypes"][name]) == bits(tensor), name


class Hostile:
    def __init__(self, folder: Path) -> None:
        self.flag = folder / "executed"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.flag),)


def rewritten(folder: Path, change: Any) -> None:
    """Change the metadata of a folder as an object and put them back."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("place", ["planner_data", "storage_data", "storage_meta", "state_dict_metadata"])
def test_code_in_the_metadata_is_refused_and_not_run(tmp_path: Path, place: str) -> None:
    save(tmp_path / "ck", {"w": torch.ones(3)})
    hostile = Hostile(tmp_path)
    rewritten(tmp_path / "ck", lambda metadata: setattr(metadata, place, {"w": hostile}))
    with ExitStack() as stack, pytest.raises(UnsafeObjectError, match=r"mkdir"):
        leaves_of(tmp_path / "ck", stack, allow_pickle=True)
    assert not hostile.flag.exists()


def test_code_in_an_object_runs_only_if_it_is_allowed(tmp_path: Path) -> None:
    hostile = Hostile(tmp_path)
    save(tmp_path / "ck", {"w": torch.ones(3), "bad": hostile})
    with ExitStack() as stack:
        leaves = leaves_of(tmp_path / "ck", stack)
        assert leaves[("w",)].load().tolist() == [1, 1, 1]
        with pytest.raises(UnsafeObjectError):
            leaves[("bad",)].load()
    assert not hostile.flag.exists()
    with ExitStack() as stack:
        leaves_of(tmp_path / "ck", stack, allow_pickle=True)[("bad",)].load()
    assert hostile.flag.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'exit'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05torch\x94\x8c\x1chub.load_state_dict_from_url\x94\x93.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"ctorch.distributed.checkpoint.filesystem\npickle\n.",
    ],
)
def test_any_other_name_is_refused(code: bytes) -> None:
    with pytest.raises((UnsafeObjectError, UnsupportedError)):
        parse_metadata(code, "here")


METADATA_MODULE = b"torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b".",
        b"N.",
        b"}.",
        b"garbage",
        b"(lp0\n.",
        b"r\xff\xff\xff\x7f.",
        b"\x80\x05\x95\xff",
        b"I1\n0.",
        b"\x96" + b"\xff" * 7 + b"\x00.",
        b"ctorch\nSize\n]\x85R.",
        b"c" + METADATA_MODULE + b"\nMetadata\n)\x81.",
        b"ctorch\nfloat32\n}S'name'\nS'nn'\nsb.",
    ],
)
def test_what_is_no_metadata_is_malformed(code: bytes) -> None:
    with pytest.raises(MalformedFileError):
        parse_metadata(code, "here")


DOUBLED = b")" + b"2\x86" * 60
"""Sixty tuples, each of which holds the one before it twice (DUP, TUPLE2)."""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(b"}" + DOUBLED + b"Ns.", id="SETITEM"),
        pytest.param(b"}(NN" + DOUBLED + b"Nu.", id="SETITEMS"),
        pytest.param(b"(" + DOUBLED + b"Nd.", id="DICT"),
        pytest.param(b"\x8f(" + DOUBLED + b"\x90.", id="ADDITEMS"),
        pytest.param(b"(" + DOUBLED + b"\x91.", id="FROZENSET"),
        pytest.param(b"ccollections\nOrderedDict\n" + DOUBLED + b"N\x86\x85\x85R.", id="OrderedDict"),
        pytest.param(DOUBLED + b"NR.", id="called-with-no-tuple"),
        pytest.param(b"}c" + METADATA_MODULE + b"\nMetadata\n)R" + DOUBLED + b"bNs.", id="state-of-a-key"),
        pytest.param(b"ctorch\nfloat32\n}S'name'\n" + DOUBLED + b"sb.", id="state-of-a-dtype"),
        pytest.param(b"c" + METADATA_MODULE + b"\nMetadata\n)R" + DOUBLED + b"b.", id="fields"),
    ],
)
def test_what_is_doubled_through_the_memo_is_never_walked(code: bytes) -> None:
    # In another process: where it hangs, it hangs in C, and no signal ends it.
    program = "import sys; from thinpoint.formats.dcp_metadata import parse_metadata as p; p(sys.stdin.buffer.read(), 'x')"
    done = subprocess.run(
        [sys.executable, "-c", program], input=code, capture_output=True, timeout=60, check=False
    )
    assert b"thinpoint.errors.MalformedFileError: " in done.stderr, done.stderr


@pytest.mark.parametrize("key", [1 << 63, (("a",),), ("a",) * 101, 1.5, b"a", None, frozenset("a")])
def test_a_key_that_no_metadata_have_is_malformed(tmp_path: Path, key: Any) -> None:
    save(tmp_path / "ck", {"w": torch.ones(3)})
    rewritten(tmp_path / "ck", lambda metadata: setattr(metadata, "planner_data", {key: 1}))
    with ExitStack() as stack, pytest.raises(MalformedFileError, match="a key"):
        leaves_of(tmp_path / "ck", stack)


def test_keys_and_containers_of_another_planner_are_left_aside(tmp_path: Path) -> None:
    save(tmp_path / "ck", {"w": torch.ones(3)})
    index = MetadataIndex("w", torch.Size([0]))
    data = {-1: {"a"}, ("a", 1): frozenset("b"), index: OrderedDict(x=1), (index, "a"): OrderedDict()}
    rewritten(tmp_path / "ck", lambda metadata: setattr(metadata, "planner_data", data))
    with ExitStack() as stack:
        assert list(leaves_of(tmp_path / "ck", stack)) == [("w",)]


def many_chunks(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([0])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))] * 50_000
    metadata.state_dict_metadata = dict.fromkeys(map(str, range(20_000)), entry)


def long_paths(metadata: Any) -> None:
    entry, key = metadata.state_dict_metadata["w"], "x" * 100_000
    metadata.state_dict_metadata = {str(i): entry for i in range(20_000)}
    metadata.storage_data |= {
        MetadataIndex(str(i)): info for i in range(20_000) for info in [*metadata.storage_data.values()][:1]
    }
    metadata.planner_data = {str(i): (key, i) for i in range(20_000)}


def many_transforms(metadata: Any) -> None:
    (info,) = metadata.storage_data.values()
    info.transform_descriptors = [""] * 100_000
    metadata.storage_data = {MetadataIndex(str(i)): info for i in range(20_000)}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [many_chunks, long_paths, many_transforms])
def test_parts_that_the_file_holds_once_are_not_made_many_times(tmp_path: Path, change: Any) -> None:
    save(tmp_path / "ck", {"w": torch.ones(3)})
    rewritten(tmp_path / "ck", change)
    with pytest.raises(MalformedFileError, match="more than the file"):
        parse_metadata((tmp_path / "ck" / ".metadata").read_bytes(), "here")


def test_nesting_without_end_is_malformed() -> None:
    record = b"c" + METADATA_MODULE + b"\nMetadata\nq\x00"
    for code in (b")" + b"\x85" * 500_000, record + b"0N" + b"q\x010h\x00)Rh\x01b" * 200_000):
        with pytest.raises(MalformedFileError, match="hold"):
            parse_metadata(code + b".", "here")


def test_a_pickle_cannot_change_classes_of_this_process(tmp_path: Path) -> None:
    name = "torch.distributed.checkpoint.metadata"
    stream = (
        f"c{name}\nMetadata\n".encode()
        + b"(N(S'fields'\nS'changed'\nS'__init__'\nI1\ndtb."  # BUILD with slot state sets attributes of the class
    )
    pickletools.dis(stream, out=io.StringIO())
    with pytest.raises(MalformedFileError):
        parse_metadata(stream, "here")
    from torch.distributed.checkpoint.metadata import Metadata

    assert not hasattr(Metadata, "fields") and callable(Metadata.__init__)


def shift_chunk(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata["w"].chunks[0]
    chunk.offsets = torch.Size([1, 0])


def drop_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks = []


def double_chunk(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks.append(chunks[0])


def escape(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"


def absolute(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "/etc/passwd"


def beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length += 10**9


def negative(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = -5


def other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def larger(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([10**12, 4])
    entry.chunks[0].sizes = entry.size


@pytest.mark.parametrize(
    "change",
    [shift_chunk, drop_chunk, double_chunk, escape, absolute, beyond, negative, other_dtype, larger],
)
def test_metadata_that_lie_are_found_out(tmp_path: Path, change: Any) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 100)
    save(tmp_path / "ck", {"w": torch.ones(3, 4)})
    rewritten(tmp_path / "ck", change)
    with ExitStack() as stack, pytest.raises(MalformedFileError):
        leaves_of(tmp_path / "ck", stack)[("w",)].read((slice(0, 1), slice(0, 4)))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    save(folder, {"w": torch.randn(300, 4)})
    (data,) = folder.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with ExitStack() as stack, pytest.raises(MalformedFileError, match=r"distcp"):
        leaves_of(folder, stack)[("w",)].load()
    data.unlink()
    with ExitStack() as stack, pytest.raises(NotFoundError, match=r"distcp"):
        leaves_of(folder, stack)[("w",)].load()


@pytest.mark.parametrize("place", range(0, 1600, 23))
def test_no_flipped_bit_raises_anything_but_ours(tmp_path: Path, place: int) -> None:
    folder = tmp_path / "ck"
    save(folder, {"w": torch.arange(6.0), "x": {"y": 3}})
    for path in (folder / ".metadata", *folder.glob("*.distcp")):
        content = bytearray(path.read_bytes())
        if place >= len(content):
            continue
        content[place] ^= 1 << place % 8
        damaged = tmp_path / f"damaged-{path.name}"
        damaged.mkdir()
        for other in folder.iterdir():
            (damaged / other.name).write_bytes(bytes(content) if other == path else other.read_bytes())
        try:
            with ExitStack() as stack:
                materialized(open_dcp(open_store(str(damaged)), stack).tree)
        except ThinpointError:
            pass


def test_metadata_of_another_writer_are_told_apart(tmp_path: Path) -> None:
    save(tmp_path / "ck", {"w": torch.ones(3)})
    rewritten(
        tmp_path / "ck",
        lambda metadata: setattr(metadata, "storage_data", dict.fromkeys(metadata.storage_data, 3)),
    )
    with ExitStack() as stack, pytest.raises(UnsupportedError, match="FileSystemWriter"):
        leaves_of(tmp_path / "ck", stack)


def test_leaves_say_what_they_are(tmp_path: Path) -> None:
    save(tmp_path / "ck", {"w": torch.ones(3, 2).bfloat16(), "n": 3})
    with ExitStack() as stack:
        leaves = leaves_of(tmp_path / "ck", stack)
    leaf = leaves[("w",)]
    assert isinstance(leaf, TensorLeaf) and isinstance(leaves[("n",)], ObjectLeaf)
    assert (leaf.dtype_name, leaf.shape, leaf.num_bytes) == ("bfloat16", (3, 2), 12)
