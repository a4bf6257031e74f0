"""``moe-triton model``: what plans cost on an NPU, by a model that published times can refute."""

from __future__ import annotations

import typer

from moe_triton.tools.cli.errors import Commands
from moe_triton.tools.cli.model.calibrate import calibrate
from moe_triton.tools.cli.model.cluster import cluster
from moe_triton.tools.cli.model.kernel import kernel
from moe_triton.tools.cli.model.parts import parts
from moe_triton.tools.cli.model.plan import plan, prices
from moe_triton.tools.cli.model.validate import validate

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, help=__doc__)
for command in (validate, plan, prices, cluster, parts, kernel, calibrate):
    app.command()(command)
