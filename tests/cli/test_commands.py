"""The command line, as a user meets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moe_triton.backends.cpu import extension, native
from moe_triton.tools.cli import demo as demo_module
from moe_triton.tools.cli import doctor as doctor_module
from moe_triton.tools.cli.app import app
from tests.patience import seconds
from tests.test_scheme_tables import write

SMALL = [
    "--tokens",
    "3",
    "--hidden",
    "64",
    "--topk",
    "2",
    "--experts",
    "6",
    "--intermediate",
    "8",
    "--rounds",
    "2",
]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    "options",
    [
        ["--ranks", "2"],
        ["--ranks", "2", "--quantize", "none"],
        ["--ranks", "3", "--shared", "1"],
        ["--ranks", "2", "--kernels", "torch"],
    ],
)
def test_demo_checks_every_number(options: list[str]) -> None:
    output = run("demo", *SMALL, *options)
    ranks = int(options[1])
    assert output.count("equal") >= ranks
    assert "bit for bit" in output


def test_demo_refuses_what_a_buffer_refuses() -> None:
    assert "num_experts is 9" in run("demo", "--ranks", "2", "--experts", "9", code=1)


def settings(**changes: object) -> demo_module.DemoSettings:
    values: dict[str, object] = {
        "ranks": 2,
        "tokens": 3,
        "hidden": 64,
        "topk": 2,
        "experts": 4,
        "shared": 0,
        "shared_ranks": 0,
        "quantize": "int8",
        "intermediate": 8,
        "rounds": 1,
        "seed": 0,
        "kernels": "triton",
        "timeout_s": 30.0,
    }
    return demo_module.DemoSettings(**{**values, **changes})  # type: ignore[arg-type]


def wrong_in_one_number(rank: int, num_ranks: int, chosen: demo_module.DemoSettings) -> dict[str, object]:
    """The demo's rank, with one element of one expert output wrong on rank 1."""
    good = demo_module.run_experts

    def flip(output: object, experts: object) -> torch.Tensor:
        y = good(output, experts)  # type: ignore[arg-type]
        if rank == 1:
            y[0, 0] += 1
        return y

    demo_module.run_experts = flip  # type: ignore[assignment]
    try:
        return demo_module.demo_rank(rank, num_ranks, chosen)
    finally:
        demo_module.run_experts = good


def test_demo_fails_when_a_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo_module.run_ranks
    monkeypatch.setattr(
        demo_module,
        "run_ranks",
        lambda function, *args, **options: real(wrong_in_one_number, *args, **options),
    )
    console = Console(record=True, width=200)
    assert demo_module.run_demo(settings(), console) == 1
    assert "combined output differ" in console.export_text()


def test_doctor_finds_this_machine_ready() -> None:
    output = run("doctor")
    assert "The CPU back end is ready" in output
    assert re.search(r"npu: CANN.*(ok|missing)", output)


def test_doctor_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda: None)
    console = Console(record=True, width=300)
    assert doctor_module.run_doctor(console) == 1
    text = console.export_text()
    assert "apt-get install g++" in text
    assert "cannot run" in text


def test_doctor_needs_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "why_not", lambda: "it was left out")
    console = Console(record=True, width=300)
    assert doctor_module.run_doctor(console) == 0
    assert re.search(r"faster calls.*missing.*it was left out", console.export_text())


def test_layout_prints_every_region() -> None:
    output = run("layout", "--ranks", "4")
    for region in ("dispatch_slots", "combine_slots", "dispatch_status", "combine_status"):
        assert region in output
    assert re.search(r"dispatch_slots .* source 4 x \d+ \(\+ rank\)", " ".join(output.split()))
    assert output.count("(+ rank)") == 1
    assert "num_ranks is 0" in run("layout", "--ranks", "0", code=1)


def test_layout_and_plan_say_which_scheme_is_taken_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_TRITON_TABLES", str(tmp_path))
    write(tmp_path, {("own", 64): "fullmesh_v2", ("window", 64): "direct"})
    for command in ("layout", "plan"):
        assert run(command).startswith("scheme fullmesh_v2: table schemes-cpu-")
        assert run(command, "--outputs", "window").startswith("scheme direct: table schemes-cpu-")
        assert run(command, "--comm-alg", "fullmesh_v1").startswith("scheme fullmesh_v1: comm_alg=")


def test_layout_prints_what_a_scheme_has() -> None:
    output = run("layout", "--ranks", "4", "--comm-alg", "direct")
    for region in ("direct_counts", "rows_status", "results_status", "rows", "stamps", "results"):
        assert f"\n{region} " in output
    assert "dispatch_slots" not in output
    between = run("layout", "--comm-alg", "hierarchy", "--ranks", "4", "--ranks-per-server", "2")
    for region in ("rail_slots", "forward_slots", "token_counts", "result_slots", "partial_rows"):
        assert f"\n{region} " in between


def test_a_machine_of_a3_is_a_server_of_its_hierarchy() -> None:
    by_machines = "--comm-alg", "hierarchy", "--product", "A3", "--experts", "64", "--ranks"
    for command in ("layout", "plan"):
        of_one, of_two = (run(command, *by_machines, ranks) for ranks in ("16", "32"))
        assert of_one.startswith("scheme hierarchy: comm_alg='hierarchy'")
        assert "servers of" not in of_one
        assert "2 servers of 16, 16 ranks" in of_two
    # without the product's name it is A2's, whose servers are 8
    assert "2 servers of 8, 8 ranks" in run("layout", *by_machines[:2], *by_machines[4:], "16")


def test_layout_and_plan_know_products_and_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    a2 = "--product", "A2", "--ranks", "4"
    for command in ("layout", "plan"):

        def said(*options: str, command: str = command, code: int = 0) -> str:
            return " ".join(run(command, *options, code=code).split())  # lines are broken anywhere

        assert run(command, *a2).startswith("scheme fullmesh: the product's own; no table")
        inside = run(command, *a2, "--comm-alg", "hierarchy")
        assert inside.startswith("scheme fullmesh: a group inside one server is fullmesh on A2, also with")
        assert " servers of " not in inside
        of_four = run(command, *a2, "--comm-alg", "fullmesh", "--ranks-per-server", "3,1")
        assert of_four.splitlines()[:2] == ["scheme fullmesh: comm_alg='fullmesh'", "2 servers of 3, 1 ranks"]
        several = *a2, "--ranks-per-server", "2"
        assert "2 servers of 2, 2 ranks" in run(command, *several)
        assert said(*several, "--comm-alg", "hierarchy").startswith("scheme hierarchy: comm_alg='hierarchy'")
        monkeypatch.setenv("HCCL_INTRA_PCIE_ENABLE", "1")
        monkeypatch.setenv("HCCL_INTRA_ROCE_ENABLE", "0")
        assert said(*several, "--comm-alg", "").startswith("scheme hierarchy: comm_alg='' with HCCL_INTRA")
        monkeypatch.delenv("HCCL_INTRA_ROCE_ENABLE")
        on_two = said("--ranks-per-server", "4", "--comm-alg", "fullmesh_v2", code=1)
        assert "ranks_per_server is [4, 4]" in on_two
        assert "480 bytes" in on_two


@pytest.mark.parametrize("text", ["x", "3,", "3;1", "0", "3,-1", "5,5"])
def test_layout_refuses_servers_that_there_are_not(text: str) -> None:
    assert run("layout", "--ranks-per-server", text, code=1).startswith("ranks_per_server is ")


STEPS = {
    "fullmesh_v1": ["route + pack", "send", "wait", "offsets", "rows", "arrange", "send", "wait", "sum"],
    "direct": [
        *("route + pack", "send counts", "wait for counts", "send", "flag", "offsets", "wait", "stamps"),
        *("copy", "flag", "wait", "sum"),
    ],
}


@pytest.mark.parametrize("comm_alg", list(STEPS))
def test_plan_prints_the_steps_in_order(comm_alg: str) -> None:
    output = run("plan", "--comm-alg", comm_alg)
    steps = re.findall(
        r"^[+&]?\s+(?:compute|communication)\s+(\w+(?: [\w+]+)*?)\s+\w+x\d+\(", output, flags=re.M
    )
    assert steps == STEPS[comm_alg]


def test_the_npu_back_ends_plan_is_that_of_all_cores() -> None:
    usual = run("plan", "--backend", "npu", "--comm-alg", "fullmesh_v1")
    assert "dispatch_sendx24(" in usual
    assert "dispatch_receivex24(" in usual
    a2 = run("plan", "--backend", "npu", "--product", "A2", "--comm-alg", "fullmesh", "--ranks", "8")
    assert "blocks_sendx40(" in a2
    in_turn = run("plan", "--backend", "npu", "--comm-alg", "fullmesh_v1", "--blocks", "1")
    assert "dispatch_sendx1(" in in_turn
    assert "dispatch_receive" not in in_turn


def test_the_npu_back_ends_plan_finds_its_zone_in_memory() -> None:
    npu, cpu = (run("plan", "--backend", backend) for backend in ("npu", "cpu"))
    assert "zone_at=<zones+4>" in npu
    assert "turn" in npu
    assert "<zones" not in cpu


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tokens", "64"), "dispatch: 1 part of 64 tokens; 64 tokens a part, unless set"),
        (("--tokens", "130"), "combine: 3 parts of 130 tokens; 64 tokens a part, unless set"),
        (("--dispatch-tokens", "32"), "dispatch: 2 parts of 64 tokens; Tuning(dispatch_tokens=32)"),
        (
            ("--combine-tokens", "16", "--comm-alg", "direct"),
            "combine: 1 part of 64 tokens; it cannot be cut",
        ),
        (("--backend", "npu"), "combine: 1 part of 64 tokens; without communication_blocks nothing overlaps"),
        (
            ("--backend", "npu", "--blocks", "48", "--communication-blocks", "24"),
            "combine: 1 part of 64 tokens; one part, unless set: the fastest by the model",
        ),
    ],
)
def test_plan_says_in_how_many_parts_and_why(options: tuple[str, ...], said: str) -> None:
    output = run("plan", *options)
    assert said in output
    operator, _, rest = said.partition(": ")
    if options[0] == "--tokens" and operator == "combine":
        assert len(re.findall(r"^&?\s+compute\s+sum", output, flags=re.M)) == int(rest[0])


BY_SERVERS = "--comm-alg", "hierarchy", "--ranks", "4", "--ranks-per-server", "2"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--communication-blocks", "1"), "tuning.communication_blocks is 1"),
        (("--blocks", "1000"), "num_blocks is 1000"),
        (("--ranks", "4", "--ranks-per-server", "3,2"), "ranks_per_server is (3, 2)"),
        (("--quantize", "int9"), "quantize is 'int9'"),
        ((*BY_SERVERS, "--product", "A3", "--tokens", "257"), "num_max_tokens_per_rank is 257"),
        ((*BY_SERVERS, "--product", "A3", "--ranks-per-server", "3"), "ranks_per_server is [3, 1]"),
        (
            (*BY_SERVERS, "--quantize", "int8_128"),
            "quantize is 'int8_128', but with comm_alg='hierarchy' a row",
        ),
        ((*BY_SERVERS, "--dispatch-tokens", "8"), "tuning.dispatch_tokens is 8"),
        ((*BY_SERVERS, "--backend", "npu", "--posts", "aicpu"), "tuning.posts is 'aicpu'"),
        (("--posts", "aiv"), "tuning.posts is 'aiv'"),
        ((*BY_SERVERS, "--post-parts", "2"), "tuning.post_parts is 2"),
        (("--message-tokens", "2"), "tuning.message_tokens is 2"),
        ((*BY_SERVERS, "--message-tokens", "0"), "tuning.message_tokens is 0"),
        ((*BY_SERVERS, "--posts", "aicpu", "--return-pieces", "2"), "tuning.return_pieces is 2"),
        (("--product", "A2", "--comm-alg", "fullmesh", "--post-parts", "2"), "tuning.post_parts is 2"),
    ],
)
def test_plan_refuses_what_a_buffer_refuses(options: tuple[str, ...], said: str) -> None:
    assert run("plan", *options, code=1).startswith(said)


def test_plan_shows_the_parts_that_are_posted() -> None:
    servers = "--product", "A2", "--comm-alg", "fullmesh", "--ranks", "16"
    usual, asked = run("plan", *servers), run("plan", *servers, "--post-parts", "3")
    assert ("num_parts=8" in usual, "num_parts=3" in usual) == (True, False)
    assert ("num_parts=8" in asked, "num_parts=3" in asked) == (False, True)


def test_plan_shows_who_posts() -> None:
    """By token, or all at once behind what is written."""
    by_token, usual, at_once = (run("plan", *BY_SERVERS, *posts) for posts in (
        ("--posts", "aiv"), (), ("--posts", "aicpu")
    ))  # fmt: skip
    assert usual == by_token
    one_by_one = run("plan", *BY_SERVERS, "--message-tokens", "1", "--return-pieces", "1")
    for said, tokens, returns in ((by_token, 8, 2), (one_by_one, 1, 1), (at_once, 64, 1)):
        assert f"message_tokens={tokens}," in said
        assert said.count("server_return") == returns


@pytest.mark.parametrize(
    ("is_installed", "version", "kernels"),
    [
        (True, (3, 13), "triton"),
        (True, (3, 11), "triton"),
        (False, (3, 11), "triton"),
        (False, (3, 12), "torch"),
    ],
)
def test_the_demo_takes_triton_wherever_it_can_be_had(
    is_installed: bool, version: tuple[int, int], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path("triton-adapter-opt") if is_installed else None
    monkeypatch.setattr(demo_module, "find_program", lambda *_: program)
    monkeypatch.setattr(demo_module.sys, "version_info", (*version, 0))
    asked: list[str] = []
    monkeypatch.setattr(demo_module, "_run", lambda chosen: asked.append(chosen.kernels) or [])
    console = Console(record=True, width=200)
    demo_module.run_demo(settings(kernels="auto"), console)
    demo_module.run_demo(settings(kernels="torch"), Console(quiet=True))
    assert asked == [kernels, "torch"]
    said = console.export_text()
    if kernels == "torch":
        assert said.startswith("kernels: torch, which is slow: triton-ascend, ")
        assert "there is none for Python 3.12; for 3.11 there is." in " ".join(said.split())
    else:
        assert "slow" not in said


IMPATIENT = """
import sys
from moe_triton.tools import progress
from moe_triton.tools.cli.app import app
progress.EVERY_S = 0.05
app(sys.argv[1:])
"""


def test_the_demo_says_what_it_does_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    # A process of its own: the server that forks ranks keeps the environment of its beginning.
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT, "demo", *SMALL, "--ranks", "2"],
        env={**os.environ, "COLUMNS": "200", "MOE_TRITON_CACHE": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        timeout=seconds(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for part in ("demo: 0 of 2, starting the ranks, ", "compiling the kernel ", "kept for the next time"):
        assert part in done.stderr
    assert "compiling" not in done.stdout


def test_what_a_rank_of_the_demo_refuses_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "kernels_of", lambda asked: asked)  # refused before ranks start
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["demo", *SMALL, "--ranks", "2", "--kernels", "cuda"]
    )
    assert result.exit_code == 1
    assert result.stderr.startswith("ranks 0, 1: kernels is 'cuda', but it must be one of")
    assert "Traceback" not in result.output
