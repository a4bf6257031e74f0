"""The battery goes on whatever a check does: it fails, crashes, hangs, or has nothing to check."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from moe_triton.tools.selftest import run as running
from moe_triton.tools.selftest.check import Check, Finding, Result, Settings
from moe_triton.tools.selftest.run import Battery
from tests.patience import seconds
from tests.selftest import probes

SETTINGS = Settings(timeout_s=seconds(60.0))


def check(name: str, function: object, *arguments: object, **options: object) -> Check:
    return Check(name, "environment", function, arguments, on_device=False, **options)  # type: ignore[arg-type]


def run(*checks: Check, settings: Settings = SETTINGS) -> list[Result]:
    with Battery(settings) as started:
        started.run(checks)
        return started.results


@pytest.mark.parametrize("hanging", [0, 1])
def test_a_check_that_hangs_is_ended_at_its_deadline_and_named(hanging: int) -> None:
    start = time.monotonic()
    first, hung, after = run(
        check("first", probes.work, ranks=2),
        check("hangs", probes.hang, hanging, ranks=2, timeout_s=1.0),
        check("after", probes.work, ranks=2),
    )
    assert time.monotonic() - start < 40
    assert (first.status, hung.status, after.status) == ("passed", "failed", "passed")
    assert hung.name == "hangs"
    assert hung.details == (f"rank(s) [{hanging}]: no result within 1 s; its processes were ended",)
    assert 1.0 <= hung.seconds < 10
    assert first.figures[probes.PID] != after.figures[probes.PID]


def test_a_check_that_fails_does_not_stop_the_others_nor_spoil_their_processes() -> None:
    results = run(
        check("one", probes.work),
        check("crash", probes.crash),
        check("stumble", probes.stumble),
        check("lack", probes.lack),
        check("two", probes.work),
        check("three", probes.work),
    )
    assert [r.status for r in results] == ["passed", "failed", "failed", "failed", "passed", "passed"]
    _, crash, stumble, lack, two, three = results
    assert "died without an error" in crash.details[0]
    assert "IndexError" in stumble.details[0]
    assert lack.details == ("ToolchainError: the gold compiler is missing",)
    assert two.figures[probes.PID] == three.figures[probes.PID]


def test_what_is_wrong_on_any_rank_is_told_with_the_rank() -> None:
    (result,) = run(check("disagree", probes.disagree, ranks=2))
    assert (result.status, result.details) == ("failed", ("rank 1: 1 is odd",))


def test_checks_without_their_needs_are_skipped_and_name_the_root() -> None:
    results = run(
        check("root", probes.disagree, ranks=2),
        check("leaf", probes.work, needs=("root",)),
        check("leaf of leaf", probes.work, needs=("leaf",)),
        check("other", probes.work),
        check("of other", probes.work, needs=("other", "not part of this run")),
        check("nothing", probes.decline),
        check("of nothing", probes.work, needs=("nothing",)),
    )
    found = {r.name: (r.status, r.details) for r in results}
    assert found["leaf"] == ("skipped", ("because of 'root'",))
    assert found["leaf of leaf"] == ("skipped", ("because of 'root'",))
    assert found["other"] == ("passed", ())
    assert found["of other"] == ("passed", ())
    assert found["nothing"] == ("skipped", ("there is nothing to do",))
    assert found["of nothing"] == ("skipped", ("because of 'nothing'",))


def test_only_the_stages_that_were_asked_for_run_beside_the_environment() -> None:
    checks = [
        Check(stage, stage, probes.work, on_device=False) for stage in ("environment", "kernels", "timing")
    ]
    results = run(*checks, settings=Settings(only=("timing",)))
    assert [r.stage for r in results] == ["environment", "timing"]


def test_results_are_told_as_they_come() -> None:
    told: list[str] = []
    settings = Settings()
    with Battery(
        settings, lambda c: told.append(f"begin {c.name}"), lambda r: told.append(r.status)
    ) as battery:
        battery.run([check("a", probes.work), check("b", probes.disagree), check("c", probes.decline)])
    assert told == ["begin a", "passed", "begin b", "passed", "begin c", "skipped"]


def never(findings: Sequence[Finding]) -> Finding:
    raise AssertionError("there is nothing to merge")


def test_nothing_is_merged_where_a_rank_gave_no_finding() -> None:
    (result,) = run(check("crash", probes.crash, merge=never))
    assert result.status == "failed"


def test_processes_that_cannot_be_started_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(running, "RankGroup", refuse)
    first, second = run(check("a", probes.work), check("b", probes.work))
    assert first.status == second.status == "failed"
    assert first.details == ("its processes could not be started: no more processes",)


def test_ranks_that_an_exception_has_put_out_of_step_are_not_used_again() -> None:
    before, _, after = run(
        check("before", probes.work, ranks=2),
        check("lack", probes.lack, ranks=2),
        check("after", probes.work, ranks=2),
    )
    assert before.figures[probes.PID] != after.figures[probes.PID]
