"""Whether the extension module can have been built: only that needs Python's headers."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

HAS_HEADERS = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
needs_headers = pytest.mark.skipif(
    not HAS_HEADERS,
    reason="Python's headers are missing: apt-get install python3-dev",
)
