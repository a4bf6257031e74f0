"""Files that several processes read, add to and write."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.plain_files import open_to_lock

LOCK = ".lock"  # an empty file beside those that it is of; it stays: others may hold it open
WAIT_S = 60.0  # for another process that writes, or that begins to work on the same
PAUSE_S = 0.05


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Callable[[str], None]]:
    """Nobody else writes in a file's folder meanwhile; made if absent.

    Args:
        path: of the file, which may be read inside.

    Yields:
        What puts a text in the file's place: a reader sees the one before or all of this one.

    Raises:
        ArgumentError: the file cannot be written, or another process holds the lock too long; of the
            function that is yielded, too.
    """

    def put(text: str) -> None:
        draft = path.with_name(f".{path.stem}-{secrets.token_hex(8)}.new")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            raise not_writable("output", path, error) from None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    lock = path.parent / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_to_lock(lock)
    except OSError as error:
        raise not_writable("output", lock, error) from None
    with file:
        lock_within(file, fcntl.LOCK_EX, "output", lock)
        yield put


def lock_within(file: IO[bytes], how: int, argument: str, path: Path) -> None:
    """Waits for a lock, but not for ever: who holds it may be stopped.

    Args:
        file: to be locked.
        how: LOCK_EX or LOCK_SH.
        argument, path: for the error.

    Raises:
        ArgumentError: another process holds it for `WAIT_S`.
    """
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end:
                rule = f"another process has held it for {WAIT_S:.0f} s"
                raise ArgumentError(argument, path, rule, "End that process.") from None
            time.sleep(PAUSE_S)


def not_writable(argument: str, path: Path, error: OSError) -> ArgumentError:
    """The error of a file that cannot be written."""
    rule = f"it must be a file that can be written ({error.strerror or error})"
    remedy = f"Remove it, make room, or name another place: --{argument}."
    return ArgumentError(argument, path, rule, remedy, code=INVALID_ARGUMENT)
