"""Whether plots can be drawn: matplotlib comes with an extra."""

from __future__ import annotations

import importlib.util

import pytest

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the bench extra is not installed: no matplotlib"
)
