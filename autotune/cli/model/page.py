"""Prints docs/model-figures.md; with a folder as argument, draws its pictures there too."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from autotune.cli.model import predicted
from autotune.cli.model.plan import price_table
from autotune.cli.model.validate import MORE, error_bars, page_text, plot_validation
from autotune.model.clusters import a2
from autotune.model.clusters.cluster import Point
from autotune.model.clusters.group import Group
from autotune.model.clusters.posted import SECOND, STAGES, THIRD, compare, stages
from autotune.model.constants import machine_named
from autotune.model.fits.predicted import predictions
from autotune.model.fits.validate import validate
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import OfArguments
from moe_triton.tables import kept
from moe_triton.tools.markdown import table
from moe_triton.tools.text_table import markdown_of

SERVERS, SERVERS_TOKENS = (16, 32, 64), (16, 64, 256)
PICTURES = "assets/model"
PRICED = "fullmesh_v1", "fullmesh_v2"

HEADER = """\
<!-- Written by `python -m autotune.cli.model.page > docs/model-figures.md`: change the model. -->

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

PREDICTED = """\
### Predicted, and not fitted to

xDeepServe's XCCL on A3, another implementation, secondary and read off a figure; and what normal mode (4096
tokens a rank) makes of the links: bytes of all rows over the time. Of the latter the model says what wires
and hops take, and nothing else that such an operator does: a bound. No constant is fitted to either, since
the times above would then leave their bounds ([why](model.md#what-is-predicted-and-not-fitted-to)).
"""

PRICES = """\
## What today's plans take

Plans as they are, on all 48 cores of a die, by a rank that receives as many rows as most; launched inside a
captured graph, or by the host ("stream"). The floor is the time of the bytes that must move: a row once
over the wire for each result, or what its own memory has to move, whichever is longer. With error bars and
by step: `moe-triton model plan`.
"""

BETWEEN_SERVERS = """\
## Plans that post, against the closed form

A2's `fullmesh` between servers of 8, whose blocks are posted: its plan launch by launch and its closed form,
on the slowest rank, int8 dispatch and bf16 combine, in a graph; then what both say of each stage: until the
launch that posts has done its work, until the last block is there, until the end. In the last column A3's
`fullmesh_v1` on the same ranks and the same network, which posts rows by themselves, and writes them inside a
server. What the differences are made of: [the model](model.md#plans-that-post).
"""
HIERARCHY_TOKENS = 16, 64, 128
HIERARCHY = """\
## Stages of A2's hierarchy, in closed form

Stage 2, whose AICPU posts a server's rows at once, and stage 3, whose cores post token by token, or a run of
neighbouring tokens at once, of the length that is best: dispatch (int8) + combine (bf16) on the slowest rank,
uniform routing, in a graph. Published of stage 3, of single tokens: 10% and more in front, on average.
"""
STAGES_OF_PLANS = """\
## Stages of A2's hierarchy, by their plans

The same of the plans that run: 8 tokens a message, results in two pieces where that pays; on a typical rank.
Posts of a vector core as they are fitted, and at both ends of what they may take. Why the plans differ from
the forms: [the model](model.md#plans-that-post).
"""
PLANS_HEADINGS = ("EP", "BS", "stage 2", "stage 3", "stage 2 / 3", "posts at 0.5 us", "posts at 2.9 us")
HIERARCHY_HEADINGS = (
    *("EP", "BS", "stage 2", "stage 3, a token", "stage 2 / 3"),
    *("tokens", "stage 3, as many tokens", "stage 2 / 3"),
)
SERVERS_HEADINGS = ("EP", "BS", "operator", "plan", "closed form", "difference", *STAGES, "fullmesh_v1")


def servers_table() -> list[tuple[object, ...]]:
    """A line of `SERVERS_HEADINGS` for each size and operator, times in us."""
    machine, kernel_costs, lines = machine_named("A2"), OfArguments(kernel_cost_of), []
    for ranks in SERVERS:
        for tokens in SERVERS_TOKENS:
            for each in compare(ranks, tokens, machine, kernel_costs):
                us = f"{each.timeline_us:.0f}", f"{each.closed_us:.0f}", f"{each.difference:+.1%}"
                stages = (f"{mine:.0f} - {its:.0f}" for mine, its in each.stages.values())
                lines.append((ranks, tokens, each.operator, *us, *stages, f"{each.rows_us:.0f}"))
    return lines


def hierarchy_table() -> list[tuple[object, ...]]:
    """A line of `HIERARCHY_HEADINGS` for each size, times in us."""
    machine = machine_named("A2")
    lines: list[tuple[object, ...]] = []
    for ranks in SERVERS:
        for tokens in HIERARCHY_TOKENS:
            group = Group(ranks, tokens, comm_alg="hierarchy", product="A2")
            by_token, ids = replace(group, comm_alg="hierarchy-aiv"), group.draw()
            second, third = a2.price(group, machine, ids), a2.price(by_token, machine, ids)
            run, fastest = a2.fastest(by_token, machine, ids)
            stages = (_both(second), *_against(second, third), run, *_against(second, fastest))
            lines.append((ranks, tokens, *stages))
    return lines


def plans_table() -> list[tuple[object, ...]]:
    """A line of `PLANS_HEADINGS` for each size, times in us."""
    machine, kernel_costs, lines = machine_named("A2"), OfArguments(kernel_cost_of), []
    for ranks in SERVERS:
        for tokens in HIERARCHY_TOKENS:
            quick, fitted, slow = stages(ranks, tokens, machine, kernel_costs)
            us = (" + ".join(f"{us:.0f}" for us in fitted.us[posts].values()) for posts in (SECOND, THIRD))
            lines.append((ranks, tokens, *us, *(f"{each.gain:.2f}" for each in (fitted, quick, slow))))
    return lines


def _both(point: Point) -> str:
    return " + ".join(f"{operator.us:.0f}" for operator in point.operators.values())


def _against(second: Point, third: Point) -> tuple[str, str]:
    return _both(third), f"{second.us / third.us:.2f}"


def published() -> str:
    """What is published, and what the model says of it."""
    validation = validate()
    others = markdown_of(predicted.parts(predictions(), MORE)) + "\n"
    return "\n".join([HEADER, page_text(validation, error_bars(validation)) + "\n", PLOTS, PREDICTED, others])


def prices() -> str:
    """What plans take on A3."""
    machine = machine_named("A3")
    tables = (f"### {scheme}\n\n{price_table(scheme, machine).markdown()}\n" for scheme in PRICED)
    return "\n".join([PRICES, *tables])


def between_servers() -> str:
    """Plans that post."""
    return "\n".join([BETWEEN_SERVERS, table(SERVERS_HEADINGS, servers_table()) + "\n"])


def hierarchies() -> str:
    """Stages of A2's hierarchy."""
    forms, plans = table(HIERARCHY_HEADINGS, hierarchy_table()), table(PLANS_HEADINGS, plans_table())
    return "\n".join([HIERARCHY, forms + "\n", STAGES_OF_PLANS, plans + "\n"])


SECTIONS = (published, prices, between_servers, hierarchies)


def page() -> str:
    """The page's text."""
    with kept.keeping({}):  # hundreds of plans, and each looks into all tables
        return "\n".join(section() for section in SECTIONS)


if __name__ == "__main__":
    sys.stdout.write(page())
    for folder in sys.argv[1:]:
        validation = validate()
        plot_validation(validation, error_bars(validation), Path(folder))
