"""``moe-triton compile``: what the NPU's compiler makes of one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from autotune.gate import GateReport, compile_for_npu, soc_named
from autotune.gate.families import parse_case, with_sizes
from autotune.gate.table import table
from autotune.npu_compiler.stages import STAGES, save_stages
from moe_triton.tools.text_table import TextTable, names, say, texts


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
    console, chip = Console(), soc_named(soc)
    sizes = {"dtype": dtype, "hidden": hidden, "topk": topk, "shared": shared}
    family, shape = parse_case(kernel)
    changed = {axis: size for axis, size in sizes.items() if size is not None}
    shape = with_sizes(family, shape, changed, feature or ())
    built = family.kernel(shape)
    if save is not None:
        for stage in save_stages(built, chip, save):
            console.print(f"{save / stage}: {STAGES[stage]}", markup=False, soft_wrap=True)
    report = compile_for_npu(built, chip.name)
    _print_report(family.case_name(shape), report, console)
    raise typer.Exit(0 if report.fits else 1)


def _print_report(case: str, report: GateReport, console: Console) -> None:
    told = "in the table" if case in table() else "not in the table"
    say(f"{case} for {report.soc} ({told})", console)
    used = f"{report.ub_bytes} of {report.ub_capacity} bytes, {report.ub_share:.1%}"
    rows: list[tuple[str, object]] = [("unified buffer", Text(used, style="" if report.fits else "red"))]
    for transfer in report.transfers:
        twice = "double-buffered" if transfer.double_buffered else "one buffer"
        rows.append((transfer.kind, f"{transfer.tile}, {twice}"))
    rows += [
        ("instructions", _counted(report.instructions)),
        ("flags", f"{report.flags_set} set, {report.flags_waited} waited for"),
        ("pipe barriers", _counted(report.barriers)),
        ("loops", f"{report.loops}, of which {report.scalar_loops} go element by element"),
    ]
    if report.switched_off:
        rows.append(("given up to fit", ", ".join(report.switched_off)))
    TextTable((names("part"), texts("what the compiler made")), rows).print(console)
    if estimate := report.estimate:
        said = (
            f"Estimate, every constant of it assumed: {estimate.cycles:.0f} cycles a turn at least, bound by "
            f"{estimate.bound} (bandwidth {estimate.bandwidth:.0f}, MTE2 {estimate.mte2:.0f}, "
            f"MTE3 {estimate.mte3:.0f}, V {estimate.v:.0f}, S {estimate.s:.0f})."
        )
    else:
        said = "An outlook: nothing is estimated for this chip."
    say(said, console)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
