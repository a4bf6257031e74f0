"""Least squares of logarithms: known answers, ranges that hold, and what the data cannot tell."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.model.constants import Constant
from autotune.model.fits.fit import fit

SIZES = np.array([1.0, 2.0, 5.0, 10.0, 40.0, 100.0])


def constant(value: float, low: float = 1e-3, high: float = 1e3) -> Constant:
    return Constant(value, "assumed", "a test", low, high)


def line(values: Mapping[str, float]) -> np.ndarray:
    return values["start"] + SIZES / values["rate"]


@given(start=st.floats(0.1, 50), rate=st.floats(0.05, 20))
def test_a_line_is_found_again(start: float, rate: float) -> None:
    measured = line({"start": start, "rate": rate})
    found = fit(line, measured, {"start": constant(1.0), "rate": constant(1.0)})
    assert found.values["start"] == pytest.approx(start, rel=1e-3)
    assert found.values["rate"] == pytest.approx(rate, rel=1e-3)


def test_a_value_stays_in_its_range() -> None:
    measured = line({"start": 30.0, "rate": 1.0})
    found = fit(line, measured, {"start": constant(5.0, high=10.0), "rate": constant(2.0)})
    assert found.values["start"] == pytest.approx(10.0)
    assert np.abs(found.log_errors).max() > 0.05


def test_what_only_comes_as_a_product_cannot_be_told_apart() -> None:
    def product(values: Mapping[str, float]) -> np.ndarray:
        return values["a"] * values["b"] * SIZES + values["c"]

    measured = product({"a": 2.0, "b": 3.0, "c": 4.0})
    found = fit(product, measured, {"a": constant(1.0), "b": constant(1.0), "c": constant(1.0)})
    errors = found.standard_errors
    assert math.isinf(errors["a"])
    assert math.isinf(errors["b"])
    assert errors["c"] < 0.1
    assert found.values["a"] * found.values["b"] == pytest.approx(6.0, rel=1e-3)


def test_errors_grow_with_noise() -> None:
    rng = np.random.default_rng(3)
    clean = line({"start": 5.0, "rate": 2.0})
    widths = []
    for noise in (0.001, 0.05):
        measured = clean * np.exp(noise * rng.standard_normal(clean.size))
        found = fit(line, measured, {"start": constant(1.0), "rate": constant(1.0)})
        widths.append(found.standard_errors["start"])
    assert widths[1] > 5 * widths[0]
