"""Every order of the steps of ranks of which some are lost: what models of all schemes have in common.

Some ranks are *slow*: others may miss them at any of their steps, whether they go on or not; so what they
still write comes late, at any step of the others, as it was computed. Some *die* at any step. The others hear
of both, as the library's rules say (`tests.lost_rules`), and go on. Nobody waits for ever, and no rank is
masked but the slow and the dead.

A model of a scheme says what ranks do, and what lies in their windows. That a deadline passes only where all
who are missing are slow, dead or wait themselves, and what notes say then, is said here.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from moe_triton.core.errors import RankMaskedError
from moe_triton.layout import Wandering
from tests.lost_rules import NUM_ZONES, Asking, Kept, MemoryStore, Renewing, Said, mask_of, members

MOST_SETS = 4

RUNS, TOLD, ENDED, RAISED, DEAD = range(5)
"""What a rank is. TOLD: it knows that it is masked, and raises behind its writes that are under way."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, and what is there against it.

    Attributes:
        num_ranks: of the group.
        slow: ranks that others may miss at any step.
        dies: ranks that may die at any step.
        gone: ranks that have died before anything else, and nobody knows.
        has_store: whether the process that hosts the group's store lives. Without it deaths alone mask.
        cut: ranks from which on and to which nothing is written any more, from any step on.
        without: a guard that is taken away; "" for none. Of all schemes:
            "new memory" of any zone, or of "zone 0", "zone 1", "part 0" or "part 1" alone; peers "follow";
            when all have "heard" of the mask; that who is masked is "refused"; "compare_set" of the store;
            that who is masked "names nobody", and shall "raise"; "notes" of those who wait.
    """

    num_ranks: int = 3
    slow: tuple[int, ...] = ()
    dies: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    has_store: bool = True
    cut: tuple[int, ...] = ()
    without: str = ""

    @cached_property
    def innocent(self) -> list[int]:
        """Ranks that nobody may mask."""
        guilty = {*self.slow, *self.dies, *self.gone}
        return [] if self.cut else [rank for rank in range(self.num_ranks) if rank not in guilty]


class Step(NamedTuple):
    """What a rank does at a time.

    Attributes:
        kind: of it, as its scheme's model has them.
        round: whose.
        operator: "dispatch" or "combine".
        zone: of it.
        to: ranks that it writes to.
        slot: that is written or summed.
    """

    kind: str
    round: int
    operator: str
    zone: int
    to: tuple[int, ...] = ()
    slot: int = 0


class Found(NamedTuple):
    """What has come of all orders.

    Attributes:
        states: that were tried.
        trouble: what goes wrong in one of them; "" if nothing ever does.
        trace: steps that lead there, as few as possible.
    """

    states: int
    trouble: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "".join(f"\n  {number:3} {text}" for number, text in enumerate(self.trace, 1))
        return f"{self.states} states" + (f"; {self.trouble}, after{steps}" if self.trouble else "")


class TroubleError(Exception):
    """A step that must not be."""


PC, STATUS, KNOWN, NUMBER, KEPT, WISH, DEAD_WISH, NOTICED = range(8)
VIEWS = 8
"""Of each part and zone of the window: the ranks that have its memory mapped. Behind them stands what a
scheme's model has of a rank."""

State = bytes
Labelled = tuple[str, State]


class LostRanks(ABC):
    """All steps of ranks of which some are lost.

    Args:
        faults: which.
        wandering: parts of a window that have no writer of their own.
        own_bytes: that a scheme's model has of each rank.
        common_bytes: that it has of all.
    """

    WRITES: ClassVar[frozenset[str]]
    """Kinds of steps that a rank still takes once it knows that it is masked."""
    HEARD: ClassVar[frozenset[str]]
    """Kinds of steps that wait until all have heard whom this rank masks."""

    def __init__(
        self, faults: Faults, wandering: Sequence[Wandering], own_bytes: int, common_bytes: int = 0
    ) -> None:
        self._faults, self._wandering = faults, wandering
        self._learned = KNOWN  # where a rank has whom its calls go by
        self._ranks = tuple(range(faults.num_ranks))
        self._everybody = mask_of(self._ranks)
        self._num_views = NUM_ZONES * len(wandering)
        self._own = VIEWS + self._num_views
        self._rank_bytes = self._own + own_bytes
        self._cut = self._rank_bytes * faults.num_ranks
        self._num_sets, self._sets = self._cut + 1, self._cut + 2
        self._common = self._sets + MOST_SETS
        self._state_bytes = self._common + common_bytes
        self._firsts = [rank * self._rank_bytes for rank in self._ranks]
        self._programmes = [self._programme(rank) for rank in self._ranks]
        self._all_kept = [Kept()]
        self._numbers = {Kept(): 0}
        self._asked: dict[tuple[Any, ...], Any] = {}

    def start(self) -> State:
        """Nobody has done anything."""
        state = bytearray(self._state_bytes)
        for rank in self._ranks:
            views = rank * self._rank_bytes + VIEWS
            state[views : views + self._num_views] = [self._everybody] * self._num_views
        for rank in self._faults.gone:
            self._end(state, rank, DEAD)
        return self._skipped(state)

    def explore(self) -> Found:
        """Every order."""
        start = self.start()
        before: dict[State, State | None] = {start: None}
        waiting = deque([start])
        while waiting:
            state = waiting.popleft()
            try:
                for _, after in self._steps(state):
                    if after not in before:
                        before[after] = state
                        waiting.append(after)
            except TroubleError as error:
                return Found(len(before), str(error), tuple(self._trace(state, before)))
        return Found(len(before))

    def _trace(self, last: State, before: dict[State, State | None]) -> list[str]:
        texts: list[str] = []
        state = last
        while (earlier := before[state]) is not None:
            texts.append(next(text for text, after in self._steps(earlier) if after == state))
            state = earlier
        return texts[::-1]

    # What a scheme's model says.

    @abstractmethod
    def _programme(self, rank: int) -> list[Step]:
        """A rank's steps."""

    @abstractmethod
    def _run(self, rank: int, step: Step, state: State) -> Iterator[Labelled]:
        """What comes of a step that need not wait."""

    @abstractmethod
    def _awaited(self, state: State, rank: int, step: Step) -> int:
        """Ranks that a step waits for which does not wait until all have heard; none where it need not."""

    @abstractmethod
    def _is_nothing(self, after: bytearray, rank: int, step: Step) -> bool:
        """Whether a step does nothing, now or later."""

    @abstractmethod
    def _forget(self, after: bytearray, rank: int, peer: int) -> None:
        """A rank has masked another one: it does not look any more at what lies there of it."""

    @abstractmethod
    def _heard(self, after: bytearray, rank: int) -> None:
        """A rank that is in its calls has masked others."""

    @abstractmethod
    def _renewed(self, after: bytearray, rank: int, part: int, zone: int) -> None:
        """A part of a window has other memory."""

    def _behind_step(self, rank: int, place: int) -> int:
        """The place of the step that comes behind one."""
        return place + 1

    # What ranks do.

    def _step(self, state: State | bytearray, rank: int) -> Step:
        return self._programmes[rank][state[rank * self._rank_bytes + PC]]

    def _is_running(self, state: State | bytearray, rank: int) -> bool:
        return state[rank * self._rank_bytes + STATUS] in (RUNS, TOLD)

    def _steps(self, state: State) -> Iterator[Labelled]:
        """What may happen next."""
        faults = self._faults
        missing = [self._missing(state, rank) for rank in self._ranks]
        moves = [False] * len(self._ranks)
        for rank in self._ranks:
            for text, after in self._steps_of(rank, state, missing):
                moves[rank] |= "suspects" not in text or self._names(rank, after) != state
                yield f"rank {rank} {text}", self._skipped(bytearray(after))
        if faults.cut and not state[self._cut]:
            cut = bytearray(state)
            cut[self._cut] = 1
            yield f"rank(s) {list(faults.cut)} are cut off", self._skipped(cut)
        for rank in faults.dies:
            if self._is_running(state, rank):
                dead = bytearray(state)
                self._end(dead, rank, DEAD)
                yield f"rank {rank} dies", self._skipped(dead)
        self._check_end(state, missing, moves)

    def _skipped(self, after: bytearray) -> State:
        """Past steps that do nothing, now or later."""
        for rank, at in enumerate(self._firsts):
            if after[at + STATUS] > TOLD:
                continue
            steps, place = self._programmes[rank], after[at + PC]
            while place < len(steps) and self._is_nothing(after, rank, steps[place]):
                after[at + PC] = place = self._behind_step(rank, place)
            if place == len(steps):
                self._end(after, rank, ENDED)
        return bytes(after)

    def _check_end(self, state: State, missing: Sequence[int], moves: Sequence[bool]) -> None:
        """Nobody waits for ever, and who is left agrees."""
        ranks = self._ranks
        status = [state[at + STATUS] for at in self._firsts]
        innocent = self._faults.innocent
        if not any(
            moves[rank] for rank in ranks if rank not in self._faults.slow
        ):  # who is slow need not go on
            for rank in innocent:
                if status[rank] != ENDED:
                    raise TroubleError(f"rank {rank} waits for ever, for {members(missing[rank])}")
        if any(moves):
            return
        for rank in ranks:
            if status[rank] in (RUNS, TOLD):
                raise TroubleError(f"rank {rank} waits for ever, for {members(missing[rank])}")
        sets, dead = self._sets_of(state), mask_of(rank for rank in ranks if status[rank] == DEAD)
        all_said = [self._ask("hear", rank, state, sets) for rank in ranks if status[rank] == ENDED]
        known = {said.known | dead for said in all_said if not said.told}
        if len(known) != 1:
            masked = [members(each) for each in known]
            raise TroubleError(f"who has ended has masked {masked}" if masked else "nobody goes on")

    def _sets_of(self, state: State | bytearray) -> tuple[int, ...]:
        return tuple(state[self._sets : self._sets + state[self._num_sets]])

    def _steps_of(self, rank: int, state: State, missing: Sequence[int]) -> Iterator[Labelled]:
        at = rank * self._rank_bytes
        status, sets = state[at + STATUS], self._sets_of(state)
        if status == DEAD:
            return
        wish, dead_wish = state[at + WISH], state[at + DEAD_WISH]
        for kind, ranks in ((WISH, wish), (DEAD_WISH, dead_wish)):
            if ranks:
                yield from self._name(rank, kind, state, sets)
        if status in (RAISED, ENDED):  # who has ended hears all the rest at the end
            return
        if state[at + NUMBER] < len(sets) and status != TOLD:
            said = self._ask("hear", rank, state, sets)
            yield f"hears of {self._listed(sets)}", self._apply(bytearray(state), rank, said)
        for dead, of in enumerate(self._firsts):
            if state[of + STATUS] == DEAD and not state[at + NOTICED] >> dead & 1 and status != TOLD:
                said = self._ask("notice", rank, state, sets, dead)
                after = bytearray(state)
                after[at + NOTICED] |= 1 << dead
                if self._faults.has_store:
                    after[at + DEAD_WISH] |= said.wish & ~self._named(sets)
                yield f"notices the death of rank {dead}", self._apply(after, rank, said)
        if status not in (RUNS, TOLD) or wish:
            return
        step = self._programmes[rank][state[at + PC]]
        if status == TOLD and step.kind not in self.WRITES:
            after = bytearray(state)
            self._end(after, rank, RAISED)
            yield "raises that it is masked", bytes(after)
        elif not missing[rank]:
            for kind, after in self._run(rank, step, state):
                yield f"{kind} in {step.operator} {step.round}", after
        elif self._faults.has_store and all(
            self._is_missed(rank, peer, state, missing) for peer in members(missing[rank])
        ):
            stuck = 0 if self._faults.without == "notes" else self._stuck(rank, missing)
            said = self._ask("decide", rank, state, sets, missing[rank], stuck)
            after = bytearray(state)
            after[at + WISH] = said.wish
            done = self._apply(after, rank, said)
            if done != state:
                yield f"has waited too long for {members(missing[rank])}, suspects {members(said.wish)}", done

    def _listed(self, sets: Sequence[int]) -> str:
        return ", ".join(str(members(each)) for each in sets)

    def _named(self, sets: Sequence[int]) -> int:
        return functools.reduce(int.__or__, sets, 0)

    def _missing(self, state: State, rank: int) -> int:
        """Ranks that this one waits for in its step; none where it need not wait."""
        if not self._is_running(state, rank):
            return 0
        step = self._step(state, rank)
        return (
            self._unheard(state, rank, step) if step.kind in self.HEARD else self._awaited(state, rank, step)
        )

    def _unheard(self, state: State, rank: int, step: Step) -> int:
        """Ranks that have yet to hear whom this one masks, before a zone has other memory."""
        at = rank * self._rank_bytes
        if not state[at + self._learned] or self._faults.without == "heard":
            return 0
        masks = self._masks(state)
        ended = mask_of(
            peer for peer in self._ranks if state[peer * self._rank_bytes + STATUS] == ENDED
        )  # they have left
        quiet, kept = state[at + NOTICED] | ended, state[at + KEPT]
        key = "unheard", rank, kept, quiet, step.operator, step.zone, masks
        if (found := self._asked.get(key)) is None:
            renewals = Renewing(self._wandering, rank, self._all_kept[kept], masks, quiet).renewals
            found = mask_of(renewals.unheard(step.operator, step.zone, members(masks[rank])))
            self._asked[key] = found
        return int(found)

    def _masks(self, state: State | bytearray) -> tuple[int, ...]:
        """Whom each rank masks."""
        return tuple(state[at + KNOWN] for at in self._firsts)

    def _is_missed(self, rank: int, peer: int, state: State, missing: Sequence[int]) -> bool:
        """Whether a wait for a peer may last longer than the time-out."""
        at = peer * self._rank_bytes
        if peer in self._faults.slow or state[at + STATUS] in (RAISED, DEAD):
            return True
        return self._step(state, rank).kind not in self.HEARD and (
            self._is_blocked(peer, rank, state, missing[peer])
            or bool(state[at + KNOWN] >> rank & 1)
            or self._is_cut(rank, peer, state)
        )

    def _is_blocked(self, rank: int, by: int, state: State, missing: int) -> bool:
        """Whether a rank waits, and not only until others have heard of a set, as they will."""
        if not missing or self._step(state, rank).kind not in self.HEARD:
            return bool(missing)
        return not missing >> by & 1 and all(
            peer in self._faults.slow or state[peer * self._rank_bytes + STATUS] in (RAISED, DEAD)
            for peer in members(missing)
        )

    def _stuck(self, rank: int, missing: Sequence[int]) -> int:
        """Ranks that say that they wait for others than this one."""
        return mask_of(
            peer
            for peer in self._ranks
            if peer not in self._faults.slow and missing[peer] and missing[peer] & ~(1 << rank)
        )

    def _is_cut(self, rank: int, peer: int, state: State | bytearray) -> bool:
        return bool(state[self._cut]) and (rank in self._faults.cut) != (peer in self._faults.cut)

    # What they ask the store.

    def _ask(
        self, how: str, rank: int, state: State, sets: tuple[int, ...], about: int = 0, stuck: int = 0
    ) -> Said:
        at = rank * self._rank_bytes
        said: Said = self._answer(how, rank, state[at + KNOWN], state[at + NUMBER], sets, about, stuck)
        return said

    def _answer(
        self,
        how: str,
        rank: int,
        known: int,
        number: int,
        sets: tuple[int, ...],
        about: int = 0,
        stuck: int = 0,
        meanwhile: tuple[int, int, int, int] | None = None,
    ) -> Any:
        """By the library's rules; with `meanwhile` also what another rank hears that names some first."""
        key = how, rank, known, number, sets, about, stuck, meanwhile
        if (found := self._asked.get(key)) is None:
            found = self._asked[key] = self._answered(*key)
        return found

    def _answered(
        self,
        how: str,
        rank: int,
        known: int,
        number: int,
        sets: tuple[int, ...],
        about: int,
        stuck: int,
        meanwhile: tuple[int, int, int, int] | None,
    ) -> Any:
        store = MemoryStore(sets, last_wins=self._faults.without == "compare_set")

        def asking(rank: int, known: int, number: int) -> Asking:
            knows_itself = self._faults.without != "names nobody"
            return Asking(rank, known, number, store, stuck, knows_itself, len(self._ranks))

        mine = asking(rank, known, number)
        if how == "hear":
            return mine.hear()
        if how == "decide":
            return mine.decide(about)
        if how == "notice":
            return mine.notice(about)
        others: list[Said] = []
        if meanwhile is not None:
            other, other_known, other_number, other_wish = meanwhile
            store.meanwhile = lambda: others.append(asking(other, other_known, other_number).name(other_wish))
        said = mine.name(about)
        return said._replace(sets=tuple(store.sets)), others[0] if others else None

    def _name(self, rank: int, kind: int, state: State, sets: tuple[int, ...]) -> Iterator[Labelled]:
        """Names whom it wants to: alone, or while another one does."""
        at = rank * self._rank_bytes
        mine = rank, state[at + KNOWN], state[at + NUMBER], sets, state[at + kind], 0
        said, _ = self._answer("name", *mine)
        yield (
            self._text_of(rank, state[at + kind], said),
            self._settle(bytearray(state), [(rank, kind, said)]),
        )
        for other in self._ranks:
            of = other * self._rank_bytes
            for other_kind in (WISH, DEAD_WISH):
                if other == rank or not state[of + other_kind]:
                    continue
                meanwhile = other, state[of + KNOWN], state[of + NUMBER], state[of + other_kind]
                said, heard = self._answer("name", *mine, meanwhile)
                if heard is None:
                    continue
                text = f"while rank {other} {self._text_of(other, state[of + other_kind], heard)}, "
                text += self._text_of(rank, state[at + kind], said)
                heard = heard._replace(sets=said.sets)
                yield text, self._settle(bytearray(state), [(other, other_kind, heard), (rank, kind, said)])

    def _names(self, rank: int, state: State) -> State:
        """What there is once a rank has named whom it suspects."""
        at = rank * self._rank_bytes
        sets = self._sets_of(state)
        return next(self._name(rank, WISH, state, sets))[1] if state[at + WISH] else state

    def _text_of(self, rank: int, ranks: int, said: Said) -> str:
        told = " finds itself in it, and" if said.told else ""
        return f"names {members(ranks)},{told} has set {said.number} of {self._listed(said.sets)}"

    def _settle(self, after: bytearray, all_said: Sequence[tuple[int, int, Said]]) -> State:
        for rank, kind, said in all_said:
            after[rank * self._rank_bytes + kind] = 0
            before = self._sets_of(after)
            for ranks in said.sets:
                wrong = [each for each in members(ranks) if each in self._faults.innocent]
                if wrong:
                    raise TroubleError(f"{wrong} is masked without a fault")
            if said.sets != before:
                after[self._num_sets] = len(said.sets)
                after[self._sets : self._sets + len(said.sets)] = bytes(said.sets)
            self._apply(after, rank, said)
        return bytes(after)

    def _apply(self, after: bytearray, rank: int, said: Said) -> State:
        """Goes by what the store has said."""
        at = rank * self._rank_bytes
        if after[at + STATUS] == RAISED:
            return bytes(after)
        after[at + NUMBER] = said.number
        if said.told and self._faults.without != "raise":
            if after[at + STATUS] == ENDED:
                self._end(after, rank, RAISED)
                return bytes(after)
            after[at + STATUS] = TOLD
        newly = said.known & ~after[at + KNOWN]
        after[at + KNOWN] = said.known
        for peer in members(newly):
            of = peer * self._rank_bytes
            both_go_on = after[of + STATUS] in (RUNS, ENDED) and after[at + STATUS] in (RUNS, ENDED)
            if both_go_on and after[of + KNOWN] >> rank & 1:
                raise TroubleError(f"ranks {rank} and {peer} have masked each other, and both go on")
            self._forget(after, rank, peer)
        if newly and self._is_running(after, rank):
            self._heard(after, rank)
        return bytes(after)

    # What is renewed, and followed.

    def _learn(self, after: bytearray, rank: int) -> None:
        """Calls go by whom this rank masks."""
        at = rank * self._rank_bytes
        number, known = after[at + KEPT], after[at + KNOWN]
        after[at + self._learned] = known
        key = "learn", rank, number, known
        if (found := self._asked.get(key)) is None:
            made = Renewing(self._wandering, rank, self._all_kept[number], (0,) * len(self._ranks))
            made.renewals.learn(frozenset(members(known)))
            found = self._asked[key] = self._number_of(made.kept())
        after[at + KEPT] = found

    def _number_of(self, kept: Kept) -> int:
        if kept not in self._numbers:
            self._numbers[kept] = len(self._all_kept)
            self._all_kept.append(kept)
        return self._numbers[kept]

    def _behind(self, after: bytearray, rank: int, operator: str, zone: int) -> None:
        """A run has ended: windows have other memory where that is due."""
        at = rank * self._rank_bytes
        if not after[at + self._learned]:
            return
        found = self._renews(after, rank, operator, zone)
        after[at + KEPT] = found[0]
        for number in found[1]:
            part, of_zone = divmod(number, NUM_ZONES)
            if self._faults.without in ("new memory", f"zone {of_zone}", f"part {part}"):
                continue
            after[at + VIEWS + number] = 1 << rank
            self._renewed(after, rank, part, of_zone)

    def _renews(self, after: State | bytearray, rank: int, operator: str, zone: int) -> Any:
        at = rank * self._rank_bytes
        key = "behind", rank, after[at + KEPT], after[at + NOTICED], operator, zone
        if (found := self._asked.get(key)) is None:
            of_rank = self._wandering, rank, self._all_kept[after[at + KEPT]], (0,) * len(self._ranks)
            made = Renewing(*of_rank, after[at + NOTICED])
            made.renewals.behind(operator, zone)
            found = self._asked[key] = self._number_of(made.kept()), made.window.renewed
        return found

    def _follow(self, after: bytearray, rank: int) -> None:
        """A run begins, or goes on. Who finds that a peer masks it raises."""
        at = rank * self._rank_bytes
        known = after[at + self._learned]
        if not known or self._faults.without == "follow":
            return
        masks = (0,) * len(self._ranks) if self._faults.without == "refused" else self._masks(after)
        key = "before", rank, known, masks
        if key not in self._asked:
            made = Renewing(self._wandering, rank, Kept(), masks)
            try:
                made.renewals.before(set(self._ranks) - set(members(known)) - {rank})
                self._asked[key] = made.window.followed
            except RankMaskedError:
                self._asked[key] = None
        if (found := self._asked[key]) is None:
            self._end(after, rank, RAISED)
            return
        for peer, number in found:
            if self._is_running(after, peer):
                after[peer * self._rank_bytes + VIEWS + number] |= 1 << rank

    def _reaches(self, after: bytearray, rank: int, peer: int) -> bool:
        """Whether a rank writes to another one, and whether anybody looks there."""
        return (
            not after[self._firsts[rank] + KNOWN] >> peer & 1
            and after[self._firsts[peer] + STATUS] <= TOLD
            and not self._is_cut(rank, peer, after)
        )

    def _has_view(self, after: bytearray, rank: int, peer: int, part: int, zone: int) -> bool:
        return bool(after[peer * self._rank_bytes + VIEWS + part * NUM_ZONES + zone] >> rank & 1)

    def _end(self, after: bytearray, rank: int, status: int) -> None:
        """Nothing of a rank counts any more but what others may still ask it for."""
        at = rank * self._rank_bytes
        kept = (KNOWN, NUMBER, NOTICED, WISH, DEAD_WISH)
        values = [after[at + each] for each in kept] if status in (ENDED, RAISED) else []
        after[at : at + self._rank_bytes] = bytes(self._rank_bytes)
        for each, value in zip(kept, values, strict=False):
            after[at + each] = value
        after[at + STATUS] = status
        if status in (RAISED, DEAD):
            for peer in self._ranks:
                first = peer * self._rank_bytes + VIEWS
                for place in range(first, first + self._num_views):
                    after[place] &= ~(1 << rank)
