"""Every exception thinpoint raises, with its exit code and a hint.

One class per cause. Damage inherits from no built-in exception, so that no `except ValueError` swallows a broken
checkpoint; what the operating system refused is also an `OSError` and keeps its errno.
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Mapping
from typing import Any


class ThinpointError(Exception):
    """Base of all errors.

    Args:
        what: what happened, in words, without a trailing period.
        where: the file (or stage) concerned.
        tensor: the name of the tensor concerned.
        offset: byte offset in the file.
        expected: what was expected at that place.
        actual: what was found.
        hint: what the user can do about it.
    """

    exit_code = 1
    default_hint: str | None = None

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: Any = None,
        actual: Any = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.actual = actual
        self.hint = hint if hint is not None else self.default_hint
        super().__init__(what)

    def __str__(self) -> str:
        text = self.what
        if self.tensor is not None:
            text += f" (tensor {self.tensor})"
        if self.where is not None:
            text += f" in {self.where}"
        if self.offset is not None:
            text += f" at byte {self.offset:,}"
        found = [f"expected {self.expected}"] if self.expected is not None else []
        found += [f"found {self.actual}"] if self.actual is not None else []
        if found:
            text += f": {', '.join(found)}"
        if self.hint:
            text += f". {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, dict(self.__dict__))


def _rebuild(cls: type[ThinpointError], what: str, fields: dict[str, Any]) -> ThinpointError:
    error = cls.__new__(cls, what)
    Exception.__init__(error, what)
    for name, value in fields.items():
        # Not into `__dict__`: an `OSError` keeps its errno elsewhere.
        setattr(error, name, value)
    return error


class UsageError(ThinpointError):
    """An argument or option that makes no sense: wrong type, unknown name, values that contradict each other."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A tensor or key that the file does not hold."""


# ---- damage: the bytes of a file are not what was written ----------------------------------------------------------


class DamagedFileError(ThinpointError):
    """The file is not intact. Base of the classes that say how."""

    exit_code = 3
    default_hint = "Do not load this file; use another copy or an older checkpoint"


class NotThinFileError(DamagedFileError):
    """The file does not begin as a .thin file does."""

    default_hint = "If it is a .pt or .safetensors file, `thinpoint compress` makes a .thin file of it"


class TruncatedFileError(DamagedFileError):
    """The file ends too early."""


class DigestMismatchError(DamagedFileError):
    """Stored bytes, or a tensor's decoded bits, do not match their checksum."""


class MalformedFileError(DamagedFileError):
    """Sizes, counts or values in the file contradict each other or the specification."""


class LimitExceededError(DamagedFileError):
    """A size in the file is beyond the limit that the specification sets."""


# ---- support: intact, but not for this version or this machine -----------------------------------------------------


class UnsupportedError(ThinpointError):
    """Intact, but this version or machine cannot read it. Base class."""

    exit_code = 4


class NotEnoughMemoryError(UnsupportedError):
    """What is to be loaded, or what a save must hold, does not fit into the memory there is; no file is to blame."""


class UnsupportedVersionError(UnsupportedError):
    """The file was written by a newer version whose format this one cannot read."""

    default_hint = "Install a newer thinpoint"


class UnsupportedFeatureError(UnsupportedError):
    """The file requires a feature that this version does not know."""

    default_hint = "Install a newer thinpoint"


class UnknownCodecError(UnsupportedError):
    """A part is coded with a codec that this version does not know."""

    default_hint = "Install a newer thinpoint"


class BackendUnavailableError(UnsupportedError):
    """A backend or codec asked for by name cannot run here."""

    default_hint = "`thinpoint doctor` lists what works on this machine"


# ---- state: the object to save or to fill --------------------------------------------------------------------------


class UnsafeObjectError(ThinpointError):
    """Loading would unpickle an object or import a class that the file names."""

    exit_code = 5


class UnsupportedObjectError(ThinpointError):
    """The state holds an object that cannot be stored, or not without pickle."""

    exit_code = 7


class StateMismatchError(ThinpointError):
    """The file and the state to fill differ: missing or unexpected names, shapes or dtypes.

    The lists are in the attributes `missing`, `unexpected` and `mismatched`.
    """

    exit_code = 7

    def __init__(
        self,
        what: str,
        *,
        missing: list[str] | None = None,
        unexpected: list[str] | None = None,
        mismatched: list[str] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(what, **fields)
        self.missing = missing or []
        self.unexpected = unexpected or []
        self.mismatched = mismatched or []


class StateChangedError(ThinpointError):
    """Values changed while they were being saved; nothing was written."""

    exit_code = 7
    default_hint = "Do not modify the state until save has returned"


class SaveCancelledError(ThinpointError):
    """The save was given up by `cancel`; nothing was written."""

    exit_code = 9


class EncodeProofError(ThinpointError):
    """An encoded part did not decode to the bits it was made from."""

    exit_code = 8
    default_hint = "This is a bug or faulty hardware: run `thinpoint doctor --bundle` and report it"


# ---- storage: what the operating system refused ---------------------------------------------------------------------


class StorageError(ThinpointError, OSError):
    """The operating system or the store refused. Also an `OSError`; `errno` is kept.

    Args:
        errno: the system's number, if there is one.
        transient: trying again may help: timeouts, lost connections, a server that is overloaded. None derives it
            from `errno`.
    """

    exit_code = 6

    def __init__(
        self, what: str, *, errno: int | None = None, transient: bool | None = None, **fields: Any
    ) -> None:
        ThinpointError.__init__(self, what, **fields)
        self.errno = errno
        self.transient = errno in _TRANSIENT if transient is None else transient

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, {**self.__dict__, "errno": self.errno})


class NotFoundError(StorageError, FileNotFoundError):
    """The file or its folder does not exist."""


class PermissionDeniedError(StorageError, PermissionError):
    """No permission to read, write or rename."""


class AlreadyExistsError(StorageError, FileExistsError):
    """The target exists and was not to be overwritten."""


class NoSpaceError(StorageError):
    """The disk or the quota is full; the incomplete file was removed."""

    default_hint = "Free some space and save again; what was there before is untouched"


class SaveTimeoutError(StorageError, TimeoutError):
    """A save took longer than it may. What it has written so far counts for nothing."""

    default_hint = "The checkpoints before it are untouched; look at the storage, or allow more time"


# ---- checkpoints: a directory of them ------------------------------------------------------------------------------


class CheckpointError(ThinpointError):
    """A directory of checkpoints holds nothing that can be loaded, or cannot take what is to be saved. Base class."""

    exit_code = 9


class SupersededError(CheckpointError):
    """Another run has taken over the directory: this one may neither commit nor delete anything in it."""

    default_hint = "End this process; the newer run goes on"


class StaleStateError(CheckpointError):
    """The training step advanced, but no weight has another value than in the checkpoint before."""

    default_hint = "Save the objects that are trained, not copies of them"


class RanksFailedError(CheckpointError):
    """A save or a restore of many ranks ended on all of them, because it failed on some.

    Args:
        failures: what went wrong, by rank: exceptions or texts.
        what: what failed, without a trailing period.
        fields: as for `ThinpointError`.

    Attributes:
        failures: as given; exceptions keep their classes.
    """

    def __init__(
        self,
        failures: Mapping[int, BaseException | str],
        what: str = "it failed on some of the ranks",
        **fields: Any,
    ) -> None:
        super().__init__(what, **fields)
        self.failures = dict(failures)

    def __str__(self) -> str:
        told = [f"rank {rank}: {_in_words(cause)}" for rank, cause in sorted(self.failures.items())]
        more = [f"and {len(told) - 8} more ranks"] if len(told) > 8 else []
        return f"{super().__str__()}: {'; '.join([*told[:8], *more])}"


class RankLostError(RanksFailedError):
    """A rank has ended, or has given no sign of life for too long, in the middle of a save or a restore."""

    def __init__(self, failures: Mapping[int, BaseException | str], what: str = "", **fields: Any) -> None:
        super().__init__(failures, what or "ranks were lost", **fields)


def _in_words(cause: BaseException | str) -> str:
    return cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"


class IncompleteSaveError(CheckpointError):
    """A rank did not write what was planned, or its file is not there as it was written; nothing was committed."""

    default_hint = "What was there before is untouched"


_TRANSIENT = {
    _errno.EINTR,
    _errno.EAGAIN,
    _errno.EBUSY,
    _errno.ESTALE,
    _errno.ETIMEDOUT,
    _errno.EPIPE,
    _errno.ECONNRESET,
    _errno.ECONNABORTED,
    _errno.ECONNREFUSED,
    _errno.ENETDOWN,
    _errno.ENETUNREACH,
    _errno.ENETRESET,
    _errno.EHOSTDOWN,
    _errno.EHOSTUNREACH,
}
"""Never EIO: a disk that lost bytes once does not become whole by asking again."""

_BY_ERRNO: dict[int, type[StorageError]] = {
    _errno.ENOENT: NotFoundError,
    _errno.ENOTDIR: NotFoundError,
    _errno.EACCES: PermissionDeniedError,
    _errno.EPERM: PermissionDeniedError,
    _errno.EROFS: PermissionDeniedError,
    _errno.EEXIST: AlreadyExistsError,
    _errno.ENOSPC: NoSpaceError,
    _errno.EDQUOT: NoSpaceError,
    _errno.EFBIG: NoSpaceError,
}


def from_os_error(
    error: OSError, what: str, *, where: object = None, hint: str | None = None
) -> StorageError:
    """The `StorageError` that stands for an `OSError`, with its errno and the system's own words."""
    cls = _BY_ERRNO.get(error.errno or 0, StorageError)
    reason = error.strerror or str(error)
    return cls(f"{what}: {reason}", errno=error.errno, where=where, hint=hint)
