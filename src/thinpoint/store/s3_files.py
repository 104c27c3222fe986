"""Objects of S3, or of a server that speaks like it, through s3fs."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from thinpoint.errors import StorageError, UsageError
from thinpoint.store.contract import StoredFile
from thinpoint.store.names import temporary_name
from thinpoint.store.remote_errors import response_of
from thinpoint.store.remote_files import RemoteFile

FIRST_PART_BYTES = 16 << 20
PARTS_OF_A_SIZE = 2000
"""A file has at most 10,000 parts and 5 TiB: after so many parts they are four times as large."""

FIXED_PART_BYTES = 64 << 20
"""For servers that want all parts of one size (s3fs: `fixed_upload_size`); files of at most 625 GiB."""

_TOKEN = "thinpoint-put"
_CONFLICT_ATTEMPTS = 5


class S3Files:
    """See `RemoteFiles`. Names are used as they are: no glob, no version in a name, no cache of listings.

    Args:
        fs: an `s3fs.S3FileSystem`.
        root: bucket, or bucket and folder.

    Raises:
        UsageError: there is no bucket.
    """

    rename = False
    ranges = True
    durable = True

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._bucket, self._root, _ = fs.split_path(root)
        if not self._bucket:
            raise UsageError("the URL names no bucket", where=root)

    @cached_property
    def creates_in_one_step(self) -> bool:
        """Whether the server heeds `If-None-Match`: some that speak like S3 do not, nor old versions of the library."""
        key = self.key(temporary_name("probe"))
        try:
            for _ in range(2):
                self.call("put_object", Key=key, Body=b"", IfNoneMatch="*")
        except OSError as error:
            if _is_taken(error):
                return True
            if response_of(error)[1] == 501:
                return False
            raise
        finally:
            with contextlib.suppress(OSError):
                self.call("delete_object", Key=key)
        return False

    def key(self, name: str) -> str:
        """The key of a file or of a prefix of files."""
        return f"{self._root}/{name}" if self._root and name else self._root or name

    def call(self, method: str, **arguments: Any) -> Any:
        """One request, tried again by the library where that is safe."""
        return self._fs.call_s3(method, Bucket=self._bucket, **arguments)

    def stat(self, name: str) -> RemoteFile:
        """See `RemoteFiles.stat`."""
        head = self.call("head_object", Key=self.key(name))
        return RemoteFile(size=head["ContentLength"], version=head.get("ETag"))

    def read(self, name: str, start: int, end: int, version: str | None) -> bytes:
        """See `RemoteFiles.read`."""
        from fsspec.asyn import sync

        match = {} if version is None else {"IfMatch": version}

        async def read() -> bytes:
            answer = await self._fs._call_s3(
                "get_object",
                Bucket=self._bucket,
                Key=self.key(name),
                Range=f"bytes={start}-{end - 1}",
                **match,
            )
            async with answer["Body"] as body:
                data: bytes = await body.read()
                return data

        try:
            data: bytes = sync(self._fs.loop, read)
        except OSError as error:
            if response_of(error)[1] == 412:
                raise StorageError("the file was replaced while it was read") from error
            raise
        return data

    def put(self, name: str, data: bytes, if_absent: bool) -> None:
        """See `RemoteFiles.put`."""
        token = secrets.token_hex(8)
        create = self.creation(name, if_absent)
        self.finish(
            name, token, lambda: self.call("put_object", Body=data, **create, **self.marked(name, token))
        )

    def creation(self, name: str, if_absent: bool) -> dict[str, str]:
        """The condition of a request that creates a file; where the server knows none, looks whether it exists."""
        if not if_absent:
            return {}
        if self.creates_in_one_step:
            return {"IfNoneMatch": "*"}
        with contextlib.suppress(FileNotFoundError):
            self.stat(name)
            raise FileExistsError(f"{name} exists already")
        return {}

    def marked(self, name: str, token: str) -> dict[str, Any]:
        """Key and metadata of a file to be written: the token tells later who wrote it."""
        metadata = {**self._fs.s3_additional_kwargs.get("Metadata", {}), _TOKEN: token}
        return {"Key": self.key(name), "Metadata": metadata}

    def finish(self, name: str, token: str, request: Callable[[], Any]) -> None:
        """Makes the request that puts a file in place.

        If its answer is lost and the library asks again, the file is there already, and it is ours.

        Raises:
            FileExistsError: another one's file is there.
        """
        for attempt in range(1, _CONFLICT_ATTEMPTS + 1):
            try:
                request()
                return
            except OSError as error:
                code, _ = response_of(error)
                if code == "ConditionalRequestConflict" and attempt < _CONFLICT_ATTEMPTS:
                    time.sleep(0.1 * attempt)
                elif not _is_taken(error) and code != "NoSuchUpload":
                    raise
                elif self._token_of(name) == token:
                    return
                elif _is_taken(error):
                    raise FileExistsError(f"{name} exists already") from error
                else:
                    raise

    def _token_of(self, name: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            token: str | None = self.call("head_object", Key=self.key(name)).get("Metadata", {}).get(_TOKEN)
            return token
        return None

    def upload(self, name: str, overwrite: bool) -> S3Upload:
        """See `RemoteFiles.upload`."""
        return S3Upload(self, name, overwrite, bool(getattr(self._fs, "fixed_upload_size", False)))

    def delete(self, name: str) -> None:
        """See `RemoteFiles.delete`."""
        self.call("delete_object", Key=self.key(name))

    def files(self, prefix: str) -> Iterator[StoredFile]:
        """See `RemoteFiles.files`."""
        start = f"{self._root}/" if self._root else ""
        page: dict[str, Any] = {}
        more: dict[str, str] = {}
        while not page or page.get("IsTruncated"):
            page = self.call("list_objects_v2", Prefix=start + prefix, **more)
            for entry in page.get("Contents", []):
                name = entry["Key"].removeprefix(start)
                # Consoles show "folders" by empty objects of such names.
                if not name.endswith("/"):
                    yield StoredFile(
                        name=name, size=entry["Size"], modified=entry["LastModified"].timestamp()
                    )
            more = {"ContinuationToken": page.get("NextContinuationToken", "")}

    def move(self, old: str, new: str) -> None:
        """S3 has no such thing: see `rename`."""
        raise NotImplementedError


class S3Upload:
    """A multipart upload, or one request for a file of less than one part. See `Upload`.

    An upload whose process dies stays, unseen, until a lifecycle rule of the bucket ends it.
    """

    parallel = True

    def __init__(self, files: S3Files, name: str, overwrite: bool, fixed_size: bool) -> None:
        self._files = files
        self._name = name
        self._overwrite = overwrite
        self._fixed_size = fixed_size
        self._token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._id: str | None = None
        self._etags: dict[int, str] = {}

    def part_bytes(self, number: int) -> int:
        """See `Upload.part_bytes`."""
        return FIXED_PART_BYTES if self._fixed_size else FIRST_PART_BYTES << 2 * (number // PARTS_OF_A_SIZE)

    def put_part(self, number: int, views: list[memoryview]) -> None:
        """See `Upload.put_part`."""
        with self._lock:
            if self._id is None:
                begun = self._files.call(
                    "create_multipart_upload", **self._files.marked(self._name, self._token)
                )
                self._id = begun["UploadId"]
        answer = self._files.call("upload_part", Body=b"".join(views), PartNumber=number + 1, **self._upload)
        self._etags[number] = answer["ETag"]

    def finish(self, number: int, views: list[memoryview]) -> None:
        """See `Upload.finish`."""
        if self._id is None:
            self._files.put(self._name, b"".join(views), not self._overwrite)
            return
        if any(view.nbytes for view in views):
            self.put_part(number, views)
        create = self._files.creation(self._name, not self._overwrite)
        parts = [{"PartNumber": index + 1, "ETag": self._etags[index]} for index in sorted(self._etags)]

        def complete() -> None:
            self._files.call(
                "complete_multipart_upload", MultipartUpload={"Parts": parts}, **create, **self._upload
            )

        self._files.finish(self._name, self._token, complete)

    def abort(self) -> None:
        """See `Upload.abort`."""
        if self._id is not None:
            self._files.call("abort_multipart_upload", **self._upload)

    @property
    def _upload(self) -> dict[str, Any]:
        return {"Key": self._files.key(self._name), "UploadId": self._id}


def _is_taken(error: OSError) -> bool:
    """The request was to create an object that exists."""
    code, status = response_of(error)
    return isinstance(error, FileExistsError) or code == "PreconditionFailed" or status == 412
