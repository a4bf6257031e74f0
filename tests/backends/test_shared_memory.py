"""The folder of windows: what is refused, and whether it has huge pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_triton.core import shared_memory
from moe_triton.core.errors import WindowError
from moe_triton.core.shared_memory import USUAL, VARIABLE, Mount, folder, huge_pages, mount_of

MOUNTINFO = r"""22 1 0:5 / / rw,relatime - ext4 /dev/vda rw,errors=remount-ro
25 24 0:23 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=24684092k
26 24 0:24 / /huge rw,relatime - tmpfs tmpfs rw,huge=always
27 24 0:25 / /huge/with\040space rw,relatime - tmpfs tmpfs rw,size=1k,huge=advise
28 24 0:26 / /huge/never rw,relatime - tmpfs tmpfs rw,huge=never
29 24 0:27 / /hidden rw,relatime - tmpfs tmpfs rw,huge=always
30 24 0:28 / /hidden rw,relatime - tmpfs tmpfs rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTINFO)
    return path


def forced(tmp_path: Path, word: str) -> Path:
    path = tmp_path / "shmem_enabled"
    words = ("always", "within_size", "advise", "never", "deny", "force")
    path.write_text(" ".join(f"[{each}]" if each == word else each for each in words) + "\n")
    return path


@pytest.mark.parametrize(
    ("path", "point"),
    [("/dev/shm/x", "/dev/shm"), ("/huge", "/huge"), ("/huge/with space/x", "/huge/with space"), ("/x", "/")],
)
def test_a_path_is_on_the_innermost_mount(mounts: Path, path: str, point: str) -> None:
    found = mount_of(Path(path), mounts)
    assert found is not None
    assert found.point == Path(point)


def test_of_mounts_at_one_place_the_last_is_seen(mounts: Path) -> None:
    assert mount_of(Path("/hidden"), mounts) == Mount(Path("/hidden"), "tmpfs", ("rw",))


@pytest.mark.parametrize(
    "name", ["größe".encode(), b"gr\xf6", b"a\x0cb", b"a\rb", "a\u0085b".encode(), b"a\\134101"]
)
def test_mounts_may_have_names_of_any_bytes(mounts: Path, name: bytes) -> None:
    mounts.write_bytes(mounts.read_bytes() + b"31 24 0:29 / /" + name + b" rw - tmpfs tmpfs rw\n")
    point = Path(os.fsdecode(b"/" + name.replace(b"\\134", b"\\")))
    assert mount_of(point / "x", mounts) == Mount(point, "tmpfs", ("rw",))
    assert mount_of(USUAL, mounts) is not None


@pytest.mark.parametrize(
    ("path", "word", "expected"),
    [
        ("/huge", "never", True),
        ("/huge/with space", "never", True),
        ("/huge/never", "never", False),
        ("/dev/shm", "never", False),
        ("/dev/shm", "force", True),
        ("/huge", "deny", False),
    ],
)
def test_huge_pages_are_those_of_the_mount(
    mounts: Path, tmp_path: Path, path: str, word: str, expected: bool
) -> None:
    assert huge_pages(Path(path), mounts, forced(tmp_path, word)) is expected


def test_who_does_not_say_has_unknown_pages(mounts: Path, tmp_path: Path) -> None:
    assert huge_pages(USUAL, mounts, tmp_path / "none") is None
    assert huge_pages(USUAL, tmp_path / "none", forced(tmp_path, "never")) is None


def test_without_the_variable_it_is_the_usual_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert folder() == USUAL
    monkeypatch.setenv(VARIABLE, "")
    assert folder() == USUAL


def test_a_folder_in_shared_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(USUAL))
    assert folder() == USUAL


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("windows", "it must be an absolute path"),
        ("{tmp}/missing", "it must be a folder: No such file or directory"),
        ("{tmp}/file", "it must be a folder"),
        ("{tmp}/open", "other users must not be able to remove files there"),
        ("{tmp}", "it must be on a tmpfs, not on ext4"),
    ],
)
def test_what_is_no_folder_for_windows_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, rule: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(shared_memory, "mount_of", lambda _: Mount(Path("/"), "ext4", ("rw",)))
    given = path.format(tmp=tmp_path)
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(WindowError) as caught:
        folder()
    said = str(caught.value)
    assert said.startswith(f"{VARIABLE} is {given}, but {rule}")
    assert "mount -t tmpfs" in said
