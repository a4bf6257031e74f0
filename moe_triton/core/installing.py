"""The commands that install what is missing: this package is in no index, so they name where it came from."""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from moe_triton.core import triton_package
from moe_triton.core.errors import ToolchainError

ANYWHERE = "/path/to/moe_triton"
"""Stands for a checkout or a wheel file where neither is known, as in the documentation."""


def install(extra: str) -> str:
    """The command that installs the packages of an extra (``pyproject.toml``).

    Args:
        extra: its name, such as ``cpu``.
    """
    return f"pip install {_source()[0]}'{_source()[1]}[{extra}]'"


def reinstall() -> str:
    """The command that installs this package anew, and nothing that it requires."""
    options, source = _source()
    return f"pip install --force-reinstall --no-deps {options}'{source}'"


def check_triton() -> None:
    """Whether the package ``triton`` is triton-ascend's, where that is installed.

    Raises:
        ToolchainError: upstream's files lie in it, or some of triton-ascend's are gone.
    """
    if problem := triton_package.ownership().problem:
        raise ToolchainError(f"{problem}. Run: {triton_package.FIX}")


@functools.cache
def _source() -> tuple[str, str]:
    """(options for pip, checkout or wheel file) that this package was installed from, by pip's note of it."""
    try:
        note = json.loads(metadata.distribution("moe_triton").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        note = {}
    url = urlsplit(note.get("url", ""))
    path = unquote(url.path)
    if url.scheme != "file" or not Path(path).exists():
        return "", ANYWHERE
    return ("-e " if note.get("dir_info", {}).get("editable") else ""), path
