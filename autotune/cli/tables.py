"""``moe-triton tune show|diff|verify``: what tables hold, and whether it still holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Shown

from autotune import results, verification
from autotune.cli import options
from autotune.cli.options import console
from autotune.kernels.scope import Scope
from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.tables import Table

Kernel = Annotated[list[str], typer.Option(help="only this one; may be repeated")]


def paths_of(machine: str) -> Iterator[Path]:
    """Where tables of a machine are looked up, in this order."""
    for folder in (tables.folder_of_user(), tables.FOLDER):
        if folder is not None:
            yield folder / f"{tables.name_of(machine)}.json"


def found_tables(machine: str) -> list[tuple[Path, Table]]:
    """The tables of a machine.

    Raises:
        ArgumentError: there is none, or one is damaged.
    """
    found = [(path, table) for path in paths_of(machine) if (table := results.read(path))]
    if not found:
        places = ", ".join(map(str, paths_of(machine)))
        remedy = f"Write one: {tables.COMMAND}."
        raise ArgumentError("tables", "none", f"a table of {machine} is one of {places}", remedy)
    return found


def show(soc: options.Soc = "A3", kernel: Kernel = []) -> None:
    """Print the tables of a machine, those first that win."""
    with options.errors_shown():
        for path, table in found_tables(Scope(soc).machine):
            console.print(f"{path}\n{table.source}", markup=False, highlight=False, soft_wrap=True)
            shown = Shown(*table.keys, *table.sizes, *table.values)
            for row in table.rows:
                if not kernel or row.keys[0] in kernel:
                    shown.add_row(*map(str, (*row.keys, *row.sizes, *row.values)))
            console.print(shown)


def diff(
    one: Annotated[Path, typer.Argument(help="a table")],
    other: Annotated[Path, typer.Argument(help="another one")],
) -> None:
    """Say what a table has other than another one; ends with 1 if anything."""
    with options.errors_shown():
        read = [results.read(path) for path in (one, other)]
        for path, table in zip((one, other), read, strict=True):
            if table is None:
                raise ArgumentError("table", path, "it must be a file", "Name a table.")
        lines = results.differences(*(table for table in read if table))
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print("as each other" if not lines else f"{len(lines)} differences", highlight=False)
        raise typer.Exit(bool(lines))


def verify(
    soc: options.Soc = "A3",
    kernel: Kernel = [],
    most: Annotated[int, typer.Option(help="rows that are priced again; 0 for all", min=0)] = 16,
    seed: options.Seed = 0,
) -> None:
    """Price rows of the shipped table again, by this model or on this machine; ends with 1 if they differ."""
    with options.errors_shown():
        scope = Scope(soc)
        path = tables.FOLDER / f"{tables.name_of(scope.machine)}.json"
        table = results.read(path)
        if table is None:
            remedy = f"Write it: {tables.COMMAND} --soc {soc} {results.ALL_SHIPPED} --write-shipped."
            raise ArgumentError(
                "table", path, "the package ships one of each machine that it was tuned for", remedy
            )
        lines = list(verification.verified(table, scope, kernel, most, seed))
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print("as kept" if not lines else f"{path.name} differs: tune again", highlight=False)
        raise typer.Exit(bool(lines))
