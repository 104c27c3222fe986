"""Cases from files and plain values, and what is said about wrong ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from thinpoint.advisor import BUILT_IN, Case, Cluster, Codec, Model, Saves, Storage, case_from, read_case_file
from thinpoint.advisor.case_file import MAX_BYTES, parse_number
from thinpoint.errors import NotFoundError, UsageError

VALUES: dict[str, Any] = {
    "model": {"params": 7e9, "optimizer": "lion", "gradients": "none"},
    "cluster": {"gpus": 16, "mtbf_hours": 100.0},
    "storage": {"gb_per_s": 20, "scope": "node"},
    "saves": {"mode": "async"},
    "codecs": {
        "thinpoint": {"encode_gb_per_s": 80},
        "mine": {"ratio": 1.3, "scope": "aggregate", "encode_gb_per_s": 16},
    },
}


def test_nothing_given_is_the_default_case() -> None:
    assert case_from({}) == Case()
    assert case_from({"model": None, "codecs": None}) == Case()


def test_what_is_given_replaces_defaults() -> None:
    case = case_from(VALUES)
    assert case.model == Model(params=7e9, optimizer="lion", gradients="none")
    assert case.cluster == Cluster(gpus=16, mtbf_hours=100.0)
    assert case.storage == Storage(gb_per_s=20, scope="node")
    assert case.saves == Saves(mode="async")
    assert [codec.name for codec in case.codecs] == [*(codec.name for codec in BUILT_IN), "mine"]
    assert case.codec("thinpoint").encode_gb_per_s == 80
    assert case.codec("thinpoint").ratios == BUILT_IN[-1].ratios
    assert case.codec("mine") == Codec(name="mine", ratio=1.3, scope="aggregate", encode_gb_per_s=16)


def test_ratios_are_given_by_component_and_precision() -> None:
    case = case_from({"codecs": {"thinpoint": {"ratios": {"weights": {"fp4": 1.1, "bf16": "1.6"}}}}})
    ratios = case.codec("thinpoint").ratios
    assert ratios["weights", "fp4"] == 1.1 and ratios["weights", "bf16"] == 1.6
    assert ratios["second_moment", "fp32"] == BUILT_IN[-1].ratios["second_moment", "fp32"]


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_files_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"case{suffix}"
    # JSON is YAML too.
    path.write_text(json.dumps(VALUES))
    assert case_from(read_case_file(path)) == case_from(VALUES)


def test_yaml_of_people(tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(
        "model:\n  params: 70e9   # a string to YAML\n  gradients: ~\n  master: none\ncluster:\n  gpus: 1,024\n"
    )
    case = case_from(read_case_file(path))
    assert (case.model.params, case.model.gradients, case.model.master) == (70e9, "none", "none")
    assert case.cluster.gpus == 1024 and isinstance(case.cluster.gpus, int)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_case_file(tmp_path / "empty.yaml") == {}


WRONG = [
    (
        {"model": {"optimizer": "adamx"}},
        "model.optimizer is not valid: expected adamw or adam or",
        "Do you mean 'adam",
    ),
    ({"model": {"params": -1}}, "model.params is not valid: expected a number of at least 1, found -1", ""),
    ({"model": {"params": "many"}}, "model.params is not valid", "found 'many'"),
    ({"model": {"params": True}}, "model.params is not valid", "found True"),
    ({"model": {"weights": "none"}}, "model.weights is not valid: expected fp32 or bf16", ""),
    ({"model": {"moments": "fp64"}}, "model.moments is not valid: expected fp32 or bf16", ""),
    ({"model": {"size_gb": 560}}, "model.size_gb contradicts the other fields of model", "expected 840.0 GB"),
    ({"model": {"components": []}}, "model.components is no field", "expected params, optimizer"),
    ({"cluster": {"gpus": 0}}, "cluster.gpus is not valid: expected a whole number of at least 1", ""),
    ({"cluster": {"gpus": 2.5}}, "cluster.gpus is not valid", "found 2.5"),
    (
        {"cluster": {"gpus": 8, "writers": 9}},
        "cluster.writers is not valid: expected at most cluster.gpus, 8",
        "",
    ),
    ({"cluster": {"usd_per_gpu_hour": -4}}, "cluster.usd_per_gpu_hour is not valid", "found -4"),
    ({"cluster": {"mtbf_hours": 0}}, "cluster.mtbf_hours is not valid: expected a number above 0", ""),
    ({"storage": {"gb_per_s": -5}}, "storage.gb_per_s is not valid: expected a number above 0, found -5", ""),
    ({"storage": {"gb_per_s": float("nan")}}, "storage.gb_per_s is not valid", "found nan"),
    (
        {"storage": {"scope": "rack"}},
        "storage.scope is not valid: expected aggregate or node, found 'rack'",
        "",
    ),
    ({"storage": {"unit": "gb"}}, "storage.unit is not valid: expected GB or GiB", ""),
    (
        {"storage": {"gb_per_sec": 5}},
        "storage.gb_per_sec is no field: expected gb_per_s",
        "Do you mean 'gb_per_s'?",
    ),
    (
        {"storge": {}},
        "storge is no field: expected model, cluster, storage, saves, codecs",
        "Do you mean 'storage'?",
    ),
    ({"storage": 5}, "storage is not valid: expected fields: gb_per_s", "found 5"),
    ({"saves": {"mode": "synch"}}, "saves.mode is not valid: expected sync or async or overlap", "'sync'?"),
    ({"saves": {"interval_min": 0}}, "saves.interval_min is not valid", "above 0"),
    ({"codecs": ["zstd"]}, "codecs is not valid", "a name with fields"),
    ({"codecs": {"x": {"ratio": 0}}}, "codecs.x.ratio is not valid: expected a number above 0", ""),
    ({"codecs": {"x": {"speed": 5}}}, "codecs.x.speed is no field", "encode_gb_per_s"),
    ({"codecs": {"x": {"scope": "node"}}}, "codecs.x.scope is not valid: expected gpu or aggregate", ""),
    ({"codecs": {"x": {"overlaps": "no"}}}, "codecs.x.overlaps is not valid: expected true or false", ""),
    ({"codecs": {"x": {"ratios": {"bias": {}}}}}, "codecs.x.ratios.bias is no field: expected weights", ""),
    (
        {"codecs": {"x": {"ratios": {"weights": 2}}}},
        "codecs.x.ratios.weights is not valid",
        "a ratio for each precision",
    ),
    (
        {"codecs": {"x": {"ratios": {"weights": {"bf16": -1}}}}},
        "codecs.x.ratios.weights.bf16 is not valid",
        "",
    ),
]


@pytest.mark.parametrize(("values", "says", "and_says"), WRONG, ids=lambda value: str(value)[:48])
def test_wrong_values_are_named_with_what_is_allowed(
    values: dict[str, Any], says: str, and_says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        case_from(values)
    assert says in str(caught.value) and and_says in str(caught.value)


def test_codecs_have_different_names_and_one_is_none() -> None:
    with pytest.raises(UsageError, match="two of the same name"):
        Case(codecs=(*BUILT_IN, BUILT_IN[0]))
    with pytest.raises(UsageError, match="lacks the codec"):
        Case(codecs=BUILT_IN[1:])
    with pytest.raises(UsageError, match="Do you mean 'thinpoint'"):
        Case().codec("thinpont")


BROKEN = {
    "a.yaml": ("model: [", "is no YAML"),
    "b.yaml": ("model:\n  params: 1\n  params: 2\n", "params stands there twice"),
    "c.yaml": ("model: !!python/object/apply:os.getcwd []\n", "is no YAML"),
    "d.yaml": ("- 1\n", "the case is not valid"),
    "e.json": ("{", "is no JSON"),
    "f.json": ('{"model": {"params": 1, "params": 2}}', "params stands there twice"),
    "g.json": ("[" * 100_000, "is no JSON"),
    "h.yaml": ("#" * (MAX_BYTES + 1), "too large"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    content, says = BROKEN[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=says) as caught:
        read_case_file(tmp_path / name)
    assert name in str(caught.value)


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_case_file(tmp_path / "none.yaml")
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no text"):
        read_case_file(tmp_path / "x.yaml")


def test_without_pyyaml_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "x.yaml").write_text("{}")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UsageError, match=r"needs PyYAML.*thinpoint\[yaml\]"):
        read_case_file(tmp_path / "x.yaml")
    assert read_case_file(tmp_path / "x.json") == {}


def test_numbers_with_suffixes() -> None:
    texts = ("70b", "125M", "1.5e9", "1,440", "1_000", " 3.5 ", "2T", "70bn", "", "b", "1e", "0x10")
    assert [parse_number(text) for text in texts] == [70e9, 125e6, 1.5e9, 1440, 1000, 3.5, 2e12, *[None] * 5]
