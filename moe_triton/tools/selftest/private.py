"""Removes names of hosts and users, addresses, and file paths from a report."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Names that are common words: they identify no machine, and occur in texts.
WORDS = {"root", "user", "admin", "test", "localhost"}
SHORTEST = 3
ADDRESS = "<address>"
PATHS = re.compile(r"(?<![\w.~<>/])/[^\s:'\",;()\[\]]+")
# Parts from which on a path is kept: inside a package, or Python's library; and paths of the system.
KEPT = ("site-packages/", "moe_triton/", "lib/python3")
SYSTEM = ("/usr/", "/dev/", "/proc/", "/etc/", "/lib/", "/lib64/")
IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
PERHAPS_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F:]{3,39}(?![\w:])")
MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
Names = list[tuple[re.Pattern[str], str]]
"""What names look like in a text, with their replacements."""


def scrubbed(value: Any, *, addresses: bool = True) -> Any:
    """A value without private data, in texts and in lists and mappings of them.

    Args:
        value: of JSON's types.
        addresses: whether to remove IP addresses; four numbers with dots may also be a version.
    """
    return _scrubbed(value, addresses, _names())


def _scrubbed(value: Any, addresses: bool, names: Names) -> Any:
    if isinstance(value, str):
        return _scrub(value, addresses, names)
    if isinstance(value, Mapping):
        return {_scrub(k, addresses, names): _scrubbed(v, addresses, names) for k, v in value.items()}
    return [_scrubbed(v, addresses, names) for v in value] if isinstance(value, list | tuple) else value


def _scrub(text: str, addresses: bool, names: Names) -> str:
    text = PATHS.sub(lambda match: _shortened(match[0]), text)
    if addresses:
        text = MAC.sub(ADDRESS, IPV4.sub(ADDRESS, text))
        text = PERHAPS_IPV6.sub(lambda match: ADDRESS if _is_ipv6(match[0]) else match[0], text)
    for secret, mark in names:
        text = secret.sub(mark, text)
    return text


def _shortened(path: str) -> str:
    """A path without its parts outside of packages and the system."""
    for start in KEPT:
        if start in path:
            return path[path.index(start) :]
    return path if path.startswith(SYSTEM) or "/" not in path[1:] else f"<path>/{Path(path).name}"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _names() -> Names:
    """Names of this machine and its user, with their replacements, the longest first."""
    host = socket.gethostname()
    replacements = [(host, "<host>"), (host.split(".")[0], "<host>"), (Path.home().name, "<user>")]
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        replacements.append((getpass.getuser(), "<user>"))
    usable = {
        (name, mark) for name, mark in replacements if len(name) >= SHORTEST and name.lower() not in WORDS
    }
    longest_first = sorted(usable, key=lambda pair: -len(pair[0]))
    return [
        (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", flags=re.I), mark) for name, mark in longest_first
    ]
