"""Objects without parts that matter: numbers, dates, paths and the like, to their nodes and back. Torch-free.

`ENCODERS` goes by exact type, so that no subclass is silently turned into its base; `DECODERS` by tag.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import fractions
import math
import os
import pathlib
import re
import struct
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

from thinpoint.state.tree import Node

MAX_PLAIN_INT = 1 << 53


class NotPlainError(Exception):
    """An object of a known type without a plain form (a datetime with a foreign tzinfo). Stays in this room."""


# ---- numbers -----------------------------------------------------------------------------------------------


def _encode_int(value: int) -> Node:
    # Hexadecimal: Python limits the digits of decimal conversions, and they take quadratic time.
    return value if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT else {"int": hex(value)}


def _decode_int(body: Any) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", body):
        raise ValueError("not a hexadecimal integer")
    return int(body, 16)


def _plain_int(node: Node) -> int:
    if type(node) is int:
        return node
    return _decode_int(_one(node, "int"))


def float_bits(value: float) -> str:
    """The 16 hexadecimal digits of a double, most significant first."""
    return struct.pack(">d", value).hex()


def float_from_bits(text: Any) -> float:
    """The inverse of `float_bits`.

    Raises:
        ValueError, TypeError: not 16 hexadecimal digits.
    """
    if len(text) != 16:
        raise ValueError("a double has 16 hexadecimal digits")
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def _encode_float(value: float) -> Node:
    return value if math.isfinite(value) else {"float": float_bits(value)}


def _decode_complex(body: Any) -> complex:
    real, imag = body
    return complex(float_from_bits(real), float_from_bits(imag))


def _decode_decimal(body: Any) -> decimal.Decimal:
    return decimal.Decimal(_text(body))


def _decode_fraction(body: Any) -> fractions.Fraction:
    numerator, denominator = body
    return fractions.Fraction(_plain_int(numerator), _plain_int(denominator))


def _decode_range(body: Any) -> range:
    start, stop, step = body
    return range(_plain_int(start), _plain_int(stop), _plain_int(step))


# ---- dates -------------------------------------------------------------------------------------------------


def _encode_delta(value: dt.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _decode_delta(body: Any) -> dt.timedelta:
    days, seconds, microseconds = _ints(body, 3)
    return dt.timedelta(days, seconds, microseconds)


def _encode_timezone(value: dt.timezone) -> Node:
    # Offset, and the name if it was given; `tzname` would make one up.
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return {"timezone": [_encode_delta(offset), *name]}


def _decode_timezone(body: Any) -> dt.timezone:
    offset, *name = body
    if len(name) > 1:
        raise ValueError("a timezone has an offset and a name")
    return dt.timezone(_decode_delta(offset), *(_text(part) for part in name))


def _encode_zoneinfo(value: zoneinfo.ZoneInfo) -> Node:
    if value.key is None:
        raise NotPlainError("a time zone without a key")
    return {"zoneinfo": value.key}


def _decode_zoneinfo(body: Any) -> zoneinfo.ZoneInfo:
    return zoneinfo.ZoneInfo(_text(body))


def _encode_tz(tz: dt.tzinfo | None) -> Node:
    if tz is None:
        return None
    if type(tz) is dt.timezone:
        return _encode_timezone(tz)
    if type(tz) is zoneinfo.ZoneInfo:
        return _encode_zoneinfo(tz)
    raise NotPlainError(f"a tzinfo of type {type(tz).__name__}")


def _decode_tz(node: Node) -> dt.tzinfo | None:
    if node is None:
        return None
    return (
        _decode_timezone(node["timezone"]) if "timezone" in node else _decode_zoneinfo(_one(node, "zoneinfo"))
    )


def _encode_time(value: dt.time) -> Node:
    numbers = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return {"time": [*numbers, _encode_tz(value.tzinfo)]}


def _decode_time(body: Any) -> dt.time:
    *numbers, tz = body
    hour, minute, second, microsecond, fold = _ints(numbers, 5)
    return dt.time(hour, minute, second, microsecond, _decode_tz(tz), fold=fold)


def _encode_datetime(value: dt.datetime) -> Node:
    date = [value.year, value.month, value.day]
    return {"datetime": [*date, *_encode_time(value.timetz())["time"]]}


def _decode_datetime(body: Any) -> dt.datetime:
    *numbers, tz = body
    year, month, day, hour, minute, second, microsecond, fold = _ints(numbers, 8)
    return dt.datetime(year, month, day, hour, minute, second, microsecond, _decode_tz(tz), fold=fold)


def _decode_date(body: Any) -> dt.date:
    return dt.date(*_ints(body, 3))


# ---- paths and ids -----------------------------------------------------------------------------------------

_PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}
_FOREIGN_PATHS = {"PosixPath": "PurePosixPath"} if os.name == "nt" else {"WindowsPath": "PureWindowsPath"}


def _encode_path(value: pathlib.PurePath) -> Node:
    return {"path": [type(value).__name__, str(value)]}


def _decode_path(body: Any) -> pathlib.PurePath:
    name, text = body
    return _PATHS[_FOREIGN_PATHS.get(name, name)](_text(text))


def _decode_uuid(body: Any) -> uuid.UUID:
    return uuid.UUID(hex=_text(body))


def _decode_ellipsis(body: Any) -> Any:
    if body is not None:
        raise ValueError("an ellipsis holds nothing")
    return ...


# ---- bytes -------------------------------------------------------------------------------------------------


def encode_base64(data: bytes) -> str:
    """Base64 of a few bytes, for the tree itself."""
    return base64.b64encode(data).decode("ascii")


def decode_base64(text: str) -> bytes:
    """The inverse of `encode_base64`.

    Raises:
        ValueError: other characters or wrong padding.
    """
    return base64.b64decode(text.encode("ascii"), validate=True)


# ---- checks ------------------------------------------------------------------------------------------------


def _one(node: Any, tag: str) -> Any:
    if not isinstance(node, dict) or list(node) != [tag]:
        raise ValueError(f"expected {tag!r}")
    return node[tag]


def _text(body: Any) -> str:
    if not isinstance(body, str):
        raise TypeError("expected a string")
    return body


def _ints(body: Any, count: int) -> list[int]:
    if len(body) != count or any(type(item) is not int for item in body):
        raise ValueError(f"expected {count} integers")
    return list(body)


# ---- tables ------------------------------------------------------------------------------------------------

ENCODERS: dict[type, Callable[[Any], Node]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    complex: lambda value: {"complex": [float_bits(value.real), float_bits(value.imag)]},
    type(...): lambda value: {"ellipsis": None},
    range: lambda value: {"range": [_encode_int(n) for n in (value.start, value.stop, value.step)]},
    decimal.Decimal: lambda value: {"decimal": str(value)},
    fractions.Fraction: lambda value: {
        "fraction": [_encode_int(value.numerator), _encode_int(value.denominator)]
    },
    dt.timedelta: lambda value: {"timedelta": _encode_delta(value)},
    dt.timezone: _encode_timezone,
    zoneinfo.ZoneInfo: _encode_zoneinfo,
    dt.date: lambda value: {"date": [value.year, value.month, value.day]},
    dt.time: _encode_time,
    dt.datetime: _encode_datetime,
    uuid.UUID: lambda value: {"uuid": value.hex},
    **dict.fromkeys(_PATHS.values(), _encode_path),
}

DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": _decode_int,
    "float": float_from_bits,
    "complex": _decode_complex,
    "ellipsis": _decode_ellipsis,
    "range": _decode_range,
    "decimal": _decode_decimal,
    "fraction": _decode_fraction,
    "timedelta": _decode_delta,
    "timezone": _decode_timezone,
    "zoneinfo": _decode_zoneinfo,
    "date": _decode_date,
    "time": _decode_time,
    "datetime": _decode_datetime,
    "uuid": _decode_uuid,
    "path": _decode_path,
}

DECODE_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    OSError,
    RuntimeError,
)
"""What a decoder may raise on a malformed body (`zoneinfo` KeyError and OSError); callers raise MalformedFileError."""
