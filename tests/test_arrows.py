"""Imports run down: CONTRIBUTING's table of rooms against every import there is."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from moe_triton.backends import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
MOST_ARROWS = 65
"""Between rooms of `moe_triton`: one more needs another one gone."""


def allowed() -> dict[str, set[str]]:
    """What each room sees, besides itself."""
    table = PAGE.read_text().split("| room | holds | sees |")[1].split("\n\n")[0]
    rows = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in table.splitlines()[2:]]
    named = [(set(re.findall(r"`(\w+)`", rooms)), sees) for rooms, _, sees in rows]
    seen: dict[str, set[str]] = {}
    for number, (rooms, sees) in enumerate(named):
        below = set().union(*(other for other, _ in named[number + 1 :]))
        seen |= dict.fromkeys(rooms, below if sees == "all below" else set(re.findall(r"`(\w+)`", sees)))
        assert seen[next(iter(rooms))] <= below, f"{rooms} sees what is not below it"
    return seen


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return first if first != "moe_triton" else rest.partition(".")[0] or "__init__"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            # From the package itself: a module of it, or what it exports.
            is_package = node.module == "moe_triton"
            yield from (f"moe_triton.{n.name}" if is_package else node.module or "" for n in node.names)


def test_every_import_is_allowed() -> None:
    seen, wrong, number, arrows = allowed(), [], 0, set()
    for path in (p for house in ("moe_triton", "autotune") for p in (ROOT / house).rglob("*.py")):
        room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imports(path):
            if module.partition(".")[0] not in ("moe_triton", "autotune", "benchmarks", "tests"):
                continue
            other, number = room_of(module), number + 1
            if module.startswith("moe_triton.") and other not in seen:
                other = "__init__"  # a name that the package exports
            arrows |= {(room, other)} if other != room != "autotune" else set()
            if other != room and other not in seen[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []
    assert len(arrows) <= MOST_ARROWS, sorted(arrows)
    assert number > 2000


def modules() -> dict[str, Path]:
    """Every module, by its name."""
    found = {}
    for path in (p for house in ("moe_triton", "autotune") for p in (ROOT / house).rglob("*.py")):
        *folders, name = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(folders if name == "__init__" else (*folders, name))] = path
    return found


def imported(path: Path, known: Collection[str]) -> Iterator[str]:
    """The modules that one imports: those that names come from, or are themselves."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{name.name}" for name in node.names)
            yield from (name if name in known else node.module or "" for name in names)


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    arrows = {name: {*imported(path, known)} & known.keys() for name, path in known.items()}
    assert sum(map(len, arrows.values())) > 1500
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_schemes_ask_a_back_end_what_it_can_and_never_its_name() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "moe_triton" / "schemes").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in BACKENDS
    ]
    assert named == []
