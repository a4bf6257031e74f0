"""The folder in shared memory that windows are made in, and whether it has huge pages."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moe_triton.core.errors import WindowError

USUAL = Path("/dev/shm")
VARIABLE = "MOE_TRITON_SHM"
MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(rb"\\([0-7]{3})")
FORCED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


# Suffix of a file's name until it is locked; until then it takes no memory.
UNLOCKED = ".new"
STALE_AFTER_S = 60.0  # of what is not locked yet


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        point: where.
        kind: such as "tmpfs".
        options: of it, such as "huge=always".
    """

    point: Path
    kind: str
    options: tuple[str, ...]


def folder() -> Path:
    """$MOE_TRITON_SHM, or /dev/shm.

    Raises:
        WindowError: what the variable names is no tmpfs that is safe from other users.
    """
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return USUAL
    path = Path(chosen)
    if rule := _broken_rule(path):
        mount = "mount -t tmpfs -o huge=always,mode=1777 tmpfs FOLDER"
        raise WindowError(f"{VARIABLE} is {chosen}, but {rule}. Use another one ({mount}), or unset it.")
    return path


def _broken_rule(path: Path) -> str:
    if not path.is_absolute():
        return "it must be an absolute path: ranks may run in different folders"
    try:
        state = path.stat()
    except OSError as error:
        return f"it must be a folder: {error.strerror}"
    if not stat.S_ISDIR(state.st_mode):
        return "it must be a folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return "you must be able to make files there"
    if state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX:
        return "other users must not be able to remove files there (chmod +t)"
    mount = mount_of(path)
    if mount is not None and mount.kind != "tmpfs":
        return f"it must be on a tmpfs, not on {mount.kind}"
    return ""


def mount_of(path: Path, mounts: Path = MOUNTS) -> Mount | None:
    """The file system that a path is on; None where the kernel does not say."""
    real = path.resolve()
    found = [mount for mount in _mounts(mounts) if real.is_relative_to(mount.point)]
    # of those at the same place, the last one hides the others
    return max(reversed(found), key=lambda mount: len(mount.point.parts), default=None)


def _mounts(mounts: Path) -> Iterator[Mount]:
    try:
        lines = mounts.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines[:-1]:
        fields, _, rest = line.partition(b" - ")
        # spaces are \040; all other bytes are as in the path, whatever they mean
        point = _OCTAL.sub(lambda octal: bytes([int(octal[1], 8)]), fields.split(b" ")[4])
        kind, _, options = map(os.fsdecode, rest.split(b" ", 2))
        yield Mount(Path(os.fsdecode(point)), kind, tuple(options.split(",")))


def huge_pages(path: Path, mounts: Path = MOUNTS, forced: Path = FORCED) -> bool | None:
    """Whether windows there lie on huge pages, as they ask for; None where the kernel does not say.

    Args:
        path: the folder.
        mounts: where the kernel lists what is mounted.
        forced: where it says what goes for all of shared memory.
    """
    try:
        words = forced.read_text().split()
    except OSError:
        return None  # a kernel without huge pages, or a container that hides it
    if "[deny]" in words:
        return False
    mount = mount_of(path, mounts)
    if mount is None:
        return None
    usual = {"huge=always", "huge=within_size", "huge=advise"}
    return "[force]" in words or not usual.isdisjoint(mount.options)


def create_locked(path: Path) -> int:
    """An empty file. It is locked before it gets its name, so a file without a lock has no living owner."""
    unlocked = path.with_name(path.name + UNLOCKED)
    fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(path)
    except BaseException:
        os.close(fd)
        unlocked.unlink(missing_ok=True)
        raise
    return fd


def remove_unlocked(folder: Path, prefix: str, older_than_s: float = 0.0) -> None:
    """Removes such files whose creators are gone: nobody holds their lock.

    Args:
        folder: of them.
        prefix: of their names.
        older_than_s: seconds since they were made, at least.
    """
    for path in folder.glob(f"{prefix}*"):
        try:
            age_s = time.time() - path.stat().st_mtime
            if age_s < (STALE_AFTER_S if path.suffix == UNLOCKED else older_than_s):
                continue
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass
        finally:
            os.close(fd)
