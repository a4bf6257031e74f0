"""Results of compilers on disk, by the content of their inputs.

Entries are kept beside the CPU back end's, under ``gate``, as compressed text: a thousand final modules take
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
    """The folder of entries, created if absent."""
    path = files.cache_folder() / "gate"
    with contextlib.suppress(OSError):  # then the cache is bypassed
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def fetch(parts: object, build: Callable[[], Any]) -> Any:
    """The result of ``build`` for these parts, read from disk if it was built before.

    Args:
        parts: everything that determines the result; its ``repr`` is the key.
        build: returns a value of JSON's types.
    """
    with files.fetch(folder(), files.entry_key(parts), lambda: _packed(build()), SUFFIX) as entry:
        return json.loads(zlib.decompress(entry.body()))


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())
