"""Small JSON files of untrusted origin: fields taken out of them, each with its type and range checked."""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

from thinpoint.errors import LimitExceededError, MalformedFileError, UsageError
from thinpoint.file.json_text import parse_json
from thinpoint.file.limits import MAX_INT64

MAX_TEXT_CHARS = 1024


def dump(value: dict[str, Any]) -> bytes:
    """A JSON object as stored: sorted keys, ASCII, a line for each field, for people who look into it.

    Raises:
        UsageError: something in it is no JSON value.
    """
    try:
        text = json.dumps(value, ensure_ascii=True, allow_nan=False, sort_keys=True, indent=1)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"not a JSON value: {error}") from error
    return text.encode("ascii") + b"\n"


class Fields:
    """The fields of one JSON object.

    Args:
        value: what was parsed.
        what: the object, for messages.
        where: the file, for messages; also an attribute.

    Raises (here and in all methods):
        MalformedFileError: a field is missing or of another type.
        LimitExceededError: a number or a text is too large.
    """

    def __init__(self, value: Any, *, what: str, where: object) -> None:
        self._what = what
        self.where = where
        if not isinstance(value, dict):
            raise self.error("it", "an object", value)
        self._value = value

    @classmethod
    def parse(cls, raw: bytes, *, what: str, where: object) -> Fields:
        """The fields of the JSON object in `raw`."""
        return cls(parse_json(raw, what=what, where=where), what=what, where=where)

    def error(self, name: str, expected: object, actual: object) -> MalformedFileError:
        """The error for a field."""
        return MalformedFileError(
            f"{self._what}: {name}", where=self.where, expected=expected, actual=reprlib.repr(actual)
        )

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._value.get(name) is not None

    def below(self, name: str) -> Fields:
        """A field that is an object."""
        return self._below(name, self.get(name, dict))

    def get(self, name: str, *types: type) -> Any:
        """A field of one of these types, exactly."""
        value = self._value.get(name)
        if type(value) not in types:
            raise self.error(name, " or ".join(t.__name__ for t in types), value)
        return value

    def number(self, name: str, most: int) -> int:
        """A whole number from 0 to `most`."""
        return self._number(name, self._value.get(name), most)

    def seconds(self, name: str) -> float:
        """A time in seconds since 1970."""
        value = float(self.get(name, float, int))
        if not (math.isfinite(value) and 0 <= value < 1e12):
            raise self.error(name, "seconds since 1970", value)
        return value

    def text(self, name: str) -> str:
        """A text of at most MAX_TEXT_CHARS characters."""
        value: str = self.get(name, str)
        if len(value) > MAX_TEXT_CHARS:
            raise LimitExceededError(
                f"{self._what}: length of {name}",
                where=self.where,
                expected=f"at most {MAX_TEXT_CHARS}",
                actual=len(value),
            )
        return value

    def items(self, name: str, most: int) -> list[Any]:
        """A list of at most `most` values, which are not checked."""
        return list(self._at_most(name, list, most))

    def mapping(self, name: str, most: int) -> dict[str, Any]:
        """An object of at most `most` values, which are not checked."""
        return dict(self._at_most(name, dict, most))

    def texts(self, name: str, most: int) -> list[str]:
        """A list of at most `most` texts."""
        items = self._at_most(name, list, most)
        return [Fields({name: item}, what=self._what, where=self.where).text(name) for item in items]

    def numbers(self, name: str, most: int) -> list[int]:
        """A list of at most `most` whole numbers from 0 to 2^63 - 1."""
        items = self._at_most(name, list, most)
        return [self._number(name, item, MAX_INT64) for item in items]

    def named_numbers(self, name: str, most: int, most_each: int) -> dict[str, int]:
        """An object of at most `most` whole numbers from 0 to `most_each`."""
        items = self._at_most(name, dict, most)
        return {key: self._number(f"{name}.{key:.40}", item, most_each) for key, item in items.items()}

    def objects(self, name: str, most: int) -> list[Fields]:
        """A list of at most `most` objects."""
        items = self._at_most(name, list, most)
        return [self._below(f"{name}[{i}]", item) for i, item in enumerate(items)]

    def named_objects(self, name: str, most: int) -> dict[str, Fields]:
        """An object of at most `most` objects."""
        items = self._at_most(name, dict, most)
        return {key: self._below(f"{name}.{key:.40}", item) for key, item in items.items()}

    def named_texts(self, name: str, most: int) -> dict[str, str]:
        """An object of at most `most` texts."""
        below = self._below(name, self._at_most(name, dict, most))
        return {key: below.text(key) for key in below._value}

    def _number(self, name: str, value: Any, most: int) -> int:
        if type(value) is not int:
            raise self.error(name, "int", value)
        if value < 0:
            raise self.error(name, "at least 0", value)
        if value > most:
            raise LimitExceededError(
                f"{self._what}: {name}",
                where=self.where,
                expected=f"at most {most:,}",
                actual=reprlib.repr(value),
            )
        return value

    def _below(self, name: str, value: Any) -> Fields:
        return Fields(value, what=f"{self._what}: {name}", where=self.where)

    def _at_most(self, name: str, kind: type, most: int) -> Any:
        items = self.get(name, kind)
        if len(items) > most:
            raise LimitExceededError(
                f"{self._what}: length of {name}",
                where=self.where,
                expected=f"at most {most:,}",
                actual=f"{len(items):,}",
            )
        return items
