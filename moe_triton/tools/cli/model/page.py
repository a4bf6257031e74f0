"""Prints docs/model-figures.md; with a folder as argument, draws its pictures there too."""

from __future__ import annotations

import sys
from pathlib import Path

from moe_triton.model.constants import machine_named
from moe_triton.model.fits.validate import validate
from moe_triton.tools.cli.model.plan import PRICE_HEADINGS, price_table
from moe_triton.tools.cli.model.validate import error_bars, text
from moe_triton.tools.cli.model.validate_plots import plot_validation
from moe_triton.tools.markdown import table

PICTURES = "assets/model"
PRICED = "fullmesh_v1", "fullmesh_v2"

HEADER = """\
<!-- Written by `python -m moe_triton.tools.cli.model.page > docs/model-figures.md`: change the model. -->

# Figures of the model

What [the model](model.md) says, and what is published. Times in microseconds; H = 7168, 8 experts per
token, of 256.

## Against published times

Dispatch of int8 rows and combine of bf16 rows, by Ascend's own fused operators. "May lie in": with each
constant moved to either end of its range. "Left out": the error of a fit to all other rows. "Null model":
bytes over the link's published rate, and one fitted constant.
"""

PLOTS = f"""\
![Predicted over published times]({PICTURES}/published.svg)

![What the predictions are made of]({PICTURES}/published_parts.svg)
"""

PRICES = """\
## What today's plans take

Plans as they are, on all 48 cores of a die, by a rank that receives as many rows as most; launched inside a
captured graph, or by the host ("stream"). The floor is the time of the bytes that must move: a row once
over the wire for each result, or what its own memory has to move, whichever is longer. With error bars and
by step: `moe-triton model plan`.
"""


def page() -> str:
    """The page's text."""
    found, machine = validate(), machine_named("A3")
    parts = [HEADER, text(found, error_bars(found)) + "\n", PLOTS, PRICES]
    for scheme in PRICED:
        parts.append(f"### {scheme}\n\n{table(PRICE_HEADINGS, price_table(scheme, machine))}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
    for folder in sys.argv[1:]:
        found = validate()
        plot_validation(found, error_bars(found), Path(folder))
