"""``moe-triton gate``: the whole table of kernels and shapes against the figures that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from autotune.gate import SOCS, golden, page, runner, soc_named, table
from autotune.gate.families import family_named
from moe_triton.core.errors import ArgumentError, MoeTritonError
from moe_triton.kernels import Case
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, texts

MOST_SHOWN = 40
SAMPLED_OTHERS = 6


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
    found = _compile(_pairs(soc or (), kernel or (), sample, seed))
    is_whole = not (kernel or sample)
    changes = {
        chip: golden.compare(golden.read(chip, golden.FOLDER), rows, is_whole=is_whole)
        for chip, rows in found.items()
    }
    _summary(found, changes).print(console)
    for chip, differences in changes.items():
        for difference in differences[:MOST_SHOWN]:
            console.print(f"{chip} {difference}", markup=False, soft_wrap=True)
        if len(differences) > MOST_SHOWN:
            console.print(f"{chip}: {len(differences) - MOST_SHOWN} more differences")
    if update:
        _keep(found, is_whole, console)
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


def _summary(found: dict[str, list[golden.Row]], changes: dict[str, list[golden.Difference]]) -> TextTable:
    columns = (
        names("chip"),
        numbers("cases"),
        numbers("rejected"),
        numbers("least UB free"),
        numbers("changed"),
        texts("verdict"),
    )
    lines = []
    for soc, rows in found.items():
        compiled = [row for row in rows if not row["rejected"]]
        fullest = max((float(row["ub_percent"]) for row in compiled), default=0.0)
        changed = len({difference.case for difference in changes[soc]})
        verdict = Text("differs", style="red") if changed else Text("as kept", style="green")
        rejected = len(rows) - len(compiled)
        lines.append((soc, len(rows), rejected, f"{100 - fullest:.1f}%", changed, verdict))
    return TextTable(columns, lines, "compiler gate")


def _keep(found: dict[str, list[golden.Row]], is_whole: bool, console: Console) -> None:
    for soc, rows in found.items():
        kept = {} if is_whole else golden.read(soc, golden.FOLDER)
        merged = kept | {row["case"]: row for row in rows}
        listed = [row for name, row in merged.items() if name in table.table()]
        path = golden.write(soc, listed, golden.FOLDER)
        console.print(f"kept: {path}", markup=False, soft_wrap=True)
    if page.PAGE.is_file():
        page.PAGE.write_text(page.inserted(page.PAGE.read_text(), page.tables()))
        console.print(f"kept: {page.PAGE}", markup=False, soft_wrap=True)
