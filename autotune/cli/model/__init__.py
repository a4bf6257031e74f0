"""``moe-triton model``: what plans cost on an NPU, by a model that published times can refute."""

from __future__ import annotations

import typer

from autotune.cli.model.calibrate import calibrate
from autotune.cli.model.cluster import cluster
from autotune.cli.model.kernel import kernel
from autotune.cli.model.plan import parts, plan, prices
from autotune.cli.model.validate import validate
from moe_triton.tools.cli.errors import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, help=__doc__)
for command in (validate, plan, prices, cluster, parts, kernel, calibrate):
    app.command()(command)
