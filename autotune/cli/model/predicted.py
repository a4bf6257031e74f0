"""What `moe-triton model validate`, and the page, say of published figures that nothing is fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from autotune.model.fits.predicted import RATES, XCCL, Predictions, Refitted
from moe_triton.tools.text_table import TextTable, names, numbers, texts

XCCL_COLUMNS = (
    texts("predicted, then fitted", alone="of"),
    numbers("EP"),
    numbers("BS"),
    names("", alone="operator"),
    numbers("published us"),
    numbers("predicted us"),
    numbers("error"),
    numbers("fitted too", alone="us, fitted to these too"),
    numbers("error then"),
)
RATE_COLUMNS = (
    texts("rate of links", alone="of"),
    numbers("EP"),
    names("", alone="operator"),
    names("rows"),
    numbers("published GB/s"),
    numbers("predicted GB/s"),
    numbers("error"),
    numbers("fitted too", alone="GB/s, fitted to these too"),
    numbers("error then"),
)


def parts(predicted: Predictions, more: str) -> tuple[TextTable | str, ...]:
    """Both tables, and what a fit to each would cost the others."""
    return (
        TextTable(XCCL_COLUMNS, _xccl(predicted), more=more),
        _cost(predicted.with_xccl),
        TextTable(RATE_COLUMNS, _rates(predicted), more=more),
        _cost(predicted.with_rates),
    )


def document(predicted: Predictions) -> dict[str, Any]:
    """The same as JSON's types."""
    us = zip(XCCL, predicted.us.tolist(), predicted.with_xccl.us.tolist(), strict=True)
    link_us = zip(RATES, predicted.link_us.tolist(), predicted.with_rates.us.tolist(), strict=True)
    return {
        "xccl": [{**asdict(row), "model_us": each, "fitted_us": fitted} for row, each, fitted in us],
        "rates": [{**asdict(rate), "link_us": each, "fitted_us": fitted} for rate, each, fitted in link_us],
        "fitted_with": {
            name: {"values": dict(refitted.values), "errors": refitted.errors.tolist()}
            for name, refitted in (("xccl", predicted.with_xccl), ("rates", predicted.with_rates))
        },
    }


def _xccl(predicted: Predictions) -> Sequence[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for row, us, fitted in zip(XCCL, predicted.us, predicted.with_xccl.us, strict=True):
        said = f"{us:.0f}", f"{us / row.us - 1:+.0%}", f"{fitted:.0f}", f"{fitted / row.us - 1:+.0%}"
        lines.append((row.system, row.ranks, row.tokens, row.operator, f"{row.us:.0f}", *said))
    return lines


def _rates(predicted: Predictions) -> Sequence[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for rate, us, fitted in zip(RATES, predicted.link_us, predicted.with_rates.us, strict=True):
        ratios = (rate.us / each for each in (us, fitted))
        said = (text for each in ratios for text in (f"{rate.gb_per_s * each:.0f}", f"{each - 1:+.0%}"))
        lines.append((rate.system, rate.ranks, rate.operator, rate.rows, f"{rate.gb_per_s:.0f}", *said))
    return lines


def _cost(refitted: Refitted) -> str:
    errors = np.abs(refitted.errors)
    values = ", ".join(f"{name} {value:.4g}" for name, value in refitted.values.items())
    return (
        f"Fitted to these as well, the times above are off by {errors.mean():.1%} in the mean and "
        f"{errors.max():.1%} at worst, with {values}."
    )
