"""The page of the API: what is on it, how it reads, and that every example on it runs."""

from __future__ import annotations

import ast
import doctest
import html
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from moe_triton import EPBuffer, torch_npu_ops
from moe_triton.core.deepep import OF_BUFFER
from moe_triton.processes import RankGroup
from moe_triton.runtime.construction import DEFAULT_TIMEOUT_S
from tests.patience import seconds
from tests.test_docs import ROOT, code_blocks, page

OPTIONS = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", flags=re.M)
MARKERS = (
    "<!-- tests/test_api_page.py runs every example of the page behind this -->",
    "<!-- tests/test_api_page.py runs this as well -->",
)


def excluded(options: dict[str, Any]) -> re.Pattern[str]:
    return re.compile("|".join(pattern.removeprefix("!") for pattern in options.get("filters", ["!^_"])))


def members_of(root: Any, options: dict[str, Any]) -> list[str]:
    """Names of the members of a root that the page shows."""
    if (listed := options.get("members")) is not None:
        return list(listed or ())
    if not isinstance(root, ModuleType):
        names = [name for name, value in vars(root).items() if inspect.getdoc(value)]
    elif hasattr(root, "__all__"):
        names = list(root.__all__)
    else:
        here = [name for name, value in vars(root).items() if inspect.isclass(value)]
        names = [name for name in here if getattr(root, name).__module__ == root.__name__]
    hidden = excluded(options)
    return [name for name in names if not hidden.search(name)]


def shown() -> Iterator[tuple[str, Any]]:
    """Everything that the page shows, by its path, as docs/api.md asks for it."""
    for path, text in OPTIONS.findall(page("api.md")):
        options = (yaml.safe_load(text) or {"options": {}})["options"]
        root = pkgutil.resolve_name(path)
        if not isinstance(root, ModuleType):
            yield path, root
        if not inspect.isfunction(root):
            for name in members_of(root, options):
                yield f"{path}.{name}", inspect.getattr_static(root, name)


def functions() -> dict[str, Any]:
    """What of it is called."""
    unwrapped = {path: getattr(found, "__func__", found) for path, found in shown()}
    return {path: found for path, found in unwrapped.items() if inspect.isroutine(found)}


def test_the_page_has_every_public_name() -> None:
    paths = dict(shown())
    wanted = [f"moe_triton.torch_npu_ops.{name}" for name in torch_npu_ops.__all__]
    of_buffer = [name for name in dir(EPBuffer) if not name.startswith("_") and name not in OF_BUFFER]
    wanted += [f"moe_triton.EPBuffer.{name}" for name in of_buffer]
    wanted.remove("moe_triton.EPBuffer.get_buffer_size_hint")  # a function of its own module
    assert [path for path in wanted if path not in paths] == []
    assert "moe_triton.runtime.size_hint.get_buffer_size_hint" in paths
    assert len(functions()) > 45


def test_nothing_internal_is_on_the_page() -> None:
    names = [path.rpartition(".")[2] for path in dict(shown())]
    allowed = {"_npu_distribute_barrier"}
    assert [name for name in names if name.startswith("_") and name not in allowed] == []
    assert not {name for name in names if re.match("check|note_|renamed|normalized|of$", name)}


def test_every_function_has_an_example() -> None:
    parser = doctest.DocTestParser()
    without = [path for path, found in functions().items() if not parser.get_examples(found.__doc__ or "")]
    assert without == []


def defaults_of(found: Any) -> Iterator[ast.expr | None]:
    """Defaults of a function, of a constructor, or of a record's fields."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    for each in node.body if isinstance(node, ast.ClassDef) else [node]:
        if isinstance(each, ast.AnnAssign):
            yield each.value
        elif isinstance(each, ast.FunctionDef) and (each is node or each.name == "__init__"):
            yield from (*each.args.defaults, *each.args.kw_defaults)


def test_defaults_are_values() -> None:
    """A reader sees "auto" and 60.0, not the name of a constant of ours."""
    named = {}
    for path, found in shown():
        unwrapped = inspect.unwrap(getattr(found, "__func__", found))
        if "errors" not in path and (inspect.isclass(unwrapped) or inspect.isfunction(unwrapped)):
            named[path] = [each.id for each in defaults_of(unwrapped) if isinstance(each, ast.Name)]
    assert len(named) > 60
    assert {path: names for path, names in named.items() if names} == {}
    assert inspect.signature(EPBuffer).parameters["timeout_s"].default == DEFAULT_TIMEOUT_S


def test_the_symbols_of_docstrings_are_in_the_legend() -> None:
    legend = page("api.md").split("## Symbols\n")[1].split("\n## ")[0]
    explained = {
        symbol
        for cell in re.findall(r"^\| ([^|]+) \|", legend, flags=re.M)
        for symbol in re.findall(r"\w+", cell)
    }
    used = set()
    for path, found in shown():
        if "model" not in path:
            shapes = re.findall(r": \(([\w\s*+(),/]+?)\)[\s,]", found.__doc__ or "")
            used |= {name for shape in shapes for name in re.findall(r"\b[A-Z]\w*\b|\b[nt]p?\b", shape)}
    assert len(used) > 8
    assert used - explained - {"Align32", "None", "True"} == set()


def run_examples(rank: int, num_ranks: int, setup: str, folder: str) -> dict[str, str]:
    """What fails of each docstring's examples."""
    os.chdir(folder)  # one writes a file
    parser, failed, begun = doctest.DocTestParser(), {}, {}
    for path, found in shown():
        examples = parser.get_doctest(inspect.getdoc(found) or "", {}, path, None, None)
        if examples.examples:
            if not begun or "closed" in repr(begun["buffer"]):
                exec(setup, begun)
            examples.globs = dict(begun)
            said: list[str] = []
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            if doctest.DocTestRunner(verbose=False, optionflags=flags).run(examples, out=said.append).failed:
                failed[path] = "".join(said)
    return failed


def test_every_example_runs(ranks: Callable[[int], RankGroup], tmp_path: Path) -> None:
    blocks = [code_blocks(page("api.md").split(marker)[1])[0] for marker in MARKERS]
    # The processes of the test have their group already.
    setup, replaced = re.subn(r"^dist\.init_process_group.*$", "", "".join(blocks), flags=re.M)
    assert replaced == 1
    assert ranks(2).run(run_examples, setup, str(tmp_path)) == [{}, {}]


@pytest.mark.long  # installs nothing by itself: `make test-long` has what it takes
def test_the_page_shows_signatures_and_what_was_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=quiet, check=True, timeout=seconds(240))
    text = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert set(re.findall(r'<h\d id="((?:moe_triton|autotune)\.[^"]+)"', text)) == set(dict(shown()))
    plain = html.unescape(re.sub(r"<[^>]+>", "", text))
    (constructor,) = re.findall(r"^EPBuffer\((.*?)^\)", plain, flags=re.S | re.M)
    parameters = list(inspect.signature(EPBuffer).parameters)
    assert re.findall(r"^    (\w+):", constructor, flags=re.M) == parameters
    assert 'comm_alg: str | None = "auto"' in constructor
    assert "timeout_s: float = 60.0" in constructor
    assert not re.findall(r"\b(?:__\w+__|check_poster|DEFAULT_TIMEOUT_S|Bases: Owner)\b", plain)
    assert plain.count(">>> ") > 100
