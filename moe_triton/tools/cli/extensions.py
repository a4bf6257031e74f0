"""Commands and groups of commands of other packages, by entry point: those of `autotune`, and anybody's.

They are imported when they are asked for: other commands do not wait for that, nor does ``--help``.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand

from moe_triton.core.installing import install, reinstall
from moe_triton.tools.cli.errors import Commands

GROUP = "moe_triton.commands"


class Known(NamedTuple):
    """A command that is known by name.

    Attributes:
        help: a line.
        remedy: how to get it, where it is not there.
    """

    help: str
    remedy: str


KNOWN = {
    "compile": Known("Print what the NPU's compiler makes of one Triton kernel.", reinstall()),
    "gate": Known(
        "Compile every Triton kernel in every shape for the NPU, and compare with what is kept.", reinstall()
    ),
    "model": Known("What plans cost on an NPU, by a model that published times can refute.", reinstall()),
    "tune": Known("Find and show settings that change speed.", install("tune")),
}


class Extended(Commands):
    """A group of commands with those that are installed; a known one that is not says how to get it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Its own, then others'."""
        own = super().list_commands(ctx)
        return own + sorted((KNOWN.keys() | _found().keys()) - set(own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or what stands for it in a list."""
        own = super().get_command(ctx, cmd_name)
        known = KNOWN.get(cmd_name)
        # In this order, for a list asks for each command, and looking for entry points takes milliseconds.
        if own is not None or (known is None and cmd_name not in _found()):
            return own
        return TyperCommand(cmd_name, callback=lambda: None, help=known.help if known else None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that was asked for."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and super().get_command(ctx, name) is None:
            command = _loaded(name, _found().get(name))
        return name, command, rest


def _found() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _loaded(name: str, point: EntryPoint | None) -> Any:
    """The command of an entry point; without it, ends with a line that tells how to get it."""
    why = "is not installed"
    if point is not None:
        try:
            return typer.main.get_command(point.load())
        except ImportError as error:
            why = f"cannot be imported ({error})"
    remedy = KNOWN[name].remedy if name in KNOWN else f"pip install {name}"
    typer.echo(f"moe-triton {name} {why}. Run: {remedy}", err=True)
    raise typer.Exit(1)
