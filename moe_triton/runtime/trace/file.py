"""The file of a trace: valid JSON at every moment, while ranks append to it and others read it.

It is ``{"displayTimeUnit": "ns", "traceEvents": [...]}`` with an event on each line. A rank that adds its
events locks the file, writes the old and the new ones to another file, and renames that over the first.
"""

from __future__ import annotations

import fcntl
import json
import os
import reprlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

TracePath = str | os.PathLike[str]

HEAD = b'{"displayTimeUnit":"ns","traceEvents":['
TAIL = b"\n]}\n"
MAX_PATH = 1024  # ranks tell each other
# Somebody may put a link there after the check.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

# Files that this process has added to: a buffer that replaces another one, after a rank was lost say, keeps
# its events.
_of_this_run: set[Path] = set()


class TraceFile:
    """The file that all ranks of a run add their events to.

    Args:
        path: of the file.

    Raises:
        ArgumentError: it is no path, or a symbolic link.
    """

    def __init__(self, path: TracePath) -> None:
        try:
            name = os.fspath(path)
            if not isinstance(name, str) or not name or "\0" in name or len(name) > MAX_PATH:
                raise ValueError
            # Relative to where the process is now. Folders may be links; a file that is one is refused.
            given = Path(name)
            self.path = given.parent.resolve() / given.name if given.name else given.resolve()
            is_link = self.path.is_symlink()
        except Exception:  # of a caller's own class, `os.fspath` may raise anything
            raise ArgumentError(
                "trace",
                reprlib.repr(path),
                f"it must be the path of a file, of 1 to {MAX_PATH} characters",
                "Pass a str or an os.PathLike.",
                code=INVALID_ARGUMENT,
            ) from None
        if is_link:
            raise self._refused("it is a symbolic link", "Name the file that it points to.")

    def check_writable(self) -> None:
        """Checks that the file can be written, by making one beside it.

        Raises:
            ArgumentError: it cannot.
        """
        try:
            if self.path.exists() and not self.path.is_file():
                raise self._refused("it is no regular file", "Name a file.")
            if self.path.exists() and not os.access(self.path, os.W_OK):
                raise self._refused("there is a file that may not be written", "Remove it.")
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name[:32]}.", dir=self.path.parent)
            os.close(descriptor)
            Path(name).unlink()
        except OSError as error:
            rule = f"no file can be made in its folder: {error.strerror}"
            raise self._refused(rule, "Name a file in a folder that exists and can be written.") from None

    def _refused(self, rule: str, remedy: str) -> ArgumentError:
        return ArgumentError("trace", repr(str(self.path)), rule, remedy, code=INVALID_ARGUMENT)

    def start(self, *, is_first: bool) -> None:
        """Marks the file as this run's.

        Args:
            is_first: whether this is the rank that replaces what an earlier run left.

        Raises:
            ArgumentError: it cannot be written.
        """
        if is_first and self.path not in _of_this_run:
            try:
                self._replace(None, [])
            except OSError as error:
                raise self._refused(f"it cannot be written: {error.strerror}", "Name another.") from None
        _of_this_run.add(self.path)

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds events to those that are there.

        Raises:
            OSError: it cannot be written.
        """
        with self._locked() as old:
            self._replace(old, events)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        while True:
            with os.fdopen(os.open(self.path, _FLAGS, 0o600), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self._is_current(file):
                    yield file
                    return
                # Another rank has replaced the file while this one waited for the lock.

    def _is_current(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.lstat())
        except FileNotFoundError:
            return False

    def _replace(self, old: BinaryIO | None, events: Iterable[Mapping[str, Any]]) -> None:
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name[:32]}.", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "wb") as new:
                if old is None or not _copy_events(old, new):
                    new.write(HEAD)
                separator = b"" if new.tell() == len(HEAD) else b","
                for event in events:
                    new.write(separator + b"\n" + json.dumps(event, separators=(",", ":")).encode())
                    separator = b","
                new.write(TAIL)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _copy_events(old: BinaryIO, new: BinaryIO) -> bool:
    """Copies a trace file up to its tail; False if it is not one."""
    end = os.fstat(old.fileno()).st_size - len(TAIL)
    if end < len(HEAD) or old.read(len(HEAD)) != HEAD:
        return False
    old.seek(end)
    if old.read() != TAIL:
        return False
    old.seek(0)
    shutil.copyfileobj(old, new, 1 << 20)
    new.truncate(end)
    new.seek(end)
    return True
