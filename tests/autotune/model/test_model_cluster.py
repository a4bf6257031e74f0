"""``moe-triton model cluster``: its tables, files and plots, and lines that cross where it says."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.cli.model.options import machine_of
from autotune.model.clusters import a2, cluster
from autotune.model.clusters.group import Group, Routing
from autotune.model.constants import machine_named
from moe_triton.core.errors import ArgumentError
from moe_triton.tools.cli.app import app
from tests.autotune.model.simple_kernel_costs import simple_kernel_costs
from tests.drawing import needs_matplotlib

A2 = ("--machine", "A2", "--routing", "node-limited", "--ep", "16,32,64", "--tokens", "8,64")
A3 = ("--ep", "2,8", "--tokens", "4,16", "--hidden", "1024", "--experts", "32")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(
        app, ["model", "cluster", *arguments], catch_exceptions=False
    )
    assert result.exit_code == code, result.output
    # How far it is, on a loaded machine, is said elsewhere.
    return result.output if code else result.stdout


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels by bytes, not by replay."""
    monkeypatch.setattr(import_module("autotune.cli.model.cluster"), "kernel_cost_of", simple_kernel_costs)


def priced(scheme: str, ranks: int, tokens: int) -> cluster.Point:
    group = Group(ranks, tokens, comm_alg=scheme, product="A2", routing=Routing("node-limited"))
    return a2.price(group, machine_named("A2"))


def test_the_table_says_what_the_model_says() -> None:
    lines = [line for line in run(*A2, "--markdown").splitlines() if re.match(r"\| \d", line)]
    assert len(lines) == 6
    for line in lines:
        ranks, tokens, *cells, fastest, imbalance = [cell.strip() for cell in line.strip("|").split("|")]
        points = [priced(scheme, int(ranks), int(tokens)) for scheme in a2.SCHEMES]
        assert cells == [
            " + ".join(f"{operator.us:.0f}" for operator in p.operators.values()) for p in points
        ]
        assert fastest == min(points, key=lambda point: point.us).group.comm_alg
        assert imbalance == f"{points[0].imbalance:.2f}"


def test_lines_cross_where_it_says() -> None:
    """On either side of a crossing the size computed next has the other scheme in front."""
    found = json.loads(run(*A2, "--json"))["crossings"]
    assert found
    sizes = {"EP": (16, 32, 64), "BS": (8, 64)}
    for crossing in found:
        fixed, value = crossing["at"].split()
        below = max(size for size in sizes[crossing["along"]] if size < crossing["size"])
        above = min(size for size in sizes[crossing["along"]] if size > crossing["size"])
        for size, winner, loser in (
            (below, crossing["below"], crossing["above"]),
            (above, crossing["above"], crossing["below"]),
        ):
            ranks, tokens = (int(value), size) if fixed == "EP" else (size, int(value))
            assert priced(winner, ranks, tokens).us < priced(loser, ranks, tokens).us


def test_json_and_csv_hold_every_operator(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    points = json.loads(run(*A2, "--json", "--csv", str(table)))["points"]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(points) == 3 * 2 * len(a2.SCHEMES)
    assert len(rows) == 2 * len(points)
    flat = [(point, name, found) for point in points for name, found in point["operators"].items()]
    for row, (point, name, found) in zip(rows, flat, strict=True):
        assert (row["comm_alg"], row["operator"]) == (point["comm_alg"], name)
        assert (int(row["ep"]), int(row["tokens"])) == (point["ranks"], point["tokens"])
        assert float(row["us"]) == pytest.approx(found["us"], abs=1e-3)
        assert int(row["egress_bytes"]) == found["egress_bytes"] > 0
        assert sum(found["parts"].values()) == pytest.approx(found["us"])


@pytest.mark.usefixtures("without_compiler")
def test_plans_are_priced_in_graphs_and_streams() -> None:
    graph = json.loads(run(*A3, "--json"))["points"]
    assert {point["comm_alg"] for point in graph} == {"fullmesh_v1", "fullmesh_v2"}
    stream = json.loads(run(*A3, "--json", "--mode", "stream"))["points"]
    assert {point["comm_alg"] for point in stream} == {"fullmesh_v1", "fullmesh_v2", "direct"}
    for point in graph:
        group = Group(point["ranks"], point["tokens"], 1024, experts=32, comm_alg=point["comm_alg"])
        expected = cluster.price(group, machine_named("A3"), simple_kernel_costs)
        for name, found in point["operators"].items():
            assert found["us"] == pytest.approx(expected.operators[name].us)
        launched = cluster.price(replace(group, mode="stream"), machine_named("A3"), simple_kernel_costs)
        assert launched.us > expected.us


@pytest.mark.usefixtures("without_compiler")
def test_a_scheme_that_no_graph_may_hold_says_how_it_is_launched() -> None:
    said = run(*A3, "--comm-alg", "direct,fullmesh_v1")
    assert "direct (stream): dispatch + combine, us" in said
    assert "  fullmesh_v1: dispatch + combine, us" in said


@needs_matplotlib
def test_plots_are_the_same_each_time(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        assert run(*A2, "--plot", str(folder)).count("wrote ") == 2
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second
    assert set(first) == {"cluster_by_tokens.svg", "cluster_by_ranks.svg"}
    assert all(content.startswith(b"<?xml") for content in first.values())


def test_a_file_is_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(machine_named("A2").replaced({"rdma_gb_per_s": 10.0}).to_json())
    assert machine_of(str(file)).rdma_gb_per_s == 10
    small = "--ep", "16", "--tokens", "64", "--comm-alg", "fullmesh", "--json"
    slow, usual = (
        json.loads(run(*small, "--machine", name))["points"][0]["operators"]["combine"]["us"]
        for name in (str(file), "A2")
    )
    assert slow > 1.5 * usual


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("ep", ["--ep", "8,x"]),
        ("ep", ["--ep", "1"]),
        ("ep", ["--ep", "1024"]),
        ("tokens", ["--tokens", "0"]),
        ("tokens", ["--tokens", "many"]),
        ("routing", ["--routing", "random"]),
        ("machine", ["--machine", "A9"]),
        ("comm_alg", ["--comm-alg", "ring"]),
        ("comm_alg", ["--machine", "A2", "--comm-alg", "direct"]),
        ("ep", ["--machine", "A2", "--ep", "12"]),
        ("quantize", ["--quantize", "int4"]),
        ("experts", ["--experts", "100"]),
        ("groups", ["--routing", "node-limited", "--groups", "7"]),
        ("exponent", ["--routing", "zipf", "--exponent", "-1"]),
    ],
)
def test_what_is_not_there_is_refused(argument: str, options: list[str]) -> None:
    said = run(*options, code=1)
    assert re.match(rf"{argument} is .*, but .*\. .*\[\d+\]", said), said


def test_a_file_that_is_no_machine_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text("{}")
    with pytest.raises(ArgumentError):
        machine_of(str(file))
    run("--machine", str(file), code=1)


def test_figures_do_not_change_from_run_to_run() -> None:
    first, second = (run(*A2, "--json") for _ in range(2))
    assert first == second


def test_every_routing_can_be_asked_for() -> None:
    def answer(routing: str) -> dict[str, Any]:
        options = "--machine", "A2", "--ep", "64", "--tokens", "32", "--routing", routing, "--json"
        found: dict[str, Any] = json.loads(run(*options))["points"][0]
        return found

    uniform, limited, zipf = (answer(kind) for kind in ("uniform", "node-limited", "zipf"))
    assert zipf["imbalance"] > 2 > uniform["imbalance"]
    assert len({point["operators"]["dispatch"]["us"] for point in (uniform, limited, zipf)}) == 3
