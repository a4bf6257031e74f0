"""What becomes of calls in rounds of which some rank may not have heard what a masked one has said of them.

How many rounds a call has follows from what all ranks say of it. A rank that is lost while it says so may
have been heard by some and not by others. So who masks a rank at that time goes by what others have heard,
which they leave in the store; and where nobody has, by what the first of them names there.

    calls/<number>/<rank>    what a rank goes by that has heard all of them; "?" of one that has not
    calls/<number>/settled   what all of those go by

The number is that of the dispatch that is the call's first round.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple, TypeVar

from moe_triton.core.errors import ArgumentError, BufferStateError, CommunicationTimeoutError
from moe_triton.core.threads import in_thread
from moe_triton.rendezvous.stores import Store, below, read_key
from moe_triton.runtime.masks import Masks
from moe_triton.runtime.on_lost import KERNELS_WAIT, KERNELS_WAIT_MORE_S, OnLostRanks

Answer = TypeVar("Answer")

NOT_HEARD, SETTLED = "?", "settled"
LOOKED_AT_S = 0.005
# A call that native code has decided may end without having seen the mask.
ENDS_S = 0.05
# Dispatches behind the one in which a rank was masked here. It may have begun the one after that, and others
# may mask it two dispatches later.
MAY_DIFFER, MAY_BE_ASKED = 1, 3


class Verdict(NamedTuple):
    """What becomes of a call.

    Attributes:
        rounds: that it has.
        refusal: argument, rule and remedy of the error that all ranks raise; None where it delivers.
        masked: ranks that are without.
    """

    rounds: int
    refusal: tuple[str, str, str] | None
    masked: tuple[int, ...] = ()

    @property
    def rounds_that_run(self) -> int:
        """One where it is refused: what was sent is received."""
        return self.rounds if self.refusal is None else 1


class SettledCalls:
    """One rank's calls in rounds.

    Args:
        open_store: returns the store of these ranks and this buffer.
        rank: this one.
        num_ranks: of the group.
        masks: of its communicator.
        timeout_s: after which a rank is missed.
        ended: returns how many dispatches have ended, and whether more of the last one's call are to come
            that some rank has told of.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        rank: int,
        num_ranks: int,
        masks: Masks,
        timeout_s: float,
        ended: Callable[[], tuple[int, bool]],
    ) -> None:
        self._open_store, self._rank, self._num_ranks = open_store, rank, num_ranks
        self._ended = ended
        self._masks, self._timeout_s = masks, timeout_s
        self._lock = threading.Lock()
        self._latest: tuple[int, Verdict] | None = None

    def note(self, *_: object) -> None:
        """A rank was masked: says what this one goes by in its latest call. From any thread; never waits."""
        in_thread(self._say_latest, "a call in rounds")

    def _say_latest(self) -> None:
        for _ in range(2):
            ended, has_more = self._ended()  # first: what is settled is so before its first round ends
            with self._lock:
                latest = self._latest
            if latest is not None:
                self._say(*latest)
            first = 0 if latest is None else latest[0] + latest[1].rounds_that_run
            if ended > first and not has_more:  # native code has run it, in one round
                self._say(ended - 1, Verdict(1, None))
            time.sleep(ENDS_S)

    def settle(self, number: int, find: Callable[[], Verdict], on_lost: OnLostRanks | None) -> Verdict:
        """What becomes of a call, once every rank has been heard that is not masked.

        Args:
            number: of its first round.
            find: finds it from what they have said.
            on_lost: what masks ranks that do not come, where anything does.

        Raises:
            BufferStateError: the others go on without this rank.
            CommunicationTimeoutError: ranks cannot agree.
        """
        verdict = find()
        with self._lock:  # either `note` finds it, or this finds the mask
            may_differ = self._masks.since_dispatch(number - MAY_DIFFER)
            if not may_differ:
                self._latest = number, verdict
        if may_differ:
            verdict = self._agree(number, find, on_lost)
            with self._lock:
                self._latest = number, verdict
            return verdict
        if self._masks.since_dispatch(number - MAY_BE_ASKED):
            self._say(number, verdict)
        return verdict

    def _of(self, number: int) -> Store:
        return below(self._open_store(), f"calls/{number}")

    def _say(self, number: int, verdict: Verdict) -> None:
        self._of(number).set(str(self._rank), json.dumps(verdict))

    def _agree(self, number: int, find: Callable[[], Verdict], on_lost: OnLostRanks | None) -> Verdict:
        began = time.monotonic()
        deadline = began + KERNELS_WAIT * self._timeout_s + KERNELS_WAIT_MORE_S
        missed_at, said = began + self._timeout_s, dict[int, str]()

        def asked(call: Callable[[], Answer]) -> Answer:
            """What the store answers; one whose host is gone never does."""
            left = deadline - time.monotonic()
            if left < 0:
                raise TimeoutError("some have said nothing")
            return in_thread(call, "a call in rounds").result(left)

        try:
            store = asked(lambda: self._begin(number))
            while not (text := asked(lambda: read_key(store, SETTLED))):
                masked = self._masks.masked
                others = [rank for rank in range(self._num_ranks) if rank not in masked]
                said = asked(partial(_said_by, store, others))
                heard = next((each for each in said.values() if each not in ("", NOT_HEARD)), "")
                if heard or all(said.values()):
                    if on_lost is not None and not heard:  # whom sets have that others name first
                        asked(partial(on_lost.agree, masked))
                        if masked != self._masks.masked:
                            continue
                    mine = heard or json.dumps(find()._replace(masked=tuple(sorted(masked))))
                    asked(partial(store.compare_set, SETTLED, "", mine))
                    continue
                if on_lost is not None and time.monotonic() > missed_at:
                    on_lost.miss([rank for rank in others if not said[rank]])
                    missed_at += self._timeout_s
                time.sleep(LOOKED_AT_S)
        except (BufferStateError, ArgumentError):
            raise
        except Exception as error:
            missing = [rank for rank, each in said.items() if not each and rank not in self._masks.masked]
            why = (
                f"ranks cannot agree on how many rounds the call has, in which some were masked ({error!r})."
            )
            raise CommunicationTimeoutError("dispatch", number, 0, missing, why) from error
        return self._taken(text)

    def _begin(self, number: int) -> Store:
        store = self._of(number)
        store.set(str(self._rank), NOT_HEARD)
        return store

    def _taken(self, text: str) -> Verdict:
        """What was settled. Nothing from a peer is trusted."""
        try:
            rounds, refusal, masked = json.loads(text)
            if refusal is not None:
                name, rule, remedy = map(str, refusal)
                refusal = name, rule, remedy
            settled = Verdict(max(1, int(rounds)), refusal, tuple(map(int, masked)))
        except (ValueError, TypeError, RecursionError) as error:
            raise BufferStateError(
                f"what ranks have settled of a call is no text of theirs: {text!r}"
            ) from error
        return settled


def _said_by(store: Store, ranks: Collection[int]) -> dict[int, str]:
    return {rank: read_key(store, str(rank)) for rank in ranks}
