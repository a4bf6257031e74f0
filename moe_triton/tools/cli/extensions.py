"""Groups of commands of other packages, by entry point: ``tune`` is that of `autotune`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from moe_triton.core.installing import install

GROUP = "moe_triton.commands"
REMEDIES = {"tune": install("tune")}
"""How to get the commands that are known by name, where they are not there."""
_HELP = {"tune": "Find and show settings that change speed."}


def add_extensions(app: typer.Typer) -> None:
    """Adds the groups that are installed; where a known one is not, a group that says how to get it."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name in sorted(found.keys() | REMEDIES.keys()):
        app.add_typer(_standing_in(name, found.get(name)), name=name)


def _standing_in(name: str, point: EntryPoint | None) -> typer.Typer:
    """A group that imports its commands when they are asked for: other commands do not wait for that."""

    class Late(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(_loaded(name, point).list_commands(ctx))

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _loaded(name, point).get_command(ctx, cmd_name)

    stand_in = typer.Typer(cls=Late, no_args_is_help=True, help=_HELP.get(name))
    stand_in.callback()(lambda: None)
    return stand_in


def _loaded(name: str, point: EntryPoint | None) -> Any:
    """The group of an entry point; without it, the command ends with a line that tells how to get it."""
    why = "is not installed"
    if point is not None:
        try:
            return typer.main.get_command(point.load())
        except ImportError as error:
            why = f"cannot be imported ({error})"
    remedy = REMEDIES.get(name, f"pip install {name}")
    typer.echo(f"moe-triton {name} {why}. Run: {remedy}", err=True)
    raise typer.Exit(1)
