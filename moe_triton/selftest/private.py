"""Takes names of hosts and users, addresses, and places in a file system out of a report."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Names that are words as well: they tell nothing about a machine, and texts are full of them.
WORDS = {"root", "user", "admin", "test", "localhost"}
SHORTEST = 3
PATHS = re.compile(r"(?<![\w.~<>/])/[^\s:'\",;()\[\]]+")
# What a path may keep: where it lies in a package, or in the system.
KEPT = re.compile(r"(?:site-packages/|(?=moe_triton/)|(?=lib/python[\d.]+/)).*")
SYSTEM = ("/usr/", "/dev/", "/proc/", "/etc/", "/lib/", "/lib64/")
IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){2,7}[0-9a-fA-F]{0,4}(?:::?[0-9a-fA-F]{1,4})*(?![\w:])|::1\b"
)


def scrubbed(value: Any, *, addresses: bool = True) -> Any:
    """The same without secrets: in texts, and in lists and mappings of them.

    Args:
        value: of JSON's types.
        addresses: whether IP addresses may be in it; four numbers with dots can be a version as well.
    """
    if isinstance(value, str):
        return _scrub(value, addresses)
    if isinstance(value, Mapping):
        return {_scrub(k, addresses): scrubbed(v, addresses=addresses) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(v, addresses=addresses) for v in value]
    return value


def _scrub(text: str, addresses: bool) -> str:
    text = PATHS.sub(lambda found: _shortened(found[0]), text)
    if addresses:
        text = IPV6.sub("<address>", IPV4.sub("<address>", text))
    for secret, mark in _names():
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", mark, text, flags=re.I)
    return text


def _shortened(path: str) -> str:
    """A path without what lies outside of packages and the system."""
    if kept := KEPT.search(path):
        return kept[0]
    if path.startswith(SYSTEM) or "/" not in path[1:]:
        return path
    return f"<path>/{Path(path).name}"


def _names() -> list[tuple[str, str]]:
    """What stands for this machine and its user, the longest first."""
    host = socket.gethostname()
    found = [(host, "<host>"), (host.split(".")[0], "<host>"), (Path.home().name, "<user>")]
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        found.append((getpass.getuser(), "<user>"))
    usable = {(name, mark) for name, mark in found if len(name) >= SHORTEST and name.lower() not in WORDS}
    return sorted(usable, key=lambda pair: -len(pair[0]))
