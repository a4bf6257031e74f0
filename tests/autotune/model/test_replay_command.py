"""``moe-triton model kernel``, as a user meets it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.model.constants import machine_named
from moe_triton.tools.cli.app import app

SMALL = ["--tokens", "16", "--ranks", "4", "--experts", "32", "--blocks", "4"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["model", "kernel", *arguments], catch_exceptions=False
    )
    assert result.exit_code == code, result.output
    # How far it is, on a loaded machine, is said elsewhere.
    return result.output if code else result.stdout


def test_what_takes_the_time_is_named() -> None:
    output = run("pack/bf16-h7168", *SMALL)
    assert "pack/bf16-h7168 on 4 cores of A3" in output
    assert "bound by memory bandwidth" in output or "bound by vector" in output
    assert "4 turns of its longest loop" in output
    for word in ("critical path", "scalar loads", "MTE2", "MTE3", "empty queue", "flag of"):
        assert word in output


def test_the_same_as_json() -> None:
    found = json.loads(run("pack/bf16-h7168", *SMALL, "--json", "--soc", "A2"))
    assert (found["case"], found["blocks"], found["machine"]) == ("pack/bf16-h7168", 4, "A2")
    assert sum(found["parts"].values()) == pytest.approx(found["cycles"])
    assert found["us"] == pytest.approx(found["cycles"] / 1850)
    assert found["bytes_written"] >= 16 * 7168
    assert found["turns"] == 4


def test_a_trace_has_every_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipes.json"
    found = json.loads(run("pack/bf16-h7168", *SMALL, "--json", "--trace", str(path)))
    events = json.loads(path.read_text())["traceEvents"]
    pipes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(pipes.values()) == ["S", "MTE2", "V", "MTE3"]
    spans = [e for e in events if e["ph"] == "X"]
    for row, pipe in pipes.items():
        own = [e for e in spans if e["tid"] == row]
        # S's instructions on registers are no spans
        if pipe != "S":
            assert sum(e["args"]["cycles"] for e in own) == pytest.approx(found["busy"][pipe])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-9 for a, b in itertools.pairwise(own))
    assert max(e["ts"] + e["dur"] for e in spans) <= found["us"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "kernel is 'nothing'"),
        (["pack/exotic"], "exotic"),
        (["pack", "--soc", "A9"], "soc is 'A9'"),
        (["pack", "--machine", "/dev/null/machine.json"], "machine is '/dev/null/machine.json'"),
        (["pack", "--soc", "950", "--machine", "A3"], "950"),
        (["pack", *SMALL, "--trace", "/dev/null/trace.json"], "trace"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], told: str) -> None:
    assert told in run(*arguments, code=1)


def test_constants_may_be_measured_ones(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_named("A3").measured({"scalar_global_cycles": 3500}, "a test").to_json())
    slow, usual = (
        json.loads(run("arrange/h1024", *SMALL, "--json", *more)) for more in (["--machine", str(path)], [])
    )
    assert slow["parts"]["scalar loads"] > 5 * usual["parts"]["scalar loads"]
