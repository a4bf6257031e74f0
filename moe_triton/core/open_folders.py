"""Folders that are opened part by part, so that what was checked is what is used.

A path says where to look, every time anew: between a check and a use, whoever can change a link or a folder
on the way makes it lead elsewhere. Here each part is looked up once, in the folder that is open before it,
links included. What is opened stays that folder; who wants a path reaches it by its descriptor.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as the kernel has it
# Nothing in a folder is read to look up a part of it: a right to search is enough.
_LOOK_UP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignLinkError(OSError):
    """A link on the way belongs to another user, who says where it leads."""


@dataclass(frozen=True)
class OpenFolder:
    """A folder that is open.

    Attributes:
        path: where it was found, without links.
        handle: its descriptor.
        why_unsafe: which folder on the way lets others put another in its place; empty where none does.
    """

    path: Path
    handle: int
    why_unsafe: str = ""

    @property
    def inside(self) -> Path:
        """A path of what is in this folder, whatever `path` leads to by now."""
        return Path(f"/proc/self/fd/{self.handle}")

    def why_not_ours(self) -> str:
        """Why it is not this user's alone; empty where it is."""
        state = os.fstat(self.handle)
        if state.st_uid != os.geteuid():
            return f"belongs to user {state.st_uid}, not to you"
        return "can be written by others" if state.st_mode & WRITABLE_BY_OTHERS else ""


@contextmanager
def opened(folder: Path, makes: bool = False) -> Iterator[OpenFolder]:
    """Opens a folder.

    Args:
        folder: its path.
        makes: whether what is absent is made, for this user alone.

    Raises:
        ForeignLinkError: a link on the way is neither this user's nor root's.
        OSError: it is not there, or is no folder.
    """
    open_folder = _Walk(makes).to(folder)
    try:
        yield open_folder
    finally:
        os.close(open_folder.handle)


@contextmanager
def opened_as_ours(folder: Path) -> Iterator[OpenFolder]:
    """Opens a folder that this process has made, wherever it is.

    Raises:
        OSError: another is in its place.
    """
    open_folder = OpenFolder(folder, os.open(folder, _LOOK_UP))
    try:
        if why := open_folder.why_not_ours():
            raise OSError(f"{folder} {why}")
        yield open_folder
    finally:
        os.close(open_folder.handle)


class _Walk:
    """A way from the root to a folder.

    Args:
        makes: see `opened`.
    """

    def __init__(self, makes: bool) -> None:
        self._makes, self._why_unsafe, self._num_links = makes, "", 0

    def to(self, folder: Path) -> OpenFolder:
        """Opens a folder part by part, each of them in the one before it."""
        self._path, self._handle = Path("/"), os.open("/", _LOOK_UP)
        left = [*reversed(folder.absolute().parts[1:])]
        try:
            while left:
                part = left.pop()
                self._why_unsafe = self._why_unsafe or self._why_others_choose()
                if target := self._link(part):
                    if target.is_absolute():
                        self._enter(Path("/"), os.open("/", _LOOK_UP))
                    left += [each for each in reversed(target.parts) if each != "/"]
                else:
                    path = self._path.parent if part == ".." else self._path / part
                    self._enter(path, os.open(part, _LOOK_UP, dir_fd=self._handle))
        except BaseException:
            os.close(self._handle)
            raise
        return OpenFolder(self._path, self._handle, self._why_unsafe)

    def _enter(self, path: Path, handle: int) -> None:
        os.close(self._handle)
        self._path, self._handle = path, handle

    def _link(self, part: str) -> Path | None:
        """Where a part of this folder leads if it is a link; made if it is absent."""
        try:
            state = os.stat(part, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            if self._makes:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=self._handle)
            return None
        if not stat.S_ISLNK(state.st_mode):
            return None
        if state.st_uid not in (0, os.geteuid()):
            raise ForeignLinkError(f"{self._path / part} is a link of user {state.st_uid}")
        self._num_links += 1
        if self._num_links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(self._path / part))
        return Path(os.readlink(part, dir_fd=self._handle))

    def _why_others_choose(self) -> str:
        """Why others can exchange what is in this folder; empty where they cannot."""
        state = os.fstat(self._handle)
        if state.st_uid not in (0, os.geteuid()):
            return f"{self._path} belongs to user {state.st_uid}"
        # In a folder with the sticky bit, as /tmp, only owners rename.
        if state.st_mode & WRITABLE_BY_OTHERS and not state.st_mode & stat.S_ISVTX:
            return f"{self._path} can be written by others"
        return ""
