"""A run of pytest inside a test, over files of the test's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.patience import seconds

ROOT = Path(__file__).resolve().parent.parent


def said_of(folder: Path, files: Mapping[str, str], workers: int) -> str:
    """What a run prints whose tests fail.

    Args:
        folder: where the files are written.
        files: texts by name.
        workers: processes that run the tests.
    """
    for name, text in files.items():
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(workers), "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "MOE_TEST_PATIENCE": "1"},
        capture_output=True,
        text=True,
        timeout=seconds(120),
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr
