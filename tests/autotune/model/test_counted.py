"""Ascend C kernels as a run of them counts them: what they move, what they grow with, whom they wait for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.model.clusters.group import OPERATORS, Group
from autotune.model.clusters.prices import Call
from autotune.model.constants import machine_named
from autotune.model.cost import Cost, Place, UnknownWorkError, work_of
from autotune.model.kernel_costs.counted.library import LOOKS, RECORD, Did
from autotune.model.kernel_costs.counted.price import clocked, counted
from autotune.model.kernel_costs.counted.run import PlanRun, standing_for
from autotune.model.kernel_costs.counted.steps import Steps
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.traffic import Traffic
from moe_triton.core import ascendc
from moe_triton.core.kernel import AscendCKernel
from moe_triton.core.plan import Plan
from moe_triton.core.reach import token_of
from moe_triton.core.region import region_in
from moe_triton.layout import BLOCK_BYTES, BLOCK_DATA_BYTES, STAMP_BYTES, STATUS_ENTRY_BYTES, WORD_BYTES
from moe_triton.schemes.ascendc import KERNELS
from tests.autotune.model.calls import config, plan, traffic

A2, A3 = machine_named("A2"), machine_named("A3")
COUNTED = (
    *("dispatch_send", "dispatch_wait", "dispatch_receive", "inband_send", "inband_collect"),
    *("combine_send", "combine_wait"),
)
GROUPS = (
    Group(8, 16),
    Group(8, 16, parts=4),
    Group(8, 16, comm_alg="fullmesh_v2"),
    Group(8, 16, comm_alg="fullmesh_v2", parts=4),
    Group(8, 16, comm_alg="direct", mode="stream"),
    Group(8, 16, comm_alg="fullmesh", product="A2"),
    Group(16, 16, comm_alg="fullmesh", product="A2"),
    Group(16, 16, comm_alg="hierarchy", product="A2"),
    Group(16, 16, comm_alg="fullmesh_v1", ranks_per_server=8),
)


def run_of(group: Group, operator: str, ranks: Sequence[int]) -> tuple[Plan, PlanRun]:
    machine = machine_named(group.product)
    ids = group.draw()
    relays = group.comm_alg == "hierarchy"
    whole = group.plans(machine, ranks[0])[operator]  # type: ignore[index]
    plan_of = (lambda rank: group.plans(machine, rank)[operator]) if relays else None  # type: ignore[index]
    traffics = [group.traffic(ids, rank) for rank in ranks]
    return whole, standing_for(whole, traffics, plan_of, lambda rank: group.scheme(machine, rank))


def launched(kernel: str, of: dict[str, Any], known: Traffic | None = None) -> Cost:
    scheme = "fullmesh_v2" if kernel.startswith("inband") else "fullmesh_v1"
    sizes = {name: of.get(name, usual) for name, usual in (("ranks", 8), ("tokens", 64), ("hidden", 7168))}
    settings, quantize = config(**sizes, scheme=scheme), of.get("quantize", "int8")
    blocks, known = of.get("blocks", 48), known or traffic(settings)
    receiving = blocks if kernel in ("dispatch_receive", "inband_collect") else 0
    for operator in OPERATORS:
        whole = plan(settings, operator, quantize, blocks + bool(receiving), 1, receiving)
        for index, launch in enumerate(whole.launches):
            if launch.kernel.name == kernel:
                return counted(work_of(launch, known, Place(standing_for(whole, [known]), index, 0)), A3)
    raise LookupError(kernel)


def cost(kernel: str, **of: Any) -> Cost:
    return launched(kernel, of)


def test_every_kernel_is_priced_without_a_line_for_it() -> None:
    priced = set()
    for group in GROUPS:
        machine = A2 if group.config.topology.num_servers > 1 else machine_named(group.product)
        call = Call.typical(group, kernel_cost_of_ascendc)
        for operator in OPERATORS:
            (found,) = call.priced(operator, machine)
            for span in found.timeline.spans:
                if isinstance(span.launch.kernel, AscendCKernel):
                    assert span.cost.us > 0
                    priced.add(span.launch.kernel.name)
    # One for other groups of ranks, one that no plan of a group in a graph has, one for rows by rank, one for
    # calls in rounds, one for hosts whose plans end with a report.
    others = {"exchange_send", "inband_receive", "tables_send", "call_post", "returns_lost"}
    assert {kernel.name for kernel in KERNELS} - priced <= others


def kernel_cost_of_ascendc(kernel: object) -> object:
    if isinstance(kernel, AscendCKernel):
        return kernel_cost_of(kernel)
    return lambda work, machine: Cost({"fixed": 1.0})


@pytest.mark.parametrize(("quantize", "row_bytes"), [("int8", 7168 + 32), (None, 2 * 7168)])
def test_dispatch_sends_a_row_and_a_stamp_for_each_result(quantize: str | None, row_bytes: int) -> None:
    """And an entry for each of 256 experts, a word to its own memory, and that a block has begun."""
    sent, found = traffic(config(8, 64)).sent, cost("dispatch_send", quantize=quantize)
    assert found.sent == sent[1:].sum() * (row_bytes + STAMP_BYTES) + 7 * 32 * STATUS_ENTRY_BYTES
    own = sent[0] * (row_bytes + STAMP_BYTES)
    assert found.written == own + 32 * STATUS_ENTRY_BYTES + WORD_BYTES


def test_flags_in_band_add_a_flag_to_each_block() -> None:
    """Of a row and its stamp, which holds its scale."""
    blocks = -(-(7168 + STAMP_BYTES) // BLOCK_DATA_BYTES)
    sent = traffic(config(8, 64, scheme="fullmesh_v2")).sent
    entries = 7 * 32 * STATUS_ENTRY_BYTES
    assert cost("inband_send").sent == sent[1:].sum() * blocks * BLOCK_BYTES + entries


def test_combine_returns_what_came() -> None:
    received = traffic(config(8, 64)).received
    assert cost("combine_send").sent == received[1:].sum() * (2 * 7168 + STATUS_ENTRY_BYTES)


@pytest.mark.parametrize("kernel", COUNTED)
def test_more_tokens_and_more_bytes_never_take_less(kernel: str) -> None:
    times = [cost(kernel, tokens=tokens).us for tokens in (8, 16, 32, 64, 128)]
    assert all(a <= b for a, b in itertools.pairwise(times))
    if kernel != "dispatch_wait":  # its entries do not depend on tokens
        assert times[0] < times[-1]
    times = [cost(kernel, hidden=hidden).us for hidden in (1024, 2048, 4096, 7168)]
    assert all(a <= b for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("kernel", COUNTED)
def test_more_cores_never_take_longer(kernel: str) -> None:
    """By more than 3%: a core that has most may have a few bytes more than its share, and its own flags."""
    times = [cost(kernel, tokens=128, blocks=blocks).us for blocks in (1, 2, 4, 8, 16, 24, 48)]
    assert all(a >= b * 0.97 for a, b in itertools.pairwise(times))
    assert times[0] > times[-1]


@pytest.mark.parametrize("kernel", ["dispatch_send", "combine_send", "inband_send"])
def test_farther_ranks_take_longer(kernel: str) -> None:
    near, far = cost(kernel, ranks=16).parts["hops"], cost(kernel, ranks=256).parts["hops"]
    assert near < far


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g.comm_alg}-{g.product}-{g.ranks}-{g.parts}")
@pytest.mark.parametrize("operator", OPERATORS)
def test_other_ranks_leave_what_they_would_have_sent(group: Group, operator: str) -> None:
    """Given only the rows of one rank, and one block: what that rank does then is what it does among all."""
    alone, among = (run_of(group, operator, ranks) for ranks in ([3], [3, *(set(range(group.ranks)) - {3})]))
    for index, launch in enumerate(alone[0].launches):
        if not isinstance(launch.kernel, AscendCKernel):
            continue
        (one,), (same, *_) = alone[1].ran(index), among[1].ran(index)
        assert one.steps.records.tobytes() == same.steps.records.tobytes(), launch.step
        assert (one.written, one.posted, one.messages) == (same.written, same.posted, same.messages)
        assert (one.messages > 0) == (one.posted > 0)
        awaited, awaited_among = alone[1].awaited(index, 0), among[1].awaited(index, 0)
        assert awaited.launch.tolist() == awaited_among.launch.tolist()
        assert awaited.rank.tolist() == awaited_among.rank.tolist()


def test_waits_are_for_what_all_ranks_send() -> None:
    group = Group(8, 16)
    whole, run = run_of(group, "dispatch", [0])
    steps = [launch.step for launch in whole.launches]
    send, wait = steps.index("send"), steps.index("wait")
    entries, rows = run.awaited(wait, 0), run.awaited(steps.index("arrange"), 0)
    for awaited in (entries, rows):
        assert set(awaited.launch.tolist()) == {send}
        assert awaited.rank.tolist() == list(range(group.ranks))
        assert not awaited.posted.any()
    assert entries.share[1:].max() < 0.5 < rows.share[1:].min()  # counts come first
    assert not run.awaited(send, 0).launch.size


def test_plans_of_ranks_that_pass_nothing_on_differ_in_their_numbers_alone() -> None:
    for group in GROUPS:
        if group.comm_alg == "hierarchy":
            continue
        machine = machine_named(group.product)
        for operator in OPERATORS:
            first, other = (group.plans(machine, rank)[operator] for rank in (0, 5))
            for mine, its in zip(first.launches, other.launches, strict=True):
                if not isinstance(mine.kernel, AscendCKernel):
                    continue
                pairs = zip(mine.kernel.args, mine.values, its.values, strict=True)
                different = {arg.name: (a, b) for arg, a, b in pairs if a != b}
                if (slots := different.pop("slots", None)) is not None:
                    assert region_in("dispatch_slots", slots[0]).on(5).words() == slots[1]
                assert different.keys() <= {"rank", "kept_rank"}


def test_what_the_model_does_not_know_is_an_error() -> None:
    known = traffic(config(8, 64))
    with pytest.raises(UnknownWorkError, match="what the other ranks of the group send"):
        launched("dispatch_send", {}, replace(known, ids=None))
    with pytest.raises(UnknownWorkError, match=r"combine_send on rank 0: .* memory that nobody knows"):
        launched("combine_send", {}, replace(known, tables={}))
    with pytest.raises(UnknownWorkError, match="does not know num_tokens"):
        launched("dispatch_send", {}, replace(known, numbers={}))
    launch = plan(config(8, 64), "combine").launches[0]
    with pytest.raises(UnknownWorkError, match="as a launch of a plan only"):
        counted(work_of(launch, known), A3)


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_entries_begin_behind_the_own_rank(blocks: int) -> None:
    """Of all entries at once, no rank gets the first ones of two ranks."""
    settings, firsts = config(8, 16), []
    for rank in range(8):
        known = traffic(settings, rank=rank)
        whole = plan(settings, "dispatch", None, blocks)
        (index,) = (i for i, launch in enumerate(whole.launches) if launch.step == "send")
        steps = standing_for(whole, [known]).ran(index)[0].steps
        of_entries = (steps.records["did"] == Did.STORE) & (steps.step == ascendc.TRACE_FLAG)
        order = steps.owner[of_entries & (steps.owner >= 0)].tolist()
        assert order == [(rank + 1 + turn) % 8 for turn in range(8)]
        firsts.append(order[0])
    assert sorted(firsts) == list(range(8))


# What is made of a log.

PEER, OWN = token_of(1), 4096 << 48


def steps_of(*blocks: list[tuple[int, int, int]], flags: int = 0) -> Steps:
    """Of what each block does: kind, bytes or number, address."""
    pipe = {Did.LOAD: 2, Did.STORE: 3}
    records = [(did, pipe.get(did, 0), 0, flags, n, at) for block in blocks for did, n, at in block]  # type: ignore[call-overload]
    return Steps(np.array(records, RECORD), np.cumsum([len(block) for block in blocks]), 0, 4)


def test_a_stamp_is_on_its_way_with_its_row() -> None:
    row, stamp = 7168, STAMP_BYTES
    store = Did.STORE
    # Two rows and then their stamps; an entry without a row; the end of a row, in a copy of its own.
    block = [(store, 32, PEER), (store, row, PEER + 512), (store, row, PEER + 9000)]
    block += [(store, stamp, PEER + 8500), (store, stamp, PEER + 17000), (store, row, PEER + 20000)]
    block += [(store, 640, PEER + 20000 + row), (store, row, OWN)]
    steps = steps_of(block, [(store, stamp, PEER + 8500)])
    assert steps.is_trip.tolist() == [True, True, True, False, False, True, False, False, True]
    assert steps.share[:9].tolist() == [0.25, 0.5, 0.75, 0.75, 0.75, 1, 1, 1, 1]
    # Neighbouring rows are not one.
    assert steps_of([(store, row, PEER), (store, row, PEER + row)]).is_trip.all()


def test_a_short_row_is_a_row_and_entries_are_none() -> None:
    short = [(Did.STORE, 64, PEER), (Did.STORE, STAMP_BYTES, PEER + 512)]
    assert steps_of(short).is_trip.tolist() == [True, False]
    assert steps_of([(Did.MARK, ascendc.TRACE_FLAG, 0), *short]).is_trip.tolist() == [False, True, True]


def test_steps_begin_with_marks_or_with_the_first_copy_to_another_rank() -> None:
    marked = steps_of([(Did.LOAD, 64, OWN), (Did.MARK, ascendc.TRACE_FLAG, 0), (Did.STORE, 64, PEER)])
    assert marked.step.tolist() == [ascendc.TRACE_BLOCK, ascendc.TRACE_BLOCK, ascendc.TRACE_FLAG]
    bare = steps_of([(Did.LOAD, 64, OWN), (Did.STORE, 64, PEER), (Did.STORE, 64, OWN)])
    assert bare.step.tolist() == [ascendc.TRACE_BLOCK, ascendc.TRACE_WRITE, ascendc.TRACE_BLOCK]


def test_a_core_takes_what_its_instructions_take() -> None:
    """A load, a barrier of all pipes, which S spends waiting, a store: one after the other."""
    steps = steps_of([(Did.LOAD, 6400, OWN), (Did.BARRIER, 0, 0), (Did.STORE, 6400, OWN)])
    records = steps.records.copy()
    records["pipe"][1] = 4  # all of them
    machine, rate = A3, 64.0
    (found,) = clocked(replace(steps, records=records), machine, rate, 0.0)
    registers, issues = 2 * 20 * machine.scalar_cycles, 2 * machine.issue_cycles
    cycles = registers + issues + 2 * 100
    cycles += machine.load_latency_cycles + machine.store_latency_cycles
    assert found.us == pytest.approx(cycles / machine.clock_ghz / 1e3)
    assert found.steps_us == {ascendc.TRACE_BLOCK: pytest.approx(found.us)}


def test_only_looks_count_of_what_a_look_takes() -> None:
    steps = steps_of([(Did.LOAD, 64, OWN), (Did.LOAD, 32, OWN)], [(Did.LOAD, 96, OWN)])
    records = steps.records.copy()
    records["flags"][1] = LOOKS
    looked = replace(steps, records=records).from_looks_on()
    assert looked.records["amount"].tolist() == [32]
    assert looked.ends.tolist() == [1, 1]
