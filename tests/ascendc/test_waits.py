"""When a wait in native code looks up, and when it begins anew because its process has not run."""

from __future__ import annotations

import subprocess

import pytest

from tests.patience import seconds

from .targets import TARGETS, Target


@pytest.mark.parametrize("target", TARGETS)
def test_a_wait_begins_anew_once(target: Target) -> None:
    """A loaded machine pauses each process again and again: its waits would never last for their time-out."""
    arguments = target.program("waits", "-O1")
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=seconds(60))
    begins, of_next_phase, looks = (
        done.stdout.split()[part] for part in (slice(0, 6), slice(6, 9), slice(9, None))
    )
    assert begins == ["1", "0", "1", "0", "0", "0"]
    assert of_next_phase == ["1", "1", "0"]
    assert looks == ["1", "1"]
