"""The token bucket of a paced link: its rate is never exceeded, and all who send get their turn."""

from __future__ import annotations

import subprocess

import pytest

from tests.patience import seconds

from .targets import TARGETS, Target

MEGABYTE = 10**6


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("rate", "bucket", "writes", "size"),
    [
        (100 * MEGABYTE, 0, 1000, 10_000),
        (100 * MEGABYTE, 100_000, 1000, 10_000),
        (10 * MEGABYTE, 50_000, 20_000, 64),  # writes that take less than a nap
        (7 * MEGABYTE + 1, 1000, 20, 60_000),  # of more than the bucket each
    ],
)
def test_n_bytes_take_their_time(
    target: Target, threads: int, rate: int, bucket: int, writes: int, size: int
) -> None:
    arguments = [str(value) for value in (rate, bucket, threads, writes, size)]
    done = subprocess.run(
        [*target.program("paced_link", "-O2"), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=seconds(120),
    )
    took_ns, taken, fewest = map(int, done.stdout.split())
    assert taken == threads * writes * size
    assert took_ns * rate >= (taken - bucket) * 10**9
    assert fewest > 0  # nobody waits until others are done
