"""Tables that are there, read once where a process says so.

A buffer reads tables when it is constructed, and a user may have written them again since the one before.
torch_npu's functions have no such moment: what they need is constructed inside a call, for which a file that
somebody broke in the meantime must be no error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from moe_triton.core.tables import Table

Kept = dict[Path, "Table | None"]
"""What was read, by file; None where there is no file, and for folders."""

_kept: ContextVar[Kept | None] = ContextVar("tables that are kept", default=None)


@contextlib.contextmanager
def keeping(known: Kept) -> Iterator[None]:
    """Reads no file twice.

    Args:
        known: what was read before; what is read meanwhile is added.
    """
    token = _kept.set(known)
    try:
        yield
    finally:
        _kept.reset(token)


def read(paths: Iterable[Path], check: Callable[[Path], Table]) -> dict[Path, Table]:
    """The tables that are there, by file.

    Args:
        paths: where they may be. A folder of that name, or a link to nothing, is an error of ``check``.
        check: reads one.

    Raises:
        ArgumentError: see ``check``.
    """
    known = _kept.get()
    tables: dict[Path, Table] = {}
    for path in paths:
        if known is not None and path in known:
            table = known[path]
        else:
            table = check(path) if os.path.lexists(path) else None
            if known is not None:
                known[path] = table
        if table is not None:
            tables[path] = table
    return tables


def is_folder(path: Path) -> bool:
    """Whether tables may lie there; what was a folder once stays one while it is kept."""
    known = _kept.get()
    if known is not None and path in known:
        return True
    is_there = path.is_dir()
    if known is not None and is_there:
        known[path] = None
    return is_there
