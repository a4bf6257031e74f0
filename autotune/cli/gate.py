"""``moe-triton gate``: the whole table of kernels and shapes against the figures that are kept."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from autotune.gate import SOCS, golden, page, runner, soc_named
from autotune.gate.families import family_named
from autotune.gate.table import sample, table
from moe_triton.core.errors import ArgumentError, MoeTritonError
from moe_triton.kernels import Case
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, texts

MOST_SHOWN = 40
SAMPLED_OTHERS = 6


def run_gate(
    socs: Sequence[str], kernels: Sequence[str], is_sample: bool, seed: int, update: bool, console: Console
) -> int:
    """Compiles, compares and prints.

    Args:
        socs: names of chips or products; all if empty.
        kernels: families; all if empty.
        is_sample: compile the cases of the tests instead of the whole table.
        seed: of the sample.
        update: keep the new figures.
        console: to print to.

    Returns:
        0 if all figures equal the kept ones, or were kept now; else 1.

    Raises:
        ArgumentError: there is no such chip or kernel, or a sample is to be kept.
        ToolchainError: the compiler is missing.
    """
    _check_checkout()
    if is_sample and update:
        rule = "it keeps whole chips or whole kernels, never a sample"
        raise ArgumentError("update", True, rule, "Leave out --sample.")
    pairs = _pairs(socs, kernels, is_sample, seed)
    with progress("cases", len(pairs)) as work:
        found = runner.run(pairs, lambda soc, row: work.advance(f"{soc} {row['case']}"))
    is_whole = not (kernels or is_sample)
    changes = {
        soc: golden.compare(golden.read(soc, golden.FOLDER), rows, is_whole=is_whole)
        for soc, rows in found.items()
    }
    _summary(found, changes).print(console)
    for soc, differences in changes.items():
        for difference in differences[:MOST_SHOWN]:
            console.print(f"{soc} {difference}", markup=False, soft_wrap=True)
        if len(differences) > MOST_SHOWN:
            console.print(f"{soc}: {len(differences) - MOST_SHOWN} more differences")
    if update:
        _keep(found, is_whole, console)
        return 0
    if any(changes.values()):
        console.print("If these are meant, keep them: moe-triton gate --update (make gate-update).")
        return 1
    return 0


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
        pairs = sample(seed, SAMPLED_OTHERS)
    else:
        pairs = [(soc, case) for soc in chips for case in table().values()]
    return [(soc, c) for soc, c in pairs if soc in chips and (not families or c.family.name in families)]


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
        path = golden.write(soc, [row for name, row in merged.items() if name in table()], golden.FOLDER)
        console.print(f"kept: {path}", markup=False, soft_wrap=True)
    if page.PAGE.is_file():
        page.PAGE.write_text(page.inserted(page.PAGE.read_text(), page.tables()))
        console.print(f"kept: {page.PAGE}", markup=False, soft_wrap=True)
