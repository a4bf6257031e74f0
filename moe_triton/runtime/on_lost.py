"""What a buffer does about ranks that do not come, where it goes on without them (``on_lost="mask"``).

A rank that is missed when a wait has lasted for the time-out is named in the next of the numbered sets that
all ranks agree on (`moe_triton.rendezvous.masked_sets`), unless it is stuck behind others, by its notes, or
has been until less than a time-out ago. Everybody masks who is in the latest set, and who finds itself there
raises.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import Literal

from moe_triton.backends.waits import Waiting, Waits
from moe_triton.core.errors import BufferStateError, CommunicationTimeoutError, RankMaskedError
from moe_triton.core.logs import log_of
from moe_triton.core.threads import Deadline, in_thread
from moe_triton.rendezvous.masked_sets import MaskedSets
from moe_triton.rendezvous.notes import Culprits, Notes
from moe_triton.runtime.diagnosis import awaited_ranks, group_of
from moe_triton.runtime.masks import Masks
from moe_triton.schemes.rank_context import RankContext

OnLost = Literal["raise", "mask"]
ON_LOST: tuple[OnLost, ...] = ("raise", "mask")

KERNELS_WAIT = 2.0
"""Time-outs after which kernels give up by themselves, and a second: who waits behind a third has two."""
KERNELS_WAIT_MORE_S = 1.0
STORE_ANSWERS_S = 1.0
# And for so long in any case, where it owes an older answer: its host has most likely stopped.
LEAST_ANSWER_S = 0.2
# A process that misses others has run for this share of the time-out at least (`Deadline`); before, it may
# have been stopped, and the store's host with it.
_HAS_RUN = 0.75
# How often its answer is looked for.
_LONGEST_LOOK_S = 0.05
FOLLOWED_S = 0.2
"""How often sets are looked at that others have named."""


def half_rung(masked: Collection[int]) -> BufferStateError:
    """Of a call in rounds of which only ranks have told that are lost, this one, and maybe nobody else."""
    return BufferStateError(
        f"rank(s) {sorted(masked)} were lost, of which one had more tokens than a round takes and told this "
        f"rank so, but may not have told all others, which then go on without further rounds. Construct a "
        f"new buffer on every rank, and pass num_max_tokens_per_rank, so that nobody has to be told."
    )


def unsettled(ranks: Sequence[int], operator: str, zone: int, why: str) -> CommunicationTimeoutError:
    """Of a call that waits for ranks of which nobody can agree whether they are lost.

    Args:
        ranks: that it waits for.
        operator: of it.
        zone: of it.
        why: kind of what the store has said.
    """
    answers = f"the group's store does not answer ({why})"
    said = f"ranks cannot agree on who is missing, as {answers}. "
    found = Culprits.unknown(ranks, answers, said)
    return CommunicationTimeoutError(
        operator, 0, zone, ranks, found.said, uncertain_ranks=found.uncertain, uncertainty=found.why
    )


class OnLostRanks:
    """Masks ranks that do not come.

    Args:
        context: of this rank.
        masks: of its communicator.
        sets: that the ranks agree on.
        notes: of this rank's waits and its peers'.
        waits: of the communicator.
        timeout_s: after which a rank is missed.
        counts: runs of each operator that have ended.
        clock: seconds.
        group: its short name in lines.

    Attributes:
        on_followed: called each time that it was looked what others have named.
    """

    on_followed: Callable[[], None] | None = None

    def __init__(
        self,
        context: RankContext,
        masks: Masks,
        sets: MaskedSets,
        notes: Notes,
        waits: Waits,
        timeout_s: float,
        counts: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
        group: str = "",
    ) -> None:
        self._log = log_of("masks", rank=context.rank, num_ranks=context.config.num_ranks, group=group)
        self._context, self._masks, self._sets = context, masks, sets
        self._notes, self._waits, self._timeout_s = notes, waits, timeout_s
        self._counts = counts
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._reasons: dict[int, str] = {}
        self._clock, self._masked_at = clock, dict[int, float]()
        self._named: set[int] = set()
        self._hearing: futures.Future[None] | None = None
        self._asked_at: float | None = None  # since when `_follow` has no answer
        self._following = in_thread(self._follow, "masked sets")

    def close(self) -> None:
        """Follows nobody any more."""
        self._ending.set()

    def missing(self, waiting: Waiting) -> None:
        """A wait has lasted for the time-out, or longer: masks whom it is for, or those who hold them up.

        Called on the thread that is in the call.
        """
        self.missing_at(self._context, waiting)

    def missing_at(self, context: RankContext, waiting: Waiting) -> None:
        """The same of a wait in launches of another rank.

        Args:
            context: that they run in.
            waiting: the wait.
        """
        ranks = awaited_ranks(context, waiting)
        if waiting.plan.phase == "announce" and self._masks.since_dispatch(self._counts["dispatch"] - 2):
            # Who was not rung never joins, and is not missed.
            self._waits.stop(lambda: half_rung(self._masks.masked))
            return
        if not ranks or group_of(context, waiting.launch):
            return
        ranks = [rank for rank in ranks if rank not in self._masks.masked and rank != self._context.rank]
        operator, zone = waiting.plan.operator, waiting.plan.zone
        try:
            self._settle(ranks)
        except Exception as error:
            self._waits.stop(partial(unsettled, ranks, operator, zone, type(error).__name__))

    def missing_ranks(self, ranks: Sequence[int], operator: str, zone: int) -> None:
        """Masks ranks that have not come or answered in time, or those who hold them up.

        Args:
            ranks: that were waited for.
            operator: in whose call.
            zone: of it.

        Raises:
            CommunicationTimeoutError: ranks cannot agree on it.
        """
        self.ask(lambda: self._decide(ranks), ranks, operator, zone)

    def ask(self, question: Callable[[], None], ranks: Sequence[int], operator: str, zone: int) -> None:
        """Asks the store something, beside the thread that is in a call.

        Args:
            question: what.
            ranks: that the call needs an answer about.
            operator: in whose call.
            zone: of it.

        Raises:
            CommunicationTimeoutError: it does not answer.
        """
        try:
            _answer_of(in_thread(question, "the group's store"), self._patience_s())
        except Exception as error:
            raise unsettled(ranks, operator, zone, type(error).__name__) from error

    def _settle(self, ranks: Sequence[int]) -> None:
        """Masks whom ranks agree on; an error says that the store does not answer, as without its host."""
        _answer_of(in_thread(lambda: self._decide(ranks), "missing ranks"), self._patience_s())

    def _patience_s(self) -> float:
        """How long the store has for an answer: less by what it has had for an older one in this wait."""
        asked_at = self._asked_at
        silent_s = 0.0 if asked_at is None else min(self._clock() - asked_at, _HAS_RUN * self._timeout_s)
        return max(STORE_ANSWERS_S - silent_s, min(LEAST_ANSWER_S, STORE_ANSWERS_S))

    def miss(self, ranks: Collection[int]) -> None:
        """Masks ranks that have said nothing for the time-out, or those who hold them up."""
        in_thread(lambda: self._decide(list(ranks)), "missing ranks")

    def name(self, masked: Collection[int]) -> None:
        """Has ranks named in the next set that somebody has masked by hand, and that a call goes without.

        They may live, and would miss the others: whoever is in a set masks nobody.
        """
        if new := set(masked) - self._named - self._sets.masked:
            self._named |= new
            in_thread(lambda: self._agree(sorted(new)), "ranks masked by hand")

    def agree(self, ranks: Collection[int]) -> None:
        """Names ranks that are masked here in the next set, and goes by that.

        Raises:
            RankMaskedError: it has this rank.
        """
        self._agree(sorted(ranks))
        if self._context.rank in self._sets.masked:
            raise self._masked_here()

    def hear(self, masked: Collection[int]) -> None:
        """Reads at once what others have named, where they mask ranks that this one does not.

        Args:
            masked: of which others have said so in their own data.
        """
        is_asking = self._hearing is not None and not self._hearing.done()
        if is_asking or set(masked) <= self._masks.masked:
            return
        self._hearing = in_thread(self._hear, "masked sets")
        with contextlib.suppress(Exception):  # a store that is gone has nothing to say
            _answer_of(self._hearing, STORE_ANSWERS_S)

    def _hear(self) -> None:
        with self._lock:
            self._apply(self._sets.follow())

    def lost(self, rank: int, why: str) -> None:
        """A rank has ended, which is certain: it is masked here at once, and in the next set.

        Callable from any thread.
        """
        self._reasons[rank] = why
        self._mask({rank})
        in_thread(lambda: self._agree([rank]), "lost rank")

    def _decide(self, ranks: Sequence[int]) -> None:
        self._apply(self._sets.follow())
        left = [rank for rank in ranks if rank not in self._masks.masked]
        since = self._clock() - self._timeout_s
        # Who has waited for those goes on only now, and is missed as long after that.
        cleared = [rank for rank, at in self._masked_at.items() if at > since]
        culprits = self._notes.holding_up(left, self._timeout_s, cleared)
        for rank in culprits:
            self._reasons.setdefault(rank, f"it did not come within {self._timeout_s:g} s")
        if culprits:
            self._agree(culprits)

    def _agree(self, ranks: Sequence[int]) -> None:
        with self._lock:
            self._apply(self._sets.add(ranks))

    def _apply(self, masked: frozenset[int]) -> None:
        """Goes by a set."""
        if self._context.rank in masked:
            self._waits.stop(self._masked_here)
            return
        self._mask(masked)

    def _masked_here(self) -> RankMaskedError:
        others = f"set {self._sets.number} of masked ranks has it: the others did not hear of it in time"
        return RankMaskedError(
            f"rank {self._context.rank} is masked, and all others go on without it ({others}). It masks "
            f"nobody itself. Construct a new buffer on every rank to take part again."
        )

    def _mask(self, masked: frozenset[int] | set[int]) -> None:
        for rank in sorted(masked - self._masks.masked):
            why = self._reasons.get(rank, "as another rank has said")
            self._masks.update(rank, True, why)
            self._masked_at[rank] = self._clock()
            number = self._counts["dispatch"]
            self._log.of_call("dispatch", number).warning(
                "dispatch number %d: rank %d is masked from now on (%s), and the others go on without it",
                number,
                rank,
                why,
            )

    def _follow(self) -> None:
        """Looks what others have named, as long as the buffer is open. Ends where the store is gone."""
        while not self._ending.wait(FOLLOWED_S):
            self._asked_at = self._clock()
            try:
                self._hear()
            finally:
                self._asked_at = None
            if self.on_followed is not None:
                self.on_followed()


def _answer_of(asking: futures.Future[None], patience_s: float) -> None:
    """Waits for what the store says, which may come later where this process was stopped meanwhile.

    Args:
        asking: it.
        patience_s: for how long.

    Raises:
        TimeoutError: it says nothing.
    """
    deadline = Deadline(patience_s)
    while True:
        left = deadline.left()
        try:
            return asking.result(min(max(left, 0.0), _LONGEST_LOOK_S))
        except futures.TimeoutError:
            if left <= 0 or asking.done():
                raise
