"""Kernels' settings: what is tuned, what cannot be had, what the model and the stop-watch prefer."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.intervals import Interval
from autotune.kernels import measured, modelled
from autotune.kernels.feasible import why_not
from autotune.kernels.occasions import configs
from autotune.kernels.scope import Scope
from autotune.kernels.tunables import Tunable, tunables_of
from autotune.model.constants import machine_named
from autotune.model.kernel_costs.replay import ReplayError
from autotune.search import Options, Outcome, run
from autotune.search.task import WrongBitsError
from autotune.tuning import tasks_of
from moe_triton import tables
from moe_triton.backends import CAPABILITIES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import PROGRAMS, Space
from moe_triton.runtime import tuning_source
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext

CHIP, MACHINE = "Ascend910_9391", machine_named("A3")


@functools.cache
def tunable(kernel: str, variant: str = "plain", soc: str = "A3") -> Tunable:
    scope = Scope(soc, kernels=(kernel,), tokens=(128,), dtypes=("bf16",))
    return next(each for each in tunables_of(scope) if each.keys[1] == variant)


def with_space(of: Tunable, space: Space, **changes: object) -> Tunable:
    return replace(of, kernel=replace(of.kernel, space=space, **changes))  # type: ignore[arg-type]


def priced(of: Tunable, machine: object = MACHINE) -> dict[tuple[int, ...], Outcome]:
    task = modelled.task_of(of, CHIP, machine)  # type: ignore[arg-type]
    return {tuple(each.values()): task.evaluate(each, None) for each in task.candidates()}


def best(outcomes: dict[tuple[int, ...], Outcome]) -> tuple[int, ...]:
    return min((o.value, key) for key, o in outcomes.items() if o.value is not None)[1]


def test_every_kernel_is_there_once() -> None:
    found = tunables_of(Scope(tokens=(16, 128), topk=(4, 8)))
    names = {each.keys[0] for each in found}
    assert names >= {"route", "route_pack", "stamps", "weighted_sum"}
    assert len({(each.keys, each.sizes) for each in found}) == len(found)
    assert {each.keys[2] for each in found} == {"any", "bf16", "fp16"}
    for each in found:
        assert each.sizes == tables.sizes_of(each.kernel, each.situations[0].works[0][0].traffic.config)
        assert len(each.situations[0].works) == 2  # a typical rank, and the one with the most rows


@pytest.mark.parametrize(
    ("soc", "comm_alg"),
    [("A3", "fullmesh_v1"), ("A2", "hierarchy"), ("cpu", "fullmesh_v1"), ("cpu", "fullmesh")],
)
def test_what_a_buffer_launches_is_tuned(soc: str, comm_alg: str) -> None:
    """The kernels that `tuning_source` tells of: a table that lacks one is of no use to that call."""
    scope = Scope(soc, tokens=(128,), dtypes=("bf16",))
    known = {(each.keys, each.sizes) for each in tunables_of(scope)}
    (config,) = (each for each in configs(scope) if each.scheme == comm_alg)
    scheme = make_scheme(RankContext(config, 0, 4, 10**6, CAPABILITIES["cpu" if scope.is_cpu else "npu"]))
    launched = list(tuning_source.launched(scheme, torch.bfloat16))
    assert launched
    for _, kernel in launched:
        assert (tables.keys_of(kernel), tables.sizes_of(kernel, config)) in known


def test_tables_of_a_chip_are_of_its_own_schemes() -> None:
    """The sums of A2's two schemes; of hierarchy those of rows and those of servers."""
    found = {each.keys[1] for each in tunables_of(Scope("A2", kernels=("weighted_sum",), tokens=(16,)))}
    assert {
        "weights-by_offset-zoned-turns",
        "weights-masked-by_expert-zoned",
        "by_expert-zoned-turns",
    } <= found
    assert "weights-zoned-turns" not in found


def test_what_cannot_be_priced_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is better than what is not known; the compiler is not asked either."""
    task = modelled.task_of(tunable("stamps"), CHIP, MACHINE)

    def undecided(*_: object) -> None:
        raise ReplayError("depends on data")

    monkeypatch.setattr(modelled, "timed", undecided)
    monkeypatch.setattr(modelled, "why_not", lambda *_: pytest.fail("compiled"))
    assert {task.evaluate(each, None).reason for each in task.candidates()} == {"depends on data"}


def test_sizes_that_no_scheme_takes_are_refused_by_the_limits_rule() -> None:
    with pytest.raises(ArgumentError, match="hidden is 33"):
        tunables_of(Scope(hidden=(33,)))


def test_a_kernel_that_does_not_depend_on_k_is_of_all_k() -> None:
    """One row of the table is for both: each counts."""
    (one,) = (
        each
        for each in tunables_of(Scope(tokens=(16,), topk=(4, 8), kernels=("route",)))
        if each.keys[1] == "plain"
    )
    assert one.sizes == (1, 1, 16, 16)
    assert {label.partition(", ")[2] for label in (each.label for each in one.situations)} == {"K 4", "K 8"}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"soc": "A9"}, "soc"),
        ({"soc": "950"}, "soc"),
        ({"hidden": (0,)}, "hidden"),
        ({"dtypes": ("fp8",)}, "dtype"),
    ],
)
def test_what_is_no_scope(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        Scope(**changes)  # type: ignore[arg-type]


def test_a_kernel_without_settings_is_named() -> None:
    with pytest.raises(ArgumentError, match="no plan of arrange_nothing of these sizes"):
        tunables_of(Scope(kernels=("arrange_nothing",), tokens=(16,)))


def test_what_the_compiler_refuses_says_why() -> None:
    outcomes = priced(with_space(tunable("stamps"), Space({"BLOCK": (32, 4096, 100000)})))
    assert outcomes[32,].is_exact
    assert "gave up" in outcomes[4096,].reason
    assert "unified buffer" in outcomes[4096,].reason
    assert "ub overflow" in outcomes[100000,].reason
    assert outcomes[4096,].value is outcomes[100000,].value is None


def test_double_buffers_that_are_asked_for_are_there() -> None:
    kernel = tunable("stamps").kernel
    assert why_not(kernel, kernel, CHIP) == ""
    assert why_not(replace(kernel, multibuffer=False), kernel, CHIP) == ""


def test_missing_double_buffers_are_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.kernels import feasible

    kernel = tunable("stamps").kernel
    made = {
        kernel: feasible.Compiled(buffered={"load": (2, 2), "store": (1, 2)}),
        "other": feasible.Compiled(buffered={"load": (1, 2), "store": (1, 2)}),
    }
    other = replace(kernel, constants={**kernel.constants, "BLOCK": 64})
    monkeypatch.setattr(feasible, "compiled", lambda k, chip: made.get(k, made["other"]))
    assert why_not(other, kernel, CHIP) == "double buffers asked for, but only 1 of 2 loads have them"
    assert why_not(replace(other, multibuffer=False), kernel, CHIP) == ""


def test_a_kernel_that_is_made_worse_is_not_chosen(tmp_path: Path) -> None:
    """Its own setting runs it on a single core."""
    space = Space({"BLOCK": (16, 32), PROGRAMS: (0,)})
    worse = with_space(tunable("stamps"), space, programs=1)
    (found,) = run(lambda: [modelled.task_of(worse, CHIP, MACHINE)], Options(tmp_path / "study.db"))
    assert found.best is not None
    assert found.default is not None
    assert found.default.settings == {"BLOCK": 32, PROGRAMS: 1}
    assert found.best.settings == {"BLOCK": 32, PROGRAMS: 0}
    assert found.best.outcome.facts["ns"] < found.default.outcome.facts["ns"]


def test_constants_of_another_machine_give_another_ranking() -> None:
    """Wide tiles where a load's latency is long, narrow ones where vectors are slow."""
    space = Space({"ROWS": (32,), "COLS": (64, 128, 256)})
    of = with_space(tunable("route"), space)
    assert best(priced(of)) == (32, 128)
    assert best(priced(of, MACHINE.replaced({"load_latency_cycles": 5000}))) == (32, 256)
    assert best(priced(of, MACHINE.replaced({"vector_bytes_per_cycle": 16}))) == (32, 64)


def test_a_candidate_costs_what_its_slowest_rank_does() -> None:
    of = tunable("stamps")
    (situation,) = of.situations
    each = [
        modelled.timed(of.kernel, replace(situation, works=(works,)), CHIP, MACHINE).ns
        for works in situation.works
    ]
    assert modelled.timed(of.kernel, situation, CHIP, MACHINE).ns == max(each)


def test_the_name_of_a_task_tells_what_decides_it() -> None:
    of = tunable("stamps")
    names = {
        modelled.task_of(of, CHIP, MACHINE).name,
        modelled.task_of(of, CHIP, MACHINE.replaced({"flag_cycles": 1})).name,
        modelled.task_of(with_space(of, Space({"BLOCK": (16,)}), multibuffer=False), CHIP, MACHINE).name,
        modelled.task_of(tunable("stamps", "weights"), CHIP, MACHINE).name,
    }
    assert len(names) == 4
    assert modelled.task_of(of, CHIP, MACHINE).name in names


def test_the_cpus_kernels_keep_their_bits(tmp_path: Path) -> None:
    """Measured for real; which one is faster is this machine's affair."""
    scope = Scope("cpu", (256,), (2,), (4,), (16,), ("bf16",), ("weighted_sum",))
    tasks = [task for task in tasks_of(scope) if "weights bf16" in task.name]
    found = run(lambda: tasks[:1], Options(tmp_path / "study.db"))
    assert found
    for each in found:
        assert each.best is not None
        assert each.best.outcome.value is not None
        assert each.best.outcome.value <= 1.0
        assert all(t.outcome.value is not None for t in each.trials), each.trials


def test_other_bits_are_an_error_that_names_the_candidate(tmp_path: Path) -> None:
    of = tunable("weighted_sum", "weights", "cpu")
    wrong = with_space(of, Space({"HAS_WEIGHTS": (0,)}))
    with pytest.raises(WrongBitsError, match=r"weighted_sum weights.*HAS_WEIGHTS=0: .* bytes of out"):
        run(lambda: [measured.task_of(wrong)], Options(tmp_path / "study.db"))


def turns(*seconds: float) -> Callable[[], float]:
    endless: Iterator[float] = itertools.cycle(seconds)
    return lambda: next(endless)


def test_the_stop_rule_ends_when_the_ratio_is_known() -> None:
    ratio = measured.compared(turns(0.5), turns(1.0))
    assert (ratio.low, ratio.middle, ratio.high) == (0.5, 0.5, 0.5)
    assert ratio.rounds == measured.FEWEST


def test_the_stop_rule_gives_up_on_what_is_clearly_slower() -> None:
    ratio = measured.compared(turns(1.5, 2.5), turns(1.0))
    assert ratio.low > measured.CLEARLY_WORSE
    assert ratio.rounds == measured.FEWEST


def test_the_stop_rule_ends_where_nothing_becomes_clear() -> None:
    noise = random.Random(1)
    ratio = measured.compared(lambda: noise.uniform(0.2, 1.8), lambda: 1.0)
    assert ratio.rounds == measured.MOST
    assert ratio.low < ratio.middle < ratio.high


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draws = random.Random(0)
    held = 0
    for _ in range(400):
        low, _, high = Interval.of([draws.gauss(1.0, 0.1) for _ in range(40)])
        held += low <= 1.0 <= high
    assert 0.92 <= held / 400 <= 1.0


def test_every_kernel_of_a_cpu_has_inputs_to_be_measured_with() -> None:
    """What `moe-triton tune kernels --soc cpu` asks for, sums of servers among it."""
    tunables = tunables_of(Scope("cpu", hidden=(1024,)))
    assert {"by_expert", "weights-masked-by_expert"} <= {of.keys[1] for of in tunables}
    for of in tunables:
        assert measured.case_of(of).kernel.constants == of.kernel.constants


def test_every_kernel_of_an_npu_has_inputs_to_be_measured_with() -> None:
    for of in tunables_of(Scope(hidden=(1024,), topk=(2,), ranks=(4,), tokens=(16,))):
        case = measured.case_of(of, "npu")
        assert case.kernel.constants == of.kernel.constants
        assert case.outputs
