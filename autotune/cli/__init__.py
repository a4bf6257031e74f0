"""``moe-triton tune``: kernels, pipeline, show, explain, diff, verify.

A group of commands that ``moe-triton`` finds by the entry point ``tune`` of ``moe_triton.commands``.
Each command is a function with typer's options; a further one is added to the list below.
"""

from __future__ import annotations

import typer

from autotune.cli.explain import explain
from autotune.cli.kernels import kernels
from autotune.cli.show import show
from autotune.cli.tables import diff, verify
from autotune.pipeline.command import pipeline
from moe_triton.tools.cli.errors import Commands

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Find and show settings that change speed."
)
for command in (kernels, pipeline, show, explain, diff, verify):
    app.command()(command)

__all__ = ["app"]
