"""From a URL to a file system, through fsspec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from thinpoint.errors import UsageError
from thinpoint.store.fsspec_store import FsspecStore
from thinpoint.store.plain_files import PlainFiles
from thinpoint.store.remote_errors import RemoteErrors, without_secrets
from thinpoint.store.remote_files import RemoteFiles
from thinpoint.store.remote_sink import RemoteSink, remote_sink
from thinpoint.store.remote_source import RemoteSource
from thinpoint.store.s3_files import S3Files

EXTRA = "thinpoint[fsspec]"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_remote_store(url: str, options: Mapping[str, Any]) -> FsspecStore:
    """The store at a URL; see `open_store`. Does not connect yet.

    Raises:
        UsageError: fsspec, or what it needs for this kind of URL, is not installed, or it knows no such kind.
    """
    scheme = _check_scheme(url)
    place = f"{scheme}://{url[len(scheme) + 3 :].strip('/')}"
    errors = RemoteErrors(without_secrets(place), options)
    return FsspecStore(lambda: _connect(place, options, errors), errors)


def open_remote_source(url: str) -> RemoteSource:
    """The file at a URL, open for reading.

    Raises:
        UsageError: as `open_remote_store`.
        NotFoundError, PermissionDeniedError, StorageError: the store refused.
    """
    files, errors = _file_at(url)
    return RemoteSource(files, errors, "")


def open_remote_sink(url: str, overwrite: bool) -> AbstractContextManager[RemoteSink]:
    """A new file at a URL; leaving the block without an error puts it in place.

    Raises:
        UsageError: as `open_remote_store`, or the URL is that of a folder.
        StorageError: the store refused.
    """
    if url.endswith("/"):
        raise UsageError("the URL is that of a folder, cannot be a file", where=without_secrets(url))
    files, errors = _file_at(url)
    return remote_sink(files, errors, "", overwrite=overwrite)


def _file_at(url: str) -> tuple[RemoteFiles, RemoteErrors]:
    _check_scheme(url)
    errors = RemoteErrors(without_secrets(url), {})
    with errors.translated("cannot connect"):
        return _connect(url, {}, errors), errors


def _connect(url: str, options: Mapping[str, Any], errors: RemoteErrors) -> RemoteFiles:
    from fsspec.core import url_to_fs

    is_s3 = hasattr(_file_system_class(_check_scheme(url)), "call_s3")
    # S3 is used past all caches of the library; of others we turn the cache off, which nobody else must notice.
    fs, root = url_to_fs(url, **options, skip_instance_cache=not is_s3)
    errors.learn(fs.storage_options)
    return S3Files(fs, root) if is_s3 else PlainFiles(fs, root)


def _check_scheme(url: str) -> str:
    """The URL's scheme, if it can be used here."""
    match = _SCHEME.match(url)
    if match is None:
        raise UsageError(
            "URLs within URLs cannot be used: a cache in between might give old bytes",
            where=without_secrets(url),
        )
    _file_system_class(match[1])
    return match[1]


def _file_system_class(scheme: str) -> Any:
    try:
        from fsspec import get_filesystem_class
    except ImportError as error:
        raise UsageError(
            f"{scheme}:// needs fsspec, which cannot be imported ({error})", hint=f"pip install '{EXTRA}'"
        ) from error
    try:
        return get_filesystem_class(scheme)
    except ImportError as error:
        raise UsageError(
            f"{scheme}:// needs a package that cannot be imported ({error})",
            hint="pip install 'thinpoint[s3]'" if scheme in ("s3", "s3a") else None,
        ) from error
    except ValueError as error:
        raise UsageError(f"fsspec knows no {scheme}://", hint="Is it a path? Put ./ before it") from error
