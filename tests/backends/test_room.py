"""What control groups leave, from trees of files like the kernel's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moe_triton.backends.cpu.room import available_memory, cgroup_limits

MB = 1 << 20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc" / "self", cgroup="0::/pods/one/rank")
    return tmp_path / "proc"


def free_of(proc: Path, mount: Path) -> list[int]:
    return [limit.free // MB for limit in cgroup_limits(proc, mount)]


def test_version_2_counts_every_group_around_a_process(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    write(mount, cgroup__controllers="memory")
    write(mount / "pods", memory__max=900 * MB, memory__current=300 * MB)
    stat = f"anon {5 * MB}\nfile {90 * MB}\ninactive_file {20 * MB}\nactive_file {10 * MB}\nshmem {60 * MB}"
    write(mount / "pods" / "one", memory__max="max", memory__current=100 * MB)
    write(
        mount / "pods" / "one" / "rank",
        memory__max=200 * MB,
        memory__current=150 * MB,
        memory__stat=stat,
    )
    assert free_of(proc, mount) == [80, 600]


def test_version_2_beside_version_1(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    write(mount / "unified" / "pods", memory__max=70 * MB, memory__current=80 * MB)
    assert free_of(proc, mount) == [0]


@pytest.mark.parametrize("place", ["", "docker/abc"])
def test_version_1(proc: Path, tmp_path: Path, place: str) -> None:
    """Of a container that sees its own group as the root, and of one that sees all."""
    mount = tmp_path / "cgroup"
    write(proc / "self", cgroup="5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/")
    unlimited = 9223372036854771712
    write(mount / "memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=MB)
    write(
        mount / "memory" / place,
        memory__limit_in_bytes=100 * MB,
        memory__usage_in_bytes=60 * MB,
        memory__stat=f"total_inactive_file {2 * MB}\ntotal_active_file {3 * MB}\nactive_file {50 * MB}",
    )
    assert free_of(proc, mount) == [45]


def test_processes_of_one_group_have_the_same_key(proc: Path, tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    for name in ("a", "b"):
        write(mount / "pods" / name, memory__max=100, memory__current=50)
    write(mount / "pods", memory__max=1000, memory__current=50)
    write(mount, cgroup__controllers="")
    keys = []
    for name in ("a", "a", "b"):
        write(proc / "self", cgroup=f"0::/pods/{name}")
        keys.append([limit.key for limit in cgroup_limits(proc, mount)])
    assert keys[0] == keys[1]
    assert keys[0][0] != keys[2][0]
    assert keys[0][1] == keys[2][1]


@pytest.mark.parametrize("said", ["", "0::/../../elsewhere", "nonsense", "0::"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, said: str) -> None:
    write(tmp_path / "proc" / "self", cgroup=said)
    write(tmp_path / "cgroup" / "unified", memory__max="nonsense", memory__current="")
    assert cgroup_limits(tmp_path / "proc", tmp_path / "cgroup") == []
    assert cgroup_limits(tmp_path / "nowhere", tmp_path / "nowhere") == []


def test_the_memory_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path, meminfo="MemTotal: 100 kB\nMemAvailable:   64 kB")
    assert available_memory(tmp_path) == 64 << 10
    assert available_memory(tmp_path / "nowhere") == sys.maxsize
    assert available_memory() > 0
