"""Searching spaces whose best settings are known."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from autotune.search import Found, Options, Outcome, run
from autotune.search.study import start_of
from autotune.search.task import WrongBitsError
from moe_triton.core.errors import ArgumentError
from tests.autotune.tasks import Bowl, Met, Wrong, bowls, wide
from tests.patience import seconds
from tests.surroundings import ROOT

DEADLINE_S = 60.0


def options(folder: Path, **changes: object) -> Options:
    return Options(folder / "study.db", **changes)  # type: ignore[arg-type]


def values(found: Found) -> list[tuple[int, int, float | None]]:
    return [(t.settings["X"], t.settings["Y"], t.outcome.value) for t in found.trials]


def test_a_small_space_is_gone_through(tmp_path: Path) -> None:
    (found,) = run(lambda: [Bowl()], options(tmp_path))
    assert [(t.settings["X"], t.settings["Y"]) for t in found.trials] == [
        (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0),
    ]  # fmt: skip
    assert [(t.settings["X"], t.settings["Y"]) for t in found.ranking] == [
        (2, 1), (2, 0), (1, 1), (1, 0), (4, 0),
    ]  # fmt: skip
    assert found.default is not None
    assert found.default.settings == {"X": 1, "Y": 0}


def test_what_cannot_be_had_says_why(tmp_path: Path) -> None:
    (found,) = run(lambda: [Bowl()], options(tmp_path))
    reasons = {t.outcome.reason for t in found.trials if t.outcome.value is None}
    assert reasons == {"three is too wide"}


def test_the_default_stays_where_nothing_is_better(tmp_path: Path) -> None:
    class Flat(Bowl):
        def evaluate(self, settings: object, best: float | None) -> Outcome:
            return Outcome(5.0)

    (found,) = run(lambda: [Flat(own={"X": 4, "Y": 0})], options(tmp_path))
    assert found.best is not None
    assert found.best.settings == {"X": 4, "Y": 0}


@pytest.mark.parametrize(("gain", "chosen"), [(0.02, 4), (0.04, 2)])
def test_a_small_gain_is_not_worth_other_settings(tmp_path: Path, gain: float, chosen: int) -> None:
    class Near(Bowl):
        def evaluate(self, settings: Mapping[str, int], best: float | None) -> Outcome:
            return Outcome(5.0 * (1 - gain * (settings["X"] == 2)))

    (found,) = run(lambda: [Near(own={"X": 4, "Y": 0})], options(tmp_path))
    assert found.best is not None
    assert found.best.settings["X"] == chosen
    assert found.ranking[0].settings["X"] == 2


def test_a_large_space_is_sampled_within_the_budget(tmp_path: Path) -> None:
    (found,) = run(wide, options(tmp_path, budget=40))
    assert len(found.trials) <= 40
    assert found.best is not None
    assert found.best.outcome.value is not None
    default = found.default
    assert default is not None
    assert default.outcome.value is not None
    assert found.best.outcome.value < default.outcome.value / 2


def test_a_seed_decides_what_is_sampled(tmp_path: Path) -> None:
    one, same, other = (
        values(run(wide, options(tmp_path / name, budget=15, seed=seed))[0])
        for name, seed in (("one", 3), ("same", 3), ("other", 4))
    )
    assert one == same
    assert one != other


def test_other_bits_stop_the_run_and_name_the_candidate(tmp_path: Path) -> None:
    with pytest.raises(WrongBitsError, match="X=2 gives other bits"):
        run(lambda: [Wrong()], options(tmp_path))


def test_what_is_known_is_not_priced_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tasks = functools.partial(bowls, log)
    first = run(tasks, options(tmp_path))
    asked = log.read_text()
    assert values(run(tasks, options(tmp_path, resume=True))[0]) == values(first[0])
    assert log.read_text() == asked
    run(tasks, options(tmp_path))  # begins anew
    assert len(log.read_text()) == 2 * len(asked)


def test_an_interrupted_candidate_is_given_back(tmp_path: Path) -> None:
    class Interrupted(Bowl):
        def evaluate(self, settings: object, best: float | None) -> Outcome:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lambda: [Interrupted()], options(tmp_path))
    (found,) = run(lambda: [Bowl()], options(tmp_path, resume=True))
    assert len(found.trials) == 7


SEARCH = """
import sys, functools
from pathlib import Path
from autotune.search import Options, run
from tests.autotune.tasks import Stuck, bowls
folder = Path(sys.argv[1])
run(functools.partial(bowls, folder / "log", 1, Stuck), Options(folder / "study.db"))
"""


UNGUARDED = """
import sys, functools
from pathlib import Path
from autotune.search import Options, run
from tests.autotune.tasks import Bowl, bowls
folder = Path({folder!r})
found = run(functools.partial({tasks}, folder / "log", 2), Options(folder / "study.db", workers=2))
print([len(each.trials) for each in found])
"""


@pytest.mark.parametrize("is_file", [True, False])
def test_a_script_without_a_guard_searches_with_workers(tmp_path: Path, is_file: bool) -> None:
    text, script = UNGUARDED.format(folder=str(tmp_path), tasks="bowls"), tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script) if is_file else "-"]
    done = subprocess.run(
        command,
        input="" if is_file else text,
        capture_output=True,
        text=True,
        timeout=seconds(2) * DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.returncode) == ("[7, 7]\n", 0), done.stderr


def test_tasks_that_workers_cannot_import_are_refused_before_any_starts(tmp_path: Path) -> None:
    text = "from tests.autotune import tasks\ndef bowls(*given): return tasks.bowls(*given)\n"
    text += UNGUARDED.format(folder=str(tmp_path), tasks="bowls").replace("Bowl, bowls", "Bowl")
    done = subprocess.run(
        [sys.executable, "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "SearchError: workers cannot import the tasks" in done.stderr
    assert not (tmp_path / "log").exists()


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SEARCH, str(tmp_path)])
    try:
        end = time.monotonic() + DEADLINE_S
        while not (tmp_path / "log.stuck").exists() and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    before = (tmp_path / "log").read_text().splitlines()
    assert len(before) == 3
    tasks = functools.partial(bowls, tmp_path / "log", 1, Bowl)
    (found,) = run(tasks, options(tmp_path, resume=True))
    after = (tmp_path / "log").read_text().splitlines()
    assert after[:3] == before
    candidates = [line.rpartition(" ")[0] for line in after]
    assert len(candidates) == len(set(candidates)) == 7  # each once, none lost
    assert found.best is not None
    assert found.best.settings == {"X": 2, "Y": 1}


def test_workers_end_with_the_run_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    search = SEARCH.replace("Stuck", "Endless").replace(", 1, ", ", 400, ").replace('db")', 'db", workers=2)')
    process = subprocess.Popen([sys.executable, "-c", search, str(tmp_path)])

    def workers() -> set[int]:
        return {int(line.split()[-1]) for line in log.read_text().splitlines()} if log.exists() else set()

    try:
        end = time.monotonic() + DEADLINE_S
        while len(workers()) < 2 and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        started = {worker: start_of(worker) for worker in workers()}
        assert all(started.values())
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    while any(start_of(worker) == start for worker, start in started.items()):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert len(log.read_text().splitlines()) < 400 * 7


def test_two_workers_share_the_studies(tmp_path: Path) -> None:
    log = tmp_path / "log"
    seen: list[str] = []
    found = run(
        functools.partial(bowls, log, 4, Met),
        options(tmp_path, workers=2),
        lambda name, settings, outcome: seen.append(name),
    )
    lines = [line.rpartition(" ") for line in log.read_text().splitlines()]
    assert len({process for *_, process in lines}) == 2
    assert str(os.getpid()) not in {process for *_, process in lines}
    candidates = [candidate for candidate, *_ in lines]
    assert len(candidates) == len(set(candidates)) == 4 * 7
    assert sorted(seen) == sorted(f"bowl{i}" for i in range(4) for _ in range(7))
    assert [values(each) for each in found] == [values(found[0])] * 4


def test_a_worker_that_fails_ends_the_run_and_says_why(tmp_path: Path) -> None:
    tasks = functools.partial(bowls, tmp_path / "log", 1, Wrong)
    with pytest.raises(WrongBitsError, match="X=2 gives other bits"):
        run(tasks, options(tmp_path, workers=2))


def test_a_second_run_takes_part_or_is_refused(tmp_path: Path) -> None:
    class Nested(Bowl):
        def evaluate(self, settings: object, best: float | None) -> Outcome:
            with pytest.raises(ArgumentError, match="--resume"):
                run(lambda: [Bowl()], options(tmp_path))
            run(lambda: [Bowl("other")], options(tmp_path, resume=True))
            return Outcome(1.0)

    (found,) = run(lambda: [Nested(own={"X": 2, "Y": 1})], options(tmp_path))
    assert found.best is not None
    assert found.best.settings == {"X": 2, "Y": 1}
