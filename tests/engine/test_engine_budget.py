"""The host memory that a save plans with, from the files that Linux gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinpoint.device import pinned
from thinpoint.engine.budget import free_bytes, host_memory_bytes
from thinpoint.errors import UsageError

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("THINPOINT_HOST_MEMORY", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def machine(root: Path, cgroup: str, files: dict[str, str], available_gib: int = 64) -> Path:
    """A folder as `/` of a machine, with these files below `/sys/fs/cgroup`."""
    meminfo = f"MemTotal: {128 << 20} kB\nMemFree: 5 kB\nMemAvailable: {available_gib << 20} kB\n"
    everything = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup}
    everything |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_version_2_counts_page_cache_as_free(tmp_path: Path) -> None:
    files = {
        "job/memory.max": f"{16 * GIB}\n",
        "job/memory.current": f"{10 * GIB}\n",
        "job/memory.stat": f"anon {6 * GIB}\nfile {4 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\nshmem {GIB}\n",
    }
    root = machine(tmp_path, "0::/job\n", files)
    assert free_bytes(root) == 9 * GIB
    assert host_memory_bytes(root=root) == 9 * GIB // 2


def test_the_tightest_of_the_cgroups_above_counts(tmp_path: Path) -> None:
    files = {
        "memory.stat": "",
        "pod/memory.max": f"{3 * GIB}\n",
        "pod/memory.current": f"{GIB}\n",
        "pod/box/memory.max": "max\n",
        "pod/box/memory.current": f"{GIB}\n",
    }
    assert free_bytes(machine(tmp_path, "0::/pod/box\n", files)) == 2 * GIB


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{5 * GIB}\n",
        "memory/job/memory.stat": f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": f"{90 * GIB}\n",
    }
    root = machine(tmp_path, "12:cpu,cpuacct:/job\n5:memory:/job\n1:name=systemd:/x\n", files)
    assert free_bytes(root) == 5 * GIB


def test_a_path_of_the_host_leaves_the_limit_at_the_top(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert free_bytes(machine(tmp_path, "5:memory:/docker/abc\n", files)) == 3 * GIB


@pytest.mark.parametrize("cgroup", ["", "0::/\n"])
def test_without_a_limit_it_is_what_the_machine_has_left(tmp_path: Path, cgroup: str) -> None:
    assert free_bytes(machine(tmp_path, cgroup, {})) == 64 * GIB


def test_a_cgroup_beyond_its_limit_leaves_something(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}
    root = machine(tmp_path, "0::/\n", files)
    assert free_bytes(root) == 0
    assert host_memory_bytes(root=root) == 1


def test_what_earlier_saves_have_page_locked_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pinned.SlabPool(is_pinned=False, slab_bytes=1 << 20)
    monkeypatch.setattr(pinned, "slab_pool", lambda *, is_pinned: pool)
    root = machine(tmp_path, "", {}, available_gib=8)
    before = host_memory_bytes(root=root)
    borrowed = [pool.borrow() for _ in range(3)]
    assert host_memory_bytes(root=root) == before
    del borrowed
    assert host_memory_bytes(root=root) == before + (3 << 20) // 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory_bytes(root=root) == GIB + (3 << 20) // 2


def test_ranks_of_a_node_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, "", {})
    for text, expected in (("8", 4 * GIB), ("0", 32 * GIB), ("many", 32 * GIB)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert host_memory_bytes(root=root) == expected


def test_an_argument_comes_before_the_environment_and_that_before_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINPOINT_HOST_MEMORY", "1000")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    root = machine(tmp_path, "", {})
    assert host_memory_bytes(root=root) == 1000
    assert host_memory_bytes(77, root=root) == 77


def test_this_machine_has_some_memory() -> None:
    assert 1 << 20 < host_memory_bytes() < 1 << 50


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", "8GB"])
def test_what_is_no_number_of_bytes_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINPOINT_HOST_MEMORY", text)
    with pytest.raises(UsageError, match="THINPOINT_HOST_MEMORY"):
        host_memory_bytes()


@pytest.mark.parametrize("value", [0, -5, 1.5, "1000", True])
def test_an_argument_that_is_no_number_of_bytes_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="host_memory"):
        host_memory_bytes(value)  # type: ignore[arg-type]
