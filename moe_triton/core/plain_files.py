"""Files that people name: read to their end, and locked, only where they have an end and nobody waits."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO

MOST_BYTES = 64 << 20
"""The most bytes of a file that is read whole: far more than any that this package writes, except traces."""

# A pipe is opened without waiting for its other end, and found to be none of ours then.
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file.

    Args:
        path: of the file.
        most_bytes: that it may have.

    Raises:
        OSError: it cannot be read, is no plain file, is too large, or is no text. `strerror` says which.
    """
    try:
        return read_bytes(path, most_bytes).decode()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"it is no text in UTF-8: {error.reason}", str(path)) from None


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """What a file holds.

    Args:
        path: of the file.
        most_bytes: that it may have.

    Raises:
        OSError: it cannot be read, is no plain file, or is too large. `strerror` says which.
    """
    with os.fdopen(_opened_plainly(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(data)) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes >> 20} MB", str(path))
    return data


def open_to_lock(path: Path) -> IO[bytes]:
    """A file to be locked, made if absent. A link is none: it could have a file made elsewhere.

    Raises:
        OSError: it cannot be opened, or is no plain file. `strerror` says which.
    """
    return os.fdopen(_opened_plainly(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+b", buffering=0)


def check_plain(path: Path) -> None:
    """Checks that others can open a path: that it is a plain file, or nothing yet.

    Raises:
        OSError: it is something else. `strerror` says what.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_plain(path, path.stat().st_mode)


def _check_plain(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is no plain file, but {kind}", str(path))


def _opened_plainly(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | _FLAGS, 0o666)
    except ValueError as error:  # a zero byte
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        _check_plain(path, os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle
