"""``moe-triton model plan`` and ``model prices``, as a user meets them."""

from __future__ import annotations

import csv
import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from autotune.model.clusters.group import Group
from autotune.model.constants import NETWORK, machine_named
from moe_triton.core.config import Config
from moe_triton.core.tables import Row, Table
from moe_triton.runtime.chosen_scheme import Asked, choose_scheme
from moe_triton.schemes.hierarchy.ascendc import KERNELS as HIERARCHY
from moe_triton.tables import schemes
from moe_triton.tools.cli.app import app

# Small rows: what the compiler makes of them is soon replayed.
SMALL = "--ranks", "8", "--tokens", "8", "--hidden", "1024", "--experts", "16", "--topk", "4"
# The package has its command under the same name.
module = import_module("autotune.cli.model.plan")
COMM_ALGS = "fullmesh_v1", "fullmesh_v2", "direct"


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["model", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    # How far it is, on a loaded machine, is said elsewhere.
    return result.output if code else result.stdout


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("plan", *SMALL, "--json", *arguments))
    return found


@pytest.mark.parametrize("comm_alg", COMM_ALGS)
def test_every_scheme_is_priced_step_by_step(comm_alg: str) -> None:
    found = document("--comm-alg", comm_alg, "--mode", "stream")
    assert (found["comm_alg"], found["ranks"], found["mode"]) == (comm_alg, 8, "stream")
    for operator in found["operators"].values():
        assert operator["us"] == pytest.approx(sum(operator["parts_us"].values()))
        assert operator["low_us"] < operator["us"] < operator["high_us"]
        assert operator["us"] > operator["floor_us"] > 0
        assert operator["seen_by_host_us"] > operator["us"]
        launches = operator["launches"]
        assert all(a["end_us"] <= b["begin_us"] for a, b in pairwise(launches))  # on one stream
        for launch in launches:
            assert launch["us"] == pytest.approx(sum(launch["parts_us"].values()))
            assert launch["us"] >= launch["floor_us"] * (1 - 1e-9)
        swings = [abs(each["high_us"] - each["low_us"]) for each in operator["sensitivities"]]
        assert swings == sorted(swings, reverse=True)
        assert swings[2] > 0


def test_the_text_says_the_same_as_the_document() -> None:
    output, found = run("plan", *SMALL, "--markdown"), document()
    for name, operator in found["operators"].items():
        assert f"{name}: {operator['us']:.1f} us, between {operator['low_us']:.1f} and" in output
        for launch in operator["launches"]:
            assert f"| {launch['kernel']} x {launch['blocks']} | {launch['begin_us']:.1f} |" in output
        for each in operator["sensitivities"][: module.MOST_SHOWN]:
            assert f"{each['constant']} ({each['low_us']:.1f} to" in output


def test_parts_run_on_two_streams() -> None:
    launches = document("--parts", "2")["operators"]["dispatch"]["launches"]
    steps = [launch["step"] for launch in launches]
    assert [steps.count(step) for step in ("route + pack", "send", "rows", "arrange")] == [1, 2, 2, 2]
    assert {launch["stream"] for launch in launches} == {"compute", "communication"}
    assert [launch["alongside"] for launch in launches].count(True) == 1


def test_a_trace_has_streams_and_pipes(tmp_path: Path) -> None:
    path, slow = tmp_path / "plan.json", tmp_path / "machine.json"
    slow.write_text(machine_named("A3").replaced({"flag_latency_us": 50}).to_json())
    run("plan", *SMALL, "--parts", "2", "--machine", str(slow), "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {threads[e["tid"]] for e in spans} == set(threads.values())
    for tid in threads:
        mine = sorted((e for e in spans if e["tid"] == tid), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(mine)), threads[tid]
    waits = [e for e in spans if e["cat"] == "wait"]
    assert {(e["name"], e["args"]["of"]) for e in waits} == {
        ("wait", "dispatch"),
        ("rows", "dispatch"),
        ("wait", "combine"),
    }
    assert all(40 < e["dur"] < 50 for e in waits if e["args"]["of"] == "combine")
    launched = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in spans if threads[e["tid"]] == "compute"]
    pipes = [e for e in spans if e["cat"] == "pipe"]
    assert {e["args"]["of"] for e in pipes} >= {"route + pack", "arrange", "sum"}
    for e in pipes:
        assert any(
            name == e["args"]["of"] and begin - 1e-6 <= e["ts"] and e["ts"] + e["dur"] <= end + 1e-6
            for name, begin, end in launched
        )


def test_a_file_of_constants_is_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine = machine_named("A3").replaced({"launch_graph_us": 14})
    path.write_text(machine.to_json())
    slow, usual = (document(*options)["operators"] for options in (("--machine", str(path)), ()))
    for operator in ("dispatch", "combine"):
        launches = sum(not launch["joined"] for launch in usual[operator]["launches"])
        assert slow[operator]["us"] == pytest.approx(usual[operator]["us"] + 10 * launches)


def test_auto_is_the_scheme_that_a_buffer_would_have() -> None:
    config = Config(8, 8, 1024, 4, 16, relaxed=True)
    chosen = choose_scheme(Asked("auto", backend="npu"), config, range(8), exchange=False)
    assert document("--comm-alg", "auto")["comm_alg"] == chosen.config.scheme
    assert run("plan", *SMALL, "--comm-alg", "auto").startswith(f"auto: {chosen.source}\n")


def test_auto_goes_by_the_users_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row(("own",), (1024, 4, 8, 8), ("fullmesh_v2", 1, 1)),
        Row(("window",), (1024, 4, 8, 8), ("direct", 1, 1)),
    ]
    name = "schemes-Ascend910_9391"
    table = Table(name, schemes.COMMAND, "by hand", schemes.KEYS, schemes.SIZES, schemes.VALUES, tuple(rows))
    (tmp_path / f"{name}.json").write_text(table.to_json())
    monkeypatch.setenv("MOE_TRITON_TABLES", str(tmp_path))
    assert document("--comm-alg", "auto")["comm_alg"] == "fullmesh_v2"
    window = "--comm-alg", "auto", "--outputs", "window", "--mode", "stream"
    assert document(*window)["comm_alg"] == "direct"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--comm-alg", "direct"], "cannot be captured"),
        (["--machine", "A2"], "only between servers has a scheme of A3 a price on A2"),
        (["--machine", "/dev/null/machine.json"], "or a file"),
        (["--machine", "/"], "or a file (it is a folder)"),
        (["--communication-blocks", "48"], "communication_blocks is 48, but of 48 cores 0 to 47 may only"),
        (["--communication-blocks", "-4"], "communication_blocks is -4"),
        (["--trace", "/dev/null"], "trace is '/dev/null', but it is no regular file"),
        (["--experts", "9"], "experts"),
        (["--quantize", "int9"], "quantize"),
        (["--parts", "99"], "parts"),
        (["--ranks-per-server", "3,2"], "ranks_per_server is (3, 2)"),
        (["--ranks-per-server", "4;4"], "ranks_per_server is '4;4'"),
        (
            ["--comm-alg", "fullmesh", "--ranks-per-server", "4"],
            "A3 has no AICPU that posts (post_aicpu_us); A2 has. Pass --machine A2",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], said: str) -> None:
    assert said in " ".join(run("plan", *SMALL, *options, code=1).split())


def test_a_machine_without_a_network_has_no_price_of_posts(tmp_path: Path) -> None:
    """A file of one, as those of A3 once were; inside a machine nothing is missing."""
    file = tmp_path / "machine.json"
    whole = json.loads(machine_named("A3").to_json())
    whole["constants"] = {name: entry for name, entry in whole["constants"].items() if name not in NETWORK}
    file.write_text(json.dumps(whole))
    options = *SMALL, "--machine", str(file)
    run("plan", *options)
    said = " ".join(run("plan", *options, "--ranks-per-server", "4", code=1).split())
    assert f"A3 has no constants of a network ({', '.join(NETWORK)}). Pass --machine A2" in said


@pytest.mark.parametrize("comm_alg", ["fullmesh_v1", "hierarchy"])
def test_what_cores_post_has_a_price_on_a3(comm_alg: str) -> None:
    operators = document("--comm-alg", comm_alg, "--ranks-per-server", "4")["operators"]
    assert "posts" in {launch["bound"] for each in operators.values() for launch in each["launches"]}


def test_servers_are_named_as_elsewhere() -> None:
    found = document("--machine", "A2", "--ranks-per-server", "7,1")
    assert found["ranks_per_server"] == [7, 1]
    assert {launch["step"] for launch in found["operators"]["dispatch"]["launches"]} >= {"post"}


def test_ranks_are_as_far_as_their_servers() -> None:
    group = Group(4, 1, 32, 1, 4, ranks_per_server=[1, 3])
    tiers = "network", "node", "self", "node"
    assert group.traffic(np.zeros((4, 1, 1), np.int32), 2).tiers == tiers


def test_a_hierarchy_is_priced_like_all_others() -> None:
    """Each kernel of it, and what its posts take."""
    found = document("--machine", "A2", "--comm-alg", "hierarchy", "--ranks-per-server", "4")["operators"]
    launches = {launch["kernel"]: launch for each in found.values() for launch in each["launches"]}
    # On an NPU what sends says who is lost.
    kernels = {kernel.name for kernel in HIERARCHY} - {"returns_lost"}
    assert launches.keys() >= kernels
    assert all(launches[kernel]["us"] > 0 for kernel in kernels)
    assert launches["rail_send"]["bound"] == launches["partials_send"]["bound"] == "posts"


def test_prices_are_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_RANKS", (8, 16))
    monkeypatch.setattr(module, "TABLE_TOKENS", (8,))
    lines = list(csv.reader(run("prices", "--csv").splitlines()))
    assert lines[0] == [column.heading for column in module.PRICE_COLUMNS]
    assert [line[:3] for line in lines[1:]] == [
        [ranks, "8", rows] for ranks in ("8", "16") for rows in ("int8", "bf16")
    ]
    for line in lines[1:]:
        graph, stream, floor, combine_graph, combine_stream, combine_floor = map(float, line[3:])
        assert floor < graph < stream
        assert combine_floor < combine_graph < combine_stream
    assert f"| {' | '.join(lines[1])} |" in run("prices", "--markdown")
    assert " ".join(lines[1]) in " ".join(run("prices").split())
    direct = list(csv.reader(run("prices", "--csv", "--comm-alg", "direct").splitlines()))
    assert [line[3] for line in direct[1:]] == [""] * 4  # no graph may hold it
