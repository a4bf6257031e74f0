"""The figures that are kept: whole, within the unified buffer, and what the compiler gives today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotune.gate import SOCS, golden, page, runner
from autotune.gate.costs import Estimate
from autotune.gate.golden import Difference, Row, compare, row_of
from autotune.gate.report import GateReport, Transfer
from autotune.gate.table import sample, shown_cases, table
from autotune.npu_compiler.socs import SOC_OF_PRODUCT
from moe_triton.core.errors import ToolchainError

A2, A3 = SOC_OF_PRODUCT.values()
SEED, OTHERS = 20260101, 8

REPORT = GateReport(
    "add",
    A3,
    49152,
    (Transfer("load", "64xf32", True), Transfer("load", "64xf32", False), Transfer("store", "1xf32", False)),
    "module",
    instructions={"MTE2": 2, "MTE3": 1, "V": 3, "S": 4},
    flags_set=5,
    flags_waited=6,
    barriers={"ALL": 1, "V": 7},
    loops=2,
    scalar_loops=1,
    switched_off=("enable-code-motion",),
    estimate=Estimate(1.4, 2.6, 3, 4, 5),
)


def test_a_line_holds_every_figure() -> None:
    assert list(row_of("add/h64", REPORT).values()) == [
        *("add/h64", "49152", "25.0", "1/2", "", "2", "1", "3", "4", "5", "6", "ALL:1 V:7", "2", "1"),
        *("enable-code-motion", "1", "3", "3", "4", "5", "S", ""),
    ]


def test_a_rejected_case_is_a_line_with_the_reason() -> None:
    row = row_of("add/h64", "ub overflow, requires 2 bits")
    assert {name: value for name, value in row.items() if value} == {
        "case": "add/h64",
        "rejected": "ub overflow, requires 2 bits",
    }


def test_files_are_read_back(tmp_path: Path) -> None:
    rows = [row_of("b", REPORT), row_of("a", "a reason, with a comma")]
    path = golden.write(A3, rows, tmp_path)
    assert [line.partition(",")[0] for line in path.read_text().splitlines()] == ["case", "a", "b"]
    assert golden.read(A3, tmp_path) == {row["case"]: row for row in rows}
    assert golden.read(A2, tmp_path) == {}


@pytest.mark.parametrize("column", golden.COLUMNS[1:])
def test_a_changed_figure_is_found(column: str) -> None:
    kept, found = row_of("add", REPORT), row_of("add", REPORT)
    assert compare({"add": kept}, [found]) == []
    found[column] = "changed"
    assert compare({"add": kept}, [found]) == [Difference("add", column, kept[column], "changed")]
    assert str(compare({"add": found}, [kept])[0]) == f"add: {column} changed -> {kept[column] or 'none'}"


def test_new_and_missing_cases_are_found() -> None:
    kept, found = row_of("old", REPORT), row_of("new", REPORT)
    assert [str(d) for d in compare({"old": kept}, [found])] == ["new: new", "old: gone"]
    assert [str(d) for d in compare({"old": kept}, [found], is_whole=False)] == ["new: new"]


@pytest.mark.parametrize("soc", SOCS)
def test_the_whole_table_is_kept(soc: str) -> None:
    assert golden.read(soc).keys() == table().keys(), "run: make gate-update"


def test_kept_files_are_small() -> None:
    assert sum(path.stat().st_size for path in golden.FOLDER.iterdir()) < 400_000
    assert {path.stem for path in golden.FOLDER.iterdir()} == SOCS.keys()


@pytest.mark.parametrize("soc", SOCS)
def test_every_kernel_fits(soc: str) -> None:
    rows = golden.read(soc).values()
    assert [row["case"] for row in rows if row["rejected"]] == []
    assert [row["case"] for row in rows if float(row["ub_percent"]) > 100] == []
    assert [row["case"] for row in rows if row["switched_off"]] == []


def test_the_compiler_gives_what_is_kept() -> None:
    found = runner.run(sample(SEED, OTHERS))
    differences = {soc: compare(golden.read(soc), rows, is_whole=False) for soc, rows in found.items()}
    assert sum(len(rows) for rows in found.values()) >= len(shown_cases()) + 3 * OTHERS - 3
    assert [f"{soc} {d}" for soc, found in differences.items() for d in found] == [], "see: make gate"


def test_a_missing_tool_is_no_rejected_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_program", lambda package, relative: None)
    with pytest.raises(ToolchainError, match=r"bishengir-compile is missing: pip install"):
        runner.run(sample(SEED, 0))


def test_a_rejected_kernel_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reject(kernel: object, soc: str) -> GateReport:
        raise ToolchainError(f"the NPU compiler rejects add for {soc}: ub overflow")

    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "compile_for_npu", reject)
    monkeypatch.setattr(runner, "npu_ir", lambda kernel: "text")
    case = shown_cases()[0]
    assert runner.line_of(A3, case) == row_of(case.name, "ub overflow")


def test_a_kernel_that_triton_rejects_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(kernel: object) -> str:
        raise ToolchainError("Triton rejects kernel add: no such thing")

    monkeypatch.setattr(runner, "npu_ir", reject)
    case = shown_cases()[0]
    assert runner.line_of(A3, case) == row_of(case.name, "Triton rejects kernel add: no such thing")


def test_a_line_is_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted = []

    def count(kernel: object, soc: str) -> GateReport:
        counted.append(soc)
        return REPORT

    monkeypatch.setenv("MOE_TRITON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "compile_for_npu", count)
    monkeypatch.setattr(runner, "npu_ir", lambda kernel: "text")
    first, second = shown_cases()[:2]
    assert runner.line_of(A3, first) == row_of(first.name, REPORT)
    assert runner.line_of(A3, second) == row_of(second.name, REPORT)
    runner.line_of(A2, first)
    assert counted == [A3, A2]
    monkeypatch.setattr(runner, "_reader_version", lambda: "another")
    runner.line_of(A3, first)
    assert counted == [A3, A2, A3]


def test_the_page_holds_the_figures_that_are_kept() -> None:
    text = page.PAGE.read_text()
    assert page.inserted(text, page.tables()) == text, "run: make gate-update"


def test_the_page_shows_every_kernel_and_says_what_is_rejected() -> None:
    rows: dict[str, dict[str, Row]] = {soc: dict(golden.read(soc)) for soc in SOCS}
    shown = shown_cases()
    text = page.tables(rows)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len([line for line in lines if line.startswith("| `")]) == 2 * len(shown)
    assert {line.count(" |") for line in lines if "--" not in line} == {12, 7}
    name = shown[0].name
    rows[A3] |= {name: row_of(name, "ub overflow")}
    assert "ub overflow" in page.tables(rows)
    assert "1 rejected" in page.tables(rows)
    del rows[A3][name]
    assert "not compiled" in page.tables(rows)


def test_what_stands_around_the_table_stays() -> None:
    text = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    assert page.inserted(text, "new") == f"before\n{page.BEGIN}\nnew\n{page.END}\nafter\n"


def test_the_page_explains_every_kernel_that_bandwidth_does_not_bound() -> None:
    explained = page.PAGE.read_text().split("## What bounds the others")[1]
    explained = explained.split("\n## ")[0]
    kept = golden.read(A3)
    bound = {
        case.family.name: kept[case.name]["bound"]
        for case in shown_cases()
        if case.family.name != "weighted_sum"
    }
    sums = {case.name for case in shown_cases() if case.family.name == "weighted_sum"}
    named = set(re.findall(r"`([a-z_]+)`", explained))
    assert {name for name, pipe in bound.items() if pipe != "bandwidth"} <= named
    features = {f for name in sums if kept[name]["bound"] != "bandwidth" for f in name.split("-")[4:]}
    assert features <= named


def _is_single(row: Row) -> bool:
    """Whether a copy of whole tiles has one buffer: it does not overlap with the work on the other one."""
    return any(len(set(row[copies].split("/"))) > 1 for copies in ("loads", "stores"))


@pytest.mark.parametrize("soc", [A2, A3])
def test_copies_of_rows_overlap_with_the_work_on_them(soc: str) -> None:
    """Except in tables of words, where there is no room to have a tile of fp32 twice, of zeros, and where a
    table is loaded once for all tokens.
    """
    rows = golden.read(soc)
    single = {case for case, row in rows.items() if _is_single(row)}
    sums = {case for case in single if case.startswith("weighted_sum/")}
    clearing = {
        case
        for case in single
        if case.partition("/")[0] in ("arrange", "arrange_own", "arrange_part", "const_alphas")
    }
    mapping = {case for case in single if case.startswith("map_experts/")}
    assert single - sums - clearing - mapping == {"returns/shared_rank"}
    assert all(re.fullmatch(r"(\d)/\1", rows[case]["loads"]) for case in clearing)
    assert all(re.search(r"-s0-weights-fp32_out$", case) for case in sums)
    for kernel in (
        "pack",
        "pack_smooth",
        "route_pack",
        "route_pack_smooth",
        "arrange",
        "arrange_own",
        "arrange_part",
        "append",
        "add_rows",
        "block_quantize",
        "rms_norm",
    ):
        found = [row for case, row in rows.items() if case.partition("/")[0] == kernel]
        assert found
        assert all(row["loads"] and row["stores"] for row in found), kernel
