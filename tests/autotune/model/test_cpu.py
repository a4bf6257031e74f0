"""A CPU as a machine of the model: its kernels, ranks that share cores, and timelines of all its ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from autotune.model.clusters.routing import draw_ids
from autotune.model.constants import Machine, machine_named
from autotune.model.cost import Place, Work, work_of
from autotune.model.kernel_costs.counted.run import standing_for
from autotune.model.timelines import cpu
from autotune.model.traffic import Traffic, traffic_of
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.plan import Plan
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext

HIDDEN, TOPK = 7168, 8
MACHINE = machine_named("cpu").measured(
    {"cores": 2, "launch_stream_us": 0.1, "flag_latency_us": 1.0, "hop_sibling_us": 0.0}, "a test"
)
OWN = [name for name in machine_named("cpu").constants if name.startswith("cpu_")]
SCHEMES = ("fullmesh_v1", "fullmesh_v2", "direct")


def plans(scheme: str, ranks: int, tokens: int, quantize: str | None = None, blocks: int = 1) -> list[Plan]:
    """Dispatch and combine as EPBuffer runs them on rank 0."""
    config = Config(ranks, tokens, HIDDEN, TOPK, 8 * ranks, scheme=scheme)
    made = make_scheme(RankContext(config, 0, blocks, 1_000_000, CAPABILITIES["cpu"]))
    in_place = made.place("results", 2) is not None
    own = made.local_bypass
    dispatch = DispatchVariant(torch.bfloat16, ROW_FORMATS[quantize], local_bypass=own)
    combine = CombineVariant(torch.bfloat16, weights=True, in_place=in_place, local_bypass=own)
    return [made.whole(dispatch, 0), made.whole(combine, 0)]


def traffics(ranks: int, tokens: int, scheme: str = "fullmesh_v1") -> list[Traffic]:
    config = Config(ranks, tokens, HIDDEN, TOPK, 8 * ranks, scheme=scheme)
    ids = draw_ids("uniform", ranks, tokens, TOPK, 8 * ranks, 0)
    return [traffic_of(config, rank, ids, cpu.tiers(ranks, rank)) for rank in range(ranks)]


def work(plan: Plan, step: str, group: Sequence[Traffic]) -> Work:
    index, launch = next((n, launch) for n, launch in enumerate(plan.launches) if launch.step == step)
    return work_of(launch, group[0], Place(standing_for(plan, group), index, 0))


def us_of(done: Work, machine: Machine = MACHINE) -> float:
    return cpu.kernel_cost_of(done.kernel)(done, machine).us


def total_us(plan: Plan, group: Sequence[Traffic], machine: Machine = MACHINE) -> float:
    return max(timeline.end_us for timeline in cpu.timelines(plan, group, machine))


def test_rows_take_their_bytes_over_the_rate_and_a_little_each() -> None:
    """Of a row its stamp or flag, and of an entry: less than two, and what looking into tables takes."""
    (dispatch, combine), group = plans("fullmesh_v1", 2, 16), traffics(2, 16)
    away, own = (int(group[0].sent[rank]) for rank in (1, 0))
    c = MACHINE
    entry, row = c.cpu_entry_ns / 1e3, 2 * HIDDEN / c.cpu_send_gb_per_s / 1e3
    send = c.cpu_start_us + (away + 16) * entry + away * row
    assert send < us_of(work(dispatch, "send", group)) < send + (away + 16) * entry
    come = int(group[0].received[1])
    arrange = 2 * (come + own) * 2 * HIDDEN / c.cpu_gather_gb_per_s / 1e3
    assert us_of(work(dispatch, "arrange", group)) == pytest.approx(arrange)
    back = c.cpu_start_us + come * (entry + row)
    assert back < us_of(work(combine, "send", group)) < back + 2 * (come + own) * entry
    assert us_of(work(combine, "wait", group)) < c.cpu_start_us + 16 * TOPK * entry
    assert us_of(work(dispatch, "route", group)) == pytest.approx(16 * TOPK * c.cpu_id_ns / 1e3)


def test_kernels_that_know_their_bytes_take_them_over_their_rate() -> None:
    (dispatch, combine), group = plans("fullmesh_v1", 2, 16, "int8"), traffics(2, 16)
    pack, added = work(dispatch, "route + pack", group), work(combine, "sum", group)
    ids = 16 * TOPK * MACHINE.cpu_id_ns / 1e3
    packed = 16 * (3 * HIDDEN + 4) / MACHINE.cpu_pack_gb_per_s / 1e3
    assert us_of(pack) == pytest.approx(ids + packed, rel=0.02)
    read = 16 * 2 * HIDDEN * (TOPK + 1)
    assert us_of(added) == pytest.approx(read / MACHINE.cpu_sum_gb_per_s / 1e3, rel=0.02)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_every_kernel_of_a_plan_has_a_kernel_cost_and_more_tokens_take_longer(
    scheme: str, quantize: str | None
) -> None:
    taken = []
    for tokens in (1, 16, 64, 128):
        group = traffics(4, tokens, scheme)
        taken.append([total_us(plan, group) for plan in plans(scheme, 4, tokens, quantize)])
    assert (np.diff(taken, axis=0) > 0).all()


def test_more_blocks_take_less() -> None:
    group = traffics(2, 64)
    one, two = (plans("fullmesh_v1", 2, 64, "int8", blocks) for blocks in (1, 2))
    for slow, fast in zip(one, two, strict=True):
        assert total_us(slow, group) / 2 < total_us(fast, group) < total_us(slow, group)


def test_every_constant_of_a_cpu_counts() -> None:
    def total(machine: Machine) -> float:
        return sum(total_us(plan, group, machine) for plan in plans("fullmesh_v1", 4, 16, "int8"))

    group = traffics(4, 16)
    plain = total(MACHINE)
    for name in [*OWN, "launch_stream_us", "flag_latency_us"]:
        changed = total(MACHINE.replaced({name: 2 * getattr(MACHINE, name)}))
        assert changed < plain if name in cpu.RATES else changed > plain, name


def test_ranks_with_a_core_each_have_all_of_it_and_others_take_turns() -> None:
    assert cpu.shared(MACHINE, 1) == cpu.shared(MACHINE, 2)
    alone, shared = cpu.shared(MACHINE, 2), cpu.shared(MACHINE, 8)
    for name in MACHINE.constants:
        factor = 4 if name in cpu.TIMES else 1 / 4 if name in cpu.RATES else 1
        assert getattr(shared, name) == pytest.approx(factor * getattr(alone, name)), name
    quiet = MACHINE.replaced({"flag_latency_us": 0})
    group = traffics(8, 16)
    few = quiet.replaced({"cores": 4})
    for plan in plans("direct", 8, 16):
        assert total_us(plan, group, quiet) == pytest.approx(2 * total_us(plan, group, few))


def test_a_late_rank_is_waited_for_and_only_where_something_is_awaited() -> None:
    group, late_us = traffics(2, 16), 5000.0
    dispatch, _ = plans("fullmesh_v1", 2, 16)
    on_time, late = (cpu.timelines(dispatch, group, MACHINE, begins) for begins in (None, [0.0, late_us]))
    steps = [span.launch.step for span in late[0].spans]
    send, wait = steps.index("send"), steps.index("wait")
    for before, after in zip(on_time[0].spans[:wait], late[0].spans[:wait], strict=True):
        assert (before.begin_us, before.end_us) == (after.begin_us, after.end_us)
    sender, (counts, rows) = late[1].spans[send], (late[0].spans[steps.index(s)] for s in ("wait", "rows"))
    assert sender.begin_us > late_us
    assert sender.begin_us < counts.end_us - MACHINE.flag_latency_us < sender.end_us
    assert counts.waited_us > late_us / 2
    assert rows.end_us == pytest.approx(sender.end_us + MACHINE.flag_latency_us)


def test_a_triton_kernel_that_nobody_has_described_is_an_error_that_names_it() -> None:
    dispatch, _ = plans("fullmesh_v1", 2, 16)
    kernel = next(launch.kernel for launch in dispatch.launches if launch.step == "arrange")
    with pytest.raises(LookupError, match="fold"):
        cpu.kernel_cost_of(dataclasses.replace(kernel, name="fold"))


def test_an_ascendc_kernel_has_a_time_as_a_launch_of_a_plan_only() -> None:
    (dispatch, _), group = plans("fullmesh_v1", 2, 16), traffics(2, 16)
    launch = next(launch for launch in dispatch.launches if launch.step == "send")
    with pytest.raises(LookupError, match=r"dispatch_send .* launch of a plan only"):
        us_of(work_of(launch, group[0]))


def test_a_kernel_that_does_not_know_its_bytes_is_an_error_that_names_it() -> None:
    done = work(plans("fullmesh_v1", 2, 16, "int8")[0], "route + pack", traffics(2, 16))
    silent = dataclasses.replace(done, kernel=dataclasses.replace(done.kernel, bytes_moved=None))
    with pytest.raises(LookupError, match="route_pack does not know"):
        us_of(silent)
