"""What a communicator does when a rank is lost: whom a wait is for is compared with who has gone.

`moe_triton.rendezvous.deaths` tells of an end on a thread of its own. While one is known, the thread that
waits in native code says at every look whom it waits for, and its wait is ended if that cannot come any more:
from a rank whose process has ended, or from one that has given up itself because of that.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass

from moe_triton.backends.waits import Waiting, Waits
from moe_triton.core.errors import RankLostError
from moe_triton.core.health import RankHealth
from moe_triton.core.threads import in_thread
from moe_triton.rendezvous.deaths import Gone, Watch
from moe_triton.rendezvous.notes import Notes
from moe_triton.runtime.diagnosis import awaited_ranks
from moe_triton.runtime.masks import Masks
from moe_triton.schemes.rank_context import RankContext

REMEDY = "Rebuild the buffer without those that are lost."
# Between looks at the last words of those that a wait is for.
ASK_PERIOD_S = 0.1
# What a rank has sent before it gave up may still be under way to this one.
LATE_S = 0.25
NO_WORDS = "nobody can say, for the group's store is gone"
# For a wait to say whom it is for: it looks up every 50 ms.
ANSWER_S = 0.2


class Losses:
    """Who is lost to one communicator.

    Args:
        context: of its rank.
        watches: of its groups: the expert-parallel one, and the tensor-parallel one where there is one.
        waits: of its calls.
        counts: runs of each operator that have ended.
        notes: of its rank.
        masks: of its ranks.
    """

    def __init__(
        self,
        context: RankContext,
        watches: Sequence[Watch],
        waits: Waits,
        counts: Mapping[str, int],
        notes: Notes,
        masks: Masks,
    ) -> None:
        self._masks = masks
        self._context, self._waits, self._counts, self._notes = context, waits, counts, notes
        self._watches = dict(zip(("expert", "tensor"), watches, strict=False))
        self._asking: futures.Future[dict[int, tuple[int, ...]]] | None = None
        self._asked_at, self._unheard_since = 0.0, float("inf")
        # Who has given up, for want of whom, and since when that is known.
        self._given_up: dict[int, tuple[tuple[int, ...], float]] = {}
        self._waiting: tuple[tuple[int, ...], float, Callable[[], bool]] | None = None
        self._answered = threading.Event()
        me = weakref.ref(self)  # waits are kept by native code, and by this

        def answer(waiting: Waiting) -> None:
            if (losses := me()) is not None:
                losses._answer(waiting)

        waits.answer_alarms(answer)

    def hear(self, gone: Gone) -> None:
        """A rank has gone. From any thread."""
        if gone.has_ended:
            self._waits.alarm()

    def dead(self) -> dict[str, tuple[int, ...]]:
        """Who is dead and not masked, by group, where anybody is."""
        found = {group: self._unmasked(group, watch.dead()) for group, watch in self._watches.items()}
        return {group: tuple(dead) for group, dead in found.items() if dead}

    def _unmasked(self, group: str, gone: Mapping[int, Gone]) -> dict[int, Gone]:
        """Those that calls need: masks are of the expert-parallel group."""
        masked = self._masks.masked if group == "expert" else frozenset()
        return {rank: each for rank, each in gone.items() if rank not in masked}

    def refusal(self) -> RankLostError | None:
        """What a call raises that begins now, if a rank is dead; this rank's last word is said then."""
        for group, dead in self.dead().items():
            lost = _Lost(self._context, self._watches[group], group, dead)
            self._last_word("calls", group, dead)
            return lost.error("call", sum(self._counts.values()), 0)
        return None

    def note(self, waiting: Waiting) -> tuple[str, list[int]]:
        """Keeps whom a wait is for, and returns them, with their group. On the thread that waits."""
        ranks = awaited_ranks(self._context, waiting) or []
        group = self._context.scheme.peers_of(waiting.launch).group if ranks else "expert"
        if group == "expert":
            self._waiting = tuple(ranks), time.time() - waiting.seconds, waiting.pending
        return group, ranks

    def _answer(self, waiting: Waiting) -> None:
        group, ranks = self.note(waiting)
        self._answered.set()
        if not ranks:
            return
        known = self._unmasked(group, self._watches[group].gone())
        gone = {rank: each for rank, each in known.items() if each.has_ended}
        if not gone:
            return
        lost, said = tuple(rank for rank in ranks if rank in gone), ""
        if any(self._may_still_come(group, gone[rank]) for rank in lost):
            return
        if not lost and group == "expert":
            stuck = self._stuck(ranks, gone)
            lost = tuple({rank for behind in stuck.values() for rank in behind})
            said = f"Rank(s) {list(stuck)}, which it waited for, have given up without them. "
            if not lost and time.monotonic() > self._unheard_since + LATE_S:
                lost, said = tuple(gone), f"Whether rank(s) {ranks} still come {NO_WORDS}. "
        if not lost:
            return
        operator, zone = waiting.plan.operator, waiting.plan.zone
        number = self._counts[operator]
        self._last_word(f"{operator} number {number}", group, lost)
        made = _Lost(self._context, self._watches[group], group, lost, said)
        self._waits.stop(lambda: made.error(operator, number, zone))

    def _may_still_come(self, group: str, gone: Gone) -> bool:
        """Whether what a rank has sent before its end may be under way: the word of that has its own way."""
        elsewhere = self._watches[group].is_on_other_host(gone.rank)
        return elsewhere and time.time() < gone.since_s + LATE_S

    def _last_word(self, call: str, group: str, lost: Sequence[int]) -> None:
        """Says that this rank gives up; and without whom, where notes have the same numbers."""
        self._notes.last_word("raised", call, lost if group == "expert" else ())

    def _stuck(self, ranks: Sequence[int], gone: Collection[int]) -> dict[int, list[int]]:
        """Those of some ranks that have given up, and without which of those that have gone; a while ago."""
        now = time.monotonic()
        if self._asking is not None and self._asking.done():
            if self._asking.exception():  # nobody is asked again where the store's host is gone
                self._asked_at, self._unheard_since = float("inf"), now
            found = {} if self._asking.exception() else self._asking.result()
            since = {rank: self._given_up.get(rank, ((), now))[1] for rank in found}
            self._given_up = {rank: (behind, since[rank]) for rank, behind in found.items()}
            self._asking = None
        if self._asking is None and now > self._asked_at + ASK_PERIOD_S:
            self._asked_at = now
            self._asking = in_thread(lambda: self._notes.given_up(ranks), "last words")
        late = {rank: behind for rank, (behind, since) in self._given_up.items() if now > since + LATE_S}
        stuck = {rank: [each for each in late.get(rank, ()) if each in gone] for rank in ranks}
        return {rank: behind for rank, behind in stuck.items() if behind}

    def health(self, is_busy: bool) -> tuple[RankHealth, ...]:
        """What is known of each rank of the expert-parallel group.

        Args:
            is_busy: another thread is in a call, and may wait.
        """
        if is_busy and self._waits.are_seen:
            self._answered.clear()
            self._waits.alarm()
            self._answered.wait(ANSWER_S)
        self._waits.alarm(False)
        if any(gone.has_ended for watch in self._watches.values() for gone in watch.gone().values()):
            self._waits.alarm()
        found = self._watches["expert"].health()
        if self._waiting is not None and self._waiting[2]():
            ranks, since_s, _ = self._waiting
            for rank in ranks:
                if found[rank].state == "alive":
                    found[rank] = dataclasses.replace(found[rank], state="late", since_s=since_s)
        return tuple(found)

    def close(self) -> None:
        """Nobody is watched any more."""
        for watch in self._watches.values():
            watch.close()


@dataclass(frozen=True)
class _Lost:
    """Ranks without which a call cannot go on.

    Attributes:
        context: of this rank.
        watch: of their group.
        group: "expert" or "tensor".
        ranks: whom it waited for, and cannot come; others that are dead by the time of the error are named,
            too.
        said: a sentence more, with a space behind it, or "".
    """

    context: RankContext
    watch: Watch
    group: str
    ranks: tuple[int, ...]
    said: str = ""

    def error(self, operator: str, number: int, zone: int) -> RankLostError:
        """The error of a call."""
        gone, now = self.watch.gone(), time.time()
        lost = sorted({*self.ranks, *self.watch.dead()})
        each = [f"rank {rank} {gone[rank].in_words}, {now - gone[rank].since_s:.1f} s ago" for rank in lost]
        named = self.context.config.topology.in_words(lost)
        if self.group == "tensor":
            named = f"tensor-parallel rank(s) {lost}"
        detail = f"{'; '.join(each)}. {self.said}{REMEDY}"
        return RankLostError(operator, number, zone, lost, detail, named)
