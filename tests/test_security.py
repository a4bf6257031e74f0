"""What SECURITY.md says is protected, as far as no other test has it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_triton import EPBuffer
from moe_triton.backends.cpu import window
from moe_triton.backends.cpu.spare import DOORBELL_BYTES, Spare
from moe_triton.backends.cpu.window import PREFIX, SharedWindow
from moe_triton.core import shared_memory
from moe_triton.core.errors import WindowError
from moe_triton.core.flight_file import PREFIX as FLIGHT_PREFIX
from moe_triton.processes import RankGroup
from moe_triton.rendezvous.meeting import Meeting
from tests.distributed.cases import small_case
from tests.distributed.workers import make_buffer

ROOT = Path(__file__).resolve().parent.parent
Groups = Callable[[int], RankGroup]


def windows_of_a_buffer(rank: int, num_ranks: int) -> tuple[set[int], set[int], set[int], int]:
    """Names in the file system, modes and owners of the mapped files, and what new memory holds."""
    with make_buffer(small_case(num_ranks)) as buffer:
        assert isinstance(buffer, EPBuffer)
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        held = {link: str(link.readlink()).removeprefix("/dev/shm/") for link in links}
        # The flight recorder is what others of the user read.
        recorders = [link for link, name in held.items() if name.startswith(FLIGHT_PREFIX)]
        found = {
            (state.st_ino, state.st_nlink, stat.S_IMODE(state.st_mode)) for state in map(Path.stat, recorders)
        }
        assert [rest for _, *rest in found] == [[1, 0o600]]
        mapped = [link for link, name in held.items() if name.startswith(PREFIX) and link not in recorders]
        states = [link.stat() for link in mapped]
        assert len({state.st_ino for state in states}) == num_ranks
        layout, memory = buffer.layout, buffer._communicator._windows[0].tensor()
        data = memory[len(memory) - layout.data_bytes :]
        return (
            {state.st_nlink for state in states},
            {stat.S_IMODE(state.st_mode) for state in states},
            {state.st_uid for state in states},
            int(torch.count_nonzero(data)),
        )


def test_windows_in_use_have_no_name_and_are_their_users_alone(ranks: Groups) -> None:
    for names, modes, owners, not_zero in ranks(3).run(windows_of_a_buffer):
        assert names == {0}
        assert modes == {0o600}
        assert owners == {os.getuid()}
        assert not_zero == 0


NAMES = [
    "../../etc/passwd",
    f"{PREFIX}0-../x",
    f"{PREFIX}x",
    "",
    f"{PREFIX}1-{'0' * 23}g",
    f"/{PREFIX}1-{'0' * 24}",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_windows_is_neither_opened_nor_removed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    touched: list[object] = []
    monkeypatch.setattr(shared_memory, "USUAL", tmp_path)
    monkeypatch.setattr(window, "_unlink", touched.append)
    monkeypatch.setattr(window, "_map", lambda *arguments: touched.append(arguments))
    meeting = Meeting(None, 5.0)
    monkeypatch.setattr(meeting, "exchange", lambda *_: [{"name": name, "cgroups": []}])
    with pytest.raises(WindowError, match="which no rank of this package does"):
        SharedWindow(4096, meeting)
    assert touched == []


@pytest.mark.parametrize("change", [{"mode": 0o640}, {"link": True}])
def test_a_file_that_is_not_as_windows_are_is_not_mapped(change: dict[str, int], tmp_path: Path) -> None:
    path, size = tmp_path / "file", 4096 + DOORBELL_BYTES
    path.write_bytes(bytes(size))
    path.chmod(change.get("mode", 0o600))
    if "link" in change:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    with pytest.raises((WindowError, OSError)):
        window._map(path, Spare(4096, 0))


def test_the_tests_that_the_page_names_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/.]+)`", text)
    assert len(named) > 8
    assert [path for path in named if not (ROOT / path).is_file()] == []
