"""Every command that prints a table prints all of it, in a terminal of 80 columns and in one of 40."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autotune.model.clusters import parts
from autotune.model.clusters.group import Group
from benchmarks import decode, harness
from benchmarks.compare.figures import Samples
from benchmarks.compare.report import print_report
from moe_triton.tools.cli import demo as demo_module
from moe_triton.tools.cli.app import app
from moe_triton.tools.text_table import TextTable
from tests.benchmarks.test_compare import some_samples

SMALL = "--hidden", "1024", "--experts", "16", "--topk", "4"
COMMANDS = (
    ("demo",),
    ("doctor",),
    ("layout",),
    ("compile", "--kernel", "gather_counts"),
    ("gate", "--kernel", "gather_counts"),
    ("selftest", "--only", "environment", "--quick", "--output", "report"),
    ("model", "validate"),
    ("model", "plan", "--ranks", "8", "--tokens", "8", *SMALL),
    ("model", "prices"),
    ("model", "cluster", "--machine", "A2", "--ep", "8,16", "--tokens", "8"),
    ("model", "parts"),
    ("model", "kernel", "pack/bf16-h1024", "--tokens", "16", "--ranks", "4", "--blocks", "4"),
    ("tune", "show"),
    ("tune", "show", "--kernel", "stamps"),
    ("tune", "explain", "stamps", "--variant", "plain", "--study", "study.db"),
)
RANK = {"sent": 16, "received": 129, "bytes": 2_050_000, "wrong": []}
TIMES = {"dispatch": 9144.0, "experts": 270_208.0, "combine": 2985.0}


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[TextTable]:
    """All tables that were printed."""
    found: list[TextTable] = []
    usual = TextTable.print

    def noting(table: TextTable, console: Console) -> None:
        found.append(table)
        usual(table, console)

    monkeypatch.setattr(TextTable, "print", noting)
    return found


@pytest.fixture(scope="module", autouse=True)
def predicted_once() -> Iterator[None]:
    """``model validate`` takes seconds for what is the same each time."""
    module = import_module("autotune.cli.model.validate")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("compare", "predictions"):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What takes long is little, or not done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_module, "_run", lambda settings: [{**RANK, "us": TIMES}] * 4)
    monkeypatch.setattr(parts, "groups", lambda: iter([Group(16, 16, 7168)]))
    prices = import_module("autotune.cli.model.plan")
    monkeypatch.setattr(prices, "TABLE_RANKS", (8,))
    monkeypatch.setattr(prices, "TABLE_TOKENS", (8, 16))


def lost(table: TextTable, said: str) -> Iterator[str]:
    """What of a table was not printed, nor named as left out."""
    left_out = " ".join(said.split())
    for row in table.rows:
        for column, cell in zip(table.columns, row, strict=True):
            whole = str(cell).split() if column.kind == "text" else [" ".join(str(cell).split())]
            if not all(each in said for each in whole) and not (
                column.spare and f"{column.label}" in left_out.partition("Not shown: ")[2]
            ):
                yield str(cell)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_prints_all_names_and_numbers(
    words: Sequence[str], width: int, printed: list[TextTable]
) -> None:
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    assert printed, result.output
    assert "…" not in result.output
    assert "| ---" not in result.output
    for table in printed:
        assert list(lost(table, result.output)) == []


def decode_table() -> None:
    cells = [[f"{100 * row + column}.5" for column in range(1, len(decode.COLUMNS))] for row in range(3)]
    harness.print_table("decode", decode.COLUMNS, [[name, *cells[i]] for i, name in enumerate(decode.WAYS)])


def compare_tables() -> None:
    print_report(Samples(some_samples()), Console())


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("show", [decode_table, compare_tables])
def test_a_benchmark_prints_all_names_and_numbers(
    show: Callable[[], None],
    width: int,
    printed: list[TextTable],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show()
    said = capsys.readouterr().out
    assert printed
    assert "…" not in said
    for table in printed:
        assert list(lost(table, said)) == []


def test_layout_says_sizes_in_megabytes() -> None:
    output = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["layout", "--ranks", "4"]).output
    lines = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    num_bytes, size, unit = lines["window"][1:]
    assert unit == "MB"
    assert float(size) == pytest.approx(int(num_bytes) / 1e6, abs=0.005)
    assert "KB" in lines["dispatch_status"]


def test_a_pipe_gets_whole_rows(monkeypatch: pytest.MonkeyPatch, printed: list[TextTable]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    output = CliRunner().invoke(app, ["model", "validate"]).output
    for table in printed:
        for row in table.rows:
            words = " ".join(" ".join(map(str, row)).split())
            assert any(" ".join(line.split()) == words for line in output.splitlines())


def test_markdown_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["validate"], ["cluster", "--machine", "A2", "--ep", "8", "--tokens", "8"]):
        said: dict[bool, Any] = {
            option: CliRunner(env={"COLUMNS": "80"})
            .invoke(app, ["model", *words, *(["--markdown"] if option else [])])
            .output
            for option in (False, True)
        }
        assert "| --- |" in said[True]
        assert "| --- |" not in said[False]


def test_progress_of_a_command_is_not_in_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["model", "cluster", "--machine", "A2", "--ep", "8", "--json"])
    assert result.stdout.startswith("{")
    assert io.StringIO(result.stdout).read().rstrip().endswith("}")
