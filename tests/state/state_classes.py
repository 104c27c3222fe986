"""Classes that states in the tests refer to by name."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

created: list[str] = []


class Color(enum.Enum):
    RED = 1
    GREEN = "g"
    ALIAS = 1


class Level(enum.IntEnum):
    LOW = 1


class Option(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    tags: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        created.append("Config")


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: Any = None


@dataclasses.dataclass
class Guarded:
    a: int

    def __setattr__(self, name: str, value: object) -> None:
        created.append("Guarded.__setattr__")
        object.__setattr__(self, name, value)

    @property
    def doubled(self) -> int:
        return 2 * self.a


@dataclasses.dataclass
class Finalised:
    path: str

    def __del__(self) -> None:
        created.append("Finalised.__del__")


@dataclasses.dataclass
class Reduced:
    a: int

    def __reduce__(self) -> Any:
        return Reduced, (self.a + 1,)


class Point(NamedTuple):
    x: int
    y: Any


Pair = collections.namedtuple("Pair", ["first", "second"])


class Plain:
    """An object that only pickle can store."""

    def __init__(self, value: Any) -> None:
        self.value = value


class MyDict(dict):  # type: ignore[type-arg]
    pass
