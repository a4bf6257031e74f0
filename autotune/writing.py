"""Files that several processes read, add to and write."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK = ".lock"  # an empty file beside those that it is of; it stays: others may hold it open


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Callable[[str], None]]:
    """Nobody else writes in a file's folder meanwhile; made if absent.

    Args:
        path: of the file, which may be read inside.

    Yields:
        What puts a text in the file's place: a reader sees the one before or all of this one.
    """

    def put(text: str) -> None:
        draft = path.with_name(f".{path.stem}-{secrets.token_hex(8)}.new")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield put
