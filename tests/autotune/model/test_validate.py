"""The model against published times: it stays within its bounds, and each part of the comparison can fail."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.model.clusters import fused
from autotune.model.constants import machine_named
from autotune.model.fits import validate
from autotune.model.fits.validate import ROWS, predict


@pytest.fixture(scope="module")
def found() -> validate.Validation:
    return validate.validate()


def test_errors_are_within_bounds(found: validate.Validation) -> None:
    errors = np.abs(found.errors)
    assert errors.mean() <= validate.MOST_MEAN
    assert errors.max() <= validate.MOST_WORST


def test_it_is_better_than_bytes_and_a_constant(found: validate.Validation) -> None:
    assert np.abs(found.errors).mean() < np.abs(found.null_errors).mean() / 2


def test_no_time_is_predicted_by_itself_alone(found: validate.Validation) -> None:
    assert [left.row for left in found.left_out] == list(ROWS)
    errors = np.abs([left.error for left in found.left_out])
    assert errors.mean() <= validate.MOST_MEAN
    assert errors.max() <= validate.MOST_WORST


def test_fitted_constants_are_the_fits(found: validate.Validation) -> None:
    assert len(validate.FITTED) <= 6
    for name in validate.FITTED:
        entry = machine_named("A2").constants[name]
        assert entry.kind == "fitted"
        assert found.refitted.values[name] == pytest.approx(entry.value, rel=2e-3), name


def test_no_other_constant_is_fitted() -> None:
    for product in ("A2", "A3"):
        fitted = {name for name, entry in machine_named(product).constants.items() if entry.kind == "fitted"}
        assert fitted <= set(validate.FITTED)


def test_no_constant_is_fitted_to_a_single_time() -> None:
    """Without it the answers of several rows change."""
    known = validate.machines()
    for name in validate.FITTED:
        changed = validate.with_values(known, {name: known["A2"].constants[name].value * 1.2})
        moved = [
            row
            for row in ROWS
            if predict(row, changed[row.product]) != pytest.approx(predict(row, known[row.product]))
        ]
        assert len(moved) >= 2, name


def test_twice_the_cores_gain_what_is_published(found: validate.Validation) -> None:
    assert 0 < max(found.gains.values()) <= validate.MOST_GAIN
    assert found.may_choose_core_splits


def test_without_the_limit_of_rows_on_their_way_cores_would_gain_too_much() -> None:
    """The bound of the whole device is what the published figure asks for."""
    unlimited = machine_named("A3").replaced({"remote_writes_in_flight": 1000})
    gains = [
        predict(row, unlimited, 24) / predict(row, unlimited, 48) - 1 for row in ROWS if row.product == "A3"
    ]
    assert max(gains) > validate.MOST_GAIN


def test_dispatch_has_the_phases_of_the_published_design() -> None:
    row = ROWS[0]
    call = fused.Call(row.product, row.ranks, row.tokens, 8, 256, 7168, 1060.0)
    assert list(fused.dispatch(call, machine_named("A3"))) == [
        "start",
        "count",
        "send",
        "barrier",
        "flag",
        "wait",
        "second barrier",
        "arrange",
    ]
    assert "barrier" not in fused.combine(call, machine_named("A3"))
