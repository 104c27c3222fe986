"""A file appears complete or not at all, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from thinpoint.errors import (
    AlreadyExistsError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    UsageError,
)
from thinpoint.store import buffers
from thinpoint.store.atomic import AtomicWriter
from thinpoint.store.local import LocalSource

NOBODY = 65534


def put(path, data=b"new", **options) -> None:
    with AtomicWriter(path, **options) as sink:
        sink.write(data)
        sink.commit()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@contextmanager
def umask(mask: int):
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@pytest.fixture
def old(tmp_path) -> Path:
    path = tmp_path / "run.thin"
    path.write_bytes(b"old")
    return path


def only_old(path: Path) -> bool:
    return path.read_bytes() == b"old" and names(path.parent) == [path.name]


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_new_file_is_written(tmp_path, durable, overwrite):
    path = tmp_path / "a"
    with AtomicWriter(path, overwrite=overwrite, durable=durable) as sink:
        for buffer in (b"abc", bytearray(b"d"), np.arange(3, dtype=np.uint16), np.zeros(0, np.uint8)):
            sink.write(buffer)
        assert sink.tell() == 10
        assert not path.exists()
        sink.commit()
        assert path.read_bytes() == b"abcd" + np.arange(3, dtype=np.uint16).tobytes()
    assert names(tmp_path) == ["a"]


def test_old_file_is_there_until_commit_and_replaced_by_it(old):
    with open(old, "rb") as reader:
        with AtomicWriter(old) as sink:
            sink.write(b"new")
            assert old.read_bytes() == b"old"
            sink.commit()
        assert old.read_bytes() == b"new"
        assert reader.read() == b"old"
    assert names(old.parent) == [old.name]


def test_block_left_without_commit_changes_nothing(old):
    with AtomicWriter(old) as sink:
        sink.write(b"new")
    assert only_old(old)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_any_exception_leaves_the_old_file(old, error):
    def fail() -> None:
        with AtomicWriter(old) as sink:
            sink.write(b"new")
            raise error

    with pytest.raises(error):
        fail()
    assert only_old(old)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 1,000 bytes of at most 7 buffers, and a system that writes at most 700 of them at a time."""
    monkeypatch.setattr(buffers, "PIECE_BYTES", 1000)
    monkeypatch.setattr(buffers, "_MAX_BUFFERS", 7)
    calls = []
    pwritev = os.pwritev

    def short_write(fd, views, offset):
        calls.append((len(views), sum(view.nbytes for view in views)))
        data = b"".join(views)[:700]
        return pwritev(fd, [data], offset)

    monkeypatch.setattr(os, "pwritev", short_write)
    return calls


def test_large_buffers_are_written_in_pieces(tmp_path, small_pieces):
    data = np.random.default_rng(0).bytes(12_345)
    put(tmp_path / "a", data)
    assert max(small_pieces)[1] == 1000
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_many_buffers_are_written_in_order_by_several_threads(tmp_path, small_pieces, num_threads):
    rng = np.random.default_rng(1)
    parts = [rng.bytes(int(size)) for size in rng.integers(0, 400, 200)] + [
        rng.bytes(5000),
        b"",
        rng.bytes(3),
    ]
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    with ThreadPoolExecutor(num_threads or 1) as pool, AtomicWriter(tmp_path / "a") as sink:
        sink.write(b"first")
        sink.write_all(arrays, *([pool.map] if num_threads else []))
        assert sink.tell() == 5 + sum(map(len, parts))
        sink.write_all([])
        sink.write(b"last")
        sink.commit()
    assert (tmp_path / "a").read_bytes() == b"first" + b"".join(parts) + b"last"
    assert max(count for count, _ in small_pieces) <= 7


def test_plane_of_neighbouring_blocks_is_one_call(tmp_path, monkeypatch):
    calls = []
    pwritev = os.pwritev

    def count(fd, views, offset):
        calls.append(len(views))
        return pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", count)
    plane = np.arange(1 << 16, dtype=np.uint8)
    with AtomicWriter(tmp_path / "a") as sink:
        sink.write_all([plane[start : start + 4096] for start in range(0, plane.size, 4096)])
        sink.commit()
    assert calls == [16]
    assert (tmp_path / "a").read_bytes() == plane.tobytes()


def test_error_of_one_thread_is_raised_when_all_have_stopped(old, monkeypatch):
    monkeypatch.setattr(buffers, "PIECE_BYTES", 1000)
    pwritev = os.pwritev
    running = []

    def fail_once(fd, views, offset):
        running.append(offset)
        try:
            if offset == 2000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            time.sleep(0.05)
            return pwritev(fd, views, offset)
        finally:
            running.remove(offset)

    monkeypatch.setattr(os, "pwritev", fail_once)
    with ThreadPoolExecutor(4) as pool:
        with AtomicWriter(old) as sink:
            with pytest.raises(NoSpaceError) as caught:
                sink.write_all([bytes(20_000)], pool.map)
            assert not running
        assert caught.value.errno == errno.ENOSPC
    assert only_old(old)


def test_existing_file_is_kept_if_not_to_be_overwritten(old):
    with pytest.raises(AlreadyExistsError) as caught, AtomicWriter(old, overwrite=False):
        pytest.fail("the block must not run")
    assert caught.value.errno == errno.EEXIST and isinstance(caught.value, FileExistsError)
    assert only_old(old)


@pytest.mark.parametrize("link_errno", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_file_that_appears_meanwhile_is_kept_if_not_to_be_overwritten(tmp_path, monkeypatch, link_errno):
    path = tmp_path / "a"
    link = os.link

    def late(source, target):
        path.write_bytes(b"theirs")
        if link_errno:
            raise OSError(link_errno, "no hard links here")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(AlreadyExistsError):
        put(path, overwrite=False)
    assert path.read_bytes() == b"theirs"
    assert names(tmp_path) == ["a"]


def test_file_system_without_hard_links_works(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    put(tmp_path / "a", overwrite=False)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_missing_folder_is_named_with_a_hint(tmp_path):
    with pytest.raises(NotFoundError, match="Create the folder first") as caught:
        put(tmp_path / "no" / "such" / "a")
    assert str(tmp_path / "no" / "such") in str(caught.value)
    assert names(tmp_path) == []


def test_file_in_place_of_the_folder_is_refused(old):
    with pytest.raises(NotFoundError):
        put(old / "a")
    assert only_old(old)


def test_folder_pipe_and_device_are_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    for path, word in (
        (tmp_path / "folder", "folder"),
        (str(tmp_path / "folder") + "/", "folder"),
        (str(tmp_path / "nothing") + "/", "folder"),
        (tmp_path / "pipe", "pipe"),
        ("/dev/null", "device"),
        ("", "folder"),
    ):
        with pytest.raises(UsageError, match=word):
            put(path)
    assert names(tmp_path) == before
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    target = tmp_path / "far" / "run.thin"
    target.write_bytes(b"old")
    link = tmp_path / "near" / "latest"
    link.symlink_to("../far/run.thin")
    put(link)
    assert link.is_symlink() and os.readlink(link) == "../far/run.thin"
    assert target.read_bytes() == b"new"
    assert names(tmp_path / "far") == ["run.thin"] and names(tmp_path / "near") == ["latest"]


def test_dangling_link_gets_its_target_and_a_circle_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("target")
    put(tmp_path / "link")
    assert (tmp_path / "target").read_bytes() == b"new" and (tmp_path / "link").is_symlink()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UsageError, match="circle"):
        put(tmp_path / "circle")


def test_longest_name_and_every_kind_of_path_work(tmp_path):
    for name in ("x" * 255, "ü" * 127):
        put(tmp_path / name)
        put(os.fsencode(tmp_path / name), b"again")
        assert (tmp_path / name).read_bytes() == b"again"


@pytest.mark.parametrize("path", [3, None, "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(UsageError):
        AtomicWriter(path)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0, 0o666)])
@pytest.mark.parametrize("overwrite", [True, False])
def test_new_file_follows_the_umask(tmp_path, mask, mode, overwrite):
    with umask(mask):
        put(tmp_path / "a", overwrite=overwrite)
        (tmp_path / "plain").touch()
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == mode
    assert os.stat(tmp_path / "plain").st_mode == os.stat(tmp_path / "a").st_mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_replaced_file_keeps_its_permission_bits(old, mode):
    old.chmod(mode)
    with umask(0o022), AtomicWriter(old) as sink:
        (tmp,) = old.parent.glob(".run.thin.*.tmp")
        assert stat.S_IMODE(tmp.stat().st_mode) == mode
        sink.write(b"new")
        sink.commit()
    assert stat.S_IMODE(old.stat().st_mode) == mode
    assert old.read_bytes() == b"new"


def test_setgid_folder_gives_its_group(tmp_path):
    group = NOBODY if os.geteuid() == 0 else next((g for g in os.getgroups() if g != os.getegid()), None)
    if group is None:
        pytest.skip("the user is in one group only")
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, -1, group)
    folder.chmod(0o2775)
    put(folder / "a")
    assert (folder / "a").stat().st_gid == group != os.getegid()


def test_default_acl_of_the_folder_is_inherited(tmp_path):
    if not shutil.which("setfacl"):
        pytest.skip("setfacl is not installed")
    folder = tmp_path / "acl"
    folder.mkdir()
    done = subprocess.run(
        ["setfacl", "-d", "-m", f"u:{NOBODY}:rw", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no ACLs on this file system: {done.stderr.strip()}")
    put(folder / "a")
    (folder / "plain").touch()
    acl = [
        subprocess.run(["getfacl", "-cn", str(folder / n)], capture_output=True, text=True, check=True).stdout
        for n in ("a", "plain")
    ]
    assert f"user:{NOBODY}:rw" in acl[0]
    assert acl[0] == acl[1]


@contextmanager
def without_privileges():
    """Runs the block as another user if this one is root, who may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.fixture
def public_folder():
    """A folder that every user reaches, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_no_permission_is_refused_and_leaves_nothing(public_folder):
    path = public_folder / "run.thin"
    path.write_bytes(b"old")
    path.chmod(0)
    public_folder.chmod(0o555)
    with without_privileges():
        for name in (path, public_folder / "new"):
            with pytest.raises(PermissionDeniedError) as caught:
                put(name)
            assert caught.value.errno == errno.EACCES and isinstance(caught.value, PermissionError)
            assert str(name) in str(caught.value)
        with pytest.raises(PermissionDeniedError):
            LocalSource(path)
    path.chmod(0o644)
    assert only_old(path)


def test_folder_that_cannot_be_listed_is_written_all_the_same(public_folder):
    drop = public_folder / "drop"
    drop.mkdir()
    drop.chmod(0o333)
    with without_privileges():
        put(drop / "a")
    drop.chmod(0o755)
    assert (drop / "a").read_bytes() == b"new"
    assert names(drop) == ["a"]


def test_read_only_file_system_is_refused(tmp_path):
    with mounted(tmp_path / "ro", "size=1m") as folder:
        (folder / "run.thin").write_bytes(b"old")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
        with pytest.raises(PermissionDeniedError) as caught:
            put(folder / "run.thin")
        assert caught.value.errno == errno.EROFS
        assert only_old(folder / "run.thin")


@contextmanager
def mounted(folder: Path, options: str):
    """A small tmpfs."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def test_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as folder:
        (folder / "run.thin").write_bytes(b"old")
        with pytest.raises(NoSpaceError) as caught:
            put(folder / "run.thin", bytes(4 << 20))
        assert caught.value.errno == errno.ENOSPC
        assert "Free some space" in str(caught.value)
        assert only_old(folder / "run.thin")
        put(folder / "run.thin", bytes(500_000))


def test_file_size_limit_leaves_the_old_file_and_nothing_else(old):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(NoSpaceError) as caught:
            put(old, bytes(300_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert only_old(old)


@pytest.mark.parametrize("call", ["fsync", "close", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_failure_that_appears_only_at_the_end_leaves_the_old_file(old, monkeypatch, call, code):
    real = getattr(os, call)
    has_failed = []

    def fail(*arguments):
        if call == "close":
            real(*arguments)
        if has_failed:
            return None if call == "close" else real(*arguments)
        has_failed.append(True)
        raise OSError(code, os.strerror(code))

    with AtomicWriter(old) as sink:
        sink.write(b"new")
        monkeypatch.setattr(os, call, fail)
        with pytest.raises(StorageError) as caught:
            sink.commit()
        monkeypatch.undo()
    assert caught.value.errno == code
    assert isinstance(caught.value, NoSpaceError) == (code != errno.EIO)
    assert only_old(old)


def test_folder_that_cannot_be_made_durable_is_told(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="the file is in place"):
        put(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"
    put(tmp_path / "b", durable=False)


def test_file_and_then_folder_are_fsynced(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd):
        calls.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def note_replace(*arguments):
        calls.append("rename")
        replace(*arguments)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    put(tmp_path / "a")
    put(tmp_path / "b", durable=False)
    assert calls == ["file", "rename", "folder", "rename"]


@pytest.mark.timeout(60)
def test_kill_in_mid_write_leaves_the_old_file(old):
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from thinpoint.store.local import AtomicWriter
with AtomicWriter({str(old)!r}) as sink:
    sink.write(bytes(1 << 20))
    print("written", flush=True)
    sys.stdin.read()
    sink.commit()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout.readline() == b"written\n"
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert old.read_bytes() == b"old"
    rest = [name for name in names(old.parent) if name != old.name]
    assert len(rest) == 1 and rest[0].startswith(f".run.thin.{child.pid}-") and rest[0].endswith(".tmp")
    put(old)
    assert old.read_bytes() == b"new"


def test_working_directory_may_change_while_writing(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with AtomicWriter("x") as sink:
        sink.write(b"new")
        os.chdir(tmp_path / "b")
        sink.commit()
    assert names(tmp_path / "a") == ["x"] and names(tmp_path / "b") == []


def test_writer_is_used_once_and_only_inside_its_block(tmp_path):
    writer = AtomicWriter(tmp_path / "a")
    with pytest.raises(UsageError):
        writer.write(b"x")
    with writer:
        writer.write(b"new")
        writer.commit()
        with pytest.raises(UsageError):
            writer.write(b"more")
        with pytest.raises(UsageError):
            writer.commit()
    assert (tmp_path / "a").read_bytes() == b"new"


def test_no_descriptor_is_left_open(old):
    before = set(os.listdir("/proc/self/fd"))
    put(old)
    with AtomicWriter(old):
        pass
    with pytest.raises(ValueError, match="mine"), AtomicWriter(old):
        raise ValueError("mine")
    assert set(os.listdir("/proc/self/fd")) == before
