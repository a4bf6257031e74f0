"""The examples of docs/autotune.md run, and its commands are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_triton.core.tuning import Tuning
from moe_triton.tools.cli.app import app
from tests.test_docs import code_blocks, page

MARKER = "<!-- tests/autotune/test_docs.py runs this -->"


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    search, space = (code_blocks(after)[0] for after in page("autotune.md").split(MARKER)[1:])
    exec(search, {})
    said = capsys.readouterr().out
    assert said.count("'BLOCK'") == 6
    assert "kept: tables/kernels-Ascend910_9391.json" in said
    exec(space, {})
    assert capsys.readouterr().out.count("TILE") == 5
    assert Tuning(tables="tables").tables == "tables"


def test_the_commands_are_there() -> None:
    commands = set(re.findall(r"^moe-triton tune (\w+)", page("autotune.md"), flags=re.M))
    assert commands == {"kernels", "pipeline", "show", "explain", "diff", "verify"}
    for command in commands:
        assert CliRunner().invoke(app, ["tune", command, "--help"]).exit_code == 0
    options = set(
        re.findall(r"--[a-z-]+", " ".join(re.findall(r"^moe-triton tune.*$", page("autotune.md"), re.M)))
    )
    said = "".join(
        CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", command, "--help"]).output
        for command in commands
    )
    assert {option for option in options if option not in said} == set()
