"""Errors of fsspec file systems, told as errors of this package and without secrets."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from thinpoint.errors import (
    AlreadyExistsError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    ThinpointError,
    UnsupportedError,
    from_os_error,
)

_SECRET_KEY = re.compile(r"key|secret|token|pass|credential|sas|connection_string|auth", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"(://[^/@:]*):[^/@]*@")
_HTTP_SECRETS = re.compile(r"(https?://)(?:[^/@]*@)?([^?#\s]*)(?:[?#]\S*)?")

_TRANSIENT_STATUS = {408, 425, 429}
_NO_SPACE_STATUS = {413, 507}
_UNSUPPORTED_STATUS = {405, 501}
_TRANSIENT_BASES = (TimeoutError, asyncio.TimeoutError, ConnectionError, EOFError)
_TRANSIENT_CODES = {
    "SlowDown",
    "RequestTimeout",
    "RequestLimitExceeded",
    "Throttling",
    "ConditionalRequestConflict",
}
_TRANSIENT_TYPES = {
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "ServerDisconnectedError",
    "EndpointConnectionError",  # botocore
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "HTTPClientError",
    "ResponseStreamingError",
    "ServiceRequestError",  # azure
    "ServiceResponseError",
    "ChannelException",  # paramiko
}
"""By name, from libraries that need not be installed."""

_NO_CREDENTIALS_TYPES = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}


class RemoteErrors:
    """Translates what a file system raises.

    Args:
        url: the place, without secrets.
        options: of the file system; the values of those that sound secret are in no message.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        self._secrets: list[str] = []
        self.learn(options)

    def learn(self, options: Mapping[str, Any]) -> None:
        """More options, whose secrets are in no message from now on."""
        self._secrets = sorted({*self._secrets, *_secrets(options)}, key=len, reverse=True)

    def where(self, name: str) -> str:
        """The URL of a file."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    @contextmanager
    def translated(self, what: str, name: str = "") -> Iterator[None]:
        """Whatever the block raises, told as one of our errors: `what` happened to the file of that name."""
        try:
            yield
        except ThinpointError as error:
            error.where = error.where or self.where(name)
            raise
        except Exception as error:  # noqa: BLE001  # whatever a library raises
            # The library's own words may hold what must not be told, and a traceback prints them.
            cause = error if self.clean(_words(error)) == _words(error) else None
            raise self.translate(error, what, name) from cause

    def translate(self, error: Exception, what: str, name: str = "") -> ThinpointError:
        """The error that stands for `error`, which a file system raised."""
        where = self.where(name)
        words = f"{what}: {self.clean(_words(error))}"
        number = error.errno if isinstance(error, OSError) else None
        code, status = response_of(error)
        types = {cls.__name__ for link in _chain(error) for cls in type(link).__mro__}
        if isinstance(error, FileExistsError):
            return AlreadyExistsError(f"{what}: it exists already", errno=errno.EEXIST, where=where)
        if isinstance(error, NotImplementedError) or status in _UNSUPPORTED_STATUS:
            return UnsupportedError(words, where=where)
        # Before what is not found: some libraries take every failure for that.
        if isinstance(error, _TRANSIENT_BASES) or types & _TRANSIENT_TYPES or _is_transient(code, status):
            return StorageError(words, errno=number, transient=True, where=where)
        if isinstance(error, PermissionError) or types & _NO_CREDENTIALS_TYPES or status in (401, 403):
            return PermissionDeniedError(words, errno=number, where=where)
        if isinstance(error, FileNotFoundError | NotADirectoryError) or status == 404:
            kind = "bucket" if code == "NoSuchBucket" else "file"
            return NotFoundError(f"{what}: there is no such {kind}", errno=errno.ENOENT, where=where)
        if status in _NO_SPACE_STATUS:
            return NoSpaceError(words, where=where)
        if isinstance(error, OSError) and number:
            return type(from_os_error(error, what))(words, errno=number, where=where)
        return StorageError(words, where=where)

    def clean(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return without_secrets(text)


def without_secrets(text: str) -> str:
    """URLs in a text without passwords, those of the web also without queries, which often are signatures."""
    return _HTTP_SECRETS.sub(r"\1\2", _PASSWORD_IN_URL.sub(r"\1@", text))


def response_of(error: BaseException) -> tuple[str, int]:
    """The server's error code and HTTP status, as far as the libraries tell them: ("", 0) if not at all."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, Mapping):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), int(status)
        for attribute in ("status", "status_code", "code"):
            number = getattr(link, attribute, None)
            if isinstance(number, int):
                return "", number
    return "", 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_transient(code: str, status: int) -> bool:
    return code in _TRANSIENT_CODES or status in _TRANSIENT_STATUS or 500 <= status < 600


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _secrets(options: Mapping[str, Any]) -> Iterable[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and value and _SECRET_KEY.search(str(key)):
            yield value
