"""Compiled kernels on disk, shared by all processes of a user.

An entry is one file, the library followed by its SHA-256. Entries are written beside their place and
renamed into it, so that a reader sees all or nothing; a lock per entry makes processes that want the
same one at the same time build it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_triton.errors import ToolchainError

_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """$MOE_TRITON_CACHE, else $XDG_CACHE_HOME/moe_triton, else ~/.cache/moe_triton; created if absent.

    The files are code that this process will run: a folder that someone else can write to is refused.
    """
    if chosen := os.environ.get("MOE_TRITON_CACHE"):
        folder = Path(chosen)
    elif base := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(base) / "moe_triton"
    else:
        folder = Path.home() / ".cache" / "moe_triton"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise ToolchainError(
            f"the kernel cache {folder} cannot be created: {error}. "
            "Set MOE_TRITON_CACHE to a folder of your own."
        ) from error
    if state.st_uid != os.geteuid():
        raise ToolchainError(
            f"the kernel cache {folder} belongs to user {state.st_uid}, not to you. "
            "Set MOE_TRITON_CACHE to a folder of your own."
        )
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ToolchainError(
            f"the kernel cache {folder} can be written by others. Run: chmod 700 {folder}, "
            "or set MOE_TRITON_CACHE to a folder of your own."
        )
    return folder


def entry_key(parts: object) -> str:
    """Name of an entry: a digest of everything that decides its content."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def sources_digest(folder: Path) -> str:
    """A digest of the Python modules in a folder: part of the key of what they make."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fetch(folder: Path, key: str, build: Callable[[], bytes], suffix: str = ".so") -> Path:
    """The entry's file, built if it is absent or damaged."""
    path = folder / f"{key}{suffix}"
    if not _is_sound(path):
        with _lock(folder / f"{key}.lock"):
            if not _is_sound(path):  # another process may have built it meanwhile
                _write(path, build())
    return path


def body_of(path: Path) -> bytes:
    """What was built for an entry: its file without the digest."""
    return path.read_bytes()[:-_DIGEST_BYTES]


def _is_sound(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest


def _write(path: Path, body: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body + hashlib.sha256(body).digest())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
