"""The stores that the conformance suite runs on."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from thinpoint.store import LocalStore, open_store

SECRET = "a-very-secret-key"


def on_disk_through_fsspec(folder: Path):
    """A disk as fsspec shows it: stands for all file systems that rename (SFTP, HDFS)."""
    from fsspec.implementations.local import LocalFileSystem

    from thinpoint.store.fsspec_store import FsspecStore
    from thinpoint.store.plain_files import PlainFiles
    from thinpoint.store.remote_errors import RemoteErrors

    def connect():
        return PlainFiles(LocalFileSystem(skip_instance_cache=True), str(folder))

    return FsspecStore(connect, RemoteErrors(f"disk://{folder}", {}))


@pytest.fixture(scope="session")
def s3_options() -> dict:
    """Options of an S3 server on loopback with the buckets `bucket` and `no-conditions`."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    import s3fs

    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("s3_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    port = int(server.stdout.readline())
    options = {
        "key": "testing",
        "secret": SECRET,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    try:
        fs = s3fs.S3FileSystem(**options)
        for bucket in ("bucket", "no-conditions"):
            fs.call_s3("create_bucket", Bucket=bucket)
        yield options
    finally:
        server.stdin.close()
        server.wait(timeout=20)
        server.stdout.close()


@pytest.fixture
def open_new(request, tmp_path) -> Callable:
    """Opens the store of the kind that the test is for: the same place at every call, empty before the first."""
    kind = request.param
    place = uuid.uuid4().hex
    if kind == "local":
        return lambda: LocalStore(str(tmp_path / "store"))
    if kind == "memory":
        return lambda: open_store(f"memory://{place}/store")
    if kind == "disk":
        return lambda: on_disk_through_fsspec(tmp_path / "store")
    options = request.getfixturevalue("s3_options")
    return lambda: open_store(f"s3://bucket/{place}/store", **options)
