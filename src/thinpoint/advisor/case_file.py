"""A case from plain values: a YAML or JSON file, and what stands on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from thinpoint.advisor.checks import meant
from thinpoint.advisor.codecs import BUILT_IN, Codec
from thinpoint.advisor.inputs import Case, Cluster, Model, Saves, Storage
from thinpoint.advisor.sizes import COMPONENTS
from thinpoint.errors import UsageError, from_os_error

SECTIONS: dict[str, type] = {"model": Model, "cluster": Cluster, "storage": Storage, "saves": Saves}
MAX_BYTES = 1 << 20

_TEXT_FIELDS = frozenset(
    {"optimizer", "weights", "moments", "gradients", "master", "scope", "unit", "mode", "source"}
)
_HIDDEN = frozenset({"components"})
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(r"([+-]?[0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)


def case_from(values: Mapping[str, Any]) -> Case:
    """A case from nested plain values; what is missing has its default.

    Args:
        values: {"model": {"params": "70b", ...}, "cluster": {...}, "storage": {...}, "saves": {...},
            "codecs": {name: {"ratio": 1.2, "encode_gb_per_s": 16, ...}}}. A codec of a name that is built in changes that one.

    Raises:
        UsageError: an unknown section, field or value; the message names it and what is allowed.
    """
    _check_keys("the case", values, (*SECTIONS, "codecs"))
    made = {name: _section(name, values.get(name) or {}) for name in SECTIONS}
    return Case(**made, codecs=_codecs(values.get("codecs") or {}))


def read_case_file(path: Path) -> dict[str, Any]:
    """The plain values of a `.json` or YAML file, not checked yet.

    Raises:
        UsageError: it is not of its form, has a key twice, or is YAML and PyYAML is not installed.
        StorageError: the system refused.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except UnicodeDecodeError as error:
        raise UsageError("the case is no text", where=path) from error
    except OSError as error:
        raise from_os_error(error, "cannot read the case", where=path) from error
    if len(text) > MAX_BYTES:
        raise UsageError("the case is too large", where=path, expected=f"at most {MAX_BYTES:,} characters")
    values = _parse_json(text, path) if path.suffix.lower() == ".json" else _parse_yaml(text, path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(
            "the case is not valid", where=path, expected="sections with fields", actual=type(values).__name__
        )
    return values


def parse_number(text: str) -> float | None:
    """The number that a text like "70b", "1.5e9" or "1,440" stands for; None if it is none."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    return float(match[1].replace(",", "").replace("_", "")) * _SUFFIXES[match[2].lower()]


def _section(name: str, values: Any) -> Any:
    cls = SECTIONS[name]
    allowed = [field.name for field in fields(cls) if field.name not in _HIDDEN]
    _check_keys(name, values, allowed)
    return cls(**{key: _plain(key, value) for key, value in values.items()})


def _plain(key: str, value: Any) -> Any:
    """A number where one may be written as text: YAML reads 70e9 as a string."""
    if key in _TEXT_FIELDS:
        # YAML reads a bare `none` as text, but people write `null` and `~` too.
        return "none" if value is None else value
    found = parse_number(value) if isinstance(value, str) else None
    if found is None:
        return value
    return int(found) if found.is_integer() else found


def _check_keys(where: str, values: Any, allowed: Any) -> None:
    allowed = list(allowed)
    if not isinstance(values, Mapping):
        raise UsageError(
            f"{where} is not valid", expected=f"fields: {', '.join(allowed)}", actual=repr(values)[:60]
        )
    for key in values:
        if key not in allowed:
            name = key if where == "the case" else f"{where}.{key}"
            raise UsageError(f"{name} is no field", expected=", ".join(allowed), hint=meant(key, allowed))


def _codecs(values: Any) -> tuple[Codec, ...]:
    if not isinstance(values, Mapping):
        raise UsageError(
            "codecs is not valid", expected="a name with fields for each codec", actual=repr(values)[:60]
        )
    codecs = {codec.name: codec for codec in BUILT_IN}
    allowed = [field.name for field in fields(Codec) if field.name != "name"]
    for name, given in values.items():
        _check_keys(f"codecs.{name}", given, allowed)
        changes = {key: _plain(key, value) for key, value in given.items()}
        if "ratios" in changes:
            changes["ratios"] = {
                **getattr(codecs.get(name), "ratios", {}),
                **_ratios(name, changes["ratios"]),
            }
        codecs[name] = replace(codecs[name], **changes) if name in codecs else Codec(name=name, **changes)
    return tuple(codecs.values())


def _ratios(name: str, values: Any) -> dict[tuple[str, str], Any]:
    where = f"codecs.{name}.ratios"
    _check_keys(where, values, COMPONENTS)
    found = {}
    for component, by_precision in values.items():
        if not isinstance(by_precision, Mapping):
            raise UsageError(
                f"{where}.{component} is not valid",
                expected="a ratio for each precision",
                actual=repr(by_precision)[:60],
            )
        for precision, ratio in by_precision.items():
            found[component, str(precision)] = _plain("ratio", ratio)
    return found


def _parse_json(text: str, path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UsageError(f"{key} stands there twice", where=path)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the case is no JSON: {error}", where=path) from error


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(
            "a YAML file needs PyYAML, which is not installed",
            where=path,
            hint="`pip install 'thinpoint[yaml]'`, or write the same as .json",
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined,misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise UsageError(f"{key} stands there twice", where=path)
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"the case is no YAML: {problem}", where=path) from error
