"""Compiled kernels on disk, shared by all processes of a user.

An entry is one file, the library followed by its SHA-256. Entries are written beside their place and
renamed into it, so that a reader sees all or nothing; a lock per entry makes processes that want the
same one at the same time build it once.

Entries are code that this process will run. What is damaged, or may be somebody else's, is built again and
replaced. Where the folder cannot be used (full, read-only, in a folder that others can write to), the cache
is passed by, with a warning: a process then builds for itself, in a folder that goes when it ends. Folders
are opened once, and entries checked, read and loaded in what is open (`moe_triton.core.open_folders`).
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

from moe_triton.core.errors import ToolchainError
from moe_triton.core.logs import log_of
from moe_triton.core.open_folders import (
    WRITABLE_BY_OTHERS,
    ForeignLinkError,
    OpenFolder,
    opened,
    opened_as_ours,
)

_log = log_of("kernels")

REMEDY = "Set MOE_TRITON_CACHE to a folder of your own."
LOCK_WAIT_S = 60.0  # at most, for a process that builds the same entry; it may be stopped
_LOCK_PAUSE_S = 0.02
_MOST_OF_HOLDER = 200  # bytes of what stands in a lock
_PROBE_BYTES = 1 << 12
_DIGEST_BYTES = hashlib.sha256().digest_size

# Reasons for which the cache was passed by: each is said once.
_said: set[str] = set()
_private: dict[int, Path] = {}  # by process
# Until when those wait that want an entry now, by `time.monotonic`; and who they are, for whom they hold up.
_waiting: ContextVar[tuple[float, str]] = ContextVar("waiting", default=(math.inf, ""))


class Entry(NamedTuple):
    """A file of a cache, while its folder is open.

    Attributes:
        path: where it is, for people.
        opened: the same file, whatever `path` leads to by now.
    """

    path: Path
    opened: Path

    def body(self) -> bytes:
        """What was built: the file without its digest."""
        return self.opened.read_bytes()[:-_DIGEST_BYTES]


def cache_folder() -> Path:
    """$MOE_TRITON_CACHE, else $XDG_CACHE_HOME/moe_triton, else ~/.cache/moe_triton; created if absent.

    Returns:
        Its path without links; as it was chosen where somebody else can say where that leads.

    Raises:
        ToolchainError: it cannot be made, it belongs to another user, or others can write to it.
    """
    folder = _chosen_folder()
    try:
        with opened(folder, makes=True) as open_folder:
            folder = folder if open_folder.why_unsafe else open_folder.path
            state = os.fstat(open_folder.handle)
    except ForeignLinkError:
        return folder
    except (OSError, ValueError) as error:
        raise ToolchainError(f"the kernel cache {folder} cannot be created: {error}. {REMEDY}") from error
    if state.st_uid != os.geteuid():
        raise ToolchainError(
            f"the kernel cache {folder} belongs to user {state.st_uid}, not to you. {REMEDY}"
        )
    if state.st_mode & WRITABLE_BY_OTHERS:
        raise ToolchainError(
            f"the kernel cache {folder} can be written by others. Run: chmod 700 {folder}, "
            "or set MOE_TRITON_CACHE to a folder of your own."
        )
    return folder


def safe_folder() -> Path:
    """`cache_folder`, for what is used by its path.

    Raises:
        ToolchainError: as there; or others can put another in its place.
    """
    folder = cache_folder()
    if why := why_unsafe(folder):
        raise ToolchainError(f"the kernel cache {folder} cannot be used: {why}. {REMEDY}")
    return folder


def _chosen_folder() -> Path:
    if chosen := os.environ.get("MOE_TRITON_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "moe_triton"
    try:
        return Path.home() / ".cache" / "moe_triton"
    except RuntimeError as error:
        raise ToolchainError(f"there is no place for the kernel cache: {error}. {REMEDY}") from error


def why_unsafe(folder: Path) -> str:
    """What on the way to this folder lets others put another in its place; empty where nothing does."""
    try:
        with opened(folder) as open_folder:
            return open_folder.why_unsafe
    except ForeignLinkError as error:
        return str(error)


@contextmanager
def _opened_safely(folder: Path) -> Iterator[OpenFolder]:
    """Opens a folder that only this user writes to, and nobody else can exchange.

    Raises:
        OSError: it is none.
    """
    with opened(folder) as open_folder:
        why_not_ours = open_folder.why_not_ours()
        if why := open_folder.why_unsafe or (why_not_ours and f"it {why_not_ours}"):
            raise OSError(why)
        yield open_folder


def check_usable() -> None:
    """Looks whether entries can be kept, or else built without being kept.

    Raises:
        ToolchainError: neither is possible.
    """
    folder = cache_folder()
    try:
        with _opened_safely(folder) as open_folder:
            _probe(open_folder)
    except OSError as error:
        _pass_by(folder, error)
        _probe_private()


def _probe(folder: OpenFolder) -> None:
    """Finds out whether a file can be written there."""
    handle, name = tempfile.mkstemp(dir=folder.inside, prefix="probe", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(_PROBE_BYTES))
    finally:
        Path(name).unlink(missing_ok=True)


def _probe_private() -> None:
    try:
        with opened_as_ours(private_folder()) as open_folder:
            _probe(open_folder)
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> ToolchainError:
    return ToolchainError(
        f"compiled kernels can be written neither to the kernel cache nor to a temporary folder ({error}). "
        "Make room, or set MOE_TRITON_CACHE or TMPDIR to a folder that has some."
    )


def private_folder() -> Path:
    """Where this process builds what it cannot keep: nobody else can write there, and it goes at the end.

    Raises:
        OSError: none can be made.
    """
    pid = os.getpid()  # a forked process has one of its own
    if pid not in _private:
        folder = Path(tempfile.mkdtemp(prefix="moe_triton-kernels-"))
        Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)  # at the end of this process only
        _private[pid] = folder
    return _private[pid]


def _pass_by(folder: Path, error: OSError) -> None:
    why = f"the kernel cache {folder} is passed by: {error.strerror or error}"
    if why not in _said:
        _said.add(why)
        _log.warning("%s. Each process compiles for itself. %s", why, REMEDY)


def entry_key(parts: object) -> str:
    """Name of an entry: a digest of everything that decides its content."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def sources_digest(folder: Path) -> str:
    """A digest of the Python modules in a folder: part of the key of what they make."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def waiting(seconds: float, name: str) -> Iterator[None]:
    """Limits how long the calls of `fetch` in here wait, all of them together, for others that build.

    Args:
        seconds: at most, and no more than `LOCK_WAIT_S`.
        name: of whoever calls, for those that wait for it.
    """
    token = _waiting.set((time.monotonic() + seconds, name))
    try:
        yield
    finally:
        _waiting.reset(token)


@contextmanager
def fetch(
    folder: Path, key: str, build: Callable[[], bytes], suffix: str = ".so", of: str = "an entry"
) -> Iterator[Entry]:
    """An entry, built if it is absent or damaged; its folder is open inside.

    Args:
        folder: of the cache, or in it.
        key: name of the entry.
        build: gives its content.
        suffix: of its file.
        of: what it is made of, for messages.

    Raises:
        ToolchainError: there is no room for it anywhere.
    """
    with ExitStack() as held:
        try:
            open_folder = held.enter_context(_opened_safely(folder))
            entry = Entry(folder / f"{key}{suffix}", open_folder.inside / f"{key}{suffix}")
            is_sound = partial(_is_sound, entry.opened)
            if not is_sound():
                with _lock(open_folder.inside / f"{key}.lock", is_sound, of):
                    if not is_sound():  # another process may have built it meanwhile
                        _write(entry.opened, build())
        except OSError as error:
            _pass_by(folder, error)
            entry = held.enter_context(fetch_privately(key, build, suffix))
        yield entry


@contextmanager
def fetch_privately(key: str, build: Callable[[], bytes], suffix: str = ".so") -> Iterator[Entry]:
    """An entry in a folder of this process, which is open inside.

    Raises:
        ToolchainError: there is no room for it there.
    """
    with ExitStack() as held:
        try:
            open_folder = held.enter_context(opened_as_ours(private_folder()))
            entry = Entry(open_folder.path / f"{key}{suffix}", open_folder.inside / f"{key}{suffix}")
            if not _is_sound(entry.opened):
                _write(entry.opened, build())
        except OSError as error:
            raise _no_room(error) from error
        yield entry


def _is_sound(path: Path) -> bool:
    """Whether an entry is there, whole, and of this user alone.

    Raises:
        OSError: it is there, and no file can take its place.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # absent, or a link: a rename replaces that
        return False
    try:
        state = os.fstat(handle)
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(f"its entry {path.name} is a folder; remove it")
        is_ours = state.st_uid == os.geteuid() and not state.st_mode & WRITABLE_BY_OTHERS
        if not stat.S_ISREG(state.st_mode) or not is_ours:
            return False
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read()
    finally:
        os.close(handle)
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
def _lock(path: Path, is_built: Callable[[], bool], of: str) -> Iterator[None]:
    """Holds others up that want the same entry, as far as the file system can. A rename is safe without."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    began, (deadline, name) = time.monotonic(), _waiting.get()
    deadline = min(deadline, began + LOCK_WAIT_S)
    try:
        while not (is_taken := _take(handle)) and time.monotonic() < deadline and not is_built():
            time.sleep(_LOCK_PAUSE_S)
        if is_taken:
            _sign(handle, name)
        elif not is_built():
            held, holder = time.monotonic() - began, _holder(handle)
            _log.warning("%s has been building %s for more than %.1f s: built here", holder, of, held)
        yield
    finally:
        os.close(handle)


def _sign(handle: int, name: str) -> None:
    """Says in a lock who holds it."""
    process = f"process {os.getpid()} on {socket.gethostname()}"
    said = f"{name} ({process})" if name else process
    with suppress(OSError):  # no room: nobody needs it
        os.ftruncate(handle, 0)
        os.pwrite(handle, said.encode()[:_MOST_OF_HOLDER], 0)


def _holder(handle: int) -> str:
    """Who says in a lock that it holds it."""
    said = os.pread(handle, _MOST_OF_HOLDER, 0).decode(errors="replace")
    return said if said and said.isprintable() else "another process"


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks here
        return True
    return True
