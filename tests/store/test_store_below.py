"""A folder of a store is a store: what it does is done below that folder, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinpoint.errors import AlreadyExistsError, NotFoundError, UsageError
from thinpoint.store import LocalStore, open_store
from thinpoint.store.below import Below
from thinpoint.store.contract import Store


@pytest.fixture(params=["local", "memory"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path) if request.param == "local" else open_store(f"memory://{tmp_path.name}-below")


def test_all_that_a_store_does(whole: Store) -> None:
    below = Below(whole, "runs/step-1")
    whole.put("other", b"o")
    below.put("a", b"1")
    with below.sink("deep/b") as sink:
        sink.write(b"22")
    assert below.get("a", 10) == whole.get("runs/step-1/a", 10) == b"1"
    source = below.source("deep/b")
    assert source.size == 2
    source.close()
    assert [(file.name, file.size) for file in below.files()] == [("a", 1), ("deep/b", 2)]
    assert [file.name for file in below.files("deep/")] == ["deep/b"]
    with pytest.raises(AlreadyExistsError):
        below.put("a", b"2", if_absent=True)
    below.delete("a")
    with pytest.raises(NotFoundError):
        below.get("a", 10)
    if below.capabilities.rename:
        below.rename("deep", "moved")
        assert [file.name for file in whole.files()] == ["other", "runs/step-1/moved/b"]
    assert below.url == f"{whole.url}/runs/step-1"
    assert open_store(below) is below


@pytest.mark.parametrize("name", ["", "/a", "a/", "../a", "a/../b", "a//b"])
def test_names_that_lead_elsewhere(whole: Store, name: str) -> None:
    with pytest.raises(UsageError):
        Below(whole, name)
    with pytest.raises(UsageError):
        Below(whole, "a").put(name, b"x")
