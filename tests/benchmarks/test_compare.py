"""The figures of the comparison: what is counted, divided, stored, judged and shown. No measuring here."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.compare import commands, launch
from benchmarks.compare.cases import (
    AT_TEMPERATURES,
    ROUTES,
    Case,
    Job,
    Sample,
    absent_sample,
    from_message,
    read_csv,
    write_csv,
)
from benchmarks.compare.figures import (
    METRICS,
    Samples,
    Spread,
    metric_table,
    records,
    share_records,
    shares,
    summary_table,
    target_of,
    temperature_table,
    verdict,
)
from benchmarks.compare.rank import Run, Span, Timed, reduce_ranks
from benchmarks.compare.report import Report, print_report
from benchmarks.compare.routes import Delivered
from benchmarks.compare.routes.base import Inputs, compare
from benchmarks.compare.routes.ours import apart
from benchmarks.compare.traffic import combine_traffic, dispatch_traffic, group_bytes
from benchmarks.sizes import EXPERTS, TOPK
from moe_triton.core.ascendc import DISPATCH_WAIT
from moe_triton.core.installing import install
from moe_triton.core.plan import Launch

CASE = Case(2, 16, "int8")
NO_MPI = "there is no mpirun"
# us of both operators together, in three iterations
TIMES = {
    "slots": (100.0, 200.0, 400.0),
    "direct": (50.0, 50.0, 100.0),
    "nowait": (100.0, 100.0, 100.0),
    "gloo_alltoallv": (1200.0, 2400.0, 800.0),
    "mpi_alltoallv": (300.0, 900.0, 1600.0),
    "mpi_allgather": (400.0, 400.0, 1200.0),
    "memcpy_direct": (40.0, 45.0, 50.0),
}


def some_samples(case: Case = CASE) -> list[Sample]:
    made = []
    for order, (route, times) in enumerate(TIMES.items()):
        for i, us in enumerate(times):
            knows = route in ("slots", "direct", "nowait")
            kernels = 0.8 * us if knows else None
            steps = {"dispatch: send": us / 2, "dispatch: wait": 9.0, "combine: sum": us / 4}
            both = Sample(
                route,
                "both",
                case.ranks,
                case.tokens,
                case.quantize,
                i,
                order,
                us,
                kernels,
                steps=steps if knows else {},
                core_us=0.9 * us * 2,  # two cores, of which ranks take nine tenths
            )
            made += [both, replace(both, phase="dispatch", us=us / 4), replace(both, phase="combine")]
            if route in AT_TEMPERATURES:
                made += [replace(both, phase="warm", us=us / 2), replace(both, phase="cold", us=us + 50)]
    return [*made, absent_sample("mpi_native", case, NO_MPI)]


# Shares of the cores' time


def test_shares_are_of_all_cores_and_leave_waiting_out() -> None:
    steps = {"dispatch: route + pack": 5.0, "dispatch: wait": 70.0, "dispatch: offsets": 2.0}
    steps["combine: sum"] = 10.0
    case = Case(4, 16, "int8")
    made = [Sample("slots", "both", 4, 16, "int8", i, 0, 100.0, steps=steps, core_us=150.0) for i in range(3)]
    samples = Samples(made)
    assert shares(samples, case, "slots", 2) == {"busy": 0.75}
    found = shares(samples, case, "slots", 8)
    assert {name: share for name, share in found.items() if share} == pytest.approx(
        {"busy": 0.375, "pack": 0.05, "sum": 0.1, "small": 0.02, "rest": 0.83}
    )
    assert shares(samples, case, "direct", 8) == {}
    values = {record["metric"]: record["value"] for record in share_records(samples, 4)}
    assert values["share_sum"] == pytest.approx(0.1)


# Bytes


def test_bytes_of_slots_are_those_of_the_table() -> None:
    sizes = {"tokens": 10, "sent": 80, "received": 70, "kept": 30, "hidden": 100}
    plain = dispatch_traffic("slots", quantize="", **sizes)
    assert (plain.read, plain.written) == ((10 + 40 + 10) * 200, (50 + 40 + 30) * 200)
    packed = dispatch_traffic("slots", quantize="int8", **sizes)
    assert packed.read == 10 * 200 + (10 + 40 + 10) * 100
    assert packed.written == (10 + 50 + 40 + 30) * 100
    back = combine_traffic("slots", **sizes)
    assert (back.read, back.written) == ((40 + 80) * 200, (40 + 10) * 200)


def test_direct_neither_arranges_nor_sends_results() -> None:
    sizes = {"tokens": 10, "sent": 80, "received": 70, "kept": 30, "hidden": 100}
    plain = dispatch_traffic("direct", quantize="", **sizes)
    assert (plain.read, plain.written, plain.row) == (10 * 200, 80 * 200, 200)
    back = combine_traffic("direct", **sizes)
    assert (back.read, back.written) == (80 * 200, 10 * 200)
    assert back.copied == 90 * 200 // 2


def test_bytes_of_a_group_are_the_sum_over_its_ranks() -> None:
    sizes = {"tokens": 4, "topk": 8, "hidden": 64, "quantize": "int8"}
    two = group_bytes("slots", "both", ranks=2, **sizes)
    # Of more ranks' rows fewer stay where they are; direct moves all of them alike.
    assert group_bytes("slots", "both", ranks=8, **sizes) > 4 * two
    of_direct = [group_bytes("direct", "both", ranks=ranks, **sizes) for ranks in (2, 8)]
    assert of_direct[1] == 4 * of_direct[0]
    apart = (group_bytes("slots", phase, ranks=2, **sizes) for phase in ("dispatch", "combine"))
    assert sum(apart) == two


# Inputs


def test_every_rank_knows_what_it_receives() -> None:
    ranks = 4
    inputs = [Inputs.random(rank, ranks, 8) for rank in range(ranks)]
    for rank, mine in enumerate(inputs):
        to_me = sum(int((other.ids // (EXPERTS // ranks) == rank).sum()) for other in inputs)
        assert mine.num_received == to_me
        assert mine.num_sent == 8 * TOPK
        assert all(len(set(row.tolist())) == TOPK for row in mine.ids)
    assert not torch.equal(inputs[0].x, inputs[1].x)


# Times and ratios


def test_a_time_is_the_last_rank_out_minus_the_first_in() -> None:
    run = Run("slots", CASE, list)
    ranks = [
        [Timed(0, 3, 1, [Span("both", 10.0, 10.5, {"dispatch: send": 3.0, "combine: sum": 4.0})])],
        [Timed(0, 3, 1, [Span("both", 10.2, 10.9, {"dispatch: send": 8.0, "combine: sum": 1.0})])],
        [Timed(0, 3, 1, [])],  # took no part
    ]
    (sample,) = reduce_ranks([run], ranks)
    assert sample.us == pytest.approx(0.9e6)
    assert (sample.iteration, sample.order, sample.kernels_us) == (3, 1, 9.0)
    assert sample.steps == {"dispatch: send": 5.5, "combine: sum": 2.5}


@pytest.mark.parametrize(
    ("ranks", "waited_us", "is_shared"),
    [(2, 0.0, False), (2, 24_000.0, False), (2, 26_000.0, True), (4, 0.0, True)],
)
def test_ranks_share_a_core_if_they_are_more_or_one_waits_for_its_own(
    ranks: int, waited_us: float, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.rank.cores", lambda: 3)
    run = Run("slots", Case(ranks, 16, "int8"), list)
    spans = [Span("both", 10.0, 10.5), Span("both", 10.0, 10.5, waited_us=waited_us)]
    (sample,) = reduce_ranks([run], [[Timed(0, 0, 0, [span])] for span in spans])
    assert sample.shared == is_shared


def test_a_figure_of_shared_cores_is_marked_where_most_runs_are_such() -> None:
    def shared_in(runs: int) -> Samples:
        return Samples(
            [replace(s, shared=s.route == "memcpy_direct" and s.iteration < runs) for s in some_samples()]
        )

    columns = [column.heading for column in summary_table(shared_in(0)).columns]
    for runs, shown in ((1, "0.80"), (2, "(0.80)")):
        (row,) = summary_table(shared_in(runs)).rows
        cells = dict(zip(columns, map(str, row), strict=True))
        assert cells["memcpy / direct"] == shown
        assert cells["slots / direct"] == "4.00 met"
        (row,) = temperature_table(shared_in(runs)).rows
        assert [str(cell).startswith("(") for cell in row[7::2]] == [runs == 2] * 2
    marks = {(r["case"]["route"], r["case"]["shared"]) for r in records(shared_in(2)) if "route" in r["case"]}
    assert {route for route, shared in marks if shared} == {"memcpy_direct"}


def test_ratios_to_memcpy_are_of_runs_of_the_same_temperature() -> None:
    found = {r["metric"]: r["value"] for r in records(Samples(some_samples())) if "route" not in r["case"]}
    assert found["warm_fraction_of_memcpy"] == pytest.approx(0.8)  # 20 / 25, 22.5 / 25, 25 / 50
    assert found["cold_fraction_of_memcpy"] == pytest.approx(0.9)  # 90 / 100, 95 / 100, 100 / 150
    assert found["cold_fraction_of_memcpy_low"] == pytest.approx(2 / 3)
    assert found["cold_fraction_of_memcpy_high"] == pytest.approx(0.95)
    assert not any(name.endswith("slots_fraction_of_memcpy") for name in found)  # its memcpy is absent
    (row,) = temperature_table(Samples(some_samples())).rows
    cells = [str(cell) for cell in row]
    assert cells == ["2", "16", "int8", *[""] * 4, "0.80", "0.50 - 0.90", "0.90", "0.67 - 0.95"]
    without = [s for s in some_samples() if s.phase in ("both", "dispatch", "combine")]
    assert not temperature_table(Samples(without)).rows


def test_percentiles() -> None:
    spread = Spread.of([float(i) for i in range(101)])
    assert (spread.p10, spread.p50, spread.p90, spread.p99) == (10, 50, 90, 99)


def test_a_ratio_is_the_median_over_iterations_and_not_of_medians() -> None:
    samples = Samples(some_samples())
    assert samples.ratios(CASE, "gloo_alltoallv", "slots") == [12.0, 12.0, 2.0]
    metrics = {metric.name: samples.metric(CASE, metric) for metric in METRICS}
    medians = {name: spread.p50 for name, spread in metrics.items() if spread}
    assert medians == {
        "vs_gloo_alltoallv": 12.0,
        "vs_mpi_best": 3.0,  # all-gather has the lower median, 400 against 900
        "vs_nowait": 2.0,
        "direct_vs_slots": 4.0,
        "fraction_of_memcpy": 0.8,
    }


def test_iterations_that_a_route_did_not_take_part_in_are_left_out() -> None:
    samples = Samples([s for s in some_samples() if not (s.route == "slots" and s.iteration == 1)])
    assert samples.ratios(CASE, "gloo_alltoallv", "slots") == [12.0, 2.0]


def test_records_carry_the_agreed_names() -> None:
    found = records(Samples(some_samples()))
    assert all(r.keys() == {"benchmark", "case", "metric", "value", "unit"} for r in found)
    named = {r["metric"]: r for r in found if "route" not in r["case"]}
    assert {"vs_gloo_alltoallv", "vs_mpi_best", "vs_nowait", "direct_vs_slots", "fraction_of_memcpy"} <= set(
        named
    )
    assert named["vs_mpi_best"]["case"] == {"ranks": 2, "tokens": 16, "quantize": "int8"}
    assert "vs_mpi_native" not in named
    times = {
        (r["case"]["route"], r["case"]["phase"], r["metric"]): r["value"] for r in found if r["unit"] == "us"
    }
    assert times["slots", "both", "p50_us"] == 200
    assert times["slots", "both", "kernels_p50_us"] == 160
    assert times["slots", "dispatch", "p50_us"] == 50


@pytest.mark.parametrize(
    ("metric", "case", "value", "expected"),
    [
        ("vs_gloo_alltoallv", Case(2, 16, "int8"), 10.0, "met"),
        ("vs_gloo_alltoallv", Case(2, 16, "int8"), 9.9, "missed"),
        ("vs_gloo_alltoallv", Case(8, 256, ""), 5.0, "met"),
        ("vs_gloo_alltoallv", Case(2, 17, "int8"), 1.0, ""),
        ("vs_nowait", Case(4, 16, "int8"), 1.3, "met"),
        ("vs_nowait", Case(4, 64, "int8"), 1.3, "missed"),
        ("direct_vs_slots", Case(4, 256, "int8"), 1.8, "met"),
        ("fraction_of_memcpy", Case(2, 256, ""), 0.74, "missed"),
        ("fraction_of_memcpy", Case(4, 256, ""), 0.1, ""),
        ("direct_vs_mpi_best", Case(2, 16, "int8"), 0.1, ""),
        ("vs_mpi_best", Case(2, 16, "int8"), None, "absent"),
    ],
)
def test_verdicts(metric: str, case: Case, value: float | None, expected: str) -> None:
    assert verdict(metric, case, value) == expected


def test_targets_read_as_they_are_meant() -> None:
    assert str(target_of("vs_nowait", CASE)) == "<= 1.3"
    assert str(target_of("vs_mpi_native", CASE)) == ">= 2"


# Agreement of routes


def delivered(**changes: object) -> Delivered:
    rows, counts = torch.arange(8).view(4, 2), torch.tensor([1, 2])
    made = Delivered(rows, torch.ones(4), counts, torch.ones(2, 2).bfloat16())
    return made._replace(**changes)


def test_rows_behind_the_received_ones_do_not_matter() -> None:
    other = delivered().tokens.clone()
    other[3] = 99
    compare("route", delivered(tokens=other), delivered())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tokens": torch.zeros(4, 2, dtype=torch.int64)}, "tokens"),
        ({"scales": None}, "scales"),
        ({"counts": torch.tensor([2, 1])}, "counts"),
        ({"out": torch.full((2, 2), 1.0078125).bfloat16()}, "output"),
        ({"out": torch.full((2, 2), 1.015625).bfloat16(), "exact": False}, "output"),
    ],
)
def test_routes_that_differ_are_not_compared(changes: dict[str, object], what: str) -> None:
    with pytest.raises(AssertionError, match=rf"^route delivers other {what}: nothing to compare"):
        compare("route", delivered(**changes), delivered())


def test_sums_in_another_order_may_differ_by_a_unit() -> None:
    compare("route", delivered(out=torch.full((2, 2), 1.0078125).bfloat16(), exact=False), delivered())


# Files


def test_samples_survive_csv(tmp_path: Path) -> None:
    samples = some_samples()
    write_csv(tmp_path / "samples.csv", samples)
    assert read_csv(tmp_path / "samples.csv") == samples
    header = (tmp_path / "samples.csv").read_text().splitlines()[0]
    assert (
        header
        == "route,phase,ranks,tokens,quantize,iteration,order,us,kernels_us,absent,steps,core_us,shared"
    )


def test_samples_and_jobs_survive_json() -> None:
    samples = some_samples()
    assert from_message(json.loads(json.dumps([asdict(s) for s in samples]))) == samples
    job = Job("compare", 2, (16, 64), (False, True), ("slots",), None, 5.0, "results")
    assert Job.from_json(json.loads(json.dumps(asdict(job)))) == job
    assert (job.num_cases, replace(job, kind="tokens").num_cases) == (4, 2)


def test_a_report_survives_json_and_names_the_machine_but_not_its_name(tmp_path: Path) -> None:
    samples = Samples(some_samples())
    report = Report.of(records(samples), samples, {"iterations": 3}, "Open MPI v1")
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    assert report.versions["mpi library"] == "Open MPI v1"
    assert report.versions["torch"] != "not installed"
    assert int(report.machine["cores"]) >= 1
    assert report.settings["hidden"] == 7168
    assert "hostname" not in report.machine


# What is absent


def test_absent_routes_are_reported_everywhere(tmp_path: Path) -> None:
    samples = some_samples()
    found = Samples(samples)
    printed = io.StringIO()
    print_report(found, Console(file=printed, width=200))
    label = ROUTES["mpi_native"]
    assert f"{label}: absent: {NO_MPI} (in all cases)" in printed.getvalue()
    assert re.search(rf"{label} +absent", printed.getvalue())
    report = Report.of(records(found), found, {})
    assert report.absent == [f"{label}: absent: {NO_MPI} (in all cases)"]
    (metric,) = (m for m in METRICS if m.name == "vs_mpi_native")
    assert str(metric_table(found, metric).rows[0][-1]) == "absent"
    write_csv(tmp_path / "samples.csv", samples)
    assert f"mpi_native,both,2,16,int8,0,0,,,{NO_MPI}" in (tmp_path / "samples.csv").read_text()


def test_without_mpi4py_there_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    mpi = launch.Mpi.find()
    assert mpi.mpirun is None
    assert install("bench") in mpi.absent


def test_ranks_that_fall_silent_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def is_running(self) -> bool:
            return True

        def log(self) -> str:
            return "last words"

    monkeypatch.setattr(launch, "SILENCE_S", 0.2)
    results = tmp_path / "results"
    results.write_text('{"kind": "start"}\n{"kind": "it')  # half a line is no message
    messages: Iterator[launch.Message] = launch._follow(results, Silent())
    assert next(messages) == {"kind": "start"}
    with pytest.raises(launch.BenchmarkError, match="last words"):
        next(messages)


def test_options_are_checked_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.run(["--ranks", "3"])
    assert "a divisor of 64 experts" in capsys.readouterr().err


# Without waiting


def test_a_plan_is_taken_apart_into_waits_and_the_rest() -> None:
    def step(name: str, alongside: bool = False) -> Launch:
        return Launch(name, DISPATCH_WAIT, (), 1, "communication", alongside)

    plan = [step("pack"), step("send"), step("pack", True), step("wait"), step("sum"), step("wait", True)]
    waits, others = apart([*plan, step("sum", True)])
    assert [launch.step for launch in waits] == ["wait", "wait"]
    assert [launch.step for launch in others] == ["pack", "send", "pack", "sum", "sum"]
    # Only what still stands behind the launch that it was to run beside.
    assert [launch.alongside for launch in (*waits, *others)] == [
        False,
        False,
        False,
        False,
        True,
        False,
        False,
    ]
