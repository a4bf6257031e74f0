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


def test_the_steps_of_the_page_are_those_of_the_example() -> None:
    example = Path(ROOT, "examples", "survivors.py").read_text(encoding="utf-8")
    shown = page("lost-ranks.md").split("\n## Requests go on\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", shown, flags=re.S)
    assert [block in example for block in blocks] == [True, True]


def test_what_deepep_has_is_called_as_the_page_says() -> None:
    """The second column of its tables names our arguments, methods and outputs."""
    calls = (EPBuffer.__init__, EPBuffer.dispatch, EPBuffer.combine)
    arguments = {name for call in calls for name in inspect.signature(call).parameters}
    known = {*arguments, *dir(EPBuffer), *DispatchOutput._fields}
    for section in page("from-deepep.md").split("| DeepEP | Here |")[1:]:
        cells = [row[1] for row in table_after("| DeepEP | Here |" + section, "DeepEP | Here")]
        named = {word for cell in cells for word in re.findall(r"\w+", cell)}
        assert len(named) > 2
        assert named <= known
