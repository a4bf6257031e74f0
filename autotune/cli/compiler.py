"""``moe-triton compile`` and ``moe-triton gate``, by entry points of ``moe_triton.commands``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autotune.cli.compile import run_compile
from autotune.cli.gate import run_gate

compile_app, gate_app = (typer.Typer(add_completion=False) for _ in range(2))


@compile_app.command(name="compile")
def compile_kernel(
    kernel: Annotated[str, typer.Option(help="a kernel, or a case such as pack/bf16-h7168")],
    soc: Annotated[str, typer.Option(help="chip or product: A2, A3, or 950 as an outlook")] = "A3",
    dtype: Annotated[str | None, typer.Option(help="of tokens: bf16 or fp16")] = None,
    hidden: Annotated[int | None, typer.Option(help="elements of a token's row")] = None,
    topk: Annotated[int | None, typer.Option(help="routed experts per token")] = None,
    shared: Annotated[int | None, typer.Option(help="shared experts")] = None,
    feature: Annotated[list[str] | None, typer.Option(help="what a variant does; may be repeated")] = None,
    save: Annotated[Path | None, typer.Option(help="folder for the IR of every stage")] = None,
) -> None:
    """Print what the NPU's compiler makes of one Triton kernel."""
    sizes = {"dtype": dtype, "hidden": hidden, "topk": topk, "shared": shared}
    raise typer.Exit(run_compile(kernel, soc, sizes, feature or (), save, Console()))


@gate_app.command(name="gate")
def gate(
    soc: Annotated[list[str] | None, typer.Option(help="chip or product; all if not given")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="only this kernel; may be repeated")] = None,
    sample: Annotated[bool, typer.Option(help="only what the tests compile")] = False,
    seed: Annotated[int, typer.Option(help="of the sample")] = 0,
    update: Annotated[bool, typer.Option(help="keep what is found, in the repository")] = False,
) -> None:
    """Compile every Triton kernel in every shape for the NPU, and compare with what is kept."""
    raise typer.Exit(run_gate(soc or (), kernel or (), sample, seed, update, Console()))
