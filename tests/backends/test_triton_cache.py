from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.triton import cache, loader
from moe_triton.backends.cpu.triton.loader import load
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.open_folders import opened
from moe_triton.kernels.returns import own_offsets_kernel
from moe_triton.kernels.route import route_kernel
from tests.distributed.failures import wait_until_stopped
from tests.patience import seconds

Said = Callable[[], list[str]]
ANOTHER_USER = 12345


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_private", {})
    return cache.cache_folder()


def fetched(folder: Path, key: str, build: Callable[[], bytes], of: str = "an entry") -> Path:
    with cache.fetch(folder, key, build, of=of) as entry:
        assert entry.opened.samefile(entry.path)
        return entry.path


def fetched_privately(key: str, build: Callable[[], bytes]) -> Path:
    with cache.fetch_privately(key, build) as entry:
        return entry.path


def body_of(path: Path) -> bytes:
    return cache.Entry(path, path).body()


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
    path = fetched(folder, "key", lambda: b"content")
    assert path.read_bytes().startswith(b"content")
    assert path.stat().st_mode & 0o077 == 0

    def fail() -> bytes:
        raise AssertionError("built again")

    assert fetched(folder, "key", fail) == path


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow"])
def test_a_damaged_entry_is_built_again(folder: Path, damage: str) -> None:
    path = fetched(folder, "key", lambda: b"content")
    sound = path.read_bytes()
    damaged = {
        "flip": bytes([sound[0] ^ 1]) + sound[1:],
        "cut": sound[:-5],
        "empty": b"",
        "grow": sound + b"x",
    }[damage]
    path.write_bytes(damaged)
    fetched(folder, "key", lambda: b"content")
    assert path.read_bytes() == sound


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail() -> bytes:
        raise ToolchainError("no compiler")

    with pytest.raises(ToolchainError):
        fetched(folder, "key", fail)
    assert [path.name for path in folder.iterdir()] == ["key.lock"]
    assert fetched(folder, "key", lambda: b"content").exists()


def _build_slowly(folder: str, built: str) -> None:
    def build() -> bytes:
        with Path(built).open("a") as log:
            log.write("x")
        time.sleep(0.3)
        return b"content"

    fetched(Path(folder), "key", build)


def test_eight_processes_that_want_one_entry_build_it_once(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    built = tmp_path / "built"
    processes = [context.Process(target=_build_slowly, args=(str(folder), str(built))) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds(30))
        assert process.exitcode == 0
    assert built.read_text() == "x"
    assert fetched(folder, "key", lambda: b"").read_bytes().startswith(b"content")
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]


def test_keys_differ_with_every_part() -> None:
    parts = ("source", [("x", "*bf16")], "H=32", True, "x86-64-v3", (("triton-ascend", "3.2.0"),))
    keys = {cache.entry_key(parts)}
    for i in range(len(parts)):
        keys.add(cache.entry_key((*parts[:i], "other", *parts[i + 1 :])))
    assert len(keys) == len(parts) + 1


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Said]:
    """The warnings so far."""
    monkeypatch.setattr(cache, "_said", set())
    with caplog.at_level(logging.WARNING, "moe_triton"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache on a file system of 64 KB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user cannot mount anything")
    monkeypatch.setenv("MOE_TRITON_CACHE", str(mounted / "cache"))
    monkeypatch.setattr(cache, "_private", {})
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_passed_by(small: Path, said: Said) -> None:
    folder = cache.cache_folder()
    fill(small)
    cache.check_usable()
    for _ in range(2):
        path = fetched(folder, "key", lambda: b"content")
        assert body_of(path) == b"content"
        assert folder not in path.parents
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert said() == [
        f"the kernel cache {folder} is passed by: No space left on device. Each process compiles for itself. "
        f"{cache.REMEDY}"
    ]
    assert not list(folder.glob("*.tmp"))


def test_a_read_only_folder_is_passed_by(small: Path, said: Said) -> None:
    folder = cache.cache_folder()
    kept = fetched(folder, "kept", lambda: b"content")
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    cache.check_usable()
    assert fetched(folder, "kept", lambda: b"") == kept
    assert body_of(fetched(folder, "key", lambda: b"other")) == b"other"
    assert len(said()) == 1
    assert "Read-only file system" in said()[0]


FAILURES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]


@pytest.mark.parametrize("code", FAILURES)
def test_what_cannot_be_written_is_passed_by(
    folder: Path, said: Said, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = tempfile.mkstemp

    def refuse(*arguments: Any, **named: Any) -> tuple[int, str]:
        if folder.samefile(named["dir"]):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    cache.check_usable()
    assert body_of(fetched(folder, "key", lambda: b"content")) == b"content"
    assert len(said()) == 1
    assert os.strerror(code) in said()[0]


@pytest.mark.parametrize("code", FAILURES)
def test_without_room_anywhere_the_error_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*arguments: Any, **named: Any) -> tuple[int, str]:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    for call in (cache.check_usable, lambda: fetched(folder, "key", lambda: b"content")):
        with pytest.raises(ToolchainError, match="MOE_TRITON_CACHE or TMPDIR") as caught:
            call()
        assert os.strerror(code) in str(caught.value)


def test_an_entry_that_is_a_folder_is_passed_by(folder: Path, said: Said) -> None:
    (folder / "key.so").mkdir()
    assert body_of(fetched(folder, "key", lambda: b"content")) == b"content"
    assert "key.so is a folder; remove it" in said()[0]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_can_write_is_built_again(folder: Path, mode: int) -> None:
    path = fetched(folder, "key", lambda: b"theirs")
    path.chmod(mode)
    assert body_of(fetched(folder, "key", lambda: b"ours")) == b"ours"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_entry_of_another_user_is_built_again(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    path = fetched(folder, "key", lambda: b"theirs")
    try:
        os.chown(path, ANOTHER_USER, -1)
    except OSError:
        pytest.skip("this root has no other users: it is one of a user namespace")
    assert body_of(fetched(folder, "key", lambda: b"ours")) == b"ours"
    assert path.stat().st_uid == 0


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
def test_an_entry_that_is_no_file_is_built_again(folder: Path, kind: str) -> None:
    sound = fetched(folder, "other", lambda: b"theirs")
    path = folder / "key.so"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(sound if kind == "link" else folder / "nowhere")
    assert body_of(fetched(folder, "key", lambda: b"ours")) == b"ours"
    assert path.is_file()
    assert not path.is_symlink()
    assert body_of(sound) == b"theirs"


@pytest.fixture
def linked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A link to the cache in a folder that others can write to; where it leads now is only ours."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    link = shared / "cache"
    link.symlink_to(folder)
    monkeypatch.setenv("MOE_TRITON_CACHE", str(link))
    fetched(folder, "key", lambda: b"theirs")
    return link


def test_a_link_in_a_folder_that_others_can_write_to_is_passed_by(linked: Path, said: Said) -> None:
    """They can have it lead elsewhere, and back, at any time."""
    cache.check_usable()
    assert body_of(fetched(cache.cache_folder(), "key", lambda: b"ours")) == b"ours"
    assert [f"{linked.parent} can be written by others" in text for text in said()] == [True]
    with pytest.raises(ToolchainError, match="can be written by others"):
        cache.safe_folder()


def test_an_own_link_in_a_folder_like_tmp_is_followed(linked: Path, folder: Path) -> None:
    linked.parent.chmod(0o1777)
    assert cache.cache_folder() == cache.safe_folder() == folder
    assert body_of(fetched(linked, "key", lambda: b"")) == b"theirs"


@pytest.mark.parametrize("through", ["cache", "cache/inside", "./../shared/cache"])
def test_a_link_of_another_user_is_not_followed(linked: Path, folder: Path, said: Said, through: str) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    linked.parent.chmod(0o1777)
    try:
        os.lchown(linked, ANOTHER_USER, -1)
    except OSError:
        pytest.skip("this root has no other users: it is one of a user namespace")
    named = linked.parent / through
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_TRITON_CACHE", str(named))
        cache.check_usable()
        path = fetched(cache.cache_folder(), "key", lambda: b"ours")
    assert (path.parent, body_of(path)) == (cache.private_folder(), b"ours")
    assert [f"{linked} is a link of user {ANOTHER_USER}" in text for text in said()] == [True]
    assert not (folder / "inside").exists()


def test_links_in_a_circle_are_an_error_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to("a")
    monkeypatch.setenv("MOE_TRITON_CACHE", str(folder / "a"))
    with pytest.raises(ToolchainError, match="MOE_TRITON_CACHE"):
        cache.cache_folder()


def test_what_was_checked_is_read_whatever_is_put_in_its_place(folder: Path) -> None:
    """Another folder takes the place of the one that is open, while an entry is built."""
    aside, others = folder.with_name("aside"), folder.with_name("others")
    others.mkdir()
    cache._write(others / "key.so", b"theirs")

    def build() -> bytes:
        folder.rename(aside)
        others.rename(folder)
        return b"ours"

    with cache.fetch(folder, "key", build) as entry:
        assert body_of(entry.path) == b"theirs"
        assert entry.body() == b"ours"
    assert body_of(aside / "key.so") == b"ours"


def test_what_was_checked_is_loaded_whatever_is_put_in_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two kernels is its own, though its folder's descriptor has the same number."""
    kernels = [own_offsets_kernel(), route_kernel()]
    libraries = [anew(kernel).path.read_bytes() for kernel in kernels]
    real, aside = cache.fetch, folder.with_name("aside")

    @contextlib.contextmanager
    def exchanged(*arguments: Any, **named: Any) -> Iterator[cache.Entry]:
        with real(*arguments, **named) as entry:
            folder.rename(aside)
            folder.mkdir(mode=0o700)
            entry.path.write_bytes(b"theirs")
            try:
                yield entry
            finally:
                shutil.rmtree(folder)
                aside.rename(folder)

    loaded = []

    def load_library(path: str) -> ctypes.CDLL:
        loaded.append(Path(path).read_bytes())
        return library(path)

    library = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", load_library)
    monkeypatch.setattr(cache, "fetch", exchanged)
    entries = {anew(kernel).entry for kernel in kernels}
    assert (loaded, len(entries)) == (libraries, 2)


def test_a_private_folder_that_somebody_put_another_in_place_of_is_not_used(folder: Path) -> None:
    ours = cache.private_folder()
    ours.rename(ours.with_name(f"{ours.name}-aside"))
    try:
        ours.mkdir()
        ours.chmod(0o777)
        with pytest.raises(ToolchainError, match="can be written by others"):
            fetched_privately("key", lambda: b"ours")
    finally:
        shutil.rmtree(ours.with_name(f"{ours.name}-aside"))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_in_one_that_others_can_write_is_passed_by(folder: Path, said: Said, mode: int) -> None:
    """There, others could put another folder in its place."""
    fetched(folder, "key", lambda: b"theirs")
    folder.parent.chmod(mode)
    cache.check_usable()
    path = fetched(folder, "key", lambda: b"ours")
    assert body_of(path) == b"ours"
    assert f"{folder.parent} can be written by others" in said()[0]
    folder.parent.chmod(mode | stat.S_ISVTX)  # as /tmp
    assert body_of(fetched(folder, "key", lambda: b"")) == b"theirs"


def test_folders_are_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path / "one" / "two" / "cache"))
    usual = os.umask(0)
    try:
        folder = cache.cache_folder()
    finally:
        os.umask(usual)
    for part in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(part.stat().st_mode) == 0o700
    assert cache.why_unsafe(folder) == ""


@pytest.mark.parametrize("bad", ["\0", "x" * 300, "file", "file/cache"])
def test_a_name_that_is_no_folder_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache, "_chosen_folder", lambda: tmp_path / bad)
    with pytest.raises(ToolchainError, match="MOE_TRITON_CACHE"):
        cache.cache_folder()


def test_a_stopped_process_does_not_hold_others_up_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.1)
    with (folder / "key.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert body_of(fetched(folder, "key", lambda: b"content")) == b"content"


def _stop_in_a_build(folder: str) -> None:
    def build() -> bytes:
        os.kill(os.getpid(), signal.SIGSTOP)
        return b"theirs"

    with cache.waiting(seconds(60), "rank 1 of 2"):
        fetched(Path(folder), "key", build)


def test_a_wait_for_a_stopped_process_is_as_long_as_its_caller_waits_for_others_and_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "LOCK_WAIT_S", seconds(600))
    process = multiprocessing.get_context("fork").Process(target=_stop_in_a_build, args=(str(folder),))
    process.start()
    assert process.pid
    try:
        wait_until_stopped(process.pid)
        with cache.waiting(0.1, "rank 0 of 2"):
            path = fetched(folder, "key", lambda: b"ours", of="the kernel k")
        assert body_of(path) == b"ours"
    finally:
        process.kill()
        process.join()
    holder = f"rank 1 of 2 (process {process.pid} on {socket.gethostname()})"
    assert [f"{holder} has been building the kernel k for more than 0.1 s: built here"] == caplog.messages


def test_all_entries_of_one_wait_take_no_longer_than_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them is held by another process, which does not say who it is, like an older version."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(cache, "time", clock)
    keys = "one", "two", "three"
    with contextlib.ExitStack() as held, cache.waiting(10.0, "rank 0 of 2"):
        for key in keys:
            fcntl.flock(held.enter_context((folder / f"{key}.lock").open("w")), fcntl.LOCK_EX)
        for key in keys:
            fetched(folder, key, lambda: b"content")
    assert now[0] == pytest.approx(10.0, abs=0.1)
    assert [text.split(" has")[0] for text in caplog.messages] == ["another process"] * 3


def test_who_waits_for_a_lock_takes_what_others_have_built_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_WAIT_S", seconds(600))
    other_folder = folder / "other"
    other_folder.mkdir()
    content = fetched(other_folder, "key", lambda: b"theirs").read_bytes()
    build = lambda s: (folder / "key.so").write_bytes(content)  # noqa: E731
    monkeypatch.setattr(cache, "time", SimpleNamespace(monotonic=time.monotonic, sleep=build))
    with (folder / "key.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert body_of(fetched(folder, "key", lambda: b"ours")) == b"theirs"


def anew(kernel: TritonKernel) -> loader.CompiledKernel:
    return loader._load(kernel, "{}", True, loader.this_target().name, streams=False)


def test_an_entry_that_cannot_be_loaded_is_passed_by(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the right digest, but is no library."""
    kernel = own_offsets_kernel()
    made = anew(kernel)
    assert made.path.parent == folder
    # Elsewhere: of a path that is loaded already, the loader does not look at the file.
    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path / "other"))
    cache._write(cache.cache_folder() / made.path.name, b"no ELF file")
    with opened(folder):  # so that the other one has another descriptor's name
        assert anew(kernel).path == cache.private_folder() / made.path.name
    assert load(kernel)


def test_a_native_library_that_is_none_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "find", lambda: tmp_path / native.LIBRARY)
    for make in (Path.mkdir, Path.touch):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        make(tmp_path / native.LIBRARY)
        with pytest.raises(ToolchainError, match="Build it anew"):
            native._loaded.__wrapped__()


def _build_privately(report: str) -> None:
    Path(report).write_text(str(fetched_privately("key", lambda: b"content")))


def test_what_is_built_privately_goes_with_the_process(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    ours = fetched_privately("key", lambda: b"content")
    process = multiprocessing.get_context("fork").Process(target=_build_privately, args=(str(report),))
    process.start()
    process.join(seconds(30))
    assert process.exitcode == 0
    theirs = Path(report.read_text())
    assert theirs.name == ours.name == "key.so"
    assert theirs.parent != ours.parent
    assert not theirs.parent.exists()
    assert ours.exists()
