"""Published figures that nothing is fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.model.constants import machine_named
from autotune.model.fits import validate
from autotune.model.fits.predicted import RATES, XCCL, Predictions, Rate, link_us, predictions

A2, A3 = machine_named("A2"), machine_named("A3")


@pytest.fixture(scope="module")
def found() -> Predictions:
    return predictions()


def rate_of(system: str, operator: str, ranks: int) -> Rate:
    (rate,) = (r for r in RATES if (r.system, r.operator, r.ranks) == (system, operator, ranks))
    return rate


def test_nothing_is_fitted_to_them() -> None:
    assert not set(XCCL) & set(validate.ROWS)


@pytest.mark.parametrize("others", ["with_xccl", "with_rates"])
def test_a_fit_to_them_as_well_would_leave_the_bounds(found: Predictions, others: str) -> None:
    """Which is why there is none."""
    errors = np.abs(getattr(found, others).errors)
    assert errors.mean() > validate.MOST_MEAN
    assert errors.max() > validate.MOST_WORST


def test_a_fit_to_them_as_well_is_nearer_to_them(found: Predictions) -> None:
    for rows, before, after in (
        (XCCL, found.us, found.with_xccl.us),
        (RATES, found.link_us, found.with_rates.us),
    ):
        published = np.array([row.us for row in rows])
        assert np.abs(np.log(after / published)).mean() < np.abs(np.log(before / published)).mean()


@pytest.mark.parametrize(
    ("system", "operator", "ranks", "us"),
    [
        ("normal, A3, tuned", "dispatch", 16, 3508),
        ("normal, A3, tuned", "combine", 16, 4619),
        ("normal, A2, one server", "dispatch", 8, 6723),
        ("normal, A2, one server", "combine", 8, 5852),
        ("normal, A2, two servers", "dispatch", 16, 13092),
        ("normal, A2, two servers", "combine", 16, 8843),
    ],
)
def test_rates_are_all_rows_over_the_time(system: str, operator: str, ranks: int, us: float) -> None:
    assert rate_of(system, operator, ranks).us == pytest.approx(us, rel=0.01)


def test_links_take_wires_and_hops() -> None:
    away = 4096 * 8 * 7 / 8
    one = link_us(rate_of("normal, A2, one server", "combine", 8), A2)
    assert one == pytest.approx(away * (14336 / 72.5e3 + 1.0 / 48))
    two = link_us(rate_of("normal, A2, two servers", "combine", 16), A2)
    assert two == pytest.approx(one + 4096 * 14336 / 24.2e3)
    hops = 1 * 0.2 + 6 * 0.7
    on_a3 = link_us(rate_of("normal, A3", "dispatch", 8), A3)
    assert on_a3 == pytest.approx(away * 7168 / 196e3 + 4096 * hops / 48)
