"""Percentiles, lines through points, and the time that something takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_triton.backends.base import Backend

PERCENTILES = (10, 50, 90, 99)
WARM_UP = 3
PASSES = 5
LOW, HIGH = " low", " high"


class Line(NamedTuple):
    """A fit of ``us = latency_us + bytes / (1000 * gb_per_s)``.

    Attributes:
        latency_us: at no bytes, at least 0.
        gb_per_s: 1e9 bytes per second.
        worst_error: largest distance of a point from the line, as a share of the point's time.
    """

    latency_us: float
    gb_per_s: float
    worst_error: float


def fit_line(us_by_bytes: Mapping[int, float]) -> Line | None:
    """Least-squares fit of the relative errors; None if time does not grow with bytes."""
    sizes = np.array(list(us_by_bytes), dtype=np.float64)
    us = np.array(list(us_by_bytes.values()), dtype=np.float64)
    slope, latency = np.polyfit(sizes, us, 1, w=1 / us)
    if latency < 0:  # a latency cannot be negative: the line through the origin
        latency = 0.0
        slope = np.sum(sizes / us) / np.sum((sizes / us) ** 2)
    if slope <= 0:
        return None
    errors = np.abs(latency + slope * sizes - us) / us
    return Line(float(latency), float(1e-3 / slope), float(errors.max()))


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Figures ``<name>_p50_us`` and so on, of microseconds."""
    return {f"{name}_p{p}_us": float(np.percentile(values, p)) for p in PERCENTILES}


def over_passes(measure: Callable[[], Mapping[str, float]], constants: Sequence[str]) -> dict[str, float]:
    """Figures of several passes of a measurement: medians, and for constants the lowest and the highest.

    Args:
        measure: one pass; its figures.
        constants: names of those figures whose spread is kept, as "<name> low" and "<name> high".
    """
    passes = [measure() for _ in range(PASSES)]
    figures = {name: float(np.median([one_pass[name] for one_pass in passes])) for name in passes[0]}
    for name in constants:
        values = [one_pass[name] for one_pass in passes]
        figures |= {name + LOW: min(values), name + HIGH: max(values)}
    return figures


def samples_us(call: Callable[[], object], backend: Backend, iterations: int) -> list[float]:
    """Microseconds of each call on an idle device, to the end of what it ran."""
    taken = []
    for _ in range(WARM_UP + iterations):
        backend.synchronize()
        start = time.perf_counter()
        call()
        backend.synchronize()
        taken.append((time.perf_counter() - start) * 1e6)
    return taken[WARM_UP:]


def median_us(call: Callable[[], object], backend: Backend, iterations: int) -> float:
    """Median microseconds of a call on an idle device, to the end of what it ran."""
    return float(np.median(samples_us(call, backend, iterations)))
