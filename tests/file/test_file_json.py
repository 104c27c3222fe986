"""The JSON that a file may hold."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpoint.errors import MalformedFileError, UsageError
from thinpoint.file.json_text import dump_json, parse_json
from thinpoint.file.limits import MAX_JSON_DEPTH, MAX_JSON_INT_CHARS

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=20,
)


def parse(raw: bytes):
    return parse_json(raw, what="the index", where="x.thin", offset=32)


@given(json_values)
def test_any_value_comes_back_the_same(value):
    back = parse(dump_json(value))
    assert repr(back) == repr(value)


def test_text_is_canonical():
    assert dump_json({"b": [1, -0.0, "é\ud800"], "a": None}) == b'{"b":[1,-0.0,"\\u00e9\\ud800"],"a":null}'


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"a":1,}',
        b"[1] x",
        b"\xff",
        b"\xef\xbb\xbf[]",
        b"[NaN]",
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e999]",
        b'{"a":1,"a":1}',
        b'[{"b":{"a":1,"\\u0061":2}}]',
        b"[" + b"9" * (MAX_JSON_INT_CHARS + 1) + b"]",
        b"[" + b"9" * 5000 + b"]",
        b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1),
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
        b'"\n"',
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_other_json_is_refused(raw):
    with pytest.raises(MalformedFileError, match=r"the index is not valid JSON .* in x\.thin at byte 32"):
        parse(raw)


@pytest.mark.parametrize("digits", [MAX_JSON_INT_CHARS, MAX_JSON_INT_CHARS + 1])
def test_long_digits_are_refused_only_in_integers(digits):
    text = "9" * digits
    assert parse(f'[0.{text},"{text}",["{text}"],1]'.encode()) == [float(f"0.{text}"), text, [text], 1]
    longest = "9" * (MAX_JSON_INT_CHARS - 1)
    assert parse(f'["{text}",-{longest},9{longest}]'.encode())[1:] == [-int(longest), int(f"9{longest}")]
    with pytest.raises(MalformedFileError, match="an integer of 21 characters"):
        parse(f'["{text}",-9{longest}]'.encode())


def test_deepest_allowed_nesting_is_read():
    raw = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    assert dump_json(parse(raw)) == raw


def test_brackets_in_strings_do_not_nest():
    value = ["[" * 1000, '"[{' * 1000, "\\" * 999, '\\"[' * 1000, "\\\\["]
    assert parse(dump_json(value)) == value
    assert parse(dump_json([["[", "", "{", "]"]] * 1000)) == [["[", "", "{", "]"]] * 1000
    deep = b'["\\\\",' + b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH + b"]"
    with pytest.raises(MalformedFileError, match="nested"):
        parse(deep)


@pytest.mark.timeout(60)
def test_nesting_across_pieces_of_a_long_text_is_counted():
    filler = b'"' + b"x" * 100_000 + b'",'
    raw = (b"[" + filler) * (MAX_JSON_DEPTH + 1)
    assert len(raw) > 40 << 20
    with pytest.raises(MalformedFileError, match="nested"):
        parse(raw)


def test_deep_call_stack_gives_our_error_not_a_crash():
    raw = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    outcomes = set()

    def descend(depth: int) -> None:
        try:
            outcomes.add(isinstance(parse(raw), list))
        except MalformedFileError:
            outcomes.add("refused")
        if depth:
            descend(depth - 1)

    descend(min(sys.getrecursionlimit() - 200, 700) - MAX_JSON_DEPTH // 4)
    assert True in outcomes
    assert outcomes <= {True, "refused"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x", object()])
def test_what_is_no_json_is_not_written(value):
    with pytest.raises(UsageError):
        dump_json([value])


def test_cycles_are_not_written():
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(UsageError):
        dump_json(cycle)


@pytest.mark.timeout(60)
def test_long_text_of_escaped_quotes_is_linear():
    raw = b'["' + b'\\"' * 2_000_000
    with pytest.raises(MalformedFileError):
        parse(raw)
    assert json.loads(raw + b'"]') == ['"' * 2_000_000]
