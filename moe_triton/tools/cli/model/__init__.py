"""``moe-triton model``: what plans cost on an NPU, by a model that published times can refute."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
