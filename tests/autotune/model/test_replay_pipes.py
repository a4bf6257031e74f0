"""Replays of kernels by hand, against times by hand. S takes a cycle for each instruction it hands on."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.model.kernel_costs import clock
from autotune.model.kernel_costs.replay.kernel_cost import Replay
from moe_triton.core.errors import ToolchainError
from tests.autotune.model.replay_ir import (
    COPY,
    MACHINE,
    VECTOR,
    add,
    barrier,
    call,
    constant,
    flag,
    load,
    loop,
    pass_on,
    replay,
    store,
    tile,
)

LOAD_LATENCY, STORE_LATENCY, FLAG = 100, 50, 5
CHAIN = [load(), *pass_on("MTE2", "V"), add(), *pass_on("V", "MTE3"), store()]


def check_sums(found: Replay) -> None:
    """The critical path and the time of every pipe leave nothing out."""
    assert sum(found.parts.values()) == pytest.approx(found.cycles)
    for pipe, busy in found.busy.items():
        assert busy + sum(found.stalls[pipe].values()) == pytest.approx(found.cycles), pipe


def test_a_copy_takes_its_issue_its_bytes_and_its_latency() -> None:
    found = replay(tile("x"), load())
    assert found.cycles == 1 + COPY + LOAD_LATENCY
    assert found.parts == {
        "scalar": 1,
        "scalar loads": 0,
        "MTE2": LOAD_LATENCY,
        "memory bandwidth": COPY,
        "vector": 0,
        "MTE3": 0,
        "flags": 0,
    }
    assert found.bound == "memory bandwidth"
    check_sums(found)


def test_copies_follow_each_other_without_their_latency() -> None:
    assert replay(tile("x"), load(), load(), load()).cycles == 1 + 3 * COPY + LOAD_LATENCY


def test_a_barrier_shows_the_latency_of_each_copy() -> None:
    found = replay(tile("x"), load(), barrier("MTE2"), load(), barrier("MTE2"), load())
    assert found.cycles == 1 + 3 * (COPY + LOAD_LATENCY)
    assert found.stalls["MTE2"]["barrier"] == 2 * LOAD_LATENCY
    check_sums(found)


def test_a_barrier_of_another_pipe_changes_nothing() -> None:
    assert replay(tile("x"), load(), barrier("MTE3"), load()).cycles == 1 + 2 * COPY + LOAD_LATENCY


def test_a_barrier_of_all_pipes_makes_the_scalar_pipe_wait() -> None:
    found = replay(tile("x"), load(), barrier("ALL"), store())
    # the barrier is one instruction of S, which ends before the copy does
    assert found.cycles == (1 + COPY + LOAD_LATENCY) + 1 + COPY + STORE_LATENCY
    assert found.stalls["S"]["barrier"] == COPY + LOAD_LATENCY - 1
    check_sums(found)


def test_a_chain_takes_the_sum_of_its_links() -> None:
    found = replay(tile("x"), *CHAIN)
    assert found.cycles == 1 + COPY + LOAD_LATENCY + FLAG + VECTOR + FLAG + COPY + STORE_LATENCY
    assert found.parts["flags"] == 2 * FLAG
    assert found.parts["vector"] == VECTOR
    # V has the flag in front of itself after 3 instructions: the copy, its flag, the wait
    assert found.stalls["V"]["flag of MTE2"] == 1 + COPY + LOAD_LATENCY + FLAG - 3
    check_sums(found)


def test_pipes_without_flags_between_them_do_not_wait() -> None:
    found = replay(tile("x"), load(), add(), store())
    assert found.cycles == 1 + COPY + LOAD_LATENCY
    check_sums(found)


def rows(count: int, buffers: int) -> list[str]:
    """Loads, adds and stores rows, in one buffer or in two taken in turn by parity."""
    step = [
        '%wide = "arith.extsi"(%i) : (i32) -> i64',
        '%event = "arith.remsi"(%wide, %buffers) : (i64, i64) -> i64',
        flag("wait", "MTE3", "MTE2", "event"),
        load(),
        flag("set", "MTE2", "V"),
        flag("wait", "MTE2", "V"),
        add(),
        flag("set", "V", "MTE3"),
        flag("wait", "V", "MTE3"),
        store(),
        flag("set", "MTE3", "MTE2", "event"),
    ]
    return [
        tile("x"),
        constant("buffers", buffers, "i64"),
        *[flag("set", "MTE3", "MTE2", event) for event in range(buffers)],
        *loop("none", "a", *step),
        *[flag("wait", "MTE3", "MTE2", event) for event in range(buffers)],
    ]


def test_one_buffer_puts_all_in_a_row_and_two_overlap_loads_with_stores() -> None:
    one, two = (replay(*rows(40, buffers), arguments={"a": 40}) for buffers in (1, 2))
    chain = COPY + LOAD_LATENCY + FLAG + VECTOR + FLAG + COPY + STORE_LATENCY + FLAG
    assert one.turns == two.turns == 40
    assert one.cycles_per_turn == pytest.approx(chain)
    # the second buffer hides one row's chain behind another's: two rows for each turn of a buffer
    assert two.cycles_per_turn == pytest.approx(chain / 2)
    check_sums(one)
    check_sums(two)


def test_a_third_buffer_is_bound_by_the_copies() -> None:
    found = replay(*rows(60, 3), arguments={"a": 60})
    assert found.cycles_per_turn == pytest.approx(COPY)
    assert found.bound == "memory bandwidth"


def test_the_scalar_pipe_waits_while_a_queue_is_full() -> None:
    small = MACHINE.replaced({"queue_entries": 2})
    kernel_cost = [tile("x"), *[load()] * 5, add()]
    found = replay(*kernel_cost, machine=small)
    # the fifth load is handed on when the third begins, which leaves its place
    assert found.stalls["S"]["full queue of MTE2"] == 2 * COPY + 1 - 4
    assert found.stalls["V"]["empty queue"] == 1 + 2 * COPY + 2
    assert replay(*kernel_cost).stalls["S"].get("full queue of MTE2", 0) == 0
    check_sums(found)


def test_vector_instructions_take_their_latency_and_their_largest_tile() -> None:
    found = replay(tile("x"), add(), call("vdiv_1d_float", "x", "x", "x", "x"), barrier("V"))
    assert found.cycles == 1 + (10 + 16) + (10 + 4 * 16)
    reduced = replay(tile("x"), call("reduce_sum_r_float", "x", "zero", "zero"))
    assert reduced.cycles == 1 + 10 + 2 * 16


def test_a_flag_is_set_when_all_before_it_is_complete() -> None:
    early = replay(tile("x"), *pass_on("MTE2", "V"), load(), add())
    late = replay(tile("x"), load(), *pass_on("MTE2", "V"), add())
    assert early.cycles == 3 + COPY + LOAD_LATENCY
    assert late.cycles == 1 + COPY + LOAD_LATENCY + FLAG + VECTOR


def test_flags_with_the_scalar_pipe() -> None:
    found = replay(tile("x"), store(), *pass_on("MTE3", "S"), load())
    assert found.cycles == 1 + COPY + STORE_LATENCY + FLAG + 1 + COPY + LOAD_LATENCY
    assert found.stalls["S"]["flag of MTE3"] == (1 + COPY + STORE_LATENCY + FLAG) - 3
    check_sums(found)
    assert replay(tile("x"), *pass_on("S", "V"), add()).cycles == 1 + FLAG + VECTOR


def test_flags_of_different_numbers_are_different_flags() -> None:
    with pytest.raises(ToolchainError, match=r"MTE2.*V.*1.* waited for before it is set"):
        replay(tile("x"), flag("set", "MTE2", "V", 0), flag("wait", "MTE2", "V", 1))


def test_a_flag_that_nobody_takes_is_refused() -> None:
    with pytest.raises(ToolchainError, match=r"MTE2.*V.*0 is still set at the end"):
        replay(tile("x"), flag("set", "MTE2", "V"))
    with pytest.raises(ToolchainError, match=r"MTE2.*V.*0.* set again"):
        replay(tile("x"), flag("set", "MTE2", "V"), flag("set", "MTE2", "V"))


@pytest.mark.parametrize("field", ["pipe", "other"])
def test_a_pipe_that_there_is_not_is_refused(field: str) -> None:
    ops = np.zeros(1, clock.OP)
    ops["kind"], ops[field] = clock.Kind.VECTOR, 9
    with pytest.raises(ToolchainError, match="a pipe that there is not"):
        clock.cores(ops, np.array([1]), MACHINE)


def test_spans_are_kept_if_they_are_asked_for() -> None:
    found = replay(tile("x"), *CHAIN, with_spans=True)
    assert [(span.pipe, span.num_bytes) for span in found.spans] == [
        ("MTE2", 4096),
        ("V", 4096),
        ("MTE3", 4096),
    ]
    assert [span.begin for span in found.spans] == [1, 618, 649]
    assert [span.end - span.begin for span in found.spans] == [COPY, VECTOR, COPY]
    assert not replay(tile("x"), *CHAIN).spans
