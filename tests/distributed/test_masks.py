"""Masked ranks: nothing is sent to them or awaited from them, and all others go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_triton import (
    ArgumentError,
    BufferStateError,
    ConfigMismatchError,
    EPBuffer,
    RankMaskedError,
    Tuning,
)
from moe_triton.core.threads import Deadline
from moe_triton.processes import RankFailedError, run_ranks
from moe_triton.runtime import on_lost
from moe_triton.schemes.rank_context import Operator
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.cut_short import CutShort, rounds_with_a_death
from tests.distributed.masked import Masked, rounds_of_each_kind, rounds_with_masks
from tests.distributed.workers import expected_round, make_buffer, one_round
from tests.patience import UNTIL_MASKED_S, seconds

SCHEMES = "fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_others_go_on(scheme: str, in_between: bool) -> None:
    case = small_case(4, scheme, rounds=5, weights=True)
    of = Masked(case, gone=(2,), before=1, in_between=in_between)
    assert run_ranks(rounds_with_masks, 4, (of, {})) == [[]] * 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_rank_goes_on_alone(scheme: str) -> None:
    case = replace(small_case(3, scheme, "int8"), rounds=4, weights=True, num_blocks=2)
    of = Masked(case, gone=(0, 2), before=3)
    assert run_ranks(rounds_with_masks, 3, (of, {})) == [[]] * 3


def between_servers(scheme: str, ranks_per_server: int, num_ranks: int = 4) -> Case:
    case = small_case(num_ranks, scheme, rounds=4, weights=True)
    return replace(case, config=replace(case.config, ranks_per_server=ranks_per_server).normalized())


@pytest.mark.parametrize(
    ("scheme", "gone", "in_between"),
    [
        ("fullmesh_v1", (2,), True),
        ("fullmesh", (1,), False),
        ("hierarchy", (2,), False),
        ("hierarchy", (2,), True),
        ("hierarchy", (0, 3), False),
    ],
)
def test_others_go_on_between_servers(scheme: str, gone: tuple[int, ...], in_between: bool) -> None:
    of = Masked(between_servers(scheme, 2), gone, in_between=in_between)
    assert run_ranks(rounds_with_masks, 4, (of, {})) == [[]] * 4


@pytest.mark.parametrize(
    ("scheme", "tokens"), [*((scheme, 4) for scheme in SCHEMES), ("fullmesh_v1", 9), ("fullmesh", 9)]
)
def test_calls_of_each_kind(scheme: str, tokens: int) -> None:
    case = small_case(4, scheme)
    assert run_ranks(rounds_of_each_kind, 4, (case, (1,), tokens)) == [[]] * 4


@pytest.mark.parametrize(
    ("scheme", "in_between", "before"),
    [
        # The first round runs in Python, later ones in native code.
        ("fullmesh_v1", False, 1),
        ("fullmesh_v1", True, 3),
        ("fullmesh_v2", False, 3),
        ("fullmesh_v2", True, 1),
        ("fullmesh", False, 3),
        ("fullmesh", True, 3),
        ("direct", False, 1),
        ("direct", True, 3),
    ],
)
def test_a_wait_goes_on_without_who_is_masked(scheme: str, in_between: bool, before: int) -> None:
    case = small_case(4, scheme, rounds=before + 3, weights=True, num_blocks=2)
    of = Masked(case, (2,), before, in_between, while_waiting=0.2)
    assert run_ranks(rounds_with_masks, 4, (of, {})) == [[]] * 4


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("gone", "in_between", "num_blocks"),
    [
        ((2,), False, 2),
        ((3,), True, 1),
        *(
            pytest.param(*each, marks=LONG)
            for each in (((2,), True, 1), ((3,), False, 2), ((1, 2), False, 1), ((0, 3), True, 2))
        ),
    ],
)
def test_a_wait_between_servers_goes_on(gone: tuple[int, ...], in_between: bool, num_blocks: int) -> None:
    case = replace(between_servers("hierarchy", 2), rounds=4, num_blocks=num_blocks)
    of = Masked(case, gone, 1, in_between, while_waiting=0.2)
    assert run_ranks(rounds_with_masks, 4, (of, {})) == [[]] * 4


def masked_while_a_call_begins(rank: int, num_ranks: int, of: Masked) -> list[str]:
    """What differs in a round that begins while another thread masks a rank, which finds no call yet."""
    case, wrong = of.case, []
    with make_buffer(case) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        dist.barrier()
        if rank not in of.gone:
            communicator, has_begun = buffer._communicator, threading.Event()
            update = communicator.masks.update

            def update_late(gone: int, masked: bool) -> None:
                has_begun.set()
                while not communicator.is_busy:
                    time.sleep(0.001)
                update(gone, masked)

            communicator.masks.update = update_late  # type: ignore[method-assign, assignment]
            thread = threading.Thread(target=buffer.update_mask, args=(of.gone[0], True))
            thread.start()
            assert has_begun.wait(seconds(20.0))
            for number in range(1, case.rounds):
                output, sums = one_round(buffer, case, inputs_of(case, rank, number), None)
                received, expected = of.expected(number)
                texts = wrong_received(output, received[rank])
                wrong += [text for text in texts if "expand_idx" not in text]
                wrong += [] if torch.equal(sums, expected[rank]) else [f"round {number}: sums"]
            thread.join(seconds(20.0))
            assert not thread.is_alive()
        dist.barrier()
    return wrong


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "direct"])
def test_a_thread_that_masks_keeps_no_call_out(scheme: str) -> None:
    of = Masked(small_case(3, scheme, rounds=4, weights=True), (2,), 1)
    assert run_ranks(masked_while_a_call_begins, 3, (of,)) == [[]] * 3


@pytest.mark.parametrize(
    ("scheme", "in_between"),
    [
        ("fullmesh_v1", True),
        ("fullmesh_v2", False),
        ("fullmesh", True),
        ("hierarchy", False),
        ("direct", False),
    ],
)
def test_who_does_not_come_is_masked(scheme: str, in_between: bool) -> None:
    case = replace(between_servers(scheme, 2 if scheme == "hierarchy" else 4), rounds=5)
    of = Masked(case, (2,), 2, in_between, by_itself=True)
    options = {"on_lost": "mask", "timeout_s": UNTIL_MASKED_S}
    assert run_ranks(rounds_with_masks, 4, (of, options)) == [[]] * 4


def rounds_once_one_has_died(rank: int, num_ranks: int, of: Masked) -> list[str]:
    """What differs where a rank has died between two rounds, and is masked by hand when that is known."""
    case, wrong, (gone,) = of.case, [], of.gone
    with make_buffer(case) as buffer:
        for number in range(case.rounds):
            if number == of.before:
                if rank == gone:
                    os.kill(os.getpid(), signal.SIGKILL)
                while buffer.health()[gone].state != "dead":
                    time.sleep(0.001)
                buffer.update_mask(gone, True)
            output, sums = one_round(buffer, case, inputs_of(case, rank, number), None)
            received, expected = of.expected(number)
            wrong += wrong_received(output, received[rank])
            wrong += [] if torch.equal(sums, expected[rank]) else [f"round {number}: sums"]
    return wrong


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_has_died_can_be_masked_by_hand(scheme: str) -> None:
    """Calls are refused while a rank is dead, and not any more once it is masked."""
    of = Masked(small_case(3, scheme, rounds=5, weights=True), (1,), before=3)
    results = run_ranks(rounds_once_one_has_died, 3, (of,), timeout_s=seconds(60.0), allow_failures=True)
    assert isinstance(results.pop(1), RankFailedError)
    assert results == [[]] * 2


def test_a_store_has_time_to_answer_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on while a machine is paused, and the store's host is paused with it."""
    asking, looks = futures.Future[None](), 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        if looks == 4:
            asking.set_result(None)
        return 0.0 if looks < 3 else 60.0

    monkeypatch.setattr(on_lost, "Deadline", partial(Deadline, clock=clock))
    on_lost._answer_of(asking, 1.0)
    assert looks == 4


def bad_masks(rank: int, num_ranks: int) -> list[str]:
    """What each call that cannot be says; masks are left as they were."""
    case = small_case(num_ranks)
    with make_buffer(case) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        other = 1 - rank

        def said(call: Callable[[], object]) -> str:
            with pytest.raises((ArgumentError, BufferStateError)) as caught:
                call()
            return str(caught.value)

        texts = [
            said(lambda: buffer.update_mask(rank, True)),
            said(lambda: buffer.update_mask(2, True)),
            said(lambda: buffer.update_mask("one", True)),  # type: ignore[arg-type]
            said(lambda: buffer.update_mask(other, 1)),  # type: ignore[arg-type]
            said(lambda: buffer.query_mask(torch.zeros(3, dtype=torch.int32))),
        ]
        assert buffer.query_fault()[0] is False
        buffer.update_mask(np.int64(other), True)  # type: ignore[arg-type]
        has_fault, masked = buffer.query_fault()
        assert has_fault
        assert masked.tolist() == [int(each == other) for each in range(2)]
        out = torch.empty(2, dtype=torch.int32)
        assert buffer.query_mask(out) is out
        buffer.update_mask(other, False)  # no call was missed
        assert buffer.query_fault()[0] is True
        dist.barrier()
        _, sums = one_round(buffer, case, inputs_of(case, rank, 1), None)
        assert torch.equal(sums, expected_round(case, 1)[1][rank])
        dist.barrier()
        if rank == 0:
            buffer.update_mask(1, True)
            one_round(buffer, case, inputs_of(case, 0, 2), None)
            texts.append(said(lambda: buffer.update_mask(1, False)))
            texts.append(said(buffer.clean_mask))
            assert buffer.query_mask().tolist() == [0, 1]
        dist.barrier()
    return texts


def test_masks_that_cannot_be() -> None:
    first, second = run_ranks(bad_masks, 2)
    for text, part in zip(
        first,
        (
            "rank is 0, but it is this rank itself",
            "rank is 2, but it must be 0 to 1",
            "rank is",
            "masked is 1",
            "out",
            "has missed rounds",
            "has missed rounds",
        ),
        strict=True,
    ):
        assert part in text
    assert len(second) == 5


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"on_lost": "never"}, "on_lost"),
        ({"on_lost": "mask", "tuning": Tuning(receiving_blocks=1), "num_blocks": 2}, "receiving_blocks"),
    ],
)
def test_what_cannot_go_on_is_refused(options: dict[str, Any], rule: str) -> None:
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 4, "relaxed": True}
    with pytest.raises(ArgumentError, match=rule):
        EPBuffer(**{**sizes, "comm_alg": "fullmesh_v1", **options})


def masked_by_hand_alive(rank: int, num_ranks: int) -> list[int]:
    """Who is masked in the end, where others have masked a rank that knows nothing of it."""
    case, last = small_case(num_ranks), num_ranks - 1
    with make_buffer(case, on_lost="mask", timeout_s=UNTIL_MASKED_S) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        if rank == last:
            with pytest.raises(RankMaskedError):
                one_round(buffer, case, inputs_of(case, rank, 1), None)
        else:
            buffer.update_mask(last, True)
            for number in range(1, 5):
                one_round(buffer, case, inputs_of(case, rank, number), None)
        dist.barrier()
        masked: list[int] = buffer.query_mask().tolist()
    return masked


def test_who_is_masked_by_hand_masks_nobody() -> None:
    assert run_ranks(masked_by_hand_alive, 3) == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]


def unmasked_before_a_call(rank: int, num_ranks: int) -> list[str]:
    """The others have not heard of a mask that no call has gone by."""
    case = small_case(num_ranks)
    with make_buffer(case, on_lost="mask") as buffer:
        if rank == 0:
            buffer.update_mask(1, True)
            buffer.update_mask(1, False)
        return compare_one_round(buffer, case, rank)


def compare_one_round(buffer: EPBuffer, case: Case, rank: int) -> list[str]:
    received, sums = expected_round(case, 0)
    output, combined = one_round(buffer, case, inputs_of(case, rank, 0), None)
    return [*wrong_received(output, received[rank]), *([] if torch.equal(combined, sums[rank]) else ["sums"])]


def test_a_mask_that_no_call_has_gone_by_can_be_taken_back() -> None:
    assert run_ranks(unmasked_before_a_call, 2) == [[], []]


def other_on_lost(rank: int, num_ranks: int) -> str:
    with pytest.raises(ConfigMismatchError) as caught:
        make_buffer(small_case(num_ranks), on_lost=("raise", "mask")[rank])
    return str(caught.value)


def test_ranks_have_one_way() -> None:
    for text in run_ranks(other_on_lost, 2):
        assert "on_lost" in text


DIES_AFTER = {
    "dispatch": ["route", "outer table", "tokens", "send", "tokens", "send", "relay", "wait"],
    "combine": [
        *("return", "flag returned", "wait for returned", "lost"),
        *("server sum", "place", "send") * 2,
        *("return", "flag returned", "wait for returned", "lost", "server sum", "place", "send"),
    ],
}
"""What a rank has done when it dies, phase by phase."""
DEATHS = [(operator, phases) for operator, steps in DIES_AFTER.items() for phases in range(1, len(steps) + 1)]
QUICK_DEATHS = ("dispatch", 6), ("combine", 2)


@pytest.mark.parametrize("victim", [2, 3])
@pytest.mark.parametrize(
    ("operator", "phases"),
    [pytest.param(*each, marks=[] if each in QUICK_DEATHS else [LONG]) for each in DEATHS],
)
def test_a_relay_dies_in_the_middle(operator: Operator, phases: int, victim: int) -> None:
    """Some of its results are in sums by then, and some are not: marks say which."""
    case = replace(between_servers("hierarchy", 2), tokens=(40, 37, 40, 39), num_blocks=2)
    case = replace(case, config=replace(case.config, num_max_tokens_per_rank=40, num_topk=3))
    of = CutShort(case, victim, operator, phases, {"tuning": Tuning(return_pieces=2)})
    results = run_ranks(rounds_with_a_death, 4, (of,), timeout_s=seconds(60.0), allow_failures=True)
    assert isinstance(results.pop(victim), RankFailedError)
    assert [wrong for wrong, *_ in results] == [[]] * 3
    assert [ran for _, _, ran in results] == [DIES_AFTER[operator][:phases]] * 3
    # Of server 1's results those of the other rank come by its own rail, whatever becomes of the victim.
    for rank, (_, lost, _) in zip((rank for rank in range(4) if rank != victim), results, strict=True):
        cut_off = {victim} | ({2, 3} if rank % 2 == victim % 2 else set())
        assert all(
            not any(n for owner, n in enumerate(of_round) if owner not in cut_off) for of_round in lost
        )
        if (operator, phases) == ("combine", 2) and rank in (5 - victim, victim - 2):
            assert lost[0][victim]  # its neighbour's own tokens, and those that it sums itself
        if operator == "combine" and phases >= 13 and rank == victim ^ 3:
            assert not lost[0][victim]  # its neighbour has begun the next piece, and so decided that one
        assert all(of_round[victim] for of_round in lost[1:])


@pytest.mark.parametrize(
    ("scheme", "victim"),
    [("fullmesh_v1", 0), ("fullmesh_v2", 2), ("fullmesh", 0), ("hierarchy", 0), ("direct", 0)],
)
def test_who_has_died_is_masked_at_once(scheme: str, victim: int) -> None:
    """Also the host of the group's store, without which nobody can agree on who is missing."""
    case = replace(between_servers(scheme, 2 if scheme == "hierarchy" else 4), rounds=6)
    of = Masked(case, (victim,), 2, by_itself=True, dies=True)
    options = {"on_lost": "mask", "timeout_s": seconds(300.0)}
    results = run_ranks(rounds_with_masks, 4, (of, options), timeout_s=seconds(60.0), allow_failures=True)
    assert isinstance(results.pop(victim), RankFailedError)
    assert results == [[]] * 3
