"""The table of the docs, from the golden files alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.gate import golden
from autotune.gate.report import PIPES
from autotune.gate.table import shown_cases
from autotune.npu_compiler.socs import SOC_OF_PRODUCT, SOCS
from moe_triton.kernels import Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compiler-gate.md"
BEGIN, END = "<!-- begin: moe-triton gate --update writes this -->", "<!-- end -->"

_PLANNED = (
    "| kernel | UB | loads | stores | MTE2 | MTE3 | V | S | flags | barriers | loops | UB on 950 |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|",
)
_ESTIMATED = ("| kernel | bandwidth | MTE2 | MTE3 | V | S | bound by |", "|---|--:|--:|--:|--:|--:|---|")

Kept = Mapping[str, Mapping[str, golden.Row]]


def tables(kept: Kept | None = None) -> str:
    """Markdown between the markers: the shown kernels for A3, and the differences on other chips.

    Args:
        kept: rows by soc and case; the golden files if not given.
    """
    rows = kept or {soc: golden.read(soc) for soc in SOCS}
    planned = [_line(case, _planned(case, rows)) for case in shown_cases()]
    estimated = [_line(case, _estimated(case, rows)) for case in shown_cases()]
    summary = [_summary(soc, rows) for soc in SOCS]
    caption = "Cycles of one turn at least, by estimate:"
    return "\n".join([*_PLANNED, *planned, "", *summary, "", caption, "", *_ESTIMATED, *estimated])


def _line(case: Case, cells: list[str]) -> str:
    features = (name for name in case.family.features if case.shape.has(name))
    return " | ".join([f"| `{' '.join([case.family.name, *features])}`", *cells]) + " |"


def _planned(case: Case, rows: Kept) -> list[str]:
    row = rows[SOC_OF_PRODUCT["A3"]].get(case.name)
    if row is None or row["rejected"]:
        return [row["rejected"] if row else "not compiled", *[""] * 10]
    barriers = (pair.replace(":", " ") for pair in row["barriers"].split() if pair != "ALL:1")
    outlook = rows["Ascend950PR_9589"].get(case.name, {})
    return [
        f"{row['ub_percent']} %",
        row["loads"] or "-",
        row["stores"] or "-",
        *(row[pipe] for pipe in PIPES),
        row["set"],
        ", ".join(barriers) or "-",
        row["loops"] + (f" ({row['scalar_loops']})" if row["scalar_loops"] != "0" else ""),
        "rejected" if outlook.get("rejected") else f"{outlook.get('ub_percent', '-')} %",
    ]


def _estimated(case: Case, rows: Kept) -> list[str]:
    row = rows[SOC_OF_PRODUCT["A3"]].get(case.name, {})
    return [row.get(figure) or "-" for figure in (*golden.ESTIMATES, "bound")]


def _summary(soc: str, rows: Kept) -> str:
    cases = list(rows[soc].values())
    rejected = [row for row in cases if row["rejected"]]
    single = [row for row in cases if not row["rejected"] and not _is_double_buffered(row)]
    reduced = [row for row in cases if row["switched_off"]]
    text = (
        f"- {soc} ({SOCS[soc].product}): {len(cases)} cases, {len(rejected)} rejected, "
        f"{len(reduced)} with an option that the compiler gave up to fit, "
        f"{len(single)} with a copy of whole tiles that has one buffer."
    )
    a3 = rows[SOC_OF_PRODUCT["A3"]]
    if soc == SOC_OF_PRODUCT["A2"]:
        others = [row for row in cases if row != a3.get(row["case"])]
        text += f" {len(others) or 'None'} of them differ{'s' if not others else ''} from A3's."
    return text


def _is_double_buffered(row: golden.Row) -> bool:
    counts = [row[kind].split("/") for kind in ("loads", "stores") if row[kind]]
    return all(twice == copies for twice, copies in counts)


def inserted(page: str, text: str) -> str:
    """A page with the text between its markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"
