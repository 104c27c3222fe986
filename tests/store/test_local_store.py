"""What only the local disk has: leftovers with an age, durable folders, names that another process took."""

from __future__ import annotations

import errno
import os
import stat
import time

import pytest

from thinpoint.errors import AlreadyExistsError, NotFoundError, StorageError
from thinpoint.store import AtomicWriter, LocalStore, folders


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(str(tmp_path / "store"))


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """Folders that were made durable."""
    real, paths = os.fsync, []

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_leftovers_tell_name_size_and_age_and_can_be_deleted(store):
    store.put("step-1/data", b"1")
    with AtomicWriter(f"{store.url}/step-1/x.thin") as writer:
        writer.write(b"half")
        (found,) = store.leftovers()
        assert (found.size, found.age_s < 60) == (4, True)
        os.utime(f"{store.url}/{found.name}", (time.time() - 5000,) * 2)
        (found,) = store.leftovers("step-1/")
        assert 4990 < found.age_s < 5100
        assert store.leftovers("step-2/") == []
        store.delete(found.name)
        assert store.leftovers() == []
    assert [file.name for file in store.files()] == ["step-1/data"]


def test_names_of_all_new_folders_are_durable(store, synced):
    store.put("a/b/c", b"1")
    root = store.url
    assert {os.path.dirname(root), root, f"{root}/a", f"{root}/a/b"} <= set(synced)


def test_rename_is_durable_on_both_sides(store, synced):
    store.put("a/b", b"1")
    synced.clear()
    store.rename("a/b", "c/d")
    assert {f"{store.url}/a", f"{store.url}/c"} <= set(synced)


def test_empty_folders_go_but_never_the_store_itself(store):
    store.put("a/b/c", b"1")
    store.delete("a/b/c")
    assert os.listdir(store.url) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL])
def test_rename_works_where_the_system_cannot_refuse_to_replace(store, monkeypatch, number):
    """NFS: such a call fails, and the ordinary one is made after a look."""

    class Library:
        def renameat2(self, *arguments) -> int:
            folders.ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *arguments, **options: Library())
    store.put("a", b"a")
    store.put("b", b"b")
    with pytest.raises(AlreadyExistsError):
        store.rename("a", "b")
    store.rename("a", "c")
    assert (store.get("b", 1), store.get("c", 1)) == (b"b", b"a")


def test_file_where_a_folder_should_be_is_told(store):
    store.put("a", b"1")
    for call in (lambda: store.put("a/b", b"1"), lambda: store.put("a/b/c", b"1")):
        with pytest.raises(NotFoundError, match="Not a directory"):
            call()
    assert store.files("a/") == []


def test_linked_files_are_listed_and_linked_folders_are_not(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_bytes(b"123")
    store.put("a", b"1")
    os.symlink(tmp_path / "elsewhere" / "x", f"{store.url}/link")
    os.symlink(tmp_path / "elsewhere", f"{store.url}/folder")
    os.symlink("nowhere", f"{store.url}/dangling")
    os.mkfifo(f"{store.url}/pipe")
    assert [(file.name, file.size) for file in store.files()] == [("a", 1), ("link", 3)]


@pytest.mark.parametrize(
    ("number", "transient"), [(errno.ESTALE, True), (errno.EAGAIN, True), (errno.EIO, False)]
)
def test_folder_that_cannot_be_listed_is_an_error_and_not_empty(store, monkeypatch, number, transient):
    def scandir(path):
        raise OSError(number, os.strerror(number))

    store.put("a", b"1")
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError) as caught:
        store.files()
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.transient) == (number, transient)


def test_a_folder_that_is_a_link_is_outside(tmp_path):
    (tmp_path / "outside" / "in").mkdir(parents=True)
    (tmp_path / "outside" / "in" / "file").write_bytes(b"x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    store = LocalStore(root)
    for prefix in ("", "link", "link/", "link/in/", "link/in/file"):
        assert store.files(prefix) == []
