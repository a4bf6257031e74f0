"""``moe-triton compile`` and ``moe-triton gate``, by entry points of ``moe_triton.commands``."""

from __future__ import annotations

import typer

from autotune.cli.compile import compile_kernel
from autotune.cli.gate import gate

compile_app, gate_app = (typer.Typer(add_completion=False) for _ in range(2))
compile_app.command(name="compile")(compile_kernel)
gate_app.command(name="gate")(gate)
