"""``moe-triton model parts``: how many parts pay, and the table of it that buffers on an NPU look up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from autotune.cli.model.options import MARKDOWN, Markdown
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, print_parts

if TYPE_CHECKING:
    from autotune.model.clusters.parts import Priced

MOST_SHOWN = 40


def parts(
    write: Annotated[bool, typer.Option("--write", help="keep the table, in the package")] = False,
    as_markdown: Markdown = False,
) -> None:
    """Price plans in 1, 2 and 4 parts on two streams, and compare what is fastest with the table."""
    from autotune.model.bodies.body import body_of
    from autotune.model.bodies.remembered import Remembered
    from autotune.model.clusters.parts import PARTS, groups, priced, table_of

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
    text = table_of([each.row for each in found]).to_json()
    raise typer.Exit(_keep(text, console) if write else _compare(text, console))


def _line(found: Priced) -> tuple[object, ...]:
    g = found.group
    us = (f"{each:.1f}" for each in found.us.values())
    return g.comm_alg, g.hidden, g.ranks, g.tokens, found.operator, *us, found.parts


def _keep(text: str, console: Console) -> int:
    from moe_triton.schemes.part_tokens import TABLE

    TABLE.write_text(text, encoding="utf-8")
    console.print(f"kept: {TABLE}", markup=False, soft_wrap=True)
    return 0


def _compare(text: str, console: Console) -> int:
    """0 if the table is what the model says.

    Raises:
        ArgumentError: it is missing or damaged.
    """
    from moe_triton.schemes.part_tokens import COMMAND, TABLE, kept

    was = kept().to_json().splitlines()
    is_now = text.splitlines()
    lines = [f"- {line}" for line in was if line not in is_now]
    lines += [f"+ {line}" for line in is_now if line not in was]
    for line in lines[:MOST_SHOWN]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    verdict = f"{TABLE.name} differs: {COMMAND} keeps what the model says now." if lines else "as kept"
    console.print(verdict, markup=False, soft_wrap=True)
    return int(bool(lines))
