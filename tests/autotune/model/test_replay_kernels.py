"""Replays of real kernels, as the NPU compiler makes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autotune.gate import compile_for_npu, costs
from autotune.gate.costs import Estimate, estimate
from autotune.gate.families import parse_case
from autotune.gate.stream import Branch, Loop, Node, parse
from autotune.gate.table import shown_cases
from autotune.model.constants import Machine, machine_named
from autotune.model.kernel_costs.replay import replay_of
from autotune.model.kernel_costs.replay.case import case_arguments, replay_case
from autotune.model.kernel_costs.replay.instructions import FUNCTIONS
from autotune.model.kernel_costs.replay.kernel_cost import recorded, timed
from autotune.model.kernel_costs.replay.translate import translated
from autotune.npu_compiler import compile as npu_compile
from autotune.npu_compiler.compile import compile_ir, entry_of, generic_form, kernel_function, npu_ir
from autotune.npu_compiler.socs import SOC_OF_PRODUCT, SOCS
from moe_triton.backends.cpu.triton.ir import read
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels import Case, Sizes
from tests.autotune.model.replay_ir import barrier

A3 = machine_named("A3")
SOC = SOCS[SOC_OF_PRODUCT["A3"]]
SIZES = Sizes(tokens=64, num_experts=32, num_ranks=4, unrouted=0.0, first_token=0)
CASES = {case.name: Case(case.family, case.shape, SIZES) for case in shown_cases()}
ROWS = "pack/bf16-h7168", "rms_norm/h7168", "weighted_sum/bf16-h7168-k8-s0-weights"


def case_named(name: str, tokens: int = 64) -> Case:
    family, shape = parse_case(name)
    return Case(family, shape, replace(SIZES, tokens=tokens))


def cycles_of(case: Case, blocks: int = 1, machine: Machine = A3) -> float:
    return replay_case(case, SOC.name, machine, blocks).slowest.cycles


@pytest.fixture(scope="module")
def same_constants() -> Machine:
    """What the gate takes a core to be: one of 40 that stream."""
    machine = machine_named("A2")
    return machine.replaced({"cores": 1, "stream_bytes_per_cycle_alone": machine.stream_bytes_per_cycle})


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_is_faster_than_the_gates_lower_bound(
    name: str, same_constants: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two independent readers of the same modules. The gate's bound is one for every turn of a loop if flags
    take no time of their pipes, which is their latency, and if of two branches the cheaper one counts."""
    monkeypatch.setattr(costs, "FLAG_CYCLES", 0)
    monkeypatch.setattr(Estimate, "larger", _smaller)
    nodes = _nodes(name)
    found = replay_case(CASES[name], SOC.name, same_constants, 1).slowest
    assert found.cycles >= estimate(nodes).cycles
    if _num_loops(nodes) == 1:
        # An eighth of a cycle: masks of fewer than 16 bits, of which the gate counts whole bytes.
        assert found.cycles_per_turn >= estimate(nodes).cycles - 0.125


def test_enough_kernels_have_one_loop() -> None:
    """Of these alone the bound is one for every turn: others have a loop more, if only to turn the zone."""
    assert sum(_num_loops(_nodes(name)) == 1 for name in CASES) > len(CASES) / 3


@functools.cache
def _nodes(name: str) -> list[Node]:
    return parse(compile_for_npu(CASES[name].kernel, SOC.name).module)


def _num_loops(nodes: Sequence[Node]) -> int:
    """Loops of unknown length on the way through a kernel that has most of them."""
    ways = [max(_num_loops(n.then), _num_loops(n.otherwise)) for n in nodes if isinstance(n, Branch)]
    loops = [n for n in nodes if isinstance(n, Loop)]
    return sum(ways) + sum((n.trips is None) + _num_loops(n.body) for n in loops)


def _smaller(left: Estimate, right: Estimate) -> Estimate:
    pairs = zip(dataclasses.astuple(left), dataclasses.astuple(right), strict=True)
    return Estimate(*(min(pair) for pair in pairs))


@pytest.mark.parametrize("name", CASES)
def test_every_shown_kernel_is_replayed_and_accounts_for_its_time(name: str) -> None:
    found = replay_case(CASES[name], SOC.name, A3, 8).slowest
    assert sum(found.parts.values()) == pytest.approx(found.cycles)
    for pipe, busy in found.busy.items():
        assert busy + sum(found.stalls[pipe].values()) == pytest.approx(found.cycles), pipe


@pytest.mark.parametrize("name", ROWS)
def test_more_rows_take_longer_and_move_more(name: str) -> None:
    each = [replay_case(case_named(name, tokens), SOC.name, A3, 1) for tokens in (8, 16, 32, 64)]
    assert [found.slowest.turns for found in each] == [8, 16, 32, 64]
    cycles = [found.slowest.cycles for found in each]
    assert cycles == sorted(set(cycles))
    assert each[3].read + each[3].written > 1.9 * (each[2].read + each[2].written)
    # the slope is what another row takes
    assert (cycles[3] - cycles[2]) / 32 == pytest.approx(each[3].slowest.cycles_per_turn, rel=0.02)


@pytest.mark.parametrize("name", ROWS)
def test_longer_rows_take_longer(name: str) -> None:
    each = [cycles_of(case_named(name.replace("h7168", f"h{hidden}"))) for hidden in (1024, 2880, 7168)]
    assert each == sorted(set(each))


@pytest.mark.parametrize("name", ROWS)
def test_cores_that_halve_the_rows_of_each_are_faster(name: str) -> None:
    """64 tokens on 1 to 32 cores of 48: while a core's share of memory suffices, and up to that after it."""
    each = [cycles_of(case_named(name), blocks) for blocks in (1, 2, 4, 8, 16, 32)]
    assert each == sorted(each, reverse=True)
    assert each[0] > 8 * each[-1]


def test_cores_without_rows_change_nothing() -> None:
    """8 tokens on 8 cores or on 48 are 8 programs with a row: the others take no bandwidth."""
    few, many = (replay_case(case_named(ROWS[0], 8), SOC.name, A3, blocks) for blocks in (8, 48))
    assert (few.active, few.bytes_per_cycle) == (many.active, many.bytes_per_cycle)
    assert many.slowest.cycles == pytest.approx(few.slowest.cycles, rel=0.01)


def test_programs_take_turns_where_there_are_more_than_cores() -> None:
    case = case_named(ROWS[0])
    few = A3.replaced({"cores": 4, "stream_bytes_per_cycle": A3.stream_bytes_per_cycle * 12})
    assert cycles_of(case, 8, few) > 1.9 * cycles_of(case, 8)


def test_slower_memory_is_slower() -> None:
    case = case_named("add_rows/bf16-h7168")
    slow = A3.replaced({"stream_bytes_per_cycle": A3.stream_bytes_per_cycle / 2})
    half, whole = (replay_case(case, SOC.name, machine, 48).slowest for machine in (slow, A3))
    assert half.bound == "memory bandwidth"
    assert half.cycles > whole.cycles


def with_constants(case: Case, **constants: object) -> TritonKernel:
    return replace(case.kernel, constants={**case.kernel.constants, **constants})


def worse(case: Case, kernel: TritonKernel) -> float:
    """How many times as long another form of a case's kernel takes, on one core."""
    found = replay_of(kernel, SOC.name, case_arguments(case), 1, A3).slowest.cycles
    return found / cycles_of(case)


def test_small_tiles_are_slower() -> None:
    summed, routed = case_named("weighted_sum/bf16-h7168-k8-s0-weights"), case_named("route")
    assert worse(summed, with_constants(summed, TILE=1024)) > 1.5
    assert worse(routed, with_constants(routed, COLS=16)) > 1.5


def test_a_kernel_without_double_buffering_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_named("append/h7168")
    off = [option.replace("multi-buffer=true", "multi-buffer=false") for option in npu_compile.OPTIONS]
    assert set(off) != set(npu_compile.OPTIONS)
    usual = translated(kernel_function(case.kernel, SOC))
    monkeypatch.setattr(npu_compile, "OPTIONS", tuple(off))
    single = translated(kernel_function(case.kernel, SOC))
    times = [
        timed(recorded(case.kernel, each, case_arguments(case), 1), A3, A3.stream_bytes_per_cycle).cycles
        for each in (usual, single)
    ]
    assert times[1] > 1.3 * times[0]


@pytest.mark.parametrize("name", ["pack/bf16-h7168", "add_rows/bf16-h7168"])
def test_an_extra_barrier_is_slower(name: str) -> None:
    case = case_named(name)
    module = read(generic_form(compile_ir(npu_ir(case.kernel), SOC).module))
    function = entry_of(module, case.name)
    times = []
    for _ in range(2):
        streams = recorded(case.kernel, translated(function), case_arguments(case), 1)
        times.append(timed(streams, A3, A3.stream_bytes_per_cycle).cycles)
        for operation in function.walk("func.call"):
            if "load_gm_to_ubuf" in operation.attributes["callee"]:
                operation.insert_before(f"{barrier('ALL')}\n")
    assert times[1] > 1.2 * times[0]


def test_a_function_that_the_model_does_not_know_is_named_with_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_named("add_rows/bf16-h1024")
    new = replace(case.kernel, name="new_kernel")  # not translated before
    monkeypatch.delitem(FUNCTIONS, "vadd_")
    with pytest.raises(ToolchainError, match=r"^new_kernel cannot be replayed: .*vadd_1d_float"):
        replay_of(new, SOC.name, case_arguments(case), 1, A3)


def test_a_wait_of_a_peer_that_is_not_known_is_taken_to_be_recorded() -> None:
    """Its kernel has a branch in the form of a loop of one turn, whose condition depends on data."""
    case = case_named("waits_of_combine")
    assert replay_case(case, SOC.name, A3, 1).written == 8 * SIZES.num_ranks
