"""Results of compilers on disk, by the content that they were made from.

Entries lie beside the CPU back end's, under ``gate``, and are deflated text: a thousand final modules take
some 10 MB.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_triton.backends.cpu.triton import cache as files

SUFFIX = ".json.z"


def folder() -> Path:
    """Where entries lie, created if absent."""
    path = files.cache_folder() / "gate"
    with contextlib.suppress(OSError):  # then the cache is passed by
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def fetch(parts: object, build: Callable[[], Any]) -> Any:
    """What ``build`` returns for these parts, from the disk where it was built before.

    Args:
        parts: everything that decides the result; its ``repr`` is the key.
        build: returns something that JSON can hold.
    """
    path = files.fetch(folder(), files.entry_key(parts), lambda: _packed(build()), SUFFIX)
    return json.loads(zlib.decompress(files.body_of(path)))


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())
