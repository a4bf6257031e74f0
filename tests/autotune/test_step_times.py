"""Step times of a selftest's report: read, predicted, and refitted by the command; bad files are refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from autotune.cli.model.calibrate import fitted, run_calibrate
from autotune.model.constants import Machine, machine_named
from autotune.model.cost import Cost, KernelCost, Work
from autotune.model.kernel_costs.counted.price import counted
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import Remembered
from autotune.selftest_reports.step_times import Measured, StepModel, StepTime, read_report
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.schemes.rank_context import RankContext
from moe_triton.tools.selftest.check import Result, Settings
from moe_triton.tools.selftest.checks.operators import SCHEMES
from moe_triton.tools.selftest.report import Report

MOMENT = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc)
SOC = "Ascend910_9391"
TRUE = {"store_latency_cycles": 400.0, "scalar_local_cycles": 18.0, "vector_latency_cycles": 30.0}
# What steps of all schemes tell together, away from what is assumed of each. Of the memory's rate they say
# too little, since hardly a step depends mostly on it: a report measures that by itself.
TOLD = {
    "load_latency_cycles": 600.0,
    "store_latency_cycles": 400.0,
    "scalar_global_cycles": 500.0,
    "vector_bytes_per_cycle": 200.0,
    "sync_all_us": 6.0,
}
WAITS = {("dispatch", step) for step in ("wait", "wait for counts", "arrange")} | {("combine", "wait")}
ROWS_PER_US = 50


def toy_kernel_costs(kernel: AscendCKernel | TritonKernel) -> KernelCost:
    """Of Ascend C kernels what is counted; of Triton kernels a time that depends on two constants."""
    if isinstance(kernel, AscendCKernel):
        return counted

    def kernel_cost(work: Work, machine: Machine) -> Cost:
        tokens = work.traffic.topk_idx.shape[0]
        cycles = 50 * machine.vector_latency_cycles + 400 * tokens
        return Cost({"V": cycles / machine.clock_ghz / 1000})

    return kernel_cost


def times_of(scheme: str, rows: str, tokens: int) -> StepTime:
    return StepTime(scheme, rows, tokens, 4, 20260101, "combine", "sum", 1.0)


def results(noise: float, schemes: Sequence[str] = ("fullmesh_v1", "direct")) -> list[Result]:
    """A report's results, with times that the model gives for a machine with other constants."""
    model = StepModel(toy_kernel_costs, 48)
    machine = machine_named("A3").replaced(TRUE)
    random = np.random.default_rng(0)
    found = [Result("devices", "environment", "passed", facts={"SoC": SOC})]
    for scheme in schemes:
        for rows in ("bf16", "int8"):
            for tokens in (1, 16, 64):
                time = times_of(scheme, rows, tokens)
                model.waits(time)
                figures = {"tokens": tokens, "ranks": 4}
                for operator, step in model._works[scheme, rows, tokens, 4, 20260101]:
                    each = replace(time, operator=operator, step=step)
                    us = 77.0 if model.waits(each) else model(machine, each)
                    figures[f"{operator} step {step}_us"] = us * float(random.lognormal(0, noise))
                facts = {"scheme": scheme, "rows": rows}
                name = f"{scheme}, BS {tokens}, {rows}"
                found.append(Result(name, "timing", "passed", figures=figures, facts=facts))
    return found


def write(folder: Path, backend: str, found: list[Result]) -> None:
    document = Report(Settings(backend=backend), found, MOMENT, True).document()
    (folder / "report.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("report")
    write(made, "npu", results(0.02))
    return made


def test_a_report_gives_the_times_of_all_steps(folder: Path) -> None:
    for path in (folder, folder / "report.json"):
        read = read_report(path)
        assert (read.machine, read.where) == (machine_named("A3"), f"{SOC} 2026-03-04")
        assert {time.scheme for time in read.times} == {"fullmesh_v1", "direct"}
        assert {time.tokens for time in read.times} == {1, 16, 64}
        sends = [t for t in read.times if (t.operator, t.step) == ("combine", "send") and t.rows == "int8"]
        assert sends[0].name == "fullmesh_v1, BS 1, int8: combine, send"
        assert sends[0].us < sends[-1].us


def test_steps_that_wait_for_others_are_told_from_those_that_do_not(folder: Path) -> None:
    model = StepModel(toy_kernel_costs, 48)
    waiting = {(t.operator, t.step) for t in read_report(folder).times if model.waits(t)}
    assert waiting == WAITS


def test_a_step_in_parts_is_the_sum_of_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankContext, "parts", lambda *_: 2)
    model = StepModel(toy_kernel_costs, 48)
    time = StepTime("fullmesh_v1", "int8", 128, 2, 1, "combine", "sum", 1.0)
    works = [phase.work for phase in model._of(time)]
    assert [work.number("num_tokens") for work in works] == [64, 64]
    one = toy_kernel_costs(works[0].kernel)(works[0], machine_named("A3")).us
    assert model(machine_named("A3"), time) == pytest.approx(2 * one)


def test_a_phase_that_begins_with_a_sync_takes_it_too() -> None:
    model, machine = StepModel(toy_kernel_costs, 48), machine_named("A3")
    longer = machine.replaced({"sync_all_us": machine.sync_all_us + 5})
    for step, more in (("flag", 5), ("offsets", 0), ("stamps", 0)):
        time = StepTime("direct", "int8", 16, 4, 1, "dispatch", step, 1.0)
        assert model(longer, time) - model(machine, time) == pytest.approx(more)


def test_a_step_that_plans_do_not_have_is_named() -> None:
    time = StepTime("fullmesh_v1", "int8", 16, 2, 1, "dispatch", "teleport", 1.0)
    with pytest.raises(ArgumentError, match=r"dispatch, teleport.*plans have: dispatch, route"):
        StepModel(toy_kernel_costs, 48)(machine_named("A3"), time)


def run(
    path: Path, output: Path | None = None, kernel_costs: Callable[..., KernelCost] = toy_kernel_costs
) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    run_calibrate(path, output, 0.02, kernel_costs, console)
    return console.export_text()


def test_the_command_brings_back_the_constants_and_writes_the_machine(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    said = run(folder, file)
    machine = Machine.from_json(file.read_text())
    assert machine.vector_latency_cycles == pytest.approx(TRUE["vector_latency_cycles"], rel=0.05), said
    true = machine_named("A3").replaced(TRUE)
    for name, entry in machine.constants.items():
        if entry != true.constants[name] and name not in TRUE:
            assert entry.source.endswith(f"on {SOC} 2026-03-04")
            assert entry.low <= getattr(true, name) <= entry.high, said
    assert machine.constants["flag_latency_us"] == machine_named("A3").constants["flag_latency_us"]
    for text in ("left: no time depends on it", "constants fitted", "Error before", "Error after", str(file)):
        assert text in said
    before, after = (float(said.split(f"Error {when}: ")[1].split("%")[0]) for when in ("before", "after"))
    assert after < 5 < before


@pytest.mark.long
def test_fits_of_machines_with_all_constants_unknown_say_how_far_they_can_be_trusted(folder: Path) -> None:
    """Nineteen of twenty true values are to be in their interval, in all machines together, or nearly so."""
    read, model = read_report(folder), StepModel(toy_kernel_costs, 48)
    times = [time for time in read.times if not model.waits(time)]
    assumed = machine_named("A3")
    inside = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        true = assumed.replaced(
            {
                name: float(np.exp(random.uniform(np.log(entry.low), np.log(entry.high))))
                for name, entry in assumed.constants.items()
            }
        )
        noisy = [replace(t, us=model(true, t) * float(random.lognormal(0, 0.02))) for t in times]
        found = fitted(Measured(assumed, "x", tuple(noisy)), 0.02, toy_kernel_costs)
        assert found.fitted
        off = [np.abs(np.log(us / found.measured)).mean() for us in (found.before, found.after)]
        assert off[1] < off[0]
        for name in found.fitted:
            low, high = found.outcomes[name].interval
            inside.append(low <= getattr(true, name) <= high)
    assert len(inside) >= 8
    assert np.mean(inside) >= 0.85


@pytest.mark.long
def test_times_by_the_models_own_kernel_costs_bring_back_their_constants(tmp_path: Path) -> None:
    """Kernels as the NPU's compiler makes them, in all plans that a report times: told rightly.

    One scheme alone would not do: it has few steps, and none that depends mostly on one of the constants.
    """
    write(tmp_path, "npu", results(0.02, SCHEMES))
    kernel_costs = Remembered(kernel_cost_of)
    model = StepModel(kernel_costs, 48)
    times = [time for time in read_report(tmp_path).times if not model.waits(time)]
    assert {time.scheme for time in times} == set(SCHEMES)
    true = machine_named("A3").replaced(TOLD)
    random = np.random.default_rng(0)
    noisy = [replace(t, us=model(true, t) * float(random.lognormal(0, 0.02))) for t in times]
    found = fitted(Measured(machine_named("A3"), "x", tuple(noisy)), 0.02, kernel_costs)
    assert set(TOLD) <= set(found.fitted)
    for name in found.fitted:
        low, high = found.outcomes[name].interval
        assert low <= getattr(true, name) <= high, name
    assert np.abs(np.log(found.after / found.measured)).mean() < 0.03


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda d: d.update(format="other"), '"format" must be "moe_triton.selftest"'),
        (lambda d: d.update(version=1), "of version 1"),
        (lambda d: d["settings"].pop("backend"), "must be complete .*backend"),
        (lambda d: d["settings"].update(backend="cpu"), "of a CPU"),
        (lambda d: d.pop("machine"), "must be complete"),
        (lambda d: d.update(checks=[]), '"timing" must have passed'),
        (lambda d: d.update(checks=[3]), "must be complete"),
        (lambda d: d["checks"][1]["facts"].pop("scheme"), "must be complete .*scheme"),
        (lambda d: [check.update(status="failed") for check in d["checks"]], '"timing" must have passed'),
    ],
)
def test_a_report_with_a_mistake_is_refused(folder: Path, tmp_path: Path, damage: Damage, rule: str) -> None:
    document = json.loads((folder / "report.json").read_text())
    damage(document)
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match=rule):
        read_report(tmp_path)
    with pytest.raises(ArgumentError, match=rule):
        run(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3", "\0"])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(ArgumentError, match=r"^report is"):
        read_report(tmp_path)


def test_a_report_of_a_cpu_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "cpu", results(0))
    with pytest.raises(ArgumentError, match="of a CPU"):
        read_report(tmp_path)


def test_a_machine_that_cannot_be_written_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(folder, tmp_path / "none" / "machine.json")


def test_a_kernel_without_a_kernel_cost_is_named(folder: Path) -> None:
    def none(kernel: AscendCKernel | TritonKernel) -> KernelCost:
        raise LookupError(f"no cost of {kernel.name}")

    with pytest.raises(LookupError, match="no cost of route"):
        run(folder, kernel_costs=none)
