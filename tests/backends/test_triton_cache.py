from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from moe_triton.backends.cpu.triton import cache
from moe_triton.errors import ToolchainError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path / "cache"))
    return cache.cache_folder()


def test_the_folder_is_private(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_TRITON_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "moe_triton"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "moe_triton"


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(ToolchainError, match="chmod 700"):
        cache.cache_folder()


def test_a_folder_of_someone_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ToolchainError, match="belongs to user"):
        cache.cache_folder()


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ToolchainError, match="MOE_TRITON_CACHE"):
        cache.cache_folder()


def test_an_entry_is_built_once(folder: Path) -> None:
    path = cache.fetch(folder, "key", lambda: b"content")
    assert path.read_bytes().startswith(b"content")
    assert path.stat().st_mode & 0o077 == 0

    def fail() -> bytes:
        raise AssertionError("built again")

    assert cache.fetch(folder, "key", fail) == path


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow"])
def test_a_damaged_entry_is_built_again(folder: Path, damage: str) -> None:
    path = cache.fetch(folder, "key", lambda: b"content")
    sound = path.read_bytes()
    damaged = {
        "flip": bytes([sound[0] ^ 1]) + sound[1:],
        "cut": sound[:-5],
        "empty": b"",
        "grow": sound + b"x",
    }[damage]
    path.write_bytes(damaged)
    cache.fetch(folder, "key", lambda: b"content")
    assert path.read_bytes() == sound


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail() -> bytes:
        raise ToolchainError("no compiler")

    with pytest.raises(ToolchainError):
        cache.fetch(folder, "key", fail)
    assert [path.name for path in folder.iterdir()] == ["key.lock"]
    assert cache.fetch(folder, "key", lambda: b"content").exists()


def _build_slowly(folder: str, built: str) -> None:
    def build() -> bytes:
        with Path(built).open("a") as log:
            log.write("x")
        time.sleep(0.3)
        return b"content"

    cache.fetch(Path(folder), "key", build)


def test_eight_processes_that_want_one_entry_build_it_once(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    built = tmp_path / "built"
    processes = [context.Process(target=_build_slowly, args=(str(folder), str(built))) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert built.read_text() == "x"
    assert cache.fetch(folder, "key", lambda: b"").read_bytes().startswith(b"content")
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]


def test_keys_differ_with_every_part() -> None:
    parts = ("source", [("x", "*bf16")], "H=32", True, "x86-64-v3", (("triton-ascend", "3.2.0"),))
    keys = {cache.entry_key(parts)}
    for i in range(len(parts)):
        keys.add(cache.entry_key((*parts[:i], "other", *parts[i + 1 :])))
    assert len(keys) == len(parts) + 1
