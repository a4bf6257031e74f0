"""The table of the docs, from the golden files alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_triton.gate import golden
from moe_triton.gate.report import PIPES
from moe_triton.gate.socs import SOC_OF_PRODUCT, SOCS
from moe_triton.gate.table import Case, shown_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compiler-gate.md"
BEGIN, END = "<!-- begin: moe-triton gate --update writes this -->", "<!-- end -->"

_HEAD = (
    "| kernel | UB | loads | stores | MTE2 | MTE3 | V | S | flags | barriers | loops | UB on 950 "
    "| cycles at least | bound by |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|---|",
)

Kept = Mapping[str, Mapping[str, golden.Row]]


def tables(kept: Kept | None = None) -> str:
    """Markdown between the markers: the kernels that are shown, for A3, and what differs on other chips.

    Args:
        kept: rows by soc and case; the golden files if not given.
    """
    rows = kept or {soc: golden.read(soc) for soc in SOCS}
    lines = [*_HEAD, *(_line(case, rows) for case in shown_cases())]
    return "\n".join([*lines, "", *(_summary(soc, rows) for soc in SOCS)])


def _line(case: Case, rows: Kept) -> str:
    name = " ".join([case.family.name, *(f for f in case.family.features if case.shape.has(f))])
    row = rows[SOC_OF_PRODUCT["A3"]].get(case.name)
    if row is None or row["rejected"]:
        return f"| `{name}` | {'not compiled' if row is None else row['rejected']} |" + " |" * 12
    cycles = max(float(row[figure]) for figure in golden.ESTIMATES)
    loops = row["loops"] + (f" ({row['scalar_loops']})" if row["scalar_loops"] != "0" else "")
    outlook = rows["Ascend950PR_9589"].get(case.name, {})
    cells = [
        f"`{name}`",
        f"{row['ub_percent']} %",
        row["loads"] or "-",
        row["stores"] or "-",
        *(row[pipe] for pipe in PIPES),
        row["set"],
        ", ".join(b.replace(":", " ") for b in row["barriers"].split() if b != "ALL:1") or "-",
        loops,
        "rejected" if outlook.get("rejected") else f"{outlook.get('ub_percent', '-')} %",
        f"{cycles:.0f}",
        row["bound"],
    ]
    return "| " + " | ".join(cells) + " |"


def _summary(soc: str, rows: Kept) -> str:
    found = list(rows[soc].values())
    rejected = [row for row in found if row["rejected"]]
    single = [row for row in found if not row["rejected"] and not _is_double_buffered(row)]
    reduced = [row for row in found if row["switched_off"]]
    text = (
        f"- {soc} ({SOCS[soc].product}): {len(found)} cases, {len(rejected)} rejected, "
        f"{len(reduced)} with an option that the compiler gave up to fit, "
        f"{len(single)} with a copy of whole tiles that has one buffer."
    )
    a3 = rows[SOC_OF_PRODUCT["A3"]]
    if soc == SOC_OF_PRODUCT["A2"]:
        others = [row for row in found if row != a3.get(row["case"])]
        text += f" {len(others) or 'None'} of them differ{'s' if not others else ''} from A3's."
    return text


def _is_double_buffered(row: golden.Row) -> bool:
    counts = [row[kind].split("/") for kind in ("loads", "stores") if row[kind]]
    return all(twice == copies for twice, copies in counts)


def inserted(page: str, text: str) -> str:
    """A page with what stands between its markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def shown_part(page: str) -> str:
    """What stands between a page's markers."""
    return page.partition(BEGIN)[2].partition(END)[0].strip("\n")
