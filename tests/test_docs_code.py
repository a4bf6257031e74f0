"""The code that the pages show: it parses, fits, prints what they say, and is that of the examples."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import textwrap
from pathlib import Path

import pytest

from moe_triton import DispatchOutput, EPBuffer
from tests.test_docs import DOCS, ROOT, code_blocks, page, table_after

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
COLUMNS = 110  # of code that a screen 1280 wide shows (mkdocs.yml)


def lines_of_code(text: str) -> list[str]:
    """Lines between fences, without the indentation of the fence."""
    blocks = re.findall(r"^( *)```[^\n]*\n(.*?)^ *```$", text, flags=re.S | re.M)
    return [line.removeprefix(indent) for indent, block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("name", PAGES)
def test_code_fits_the_page(name: str) -> None:
    assert [line for line in lines_of_code(page(name)) if len(line) > COLUMNS] == []


@pytest.mark.parametrize("name", PAGES)
def test_code_is_python(name: str) -> None:
    for code in code_blocks(page(name)):
        ast.parse(code)


def test_lines_of_code_are_found() -> None:
    """The two tests above have something to look at."""
    assert lines_of_code("text\n  ```python\n  a = 1\n\n    b\n  ```\n") == ["a = 1", "", "  b"]
    assert sum(len(code_blocks(page(name))) for name in PAGES) > 10


def test_sizes_of_the_window_are_those_that_the_page_shows() -> None:
    after = page("serving.md").split("<!-- tests/test_docs_code.py runs this -->")[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code_blocks(after)[0], {})
    shown = re.findall(r"```text\n(.*?)```", after, flags=re.S)[0]
    assert printed.getvalue() == shown


def test_the_layer_of_the_page_is_that_of_the_example() -> None:
    example = Path(ROOT, "examples", "moe_layer.py").read_text(encoding="utf-8")
    (shown,) = (code for code in code_blocks(page("getting-started.md")) if code.startswith("def forward"))
    assert textwrap.indent(shown, "    ") in example


@pytest.mark.parametrize(
    ("heading", "owner"),
    [
        ("The constructor", EPBuffer.__init__),
        ("dispatch", EPBuffer.dispatch),
        ("combine", EPBuffer.combine),
    ],
)
def test_what_deepep_has_is_called_as_the_page_says(heading: str, owner: object) -> None:
    """The second column names our arguments, methods and outputs."""
    assert callable(owner)
    section = page("from-deepep.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    known = {*inspect.signature(owner).parameters, *vars(EPBuffer), *DispatchOutput._fields}
    named = [re.findall(r"\w+", cells[1]) for cells in table_after(section, "DeepEP | Here")]
    named_here = {word for words in named for word in words}
    assert len(named_here) > 2
    assert named_here <= known
