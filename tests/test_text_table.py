"""Tables for people: nothing of a row is lost at any width, and all of them are made by one helper."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from moe_triton.tools import text_table
from moe_triton.tools.text_table import Column, TextTable, names, numbers, print_parts, texts

ROOT = Path(__file__).resolve().parents[1]
WORD = st.text("abcdefghijklmnopqrstuvwxyz_0123456789/-%[]…", min_size=1, max_size=24)
WORDS = st.lists(WORD, max_size=12).map(" ".join)
NUMBER = st.one_of(
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map("{:.2f}".format),
)
CELLS = {"name": WORD, "number": NUMBER, "text": WORDS}


@st.composite
def tables(draw: st.DrawFn) -> TextTable:
    kinds = draw(st.lists(st.sampled_from(list(CELLS)), min_size=1, max_size=9))
    columns = [Column(draw(WORDS), kind, draw(st.integers(0, 2)), draw(WORDS)) for kind in kinds]  # type: ignore[arg-type]
    rows = draw(st.lists(st.tuples(*(CELLS[kind] for kind in kinds)), max_size=6))
    return TextTable(columns, rows, draw(WORDS))


def printed(table: TextTable, width: int | None) -> list[str]:
    return [line.plain for line in table.lines(width)]


def words_of(line: str) -> list[str]:
    return line.split()


@given(tables(), st.integers(20, 200))
def test_names_and_numbers_stay_whole_at_any_width(table: TextTable, width: int) -> None:
    lines = printed(table, width)
    said = [word for line in lines for word in words_of(line)]
    missing = " ".join(said).partition("Not shown: ")[2]
    for row in table.rows:
        for column, cell in zip(table.columns, row, strict=True):
            if column.spare and all(word in missing for word in column.label.split()):
                continue
            for word in str(cell).split():
                assert any(word in each for each in said), (word, lines)
            if column.kind != "text" and str(cell):
                assert any(str(cell) in line for line in lines), (cell, lines)


@given(tables(), st.integers(20, 200))
def test_no_line_is_wider_but_for_a_word_that_is(table: TextTable, width: int) -> None:
    for line in printed(table, width):
        assert len(line) <= width or len(words_of(line)) == 1, line


@given(tables())
def test_without_a_width_each_row_is_a_line(table: TextTable) -> None:
    lines = printed(table, None)
    assert len(lines) == bool(table.title) + 2 + len(table.rows)
    for row, line in zip(table.rows, lines[len(lines) - len(table.rows) :], strict=True):
        assert words_of(line) == " ".join(map(str, row)).split()


STEPS = TextTable(
    (names("step"), numbers("us"), numbers("blocks"), numbers("KB", spare=1), texts("why", spare=2)),
    [("send", "12.34", 48, "7000.5", "the wire, and what waits for it"), ("sum", "3.10", 48, "1.0", "")],
    more="--json",
)


def test_first_texts_break_then_what_is_alike_is_said_once_then_columns_go_then_rows_are_blocks() -> None:
    assert printed(STEPS, 70)[2:] == [
        "send  12.34      48  7000.5  the wire, and what waits for it",
        "sum    3.10      48     1.0",
    ]
    assert printed(STEPS, 50)[2:4] == [
        "send  12.34      48  7000.5  the wire, and what",
        "                             waits for it",
    ]
    assert printed(STEPS, 37)[2:] == [
        "send  12.34  7000.5  the wire, and",
        "                     what waits for",
        "                     it",
        "sum    3.10     1.0",
        "In all rows: blocks 48.",
    ]
    assert printed(STEPS, 30)[2:] == [
        "send  12.34  7000.5",
        "sum    3.10     1.0",
        "In all rows: blocks 48.",
        "Not shown: why. Shown by: 45",
        "columns, a pipe (| less -S),",
        "--json.",
    ]
    assert printed(STEPS, 10) == [
        *("step  send", "us", "12.34", "blocks  48", "KB", "7000.5", "why"),
        *("the wire,", "and what", "waits for", "it", ""),
        *("step  sum", "us    3.10", "blocks  48", "KB    1.0"),
    ]


def test_a_heading_by_itself_says_what_it_is_of() -> None:
    priced = TextTable((numbers("dispatch, graph"), numbers("stream", alone="dispatch, stream")), [(1, 2)])
    assert printed(priced, None)[0] == "dispatch, graph  stream"
    assert printed(priced, 16) == ["dispatch, graph", "1", "dispatch, stream", "2"]


def test_the_same_table_in_markdown() -> None:
    table = TextTable((names("constant", code=True), numbers("value")), [("a|b", 1)], "not there")
    assert table.markdown() == "| constant | value |\n| --- | --- |\n| `a\\|b` | 1 |"
    assert table.markdown(aligned=True).splitlines()[1] == "| --- | ---: |"


def shown(parts: Sequence[TextTable | str], *, width: int, is_terminal: bool, **options: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=is_terminal, color_system=None)
    print_parts(parts, console, **options)
    return file.getvalue()


def test_a_terminal_has_a_width_and_a_pipe_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    parts = "one two three four five six", STEPS
    on_terminal = shown(parts, width=30, is_terminal=True)
    assert max(map(len, on_terminal.splitlines())) <= 30
    assert "Not shown: why" in on_terminal
    in_pipe = shown(parts, width=30, is_terminal=False)
    assert "one two three four five six\n\n" in in_pipe
    assert "48  7000.5  the wire, and what waits for it\n" in in_pipe
    monkeypatch.setenv("COLUMNS", "30")
    assert shown(parts, width=30, is_terminal=False) == on_terminal
    markdown = shown(parts, width=30, is_terminal=True, as_markdown=True)
    assert "| send | 12.34 | 48 | 7000.5 | the wire, and what waits for it |\n" in markdown


def test_colours_change_no_width() -> None:
    table = TextTable((names("a"), numbers("b")), [(Text("xy", style="red"), "[red]1[/red]")])
    assert printed(table, None)[2] == "xy  [red]1[/red]"
    assert "red" in str(table.lines(None)[2].spans)


def test_no_command_makes_tables_of_its_own() -> None:
    """Tables of rich cut what does not fit, and Markdown breaks in a terminal."""
    tables = r"rich\.table import .*\bTable\b|import rich\.table|rich import .*\btable\b"
    wrong = re.compile(tables + r"|tools\.markdown|tools import .*\bmarkdown\b")
    # Which are Markdown.
    pages = (
        "autotune/cli/model/page.py",
        "moe_triton/tools/pages/arguments.py",
        "moe_triton/tools/pages/limits.py",
    )
    files = *pages, "moe_triton/tools/selftest/report.py"
    allowed = {Path(text_table.__file__), *(ROOT / file for file in files)}
    sources = (
        path for name in ("moe_triton", "autotune", "benchmarks") for path in (ROOT / name).rglob("*.py")
    )
    found = {path for path in sources if wrong.search(path.read_text(encoding="utf-8"))}
    assert found - allowed == set()
