"""``moe-triton compile``: what the NPU's compiler makes of one kernel; ``moe-triton gate``: of the whole
table of kernels and shapes, against the figures that are kept.

Found by entry points of ``moe_triton.commands``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from autotune.gate import SOCS, GateReport, compile_for_npu, golden, page, runner, soc_named, table
from autotune.gate.families import family_named, parse_case, with_sizes
from autotune.npu_compiler.stages import STAGES, save_stages
from moe_triton.core.errors import ArgumentError, MoeTritonError
from moe_triton.kernels import Case
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, say, texts

MOST_SHOWN = 40
SAMPLED_OTHERS = 6
compile_app, gate_app = (typer.Typer(add_completion=False) for _ in range(2))


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
    told = "in the table" if case in table.table() else "not in the table"
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


def gate(
    soc: Annotated[list[str] | None, typer.Option(help="chip or product; all if not given")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="only this kernel; may be repeated")] = None,
    sample: Annotated[bool, typer.Option(help="only what the tests compile")] = False,
    seed: Annotated[int, typer.Option(help="of the sample")] = 0,
    update: Annotated[bool, typer.Option(help="keep what is found, in the repository")] = False,
) -> None:
    """Compile every Triton kernel in every shape for the NPU, and compare with what is kept."""
    console = Console()
    _check_checkout()
    if sample and update:
        rule = "it keeps whole chips or whole kernels, never a sample"
        raise ArgumentError("update", True, rule, "Leave out --sample.")
    rows_by_chip = _compile(_pairs(soc or (), kernel or (), sample, seed))
    is_whole = not (kernel or sample)
    changes = {
        chip: golden.compare(golden.read(chip, golden.FOLDER), rows, is_whole=is_whole)
        for chip, rows in rows_by_chip.items()
    }
    _summary(rows_by_chip, changes).print(console)
    for chip, differences in changes.items():
        for difference in differences[:MOST_SHOWN]:
            console.print(f"{chip} {difference}", markup=False, soft_wrap=True)
        if len(differences) > MOST_SHOWN:
            console.print(f"{chip}: {len(differences) - MOST_SHOWN} more differences")
    if update:
        _keep(rows_by_chip, is_whole, console)
    elif any(changes.values()):
        console.print("If these are meant, keep them: moe-triton gate --update (make gate-update).")
        raise typer.Exit(1)


def _check_checkout() -> None:
    if not golden.FOLDER.parent.is_dir():
        told = (
            "the figures to compare with are part of the project's repository: run this in a checkout of it"
        )
        raise MoeTritonError(f"{golden.FOLDER} is not there; {told}. moe-triton compile works anywhere.")


def _pairs(socs: Sequence[str], kernels: Sequence[str], is_sample: bool, seed: int) -> list[tuple[str, Case]]:
    chips = list(dict.fromkeys(soc_named(name).name for name in socs or SOCS))
    families = {family_named(name).name for name in kernels}
    if is_sample:
        pairs = table.sample(seed, SAMPLED_OTHERS)
    else:
        pairs = [(soc, case) for soc in chips for case in table.table().values()]
    return [(soc, c) for soc, c in pairs if soc in chips and (not families or c.family.name in families)]


def _compile(pairs: Sequence[tuple[str, Case]]) -> dict[str, list[golden.Row]]:
    with progress("cases", len(pairs)) as work:
        return runner.run(pairs, lambda soc, row: work.advance(f"{soc} {row['case']}"))


def _summary(
    rows_by_chip: dict[str, list[golden.Row]], changes: dict[str, list[golden.Difference]]
) -> TextTable:
    figures = "cases", "rejected", "least UB free", "changed"
    columns = names("chip"), *map(numbers, figures), texts("verdict")
    lines = []
    for soc, rows in rows_by_chip.items():
        compiled = [row for row in rows if not row["rejected"]]
        fullest = max((float(row["ub_percent"]) for row in compiled), default=0.0)
        changed = len({difference.case for difference in changes[soc]})
        verdict = Text("differs", style="red") if changed else Text("as kept", style="green")
        rejected = len(rows) - len(compiled)
        lines.append((soc, len(rows), rejected, f"{100 - fullest:.1f}%", changed, verdict))
    return TextTable(columns, lines, "compiler gate")


def _keep(rows_by_chip: dict[str, list[golden.Row]], is_whole: bool, console: Console) -> None:
    for soc, rows in rows_by_chip.items():
        kept = {} if is_whole else golden.read(soc, golden.FOLDER)
        merged = kept | {row["case"]: row for row in rows}
        listed = [row for name, row in merged.items() if name in table.table()]
        console.print(f"kept: {golden.write(soc, listed, golden.FOLDER)}", markup=False, soft_wrap=True)
    if page.PAGE.is_file():
        page.PAGE.write_text(page.inserted(page.PAGE.read_text(), page.tables()))
        console.print(f"kept: {page.PAGE}", markup=False, soft_wrap=True)


compile_app.command(name="compile")(compile_kernel)
gate_app.command(name="gate")(gate)
