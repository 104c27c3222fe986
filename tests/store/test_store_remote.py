"""URLs: what is special about S3, about fsspec, about secrets and errors."""

from __future__ import annotations

import importlib
import logging
import pickle
import socket
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import SECRET

import thinpoint
from thinpoint.errors import (
    AlreadyExistsError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from thinpoint.store import LocalStore, open_sink, open_source, open_store, s3_files
from thinpoint.store.remote_errors import RemoteErrors

MiB = 1 << 20


@pytest.fixture
def place() -> str:
    return uuid.uuid4().hex


def s3(options: dict, place: str, bucket: str = "bucket"):
    return open_store(f"s3://{bucket}/{place}", **options)


def uploads_under_way(store) -> list[str]:
    found = store._files.call("list_multipart_uploads").get("Uploads", [])
    return [upload["Key"] for upload in found if upload["Key"].startswith(store._files._root)]


def write(store, name: str, data, **options) -> None:
    with ThreadPoolExecutor(2) as pool, store.sink(name, **options) as sink:
        sink.write_all([data], map=pool.map)


# ---- what is opened ----------------------------------------------------------------------------------------------------


def test_path_is_a_local_store_and_url_is_not(tmp_path):
    for target in (
        tmp_path,
        str(tmp_path),
        str(tmp_path).encode(),
        f"file://{tmp_path}",
        f"local://{tmp_path}/",
    ):
        store = open_store(target)
        assert isinstance(store, LocalStore) and store.url == str(tmp_path)
    assert open_store("memory://a/b/").url == "memory://a/b"
    assert open_store("a::b").url.endswith("/a::b")
    assert open_store(store) is store
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", [7, None, ["a"]])
def test_what_is_neither_path_nor_url_is_refused(target):
    with pytest.raises(UsageError):
        open_store(target)


def test_options_are_for_urls(tmp_path):
    with pytest.raises(UsageError, match="no options"):
        open_store(tmp_path, endpoint_url="x")


def test_unknown_and_chained_urls_are_refused():
    with pytest.raises(UsageError, match="knows no nonsense://"):
        open_store("nonsense://a")
    with pytest.raises(UsageError, match="old bytes"):
        open_store("simplecache::memory://a")


def test_missing_fsspec_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for call in (
        open_store,
        lambda url: open_source(url).__enter__(),
        lambda url: open_sink(url).__enter__(),
    ):
        with pytest.raises(UsageError, match=r"needs fsspec.*pip install 'thinpoint\[fsspec\]'"):
            call("memory://a")


def test_missing_library_for_s3_is_explained(monkeypatch):
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for scheme in ("s3", "s3a"):
        monkeypatch.delitem(registry._registry, scheme, raising=False)
    with pytest.raises(UsageError, match=r"pip install 'thinpoint\[s3\]'"):
        open_store("s3://bucket/a")


def test_url_without_a_bucket_is_refused(s3_options):
    with pytest.raises(UsageError, match="no bucket"):
        open_store("s3://", **s3_options).files()


# ---- files by URL ------------------------------------------------------------------------------------------------------


def test_sink_and_source_take_urls(place):
    url = f"memory://{place}/größe 1.thin"
    with open_sink(url) as sink:
        sink.write(b"abc")
        assert sink.name == url
    with open_source(url) as source:
        assert (source.name, source.size) == (url, 3)
        assert source.read_at(1, 2).tobytes() == b"bc"
    with pytest.raises(AlreadyExistsError), open_sink(url, overwrite=False) as sink:
        sink.write(b"new")
    with open_sink(url) as sink:
        sink.write(b"newer")
    assert open_store(f"memory://{place}").get("größe 1.thin", 10) == b"newer"


def test_url_of_a_folder_cannot_be_written():
    with pytest.raises(UsageError, match="folder"), open_sink("memory://a/"):
        pass


def test_state_is_saved_to_s3_and_loaded_from_there(s3_options, place, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_options["endpoint_url"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    state = {"w": torch.randn(1000, 1000), "step": 3}
    url = f"s3://bucket/{place}/run.thin"
    report = thinpoint.save(state, url)
    assert report.path == url
    assert [file.name for file in s3(s3_options, place).files()] == ["run.thin"]
    loaded = thinpoint.load(url)
    assert loaded["step"] == 3
    assert np.array_equal(loaded["w"].numpy().view(np.uint8), state["w"].numpy().view(np.uint8))
    assert thinpoint.verify(url, deep=True).num_parts == 1
    with thinpoint.open(url) as file:
        assert torch.equal(file["w"][10:12], state["w"][10:12])


def test_nothing_is_saved_at_a_url_if_saving_fails(place):
    pytest.importorskip("torch")
    with pytest.raises(thinpoint.errors.UnsupportedObjectError):
        thinpoint.save({"f": lambda: 0}, f"memory://{place}/run.thin", allow_pickle=False)
    assert open_store(f"memory://{place}").files() == []


# ---- S3 ----------------------------------------------------------------------------------------------------------------


def test_parts_grow_so_that_a_file_of_5_tib_fits(s3_options, place):
    upload = s3(s3_options, place)._files.upload("a", True)
    sizes = [upload.part_bytes(number) for number in range(10_000)]
    assert sizes == sorted(sizes) and sizes[0] == 16 * MiB and sizes[-1] <= 5 << 30
    assert sum(sizes) > 5 << 40
    fixed = open_store(f"s3://bucket/{place}", fixed_upload_size=True, **s3_options)._files.upload("a", True)
    assert {fixed.part_bytes(number) for number in (0, 5000, 9999)} == {64 * MiB}


def test_part_that_is_refused_aborts_the_upload(s3_options, place):
    store = s3(s3_options, place)
    with pytest.raises(PermissionDeniedError) as caught:
        write(store, "refused-part", np.zeros(40 * MiB, np.uint8))
    assert not caught.value.transient
    assert store.files() == [] and uploads_under_way(store) == []


def test_swallowed_error_does_not_put_half_a_file_in_place(s3_options, place):
    store = s3(s3_options, place)
    with pytest.raises(UsageError, match="writing to it failed"), store.sink("refused-part") as sink:
        with pytest.raises(PermissionDeniedError):
            sink.write(np.zeros(40 * MiB, np.uint8))
    assert store.files() == [] and uploads_under_way(store) == []


@pytest.mark.parametrize("size", [10, 20 * MiB])
def test_answer_that_is_lost_does_not_make_our_file_anothers(s3_options, place, size):
    """The server has written the file, the library asks again, and the condition says: it exists."""
    store = s3(s3_options, place)
    write(store, "lost-answer", np.ones(size, np.uint8))
    assert [file.size for file in store.files()] == [size]
    with pytest.raises(AlreadyExistsError):
        store.put("lost-answer", b"", if_absent=True)


def test_answer_that_is_lost_does_not_make_our_small_file_anothers(s3_options, place):
    store = s3(s3_options, place)
    store.put("lost-answer", b"1", if_absent=True)
    assert store.get("lost-answer", 1) == b"1"


def test_server_that_does_not_know_conditions_is_found_out(s3_options, place):
    store = s3(s3_options, place, bucket="no-conditions")
    assert not store.capabilities.put_if_absent
    assert s3(s3_options, place).capabilities.put_if_absent
    store.put("a", b"1", if_absent=True)
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"2", if_absent=True)
    with pytest.raises(AlreadyExistsError), store.sink("b") as sink:  # noqa: PT012
        sink.write(np.zeros(20 * MiB, np.uint8))
        store.put("b", b"1")
    assert [file.name for file in store.files()] == ["a", "b"]


def test_metadata_that_the_user_wants_on_all_objects_is_kept(s3_options, place):
    options = {**s3_options, "s3_additional_kwargs": {"Metadata": {"team": "red"}}}
    store = s3(options, place)
    store.put("small", b"1")
    write(store, "large", np.zeros(20 * MiB, np.uint8))
    for name in ("small", "large"):
        assert store._files.call("head_object", Key=f"{place}/{name}")["Metadata"]["team"] == "red"


def test_objects_that_stand_for_folders_are_no_files(s3_options, place):
    store = s3(s3_options, place)
    store._files.call("put_object", Key=f"{place}/folder/", Body=b"")
    store.put("folder/a", b"1")
    assert [file.name for file in store.files()] == ["folder/a"]


def test_listing_of_more_than_a_page(s3_options, place):
    store = s3(s3_options, place)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: store._files.put(f"{index:04}", b"", False), range(1010)))
    assert [file.name for file in store.files()] == [f"{index:04}" for index in range(1010)]


def test_whole_bucket_is_a_store(s3_options, place):
    store = open_store("s3://bucket/", **s3_options)
    store.put(f"{place}/a", b"1")
    assert [file.name for file in store.files(place)] == [f"{place}/a"]
    assert store.get(f"{place}/a", 1) == b"1"


def test_bucket_that_does_not_exist_is_no_empty_one(s3_options):
    store = open_store("s3://no-such-bucket/a", **s3_options)
    for call in (store.files, lambda: store.put("a", b"")):
        with pytest.raises(NotFoundError, match="no such bucket"):
            call()


def test_parts_are_uploaded_side_by_side(s3_options, place):
    """Three requests at a time only if three threads make them: each waits until all three are there."""
    store = s3(s3_options, place)
    barrier = threading.Barrier(3, timeout=20)
    upload = s3_files.S3Upload.put_part

    def meeting(self, number, views):
        barrier.wait()
        upload(self, number, views)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(s3_files.S3Upload, "put_part", meeting)
        with store.sink("a") as sink:
            sink.write_all([np.ones(48 * MiB, np.uint8)], map=pool.map)
    assert [file.size for file in store.files()] == [48 * MiB]


# ---- errors ------------------------------------------------------------------------------------------------------------

IMPATIENT = {"config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1}}


def test_overloaded_server_is_a_transient_error(s3_options, place):
    store = s3({**s3_options, **IMPATIENT}, place)
    with pytest.raises(StorageError, match="as the test asked") as caught:
        store.put("overloaded", b"1")
    assert caught.value.transient and caught.value.where == f"s3://bucket/{place}/overloaded"


def test_server_that_is_not_there_is_a_transient_error(s3_options, place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        options = {**s3_options, **IMPATIENT, "endpoint_url": f"http://127.0.0.1:{taken.getsockname()[1]}"}
        with pytest.raises(StorageError) as caught:
            s3(options, place).files()
    assert caught.value.transient


class Web(BaseHTTPRequestHandler):
    """Answers /503/... with that status; /data with ranges; of /flaky each range is refused once."""

    data = bytes(range(256)) * 40
    refused: set[str] = set()

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path, wanted = self.path.partition("?")[0], self.headers.get("Range")
        if path.strip("/").split("/")[0].isdecimal():
            self.send_error(int(path.strip("/").split("/")[0]))
            return
        if path == "/flaky" and wanted and wanted not in self.refused:
            self.refused.add(wanted)
            self.send_error(503)
            return
        body = self.data
        if wanted and path != "/ignores-ranges":
            start, end = wanted.removeprefix("bytes=").split("-")
            body = body[int(start) : int(end) + 1]
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def web():
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_file_on_the_web_is_read_without_telling_its_signature(web):
    with open_source(f"{web}/data?X-Signature=abc/def") as source:
        assert source.name == f"{web}/data"
        assert source.read_at(300, 500).tobytes() == Web.data[300:800]


@pytest.mark.parametrize(
    ("status", "kind", "transient"),
    [
        (404, NotFoundError, False),
        (403, PermissionDeniedError, False),
        (401, PermissionDeniedError, False),
        (429, StorageError, True),
        (500, StorageError, True),
        (503, StorageError, True),
        (418, StorageError, False),
    ],
)
def test_status_of_a_web_server_tells_what_is_wrong(web, status, kind, transient):
    with pytest.raises(kind) as caught, open_source(f"{web}/{status}/a?sig={SECRET}"):
        pass
    assert caught.value.transient == transient
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_range_is_read_again_after_a_transient_error(web, monkeypatch):
    monkeypatch.setattr("thinpoint.store.remote_source.FIRST_PAUSE_S", 0.01)
    with open_source(f"{web}/flaky") as source:
        assert source.read_at(10, 100).tobytes() == Web.data[10:110]
    assert len(Web.refused) == 1


def test_server_that_ignores_ranges_is_found_out(web):
    with open_source(f"{web}/ignores-ranges") as source:
        with pytest.raises(StorageError, match="other bytes"):
            source.read_at(10, 100)


def test_what_cannot_be_written_to_is_unsupported(web):
    with pytest.raises(UnsupportedError):
        open_store(web).put("a", b"1")


def raised_by_libraries() -> list:
    botocore = pytest.importorskip("botocore.exceptions")
    aiohttp = pytest.importorskip("aiohttp")
    url = "http://x"
    return [
        (TimeoutError(), StorageError, True),
        (ConnectionResetError(104, "Connection reset by peer"), StorageError, True),
        (InterruptedError(4, "Interrupted"), StorageError, True),
        (BlockingIOError(11, "Try again"), StorageError, True),
        (OSError(116, "Stale file handle"), StorageError, True),
        (OSError(5, "Input/output error"), StorageError, False),
        (OSError(28, "No space left"), NoSpaceError, False),
        (PermissionError("no"), PermissionDeniedError, False),
        (FileNotFoundError("/x"), NotFoundError, False),
        (FileExistsError("/x"), AlreadyExistsError, False),
        (NotImplementedError(), UnsupportedError, None),
        (ValueError("odd"), StorageError, False),
        (aiohttp.ClientPayloadError("cut off"), StorageError, True),
        (aiohttp.ServerDisconnectedError(), StorageError, True),
        (botocore.EndpointConnectionError(endpoint_url=url), StorageError, True),
        (botocore.ReadTimeoutError(endpoint_url=url), StorageError, True),
        (botocore.ConnectTimeoutError(endpoint_url=url), StorageError, True),
        (botocore.NoCredentialsError(), PermissionDeniedError, False),
    ]


def test_errors_of_libraries_get_their_class():
    errors = RemoteErrors("s3://bucket", {})
    for raised, kind, transient in raised_by_libraries():
        with pytest.raises(kind) as caught, errors.translated("cannot read", "a"):
            raise raised
        assert caught.value.__cause__ is raised
        assert getattr(caught.value, "transient", None) == transient
        assert caught.value.where == "s3://bucket/a"
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))


# ---- secrets -----------------------------------------------------------------------------------------------------------


def test_secrets_are_nowhere(s3_options, place, caplog):
    caplog.set_level(logging.DEBUG, "thinpoint")
    store = s3(s3_options, place)
    texts = [store.url, repr(store), str(vars(store.capabilities))]
    with store.sink("a") as sink:
        texts += [sink.name, repr(sink)]
        sink.write(b"1")
    for call in (lambda: store.get("none", 1), lambda: store.put("a", b"", if_absent=True)):
        with pytest.raises(StorageError) as caught:
            call()
        texts.append("".join(traceback.format_exception(caught.value)))
    assert SECRET not in "".join(texts) + caplog.text


def test_secrets_in_the_words_of_a_library_are_struck_out():
    options = {"secret": "s3cr3t", "client_kwargs": {"aws_session_token": "t0k3n"}, "region": "eu"}
    errors = RemoteErrors("s3://bucket", options)
    with pytest.raises(StorageError) as caught, errors.translated("cannot read"):
        raise ValueError("eu: s3cr3t t0k3n sftp://me:pass@host/x https://me:pass@host/a?sig=abc")
    text = "".join(traceback.format_exception(caught.value))
    assert "eu: *** *** sftp://me@host/x https://host/a" in text
    assert not any(word in text for word in ("s3cr3t", "t0k3n", "pass@", "abc"))


def test_password_of_a_url_is_in_no_message():
    pytest.importorskip("fsspec")
    store = open_store("ftp://me:my-password@127.0.0.1:1/folder")
    assert store.url == "ftp://me@127.0.0.1:1/folder"
    with pytest.raises(StorageError) as caught:
        store.files()
    assert caught.value.transient
    assert "my-password" not in "".join(traceback.format_exception(caught.value)) + repr(store)


# ---- other file systems ------------------------------------------------------------------------------------------------


def test_capabilities_are_what_the_file_system_has(s3_options, place, tmp_path):
    from conftest import on_disk_through_fsspec

    memory = open_store(f"memory://{place}").capabilities
    disk = on_disk_through_fsspec(tmp_path).capabilities
    bucket = s3(s3_options, place).capabilities
    local = open_store(tmp_path).capabilities
    assert (memory.rename, memory.put_if_absent, memory.ranges, memory.durable) == (False, True, True, False)
    assert (disk.rename, disk.put_if_absent, disk.durable) == (True, False, False)
    assert (bucket.rename, bucket.put_if_absent, bucket.ranges, bucket.durable) == (False, True, True, True)
    assert (local.rename, local.put_if_absent, local.ranges, local.durable) == (True, True, True, True)
    assert s3(s3_options, place).files() == []


def test_folder_that_cannot_be_listed_is_an_error_and_not_empty():
    """fsspec's own walk leaves out what it has no access to: then the newest checkpoint would be missing in silence."""
    from fsspec.implementations.memory import MemoryFileSystem

    from thinpoint.store.plain_files import PlainFiles

    class Forbidding(MemoryFileSystem):
        def ls(self, path, detail=True, **options):
            if path.endswith("/secret"):
                raise PermissionError("no access")
            return super().ls(path, detail, **options)

    fs = Forbidding(global_store=False, skip_instance_cache=True)
    files = PlainFiles(fs, "/root")
    files.put("a", b"1", False)
    files.put("secret/b", b"1", False)
    assert [file.name for file in files.files("a")] == ["a"]
    with pytest.raises(PermissionError):
        list(files.files(""))


def test_file_whose_time_is_not_told_is_not_old():
    from thinpoint.store.plain_files import _modified

    assert _modified({}) >= time.time() - 5
    assert _modified({"updated": "2024-01-02T03:04:05.678Z"}) == 1704164645.678
