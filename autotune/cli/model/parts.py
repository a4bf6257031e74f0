"""``moe-triton model parts``: how many parts pay on an NPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

from autotune.cli.model.options import MARKDOWN, Markdown
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, print_parts

if TYPE_CHECKING:
    from autotune.model.clusters.parts import Priced


def parts(as_markdown: Markdown = False) -> None:
    """Price plans in 1, 2 and 4 parts on two streams; exit with 1 where one part, the default, is slower."""
    from autotune.model.bodies.body import body_of
    from autotune.model.bodies.remembered import Remembered
    from autotune.model.clusters.parts import PARTS, groups, priced

    bodies, groups_of_all = Remembered(body_of), list(groups())
    found = []
    with progress("groups", len(groups_of_all)) as work:
        for group in groups_of_all:
            found += priced(group, bodies)
            work.advance()
    columns = (
        names("scheme"),
        *map(numbers, ("H", "EP", "BS")),
        names("operator"),
        *(numbers(f"{n} parts, us") for n in PARTS),
        numbers("fastest"),
    )
    console = Console()
    print_parts([TextTable(columns, [_line(each) for each in found], more=MARKDOWN)], console, as_markdown)
    in_one = sum(each.parts == 1 for each in found)
    console.print(f"one part, which buffers take unless set, is fastest in {in_one} of {len(found)}")
    raise typer.Exit(int(in_one < len(found)))


def _line(found: Priced) -> tuple[object, ...]:
    g = found.group
    us = (f"{each:.1f}" for each in found.us.values())
    return g.comm_alg, g.hidden, g.ranks, g.tokens, found.operator, *us, found.parts
