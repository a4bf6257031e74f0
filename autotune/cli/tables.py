"""``moe-triton tune diff|verify``: what tables differ in, and whether they still hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autotune import kinds, results, verification
from autotune.cli import options
from autotune.cli.options import again, say
from autotune.kernels.scope import Scope
from moe_triton.core.errors import ArgumentError
from moe_triton.tables.installed import source_said
from moe_triton.tools.progress import progress


def diff(
    one: Annotated[Path, typer.Argument(help="a table")],
    other: Annotated[Path, typer.Argument(help="another one of the same kind")],
) -> None:
    """Say what a table has other than another one; ends with 1 if anything."""
    lines = results.differences(kinds.read(one), kinds.read(other))
    for line in lines:
        say(line)
    say("as each other" if not lines else f"{len(lines)} differences")
    raise typer.Exit(bool(lines))


def verify(
    soc: options.Soc = "A3",
    kernel: options.Kernel = [],
    most: Annotated[int, typer.Option(help="rows of a table that are priced again; 0: all", min=0)] = 16,
    seed: options.Seed = 0,
) -> None:
    """Price rows of the shipped tables again, by the model or on this machine; ends with 1 if they differ."""
    scope = Scope(soc)
    asked = [kind for kind in kinds.KINDS if kind.name == kinds.KERNELS or not kernel]
    shipped = {kind: path for kind in asked if (path := kind.shipped(scope.machine)).exists()}
    if not shipped:
        remedy = f"There is nothing to verify. For your own: {again(kinds.KINDS[0], scope)}."
        rule = f"the package ships tables of machines that it was tuned for, and none of {scope.machine}"
        raise ArgumentError("tables", "none", rule, remedy)
    differ = False
    for kind, path in shipped.items():
        table = kind.check(path)
        if why := verification.why_not(kind, table):
            say(f"{path.name}: not verified: {why}. Source: {source_said(table)}")
            continue
        if kind.name == kinds.KERNELS:
            priced = replace(scope, measure=table.source.startswith("measured on "))
            differences = verification.verified(table, priced, kernel, most, seed)
        else:
            differences = verification.schemes_verified(table, scope, most, seed)
        with progress(f"pricing rows of {path.name} again"):
            lines = list(differences)
        for line in lines:
            say(line)
        differ = differ or bool(lines)
        say(f"{path.name}: {f'differs: {table.command}' if lines else 'as kept'}")
    raise typer.Exit(differ)
