"""JSON as the format allows it: canonical when written, without traps when read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from thinpoint.errors import MalformedFileError, UsageError
from thinpoint.file.limits import MAX_JSON_DEPTH, MAX_JSON_INT_CHARS

_CHUNK_BYTES = 1 << 20
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_ZERO_FOR_DIGIT = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))


def dump_json(value: Any) -> bytes:
    """Canonical JSON of `value`: no white space, ASCII, keys in the order of the dicts.

    Raises:
        UsageError: the value is no JSON (a NaN, an object of another type, too deep or cyclic).
    """
    try:
        return _ENCODER.encode(value).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"not a JSON value: {error}") from error


def parse_json(raw: bytes, *, what: str, where: object, offset: int | None = None) -> Any:
    """The value of untrusted JSON bytes.

    Args:
        raw: UTF-8.
        what: the thing parsed, for messages: "the index".
        where: the file, for messages.
        offset: byte offset of the thing in the file, for messages.

    Raises:
        MalformedFileError: not UTF-8, not JSON, a key twice in an object, NaN, Infinity or a number that
            overflows, an integer of more than `MAX_JSON_INT_CHARS` characters, or nesting deeper than
            `MAX_JSON_DEPTH`.
    """

    def fail(reason: str) -> NoReturn:
        raise MalformedFileError(f"{what} is not valid JSON ({reason})", where=where, offset=offset)

    if _is_too_deep(raw):
        fail(f"nested more than {MAX_JSON_DEPTH} deep")
    # Calling Python for every integer takes longer than all the rest.
    may_be_long = b"0" * MAX_JSON_INT_CHARS in raw.translate(_ZERO_FOR_DIGIT)
    try:
        return (_CAREFUL if may_be_long else _SHORT_INTS).decode(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        fail(str(error))


def _parse_int(text: str) -> int:
    if len(text) > MAX_JSON_INT_CHARS:
        raise ValueError(f"an integer of {len(text)} characters")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number beyond the range of a double")
    return value


def _parse_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key twice in one object")
    return value


def _decoder(parse_int: Callable[[str], int]) -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_int=parse_int,
        parse_float=_parse_float,
        parse_constant=_parse_constant,
        object_pairs_hook=_parse_object,
    )


_CAREFUL = _decoder(_parse_int)
_SHORT_INTS = _decoder(int)


def _is_too_deep(raw: bytes) -> bool:
    """Whether brackets outside strings nest too deeply; checked first because the parser recurses."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH:
        return False
    # Without escaped backslashes and escaped quotes, every quote that is left opens or closes a string.
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes with no bracket between them change nothing.
    text = np.frombuffer(raw.translate(None, _NO_STRUCTURE).replace(b'""', b""), np.uint8)
    in_string = False
    depth = 0
    for start in range(0, text.size, _CHUNK_BYTES):
        piece = text[start : start + _CHUNK_BYTES]
        inside = np.logical_xor.accumulate(piece == ord('"')) ^ in_string
        step = ((piece == ord("[")) | (piece == ord("{"))).astype(np.int32)
        step -= (piece == ord("]")) | (piece == ord("}"))
        step[inside] = 0
        depths = np.cumsum(step, dtype=np.int64) + depth
        if int(depths.max()) > MAX_JSON_DEPTH:
            return True
        in_string = bool(inside[-1])
        depth = int(depths[-1])
    return False
