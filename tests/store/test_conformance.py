"""What every store must do: the same tests on a local disk, memory://, a disk through fsspec, and S3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from thinpoint.errors import (
    AlreadyExistsError,
    LimitExceededError,
    NotFoundError,
    StorageError,
    TruncatedFileError,
    UnsupportedError,
    UsageError,
)

ALL = ["local", "memory", "disk", "s3"]

NAMES = [
    "a",
    "step-0000001000/manifest.json",
    "deep/er/and/deep er/x.thin",
    "größe/模型 (1).thin",
    "glob*[a-z]?{b}.thin",
    "percent%20+&=#.thin",
    "back\\slash'quote\"",
    "v?versionId=1",
    ".hidden",
    "~",
]

BAD_NAMES = ["", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", "./a", "a\0b"]

pytestmark = pytest.mark.parametrize("open_new", ALL, indirect=True)


@pytest.fixture
def store(open_new):
    return open_new()


def write(store, name: str, data: bytes, **options) -> None:
    with store.sink(name, **options) as sink:
        sink.write(data)


def read(store, name: str) -> bytes:
    source = store.source(name)
    try:
        return source.read_at(0, source.size).tobytes()
    finally:
        source.close()


def names(store, prefix: str = "") -> list[str]:
    return [file.name for file in store.files(prefix)]


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


# ---- names and listings ----------------------------------------------------------------------------------------------


def test_place_that_does_not_exist_is_empty_and_is_made_by_the_first_file(store, open_new):
    assert store.files() == []
    assert store.files("step-") == []
    store.put("deep/er/a", b"1")
    assert names(store) == names(open_new()) == ["deep/er/a"]


def test_names_are_used_as_they_are(store):
    for index, name in enumerate(NAMES):
        if index % 2:
            store.put(name, name.encode())
        else:
            write(store, name, name.encode())
    assert names(store) == sorted(NAMES)
    for name in NAMES:
        assert store.get(name, 1000) == read(store, name) == name.encode()
    store.delete("glob*[a-z]?{b}.thin")
    store.delete("v?versionId=1")
    assert names(store) == sorted(set(NAMES) - {"glob*[a-z]?{b}.thin", "v?versionId=1"})


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_by_every_method(store, name):
    store.put("good", b"1")
    for call in (
        lambda: store.put(name, b""),
        lambda: store.get(name, 10),
        lambda: store.source(name),
        lambda: store.delete(name),
        lambda: write(store, name, b""),
        *([lambda: store.rename("good", name), lambda: store.rename(name, "b")] * store.capabilities.rename),
    ):
        with pytest.raises(UsageError):
            call()
    assert names(store) == ["good"]


def test_name_of_a_file_that_is_being_written_cannot_be_taken(store):
    with pytest.raises(UsageError, match="kept for"):
        store.put("a/.x.thin.12-0123456789abcdef.tmp", b"")


def test_prefix_selects_by_the_beginning_of_the_name(store):
    for name in ("step-1/a", "step-1/b/c", "step-10/a", "step-1x", "runs/1", "step"):
        store.put(name, b"1")
    assert names(store, "step-1/") == ["step-1/a", "step-1/b/c"]
    assert names(store, "step-1") == ["step-1/a", "step-1/b/c", "step-10/a", "step-1x"]
    assert names(store, "step-1/b/") == ["step-1/b/c"]
    assert names(store, "step-1/a") == ["step-1/a"]
    assert names(store, "step-1/a/") == names(store, "none/") == names(store, "q") == []
    assert names(store) == sorted(names(store))


def test_listing_tells_sizes_and_times(store):
    before = time.time()
    write(store, "a", bytes(12345))
    store.put("b", b"")
    first, second = store.files()
    assert (first.name, first.size, second.size) == ("a", 12345, 0)
    assert all(before - 5 < file.modified < time.time() + 5 for file in (first, second))


def test_listing_is_never_an_old_one(store, open_new):
    other = open_new()
    assert other.files("step-1/") == []
    for index in range(3):
        store.put(f"step-1/{index}", b"1")
        assert len(other.files("step-1/")) == len(other.files()) == index + 1
    store.delete("step-1/0")
    assert names(other, "step-1/") == ["step-1/1", "step-1/2"]


def test_many_files_are_all_listed(store):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: store.put(f"d{index % 7}/f{index:04}", b"1"), range(120)))
    assert names(store) == sorted(f"d{index % 7}/f{index:04}" for index in range(120))


# ---- small files -----------------------------------------------------------------------------------------------------


def test_put_replaces_and_get_gives_all(store, open_new):
    for data in (b"old and longer", b"new", b""):
        store.put("manifest.json", data)
        assert store.get("manifest.json", 100) == open_new().get("manifest.json", 100) == data


def test_get_refuses_what_is_larger(store):
    store.put("a", bytes(11))
    assert len(store.get("a", 11)) == 11
    with pytest.raises(LimitExceededError, match="at most 10"):
        store.get("a", 10)


def test_put_if_absent_never_replaces(store):
    store.put("a", b"first", if_absent=True)
    with pytest.raises(AlreadyExistsError) as caught:
        store.put("a", b"second", if_absent=True)
    assert isinstance(caught.value, FileExistsError) and not caught.value.transient
    assert store.get("a", 10) == b"first"
    store.delete("a")
    store.put("a", b"third", if_absent=True)
    assert names(store) == ["a"]


def test_of_two_that_put_if_absent_one_wins(store):
    if not store.capabilities.put_if_absent:
        pytest.skip("the store does not say that it can")
    num_rounds, num_threads = 10, 4
    with ThreadPoolExecutor(num_threads) as pool:
        for number in range(num_rounds):
            barrier = threading.Barrier(num_threads)

            def attempt(me: int, number=number, barrier=barrier) -> bool:
                barrier.wait()
                try:
                    # The same bytes from all: nobody may take another's file for its own.
                    store.put(f"runs/{number}", b"1", if_absent=True)
                except AlreadyExistsError:
                    return False
                return True

            assert sum(pool.map(attempt, range(num_threads))) == 1
    assert len(names(store)) == num_rounds


# ---- sinks -----------------------------------------------------------------------------------------------------------


def test_file_is_seen_by_nobody_until_it_is_complete(store, open_new):
    other = open_new()
    with store.sink("step-1/data.thin") as sink:
        for _ in range(3):
            sink.write(noise(9 << 20))
            assert store.files() == other.files() == []
            with pytest.raises(NotFoundError):
                other.source("step-1/data.thin")
        assert sink.tell() == 27 << 20
    assert names(other) == ["step-1/data.thin"]
    assert read(other, "step-1/data.thin") == noise(9 << 20).tobytes() * 3


@pytest.mark.parametrize("size", [0, 1000, 20 << 20])
def test_error_in_the_block_leaves_what_was_there(store, size):
    store.put("old", b"old")

    def attempt(name: str, **options) -> None:
        with store.sink(name, **options) as sink:
            sink.write(bytes(size))
            raise KeyboardInterrupt

    for name in ("new", "old"):
        with pytest.raises(KeyboardInterrupt):
            attempt(name, overwrite=True)
    assert names(store) == ["old"]
    assert store.get("old", 10) == b"old"
    assert not leftovers(store)


def leftovers(store) -> list:
    """Whatever an aborted file may have left, seen with other means than the store's."""
    if hasattr(store, "leftovers"):
        return store.leftovers()
    files = store._files
    if hasattr(files, "call"):
        uploads = files.call("list_multipart_uploads").get("Uploads", [])
        return [upload for upload in uploads if upload["Key"].startswith(files._root)]
    return files._fs.find(files._root)[1:]


@pytest.mark.parametrize("size", [0, 3000, 20 << 20])
def test_sink_replaces_only_if_it_may(store, size):
    write(store, "a", b"first")
    with pytest.raises(AlreadyExistsError):
        write(store, "a", bytes(size))
    assert read(store, "a") == b"first"
    write(store, "a", bytes(size), overwrite=True)
    assert read(store, "a") == bytes(size)
    assert names(store) == ["a"]


@pytest.mark.parametrize("size", [100, 20 << 20])
def test_file_that_appears_meanwhile_is_not_replaced(store, size):
    with pytest.raises(AlreadyExistsError), store.sink("a") as sink:  # noqa: PT012
        sink.write(bytes(size))
        store.put("a", b"theirs")
    assert store.get("a", 10) == b"theirs"
    assert names(store) == ["a"] and len(leftovers(store)) == 0


def test_big_file_in_pieces_of_all_sizes_from_several_threads(store):
    data = noise(45 << 20)
    cuts = [0, 1, 8, 4096, 5000, 3 << 20, 20 << 20, (20 << 20) + 3, 31 << 20, 44_999_999, len(data)]
    buffers = [data[start:end] for start, end in pairwise(cuts)]
    with ThreadPoolExecutor(4) as pool, store.sink("big.thin") as sink:
        sink.write_all(buffers[:3], map=pool.map)
        sink.write_all([np.zeros(0, np.uint64)], map=pool.map)
        sink.write_all(buffers[3:6], map=pool.map)
        sink.write(buffers[6])
        assert sink.tell() == cuts[7]
        sink.write_all(buffers[7:], map=pool.map)
        assert sink.tell() == len(data)
    source = store.source("big.thin")
    assert source.size == len(data)
    assert np.array_equal(source.read_at(0, len(data)), data)
    source.close()


def test_buffers_may_be_reused_after_each_call(store):
    buffer = np.zeros(1 << 16, np.uint32)
    with store.sink("a") as sink:
        for value in range(90):
            buffer[:] = value
            sink.write(buffer)
    expected = np.repeat(np.arange(90, dtype=np.uint32), 1 << 16)
    assert read(store, "a") == expected.tobytes()


def test_many_small_writes_make_one_file(store):
    with store.sink("a") as sink:
        for value in range(2000):
            sink.write(bytes([value % 256]) * 3)
    assert read(store, "a") == b"".join(bytes([value % 256]) * 3 for value in range(2000))


def test_writing_needs_little_memory_beside_the_data(store, open_new):
    if "memory" in store.url:
        pytest.skip("the files are in memory")
    data = noise(96 << 20)
    write(store, "first", b"")
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(2) as pool, store.sink("a") as sink:
            sink.write_all([data[: 50 << 20], data[50 << 20 :]], map=pool.map)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # S3: each thread has a part, and the library another copy of it on its way out; one more part is the rest.
    assert peak < 84 << 20


WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import conftest
store = eval(sys.argv[2])
with store.sink("step-2/data.thin") as sink:
    for _ in range(3):
        sink.write(bytes(9 << 20))
    print("written", flush=True)
    time.sleep(60)
"""


def test_writer_that_is_killed_leaves_nothing_that_counts_as_a_file(store, open_new, request, tmp_path):
    if "memory" in store.url:
        pytest.skip("the files die with the process")
    store.put("step-1/data.thin", b"old")
    where = {
        "LocalStore": f"conftest.LocalStore({store.url!r})",
        "disk": f"conftest.on_disk_through_fsspec({str(tmp_path / 'store')!r})",
    }.get("disk" if store.url.startswith("disk") else type(store).__name__)
    if where is None:
        options = request.getfixturevalue("s3_options")
        where = f"conftest.open_store({store.url!r}, **{options!r})"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, os.path.dirname(__file__), where], stdout=subprocess.PIPE
    )
    with writer.stdout:
        assert writer.stdout.readline() == b"written\n"
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(timeout=20)
    assert names(store) == names(open_new()) == ["step-1/data.thin"]
    assert len(leftovers(store)) >= 1
    write(store, "step-2/data.thin", b"new")
    assert read(store, "step-2/data.thin") == b"new"


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_ranges_are_exact(store):
    data = noise(34 << 20)
    write(store, "a", data)
    source = store.source("a")
    ranges = [(0, 0), (0, 1), (3, 5000), (len(data) - 1, 1), (len(data), 0), (0, len(data)), (7, 33 << 20)]
    for offset, size in ranges:
        out = source.read_at(offset, size)
        assert (
            out.dtype == np.uint8 and out.ctypes.data % 8 == 0 and out.flags.owndata and out.flags.writeable
        )
        assert np.array_equal(out, data[offset : offset + size])
        memory = np.full(size + 20, 7, np.uint8)
        source.read_into(offset, memory[10 : 10 + size])
        assert np.array_equal(memory[10 : 10 + size], data[offset : offset + size])
        assert (memory[:10] == 7).all() and (memory[10 + size :] == 7).all()
    words = np.zeros((5, 3), np.uint32)
    source.read_into(40, words)
    assert words.tobytes() == data[40:100].tobytes()
    source.close()


def test_ranges_beyond_the_end_and_bad_ones_are_refused(store):
    write(store, "a", bytes(1000))
    source = store.source("a")
    for offset, size in [(1000, 1), (997, 4), (0, 1001), (1 << 40, 1), (0, 1 << 62)]:
        with pytest.raises(TruncatedFileError) as caught:
            source.read_at(offset, size)
        assert caught.value.where == source.name and source.name.endswith("a")
    for offset, size in [(-1, 4), (4, -1)]:
        with pytest.raises(UsageError):
            source.read_at(offset, size)
    with pytest.raises(UsageError, match="read-only"):
        source.read_into(0, b"1234")
    source.close()
    source.close()
    with pytest.raises(UsageError, match="closed"):
        source.read_at(0, 1)


def test_source_may_be_read_by_many_threads(store):
    data = noise(1 << 20)
    write(store, "a", data)
    source = store.source("a")

    def check(offset: int) -> bool:
        return np.array_equal(source.read_at(offset, 3000), data[offset : offset + 3000])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(0, 1_000_000, 31_347)))
    source.close()


def test_source_never_mixes_two_versions_of_a_file(store):
    old, new = bytes(100_000), b"\1" * 100_000
    write(store, "a", old)
    source = store.source("a")
    assert source.read_at(0, 10).tobytes() == old[:10]
    write(store, "a", new, overwrite=True)
    if "memory" in store.url or store.url.startswith("disk"):
        pytest.skip("a file system behind fsspec has no versions")
    try:
        assert source.read_at(50_000, 50_000).tobytes() == old[50_000:]
    except StorageError as error:
        assert "replaced" in str(error) and not error.transient and error.where == source.name
    finally:
        source.close()


# ---- delete and rename -----------------------------------------------------------------------------------------------


def test_delete_takes_away_one_file_and_forgives_what_is_not_there(store):
    for name in ("step-1/a", "step-1/b", "step-10/a"):
        store.put(name, b"1")
    store.delete("step-1/a")
    store.delete("step-1/a")
    store.delete("none/at/all")
    assert names(store) == ["step-1/b", "step-10/a"]
    with pytest.raises(NotFoundError):
        store.get("step-1/a", 10)


def test_deleting_all_files_of_a_folder_while_others_write_there(store):
    """Empty folders go, also from under a writer that has just made sure of them."""

    def churn(thread: int) -> None:
        for index in range(15):
            store.put(f"step-1/deep/{thread}-{index}", b"1")
            store.delete(f"step-1/deep/{thread}-{index}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert store.files() == []


def test_rename_moves_files_and_folders_or_says_that_it_cannot(store):
    store.put("step-1/a", b"a")
    store.put("step-1/deep/b", b"b")
    if not store.capabilities.rename:
        with pytest.raises(UnsupportedError):
            store.rename("step-1", "trash/1")
        assert names(store) == ["step-1/a", "step-1/deep/b"]
        return
    store.rename("step-1", "trash/1/step-1")
    assert names(store) == ["trash/1/step-1/a", "trash/1/step-1/deep/b"]
    store.rename("trash/1/step-1/a", "c")
    assert store.get("c", 10) == b"a"
    with pytest.raises(NotFoundError):
        store.rename("none", "d")
    store.put("e", b"e")
    for new in ("c", "trash"):
        with pytest.raises(AlreadyExistsError):
            store.rename("e", new)
    assert names(store) == ["c", "e", "trash/1/step-1/deep/b"]


def test_of_two_that_rename_to_one_name_one_wins(store):
    if not store.capabilities.rename:
        pytest.skip("the store cannot rename")

    def attempt(number: int, barrier: threading.Barrier) -> bool:
        barrier.wait()
        try:
            store.rename(f"from/{number}", "to")
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            barrier = threading.Barrier(2)
            store.put("from/0", b"0")
            store.put("from/1", b"1")
            results = list(pool.map(lambda number, barrier=barrier: attempt(number, barrier), range(2)))
            assert sum(results) == 1
            assert store.get("to", 10) == str(results.index(True)).encode()
            store.delete("to")


# ---- errors and manners ----------------------------------------------------------------------------------------------


def test_what_is_not_there_is_not_found(store):
    for _ in range(2):
        for call in (lambda: store.source("x/none"), lambda: store.get("x/none", 10)):
            with pytest.raises(NotFoundError) as caught:
                call()
            assert isinstance(caught.value, FileNotFoundError) and not caught.value.transient
            assert "x/none" in str(caught.value)
        store.put("x/other", b"1")


def test_folder_is_no_file(store):
    store.put("folder/a", b"1")
    for call in (lambda: store.source("folder"), lambda: store.get("folder", 10)):
        with pytest.raises((NotFoundError, UsageError)):
            call()


def test_sink_says_what_it_writes_and_is_closed_afterwards(store):
    with store.sink("x/a") as sink:
        assert sink.name.endswith("x/a")
        sink.write(b"1")
    with pytest.raises(UsageError):
        sink.write(b"2")
    assert read(store, "x/a") == b"1"


def test_store_tells_where_it_is(store):
    assert store.url in repr(store)
    assert store.url.endswith("store")


def test_store_is_used_by_many_threads_at_once(store):
    def work(thread: int) -> bool:
        data = noise(200_000 + thread, thread)
        write(store, f"t/{thread}", data)
        store.put(f"m/{thread}", data[:100].tobytes(), if_absent=True)
        return (
            read(store, f"t/{thread}") == data.tobytes()
            and store.get(f"m/{thread}", 100) == data[:100].tobytes()
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(12)))
    assert len(names(store, "t/")) == len(names(store, "m/")) == 12


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_store_works_in_a_forked_child(store):
    store.put("a", b"parent")
    if "memory" in store.url:
        pytest.skip("the files are in the memory of one process")
    child = os.fork()
    if child == 0:
        # A child that waits for a thread that it has not must end too.
        signal.alarm(30)
        try:
            assert store.get("a", 10) == b"parent"
            write(store, "b", bytes(20 << 20))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert names(store) == ["a", "b"]
