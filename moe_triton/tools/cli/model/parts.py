"""``moe-triton model parts``: how many parts pay, and the table of it that buffers on an NPU look up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from moe_triton.core.errors import ArgumentError
from moe_triton.tools.markdown import table

if TYPE_CHECKING:
    from moe_triton.model.clusters.parts import Priced

MOST_SHOWN = 40


def parts(
    write: Annotated[bool, typer.Option("--write", help="keep the table, in the package")] = False,
) -> None:
    """Price plans in 1, 2 and 4 parts on two streams, and compare what is fastest with the table."""
    from moe_triton.model.bodies.body import body_of
    from moe_triton.model.bodies.remembered import Remembered
    from moe_triton.model.clusters.parts import PARTS, groups, priced, table_of

    bodies, groups_of_all = Remembered(body_of), list(groups())
    progress = track(groups_of_all, "groups", console=Console(stderr=True))
    found = [each for group in progress for each in priced(group, bodies)]
    headings = ("scheme", "H", "EP", "BS", "operator", *(f"{n} parts, us" for n in PARTS), "fastest")
    console = Console()
    console.print(
        table(headings, [_line(each) for each in found]), markup=False, highlight=False, soft_wrap=True
    )
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
    """0 if the table is what the model says."""
    from moe_triton.schemes.part_tokens import COMMAND, TABLE, kept

    try:
        was = kept().to_json().splitlines()
    except ArgumentError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    is_now = text.splitlines()
    lines = [f"- {line}" for line in was if line not in is_now]
    lines += [f"+ {line}" for line in is_now if line not in was]
    for line in lines[:MOST_SHOWN]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    verdict = f"{TABLE.name} differs: {COMMAND} keeps what the model says now." if lines else "as kept"
    console.print(verdict, markup=False, soft_wrap=True)
    return int(bool(lines))
