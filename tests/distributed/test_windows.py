"""Windows in shared memory: names that killed ranks left, files that are not what they should be, room."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, ConfigMismatchError, WindowError
from moe_triton.backends.cpu import window
from moe_triton.backends.cpu.room import Limit
from moe_triton.backends.cpu.spare import DOORBELL_BYTES, Spare
from moe_triton.backends.cpu.window import SharedWindow
from moe_triton.core.shared_memory import UNLOCKED, VARIABLE, create_locked
from moe_triton.core.shared_memory import USUAL as SHM
from moe_triton.core.threads import Deadline
from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from moe_triton.rendezvous.attempts import Attempt
from moe_triton.rendezvous.meeting import Meeting, _store_of
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
NUM_BYTES = 1 << 16
TIMEOUT_S = seconds(30.0)


@pytest.fixture
def prefix() -> str:
    """For the names of one test's windows: other tests make windows at the same time."""
    return f"{window.PREFIX}test-{secrets.token_hex(8)}-"


def make(meeting: Meeting | None = None, private_bytes: int = 0) -> SharedWindow:
    return SharedWindow(NUM_BYTES, meeting or Meeting(None, TIMEOUT_S), private_bytes)


def name_of(prefix: str, digit: str) -> Path:
    return SHM / f"{prefix}{os.getuid()}-{digit * 24}"


def leftovers(prefix: str) -> list[str]:
    return sorted(path.name for path in SHM.glob(f"{prefix}*"))


def names_in_use(rank: int, num_ranks: int, prefix: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "PREFIX", prefix)
        made = make()
        dist.barrier()
        names = leftovers(prefix)
        dist.barrier()
        made.close()
        return names


def test_a_name_without_a_lock_goes_at_once(ranks: Groups, prefix: str) -> None:
    dead, alive, new, old = (name_of(prefix, digit) for digit in "0123")
    new, old = (path.with_name(path.name + UNLOCKED) for path in (new, old))
    for path in (dead, alive, new, old):
        path.touch(mode=0o600)
    os.utime(old, (1, 1))
    try:
        with alive.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert ranks(2).run(names_in_use, prefix) == [[alive.name, new.name]] * 2
    finally:
        for path in (dead, alive, new, old):
            path.unlink(missing_ok=True)


def test_a_window_has_its_name_only_when_it_is_locked(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "PREFIX", prefix)
    name = name_of(prefix, "0").name
    lock = fcntl.flock

    def look(file: int, operation: int) -> None:
        assert leftovers(prefix) == [f"{name}{UNLOCKED}"]
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", look)
    made = create_locked(SHM / name)
    assert leftovers(prefix) == [name]
    monkeypatch.undo()
    monkeypatch.setattr(window, "PREFIX", prefix)
    window.remove_stale(SHM)
    assert leftovers(prefix) == [name]
    os.close(made)
    window.remove_stale(SHM)
    assert leftovers(prefix) == []


def die_with_a_name(rank: int, num_ranks: int, prefix: str) -> str:
    """All ranks are killed while windows have names."""
    window.PREFIX = prefix
    window._map = lambda path, num_bytes: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    make()
    return "alive"


def test_names_of_a_killed_group_are_removed_by_the_next_one(ranks: Groups, prefix: str) -> None:
    results = run_ranks(die_with_a_name, 2, (prefix,), allow_failures=True)
    assert all(isinstance(result, RankFailedError) for result in results)
    assert leftovers(prefix)
    assert ranks(2).run(names_in_use, prefix) == [[], []]


def late(rank: int, num_ranks: int, prefix: str) -> Any:
    """Rank 1 dies when all windows are made."""
    window.PREFIX = prefix
    if rank == 1:
        window._map = lambda path, num_bytes: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with pytest.raises(CommunicationTimeoutError) as caught:
        make(Meeting(None, 2.0))
    return caught.value.missing_ranks, str(caught.value)


def test_a_death_is_reported_with_what_was_seen(prefix: str) -> None:
    first, second, third = run_ranks(late, 3, (prefix,), allow_failures=True)
    assert isinstance(second, RankFailedError)
    for missing, said in (first, third):
        assert missing == (1,)
        assert "(the windows are mapped)" in said
        assert "s before (the window is made)" in said
    assert not leftovers(prefix)


def of_another_size(rank: int, num_ranks: int, change: int) -> str:
    if rank == 1:
        real = window._create

        def create(name: Path, spare: Spare) -> int:
            made = real(name, spare)
            os.ftruncate(made, spare.file_bytes + change)
            return made

        window._create = create
    with pytest.raises(WindowError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("change", [-1, 4096])
def test_the_size_of_a_peers_window_is_checked(change: int) -> None:
    for said in run_ranks(of_another_size, 2, (change,)):
        expected = NUM_BYTES + DOORBELL_BYTES
        assert f"{expected + change} bytes" in said
        assert f"{expected} bytes" in said


def limited(rank: int, num_ranks: int, keys: list[str], free: int, private: tuple[int, int] = (0, 0)) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "cgroup_limits", lambda: [Limit(keys[rank], "/a/group", free)])
        try:
            make(private_bytes=private[rank]).close()
        except WindowError as error:
            return str(error)
        return ""


def test_a_control_groups_limit_is_for_all_of_its_ranks(ranks: Groups) -> None:
    free = NUM_BYTES * 3 // 2
    assert ranks(2).run(limited, ["a", "b"], free) == ["", ""]
    for said in ranks(2).run(limited, ["a", "a"], free):
        assert f"2 windows of {NUM_BYTES} bytes are needed but the memory limit of /a/group leaves" in said
        assert "rank 0: " in said
        assert "rank 1: " in said


def test_what_calls_will_take_counts_where_it_is_limited(ranks: Groups) -> None:
    free = 2 * NUM_BYTES + 1000
    assert ranks(2).run(limited, ["a", "a"], free, (400, 600)) == ["", ""]
    for said in ranks(2).run(limited, ["a", "a"], free, (400, 601)):
        needed = f"2 windows of {NUM_BYTES} bytes and 1001 bytes for calls are needed"
        assert f"{needed} but the memory limit of /a/group leaves {free} free" in said


def named(more: bytes) -> bytes:
    name = f"{window.PREFIX}{os.getuid()}-{'0' * 24}".encode()
    return b'{"purpose": "name of the window", "message": {"name": "' + name + b'"' + more + b"}}"


MALFORMED: dict[str, list[bytes]] = {
    "rank 1 sent name 5": [b'{"purpose": "name of the window", "message": {"name": 5, "cgroups": []}}'],
    "rank 1 sent cgroups None": [named(b"")],
    "rank 1 sent private None": [named(b', "cgroups": []')],
    "rank 1 sent folder None": [named(b', "cgroups": [], "private": 0')],
    "a peer named its window": [
        b'{"purpose": "name of the window", "message": {"name": "../etc/passwd", "cgroups": [[], {}]}}'
    ],
    "rank 1 sent failure 5": [
        named(b', "cgroups": [1], "private": 0, "folder": "/dev/shm"'),
        b'{"purpose": "there is room for windows", "message": {"failure": 5}}',
    ],
    "which is no message of ours": [b"[" * 60000],
}


def send_nonsense(rank: int, num_ranks: int, said: str) -> str:
    if rank == 1:
        attempt = Attempt(_store_of(dist.group.WORLD, range(num_ranks)), rank, num_ranks)  # type: ignore[arg-type]
        for message in MALFORMED[said]:
            attempt.exchange(message, Deadline(TIMEOUT_S), threading.Event())
        return ""
    with pytest.raises((ConfigMismatchError, WindowError)) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("said", MALFORMED)
def test_a_malformed_message_is_an_error_of_ours(said: str) -> None:
    assert said in run_ranks(send_nonsense, 2, (said,))[0]


def window_in(rank: int, num_ranks: int, folders: list[str]) -> str | list[str]:
    """Names in this rank's folder while windows are made, or why there are none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, folders[rank])
        seen: list[str] = []
        map_ = window._map

        def look(path: Path, num_bytes: int) -> Any:
            seen.extend(each.name for each in Path(folders[rank]).iterdir())
            return map_(path, num_bytes)

        patch.setattr(window, "_map", look)
        try:
            made = make()
        except WindowError as error:
            return str(error)
        made.tensor()[rank] = 1
        made.barrier()
        made.close()
        return sorted(set(seen))


@pytest.fixture
def own_folder() -> Iterator[Path]:
    folder = SHM / f"moe_test-{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    yield folder
    assert not list(folder.iterdir())
    folder.rmdir()


def test_windows_are_made_in_the_folder_that_is_set(ranks: Groups, own_folder: Path) -> None:
    first, second = ranks(2).run(window_in, [str(own_folder)] * 2)
    assert first == second
    assert len(first) == 2


def test_ranks_that_have_set_different_folders_say_so(ranks: Groups, own_folder: Path) -> None:
    for said in ranks(2).run(window_in, [str(SHM), str(own_folder)]):
        assert f"windows would be made in {SHM} on rank 0, {own_folder} on rank 1" in said
        assert f"Set {VARIABLE} alike" in said


def test_a_folder_of_one_rank_that_is_none_is_an_error_on_all(ranks: Groups, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for said in ranks(2).run(window_in, [str(SHM), missing]):
        assert f"rank 1: {VARIABLE} is {missing}, but it must be a folder: No such file" in said
