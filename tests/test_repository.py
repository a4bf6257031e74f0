"""Files that other programs read: they are as their schemas want them, and name what there is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import moe_triton
from moe_triton.tools.cli.app import app
from tests.patience import seconds

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
FORM = ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml"
# Schemas that come with check-jsonschema: nothing is fetched.
SCHEMAS = {
    WORKFLOW: ("vendor.github-workflows", "custom.github-workflows-require-timeout"),
    FORM: ("vendor.github-issue-forms",),
    ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml": ("vendor.github-issue-config",),
    ROOT / "CITATION.cff": ("vendor.citation-file-format",),
}


def checked(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds(60))


@pytest.mark.parametrize(
    ("path", "schema"), [(path, name) for path, names in SCHEMAS.items() for name in names]
)
def test_the_file_is_as_its_schema_wants_it(path: Path, schema: str) -> None:
    done = checked(path, schema)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_that_is_not_fails(tmp_path: Path) -> None:
    path = tmp_path / "ci.yml"
    path.write_text(WORKFLOW.read_text(encoding="utf-8").replace("runs-on", "runs_on"), encoding="utf-8")
    assert checked(path, "vendor.github-workflows").returncode != 0


def read(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def jobs() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read(WORKFLOW)["jobs"]
    return found


def commands(job: dict[str, Any]) -> set[str]:
    """What a job runs."""
    return {line for step in job["steps"] for line in str(step.get("run", "")).splitlines()}


def test_the_workflow_runs_all_on_one_python_and_imports_and_kernels_on_each() -> None:
    assert ".ci/run" in commands(jobs()["everything"])
    pythons = jobs()["pythons"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.10", "3.11", "3.12", "3.13"]
    classifiers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r"Python :: (3\.\d+)", classifiers) == pythons
    (tests,) = (command for command in commands(jobs()["pythons"]) if "pytest" in command)
    assert "tests/test_import.py tests/kernels" in tests


def test_what_the_workflow_names_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.M)
    known = get_command(app)
    for command in set().union(*(commands(job) for job in jobs().values())):
        program, *words = shlex.split(command)
        for word in (program, *words):
            if "/" in word or word.endswith((".py", ".txt")):
                assert (ROOT / word).exists(), command
            for extra in re.findall(r"\w+", "".join(re.findall(r"^\.\[(.*)\]$", word))):
                assert extra in extras, command
        if program == "make":
            assert set(words) <= targets, command
        elif program == "moe-triton":
            subcommand = known.commands[words[0]]  # type: ignore[attr-defined]
            options = {option for parameter in subcommand.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options, command
        else:
            assert program == "python" or (ROOT / program).is_file() or shutil.which(program), command


def test_the_workflow_may_only_read_and_says_that_it_was_not_run() -> None:
    found = read(WORKFLOW)
    assert found["permissions"] == {"contents": "read"}
    assert found["concurrency"]["cancel-in-progress"] is True
    actions = [step["uses"] for job in jobs().values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in actions)
    assert WORKFLOW.read_text(encoding="utf-8").startswith("# This file has not been run on GitHub.")


def test_the_form_asks_for_doctors_output() -> None:
    fields = {field.get("id"): field for field in read(FORM)["body"]}
    for name in ("doctor", "command", "happened", "expected"):
        assert fields[name]["validations"]["required"] is True
    assert "moe-triton doctor" in fields["doctor"]["attributes"]["label"]


def test_the_citation_is_of_this_version_and_licence() -> None:
    found = read(ROOT / "CITATION.cff")
    assert found["version"] == moe_triton.__version__
    assert f'license = "{found["license"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
