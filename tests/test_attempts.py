"""Ranks that meet over a store: every order of arrival and of giving up, on every kind of store."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.core.threads import Deadline
from moe_triton.rendezvous.attempts import Attempt, BadStateError, RefusedError, RoundGivenUpError
from moe_triton.rendezvous.notes import Culprits
from moe_triton.rendezvous.stores import Seal, SealedStore
from tests.patience import seconds

NEVER = threading.Event()
LONG_S = seconds(30.0)
StoreMaker = Callable[[], dist.Store]


@pytest.fixture(params=["hash", "file", "tcp", "sealed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreMaker:
    """Makes a rank's view of one store."""
    made = {
        "hash": lambda: dist.HashStore(),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), -1),
        "tcp": lambda: dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False),
        "sealed": lambda: dist.HashStore(),
    }[request.param]()
    prefixed = dist.PrefixStore("ranks", made)
    if request.param == "sealed":
        return lambda: SealedStore(prefixed.clone(), "ranks", Seal(bytes(32)))  # type: ignore[return-value, arg-type]
    return lambda: prefixed.clone()


def meet(
    store: dist.Store, rank: int, num_ranks: int, timeout_s: float, rounds: int = 2
) -> list[list[bytes]]:
    attempt = Attempt(store, rank, num_ranks)
    return [
        attempt.exchange(f"{rank} {number}".encode(), Deadline(timeout_s), NEVER) for number in range(rounds)
    ]


def in_threads(work: Callable[[int], object], num_ranks: int) -> list[object]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return [job.result(2 * LONG_S) for job in [pool.submit(work, rank) for rank in range(num_ranks)]]


def keys_left(store: dist.Store) -> list[str]:
    """What is there besides counters."""
    store = getattr(store, "_store", store)
    assert isinstance(store, dist.PrefixStore)
    names = [name for name in store.underlying_store.list_keys() if "ranks/" in name]
    return [name for name in names if not re.search("ranks/(open|ended|next/[0-9]+)$", name)]


def test_all_get_all_messages_and_leave_nothing(store: StoreMaker) -> None:
    views = [store() for _ in range(4)]
    for _ in range(3):
        for messages in in_threads(lambda rank: meet(views[rank], rank, 4, LONG_S), 4):
            assert messages == [[f"{rank} {number}".encode() for rank in range(4)] for number in range(2)]
    assert keys_left(views[0]) == []


def test_meetings_follow_each_other_without_a_pause(store: StoreMaker) -> None:
    """A fast rank opens the next attempt while a slow one has not yet seen that this one is done."""
    views = [store() for _ in range(3)]

    def work(rank: int) -> list[list[bytes]]:
        met = []
        for number in range(150):
            attempt = Attempt(views[rank], rank, 3)
            message = f"{rank} {number}".encode()
            met.append(attempt.exchange(message, Deadline(LONG_S), NEVER))
        return met

    expected = [[f"{rank} {number}".encode() for rank in range(3)] for number in range(150)]
    assert in_threads(work, 3) == [expected] * 3
    assert keys_left(views[0]) == []


def test_who_is_missing_is_named_and_a_late_rank_finds_the_next_attempt(store: StoreMaker) -> None:
    views = [store() for _ in range(2)]
    for _ in range(3):
        with pytest.raises(RoundGivenUpError) as caught:
            meet(views[0], 0, 2, 0.01)
        assert (caught.value.by, caught.value.culprits.ranks) == (0, (1,))
    # rank 1 comes only now, and finds nobody either; then both try again
    with pytest.raises(RoundGivenUpError) as caught:
        meet(views[1], 1, 2, 0.01)
    assert (caught.value.by, caught.value.culprits.ranks) == (1, (0,))
    first, second = in_threads(lambda rank: meet(views[rank], rank, 2, LONG_S), 2)
    assert first == second
    assert keys_left(views[0]) == []


def test_a_rank_that_timed_out_before_is_not_called_missing(store: StoreMaker) -> None:
    """It is here, and missed others: of three ranks it is the third that does not come."""
    views = [store() for _ in range(3)]
    with pytest.raises(RoundGivenUpError) as caught:
        meet(views[1], 1, 3, 0.01)
    assert (caught.value.by, caught.value.culprits.ranks) == (1, (0, 2))
    waits, give_up = threading.Event(), threading.Event()

    class Commanded(Deadline):
        """Passes when it is told to, and says when it is looked at: rank 0 waits."""

        def left(self) -> float:
            waits.set()
            return -1.0 if give_up.is_set() else super().left()

    def first() -> tuple[int, Culprits]:
        with pytest.raises(RoundGivenUpError) as caught:
            Attempt(views[0], 0, 3).exchange(b"", Commanded(LONG_S), NEVER)
        return caught.value.by, caught.value.culprits

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(first)
        assert waits.wait(LONG_S)
        # Rank 1 comes again, and gives up the attempt that rank 0 is in.
        with pytest.raises(RoundGivenUpError):
            meet(views[1], 1, 3, 0.01)
        give_up.set()
        by, culprits = job.result(2 * LONG_S)
        assert (by, culprits.ranks, culprits.uncertain) == (0, (2,), ())


def test_a_rank_that_has_come_and_given_up_is_not_named_beside_one_that_never_comes() -> None:
    """Ranks come at moments of their own, some of them when all before them have given up."""

    def trial(seed: int) -> None:
        chance = random.Random(seed)
        num_ranks = chance.choice((3, 4))
        view, absent = dist.PrefixStore("ranks", dist.HashStore()), chance.randrange(num_ranks)
        timed_out: set[int] = set()

        def come(rank: int, after_s: float) -> None:
            NEVER.wait(after_s)
            before = set(timed_out)
            with pytest.raises(RoundGivenUpError) as caught:
                Attempt(view.clone(), rank, num_ranks).exchange(b"", Deadline(0.05), NEVER)
            timed_out.add(rank)
            named = caught.value.culprits.ranks
            assert absent in named
            assert not before & set(named), (seed, rank, before, named)

        others = [rank for rank in range(num_ranks) if rank != absent]
        with ThreadPoolExecutor(num_ranks) as pool:
            for job in [pool.submit(come, rank, chance.random() * 0.3) for rank in others]:
                job.result(2 * LONG_S)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(trial, range(40)))


def test_who_is_interrupted_has_left_and_nobody_else_is_named(store: StoreMaker) -> None:
    views = [store() for _ in range(2)]

    def work(rank: int) -> tuple[int, tuple[int, ...]]:
        attempt = Attempt(views[rank], rank, 2)
        attempt.exchange(b"first", Deadline(LONG_S), NEVER)
        stop = threading.Event()
        if rank == 0:
            stop.set()
        else:
            left.wait(LONG_S)
        with pytest.raises(RoundGivenUpError) as caught:
            attempt.exchange(b"second", Deadline(LONG_S), stop)
        left.set()
        return caught.value.by, caught.value.culprits.ranks

    left = threading.Event()
    assert in_threads(work, 2) == [(0, (0,))] * 2


def test_a_later_round_that_is_given_up_ends_for_all_at_once(store: StoreMaker) -> None:
    views = [store() for _ in range(2)]

    def work(rank: int) -> int:
        attempt = Attempt(views[rank], rank, 2)
        attempt.exchange(b"first", Deadline(LONG_S), NEVER)
        if rank == 1:
            given_up.wait(LONG_S)
        try:
            attempt.exchange(b"second", Deadline(0.01 if rank == 0 else LONG_S), NEVER)
        except RoundGivenUpError as error:
            given_up.set()
            return error.by
        return -1

    given_up = threading.Event()
    assert in_threads(work, 2) == [0, 0]
    assert len(in_threads(lambda rank: meet(views[rank], rank, 2, LONG_S), 2)) == 2
    assert keys_left(views[0]) == []


def test_a_cancelled_wait_ends_and_the_others_go_on_waiting_for_the_next_attempt(store: StoreMaker) -> None:
    views = [store() for _ in range(2)]
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(lambda: Attempt(views[0], 0, 2).exchange(b"", Deadline(LONG_S), stop))
        stop.set()
        with pytest.raises(RoundGivenUpError):
            waiting.result(LONG_S)
        again = pool.submit(meet, views[0], 0, 2, LONG_S)
        assert meet(views[1], 1, 2, LONG_S) == again.result(LONG_S)


def test_a_rank_whose_caller_is_gone_sends_nothing(store: StoreMaker) -> None:
    """It was held up before it could join, and its caller may be in another meeting by now."""
    view, gone = store(), threading.Event()
    gone.set()
    view.set("0/0/1", b"the other rank's")
    with pytest.raises(RoundGivenUpError) as caught:
        Attempt(view, 0, 2).exchange(b"stale", Deadline(LONG_S), gone)
    assert (caught.value.by, caught.value.culprits.ranks) == (0, (0,))
    assert not view.check(["0/0/0"])


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), num_ranks=st.integers(2, 4))
def test_ranks_that_try_again_until_they_meet_take_the_same_messages(seed: int, num_ranks: int) -> None:
    """Every rank gives up at moments of its own, and tries again, until all have met twice."""
    made = dist.PrefixStore("ranks", dist.HashStore())

    def work(rank: int) -> list[list[bytes]]:
        chance, met = random.Random(f"{seed} {rank}"), []
        for number in range(2):
            for tries in range(200):
                attempt = Attempt(made, rank, num_ranks)
                # longer and longer, as those who give up at once might never meet
                timeout_s = chance.random() * 0.002 * 1.2**tries
                message = f"{rank} {number} {tries}".encode()
                try:
                    met.append(attempt.exchange(message, Deadline(timeout_s), NEVER))
                    break
                except RoundGivenUpError:
                    continue
        return met

    first, *others = in_threads(work, num_ranks)
    assert isinstance(first, list)
    assert len(first) == 2
    assert all(other == first for other in others)
    for number, messages in enumerate(first):
        assert [message.split()[:2] for message in messages] == [
            [str(rank).encode(), str(number).encode()] for rank in range(num_ranks)
        ]


def refused_by(store: dist.Store, rank: int, num_ranks: int, timeout_s: float = LONG_S) -> tuple[int, str]:
    with pytest.raises(RefusedError) as caught:
        meet(store, rank, num_ranks, timeout_s)
    return caught.value.by, caught.value.reason


def test_a_refusal_ends_the_wait_of_who_is_there_and_meets_who_comes_late(store: StoreMaker) -> None:
    views = [store() for _ in range(3)]
    reason = 'as "it" is,\nwith \udcff and \u00e4'
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refused_by, views[0], 0, 3)
        assert (key := Attempt(views[1], 1, 3).refuse(reason))
        assert waiting.result(LONG_S) == (1, reason)
    assert Attempt(views[1], 1, 3).told(key) == 2
    # Ranks 0 and 1 try again before rank 2 comes: it is told, and then meets them.
    with ThreadPoolExecutor(2) as pool:
        again = [pool.submit(meet, views[rank], rank, 3, LONG_S) for rank in range(2)]
        assert refused_by(views[2], 2, 3) == (1, reason)
        messages = meet(views[2], 2, 3, LONG_S)
        assert [job.result(LONG_S) for job in again] == [messages] * 2
    assert keys_left(views[0]) == []


def test_a_refusal_in_a_later_round_ends_it_for_all(store: StoreMaker) -> None:
    views = [store() for _ in range(3)]

    def work(rank: int) -> str:
        attempt = Attempt(views[rank], rank, 3)
        attempt.exchange(b"first", Deadline(LONG_S), NEVER)
        if rank == 1:
            attempt.refuse("no memory")
            assert attempt.refuse("twice") == ""
            return ""
        with pytest.raises(RefusedError) as caught:
            attempt.exchange(b"second", Deadline(LONG_S), NEVER)
        return f"{caught.value.by} {caught.value.reason}"

    assert in_threads(work, 3) == ["1 no memory", "", "1 no memory"]
    assert len(in_threads(lambda rank: meet(views[rank], rank, 3, LONG_S), 3)) == 3
    assert keys_left(views[0]) == []


def test_who_timed_out_waiting_does_not_refuse_the_next_attempt(store: StoreMaker) -> None:
    views = [store() for _ in range(2)]
    attempt = Attempt(views[0], 0, 2)
    with pytest.raises(RoundGivenUpError):
        attempt.exchange(b"", Deadline(0.0), NEVER)
    assert attempt.refuse("it gave up") == ""
    first, second = in_threads(lambda rank: meet(views[rank], rank, 2, LONG_S), 2)
    assert first == second


@settings(max_examples=30)
@given(seed=st.integers(0, 2**20), num_ranks=st.integers(2, 4))
def test_refusals_and_meetings_keep_their_order_on_every_rank(seed: int, num_ranks: int) -> None:
    """Ranks that never wait for each other after a refusal hear of each, in the order of their calls."""
    made = dist.PrefixStore("ranks", dist.HashStore())
    plan = random.Random(seed)
    refusing = [{r for r in range(num_ranks) if plan.random() < 0.25} for _ in range(8)]

    def work(rank: int) -> list[str]:
        chance, said = random.Random(f"{seed} {rank}"), []
        for number, refusers in enumerate(refusing):
            time.sleep(chance.random() * 0.003)
            if rank in refusers:
                Attempt(made, rank, num_ranks).refuse(f"{number}")
                said.append("refused")
                continue
            try:
                attempt = Attempt(made, rank, num_ranks)
                messages = attempt.exchange(f"{number}".encode(), Deadline(LONG_S), NEVER)
                said.append(b" ".join(messages).decode())
            except RefusedError as error:
                said.append(f"told {error.reason} by one of them: {error.by in refusers}")
        return said

    for rank, said in enumerate(in_threads(work, num_ranks)):
        assert said == [
            "refused"
            if rank in r
            else f"told {number} by one of them: True"
            if r
            else " ".join([f"{number}"] * num_ranks)
            for number, r in enumerate(refusing)
        ]


BAD_STATES = [
    *("garbage", "1 2 3", "5 0", "0 5", "-1 0", "0 a", "\udcff", "9" * 5000),
    *("refused", "refused x", 'refused 7 "no"', "refused 0 {", "refused 0 3", f"refused 0 {'[' * 100_000}"),
]
BAD_NUMBERS = ["x", "-1", "1.5", "9" * 5000, "\udcff"]


@pytest.mark.parametrize("state", BAD_STATES)
def test_a_state_that_no_rank_writes_is_an_error_for_all_who_see_it(state: str) -> None:
    made = dist.PrefixStore("ranks", dist.HashStore())
    made.set("0/1/state", state.encode(errors="surrogateescape"))

    def work(rank: int) -> str:
        with pytest.raises(BadStateError) as caught:
            meet(made, rank, 2, LONG_S)
        return caught.value.key

    assert in_threads(work, 2) == ["0/1/state"] * 2
    assert in_threads(lambda rank: len(meet(made, rank, 2, LONG_S)), 2) == [2, 2]  # as after other errors


@pytest.mark.parametrize("number", BAD_NUMBERS)
@pytest.mark.parametrize("key", ["open", "next/0"])
def test_a_number_that_no_rank_writes_is_an_error(key: str, number: str) -> None:
    made = dist.PrefixStore("ranks", dist.HashStore())
    made.set(key, number.encode(errors="surrogateescape"))
    with pytest.raises(BadStateError) as caught:
        meet(made, 0, 1, LONG_S)
    assert caught.value.key == key


def test_no_rank_goes_through_attempts_that_cannot_have_been() -> None:
    made = dist.PrefixStore("ranks", dist.HashStore())
    made.set("open", "999999999")
    with pytest.raises(BadStateError):
        meet(made, 0, 1, LONG_S)


def test_a_sum_larger_than_ranks_make_is_not_counted_to(store: StoreMaker) -> None:
    view = store()
    view.add("ended", 10**12)
    assert meet(view, 0, 1, LONG_S) == [[b"0 0"], [b"0 1"]]


@pytest.mark.parametrize("key", ["ended", "0/0/left"])
def test_a_sum_that_is_no_number_is_an_error(key: str) -> None:
    made = dist.PrefixStore("ranks", dist.HashStore())
    made.set(key, "x")
    with pytest.raises(BadStateError) as caught:
        meet(made, 0, 1, LONG_S)
    assert caught.value.key == key


def test_a_rank_that_has_seen_more_attempts_than_are_known_opens_its_own(store: StoreMaker) -> None:
    """Somebody has deleted which one is open."""
    views = [store() for _ in range(2)]
    for _ in range(3):
        in_threads(lambda rank: meet(views[rank], rank, 2, LONG_S), 2)
    views[0].delete_key("open")
    first, second = in_threads(lambda rank: meet(views[rank], rank, 2, LONG_S), 2)
    assert first == second
