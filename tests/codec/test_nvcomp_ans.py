"""What is known of `nvcomp-ans` without nvCOMP: its prefix, and what a machine that cannot decode it says."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import thinpoint
from thinpoint.cli.contents import as_json
from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import EncodedPart, serial_map
from thinpoint.codec.nvcomp import ANS_ID, ANS_MODES, ans_mode, ans_prefix, read_ans_prefix
from thinpoint.codec.raw import encode_raw
from thinpoint.errors import BackendUnavailableError, MalformedFileError, UnknownCodecError
from thinpoint.file.index import StorageEntry, TensorEntry
from thinpoint.file.reader import FileReader
from thinpoint.file.writer import FileWriter
from thinpoint.store import open_sink, open_source


def ans_part(num_elems: int = 1000) -> EncodedPart:
    """A part that says it is coded with nvcomp-ans. Its blocks are none of nvCOMP's: nothing here can tell."""
    words = np.arange(num_elems, dtype="<u4")
    return dataclasses.replace(
        encode_raw(words, serial_map),
        codec_id=ANS_ID,
        prefix=ans_prefix(ans_mode("float32"), "6.0.0.12"),
        chain="nvcomp-ans <f4 6.0.0.12",
    )


@pytest.fixture
def ans_file(tmp_path: Path) -> Path:
    """A file with one such part, and one that any machine reads."""
    path = tmp_path / "ans.thin"
    words = np.arange(1000, dtype="<u4")
    with open_sink(path) as sink:
        writer = FileWriter(sink)
        for storage, part in enumerate((ans_part(), encode_raw(words, serial_map))):
            writer.add_part(
                part,
                storage=storage,
                start_bytes=0,
                dtype="float32",
                role="weight",
                label={"name": ["ab"[storage]]},
            )
        tensors = [
            TensorEntry(storage=i, dtype="float32", shape=(1000,), stride=(1,), offset=0, extra={})
            for i in range(2)
        ]
        whole = thinpoint_tree()
        writer.finish(
            storages=[StorageEntry(bytes=4000, device="cpu") for _ in range(2)],
            tensors=tensors,
            tree=whole,
            meta={},
            encoder=0,
            writer_version="0",
        )
    return path


def thinpoint_tree() -> object:
    """The tree of {"a": tensor 0, "b": tensor 1}."""
    from thinpoint.state.flatten import flatten

    return flatten({"a": torch.zeros(1000), "b": torch.ones(1000)}).tree


def test_prefix_says_mode_and_version() -> None:
    for mode in ANS_MODES:
        prefix = ans_prefix(mode, "6.0.0.12")
        assert read_ans_prefix(prefix, mode.item_bytes) == (mode, "6.0.0.12")
    assert ans_prefix(ans_mode("float32"), "6.0.0.12") == b"\x01\x036.0.0.12"


def test_only_floats_that_nvcomp_knows_are_coded_as_floats() -> None:
    assert {name: ans_mode(name).name for name in ("float32", "float16", "bfloat16", "float8_e4m3fn")} == {
        "float32": "<f4",
        "float16": "<f2",
        "bfloat16": "<f2",
        "float8_e4m3fn": "|f1",
    }
    for other in ("float64", "float8_e5m2", "int32", "int16", "uint8", "bool", "bytes"):
        assert ans_mode(other).name == "|u1"


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"\x01",
        b"\x01\x03",
        b"\x01\x046.0",
        b"\x01\x036.0\n",
        b"\x01\x03six",
        b"\x01\x03" + b"6" * 33,
        b"\x01\x026.0",
        "\u0661".encode(),
    ],
)
def test_prefix_that_is_not_valid_is_refused(prefix: bytes) -> None:
    with pytest.raises((MalformedFileError, UnknownCodecError)):
        read_ans_prefix(prefix, 4)


def test_layout_of_a_later_version_is_an_unknown_codec() -> None:
    with pytest.raises(UnknownCodecError):
        read_ans_prefix(b"\x02\x036.0", 4)


def test_host_backend_names_the_extra_and_the_version_that_a_part_needs() -> None:
    part = ans_part()
    with pytest.raises(BackendUnavailableError) as caught:
        get_backend().decode(part, 0, part.blocks, np.empty(1000, "<u4"))
    for words in ("nvCOMP 6.0.0.12", "thinpoint[nvcomp]", "NVIDIA GPU"):
        assert words in str(caught.value)


def test_load_names_the_tensor_and_what_is_missing_and_loads_the_rest(ans_file: Path) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        thinpoint.load(ans_file)
    assert caught.value.tensor == "a"
    assert "thinpoint[nvcomp]" in str(caught.value)
    loaded = thinpoint.load(ans_file, names="b")["b"]
    assert loaded.view(torch.int32).tolist() == list(range(1000))


def test_verify_without_decoding_needs_no_nvcomp(ans_file: Path) -> None:
    thinpoint.verify(ans_file)
    with pytest.raises(BackendUnavailableError):
        thinpoint.verify(ans_file, deep=True)


def test_inspect_says_what_the_file_needs(ans_file: Path) -> None:
    with open_source(ans_file) as source:
        report = as_json(FileReader(source))
    assert report["codecs"] == {"nvcomp-ans": 1, "raw": 1}
    assert report["needs"] == ["an NVIDIA GPU and nvCOMP (thinpoint[nvcomp]) for nvcomp-ans <f4 6.0.0.12"]
