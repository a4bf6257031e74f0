"""Ranks that go on in `direct` without who is lost: every order of their steps, with the rules that run.

Each rank has a row for every rank in a dispatch, at the place that follows from whose counts count; and reads
a result of every rank in the combine behind it, where its row was sent to. So all who send have to go by the
same counts. A dispatch in which a rank is masked is repeated by all who go on, or kept by each of them:

    begin    whom the rank masks is what the call goes by; of a combine, results are where peers look for them
    counts   an entry to every rank, which says whom this one's call goes without
    agree    the entries of all whom the call does not go without; or the rank gives up
    rows     a row and its stamp to every rank, then "flag", an entry; "send" is both to all
    got      the entries of all whom the rank does not mask
    take     the rows, unless ranks have been masked meanwhile
    ran      the run is over; "end", the zone has other memory
    settle   what becomes of the attempt, as the first one has said
    keep     the zone has other memory, and rows of the masked are taken out; then "take"
    recall   an entry in the place of that of rows, to all
    meet     an entry of a barrier to all, "met" waits for theirs
    clear    entries of the attempt, then "renew", and all meet "again"; behind "met again" come "counts"
    ready    an entry to all; "heard" waits for theirs
    read     results in the windows of others; "sum", unless a peer masks the reader

What becomes of an attempt is said by the library's `Outcomes`, and all else by the rules that
`tests.lost_model` asks; `tests.test_lost_direct` holds the order of steps against the library's. What kernels
do is the model's: what a wait waits for and gives up at, that entries have no numbers, and places. Each rank
has one row for each; an entry comes with what it announces of counts and of barriers; a rank has its own
entries and rows at once. Masks by hand, un-masking and deadlines of a dispatch that is repeated are not here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moe_triton.core.errors import RankMaskedError
from moe_triton.core.region import region_of
from moe_triton.layout import Wandering
from moe_triton.runtime.outcomes import MOST_ATTEMPTS, Outcomes
from tests.lost_model import (
    ENDED,
    KNOWN,
    PC,
    RAISED,
    Faults,
    Labelled,
    LostRanks,
    State,
    Step,
    TroubleError,
)
from tests.lost_rules import NUM_ZONES, mask_of, members

SEVERAL = 4
"""More attempts than any dispatch has."""
RECALLED = 0xF
"""In the place of a set of ranks: the dispatch is to be repeated."""
WORD_BYTES = 8
WORD = region_of("indexed_slots", 0, WORD_BYTES, (NUM_ZONES, WORD_BYTES), (1, WORD_BYTES), name="outcomes")


@dataclass(frozen=True)
class Case(Faults):
    """What is tried.

    Attributes:
        wandering: parts of a window that have no writer of their own: rows, and stamps.
        calls: that each rank makes, D a dispatch and C a combine.
        zones: of each call.
        told: ranks that have counts of those that are gone.
        without: also: "sets" in entries, of counts or of rows; that a rank "gives up" where another one is
            masked while it waits for counts; "recall"; that the "first word" holds of what becomes of an
            attempt; its number, so that each is the first "attempt"; that others are not called off before
            that, by a "recall first"; that all "meet", or "meet again", before a dispatch is repeated;
            "clear"; that rows of the masked are taken "out"; that results are where rows were "sent"; and
            that who has "read" looks whether it is masked.
    """

    wandering: tuple[Wandering, ...]
    calls: str
    zones: tuple[int, ...]
    told: tuple[int, ...] = ()


CALL, ATTEMPT, GIVES_UP, SENT, HAS, BARRIERS, MISREAD, LIVE = range(8)
"""What the model has of a rank. CALL: whom the running call goes without. SENT: whom rows of the latest
dispatch were sent without. HAS: whose rows the rank has. BARRIERS: how many have ended. MISREAD: whether it
has read anything but what it was to read. LIVE: of each zone, how many rows in it are a user's."""
PLACES = LIVE + NUM_ZONES
NAMES = "counts", "flags", "barriers", "ready", "rows", "stamps", "results"
"""Of what stands there for each zone: entries by source, and bytes by place."""


def entry(number: int, said: int) -> int:
    """An entry of a dispatch. Ranks find no number there: the model looks at it."""
    return 1 + said + (RECALLED + 1) * number


class Model(LostRanks):
    """All steps of a case.

    Args:
        case: which.
    """

    WRITES: ClassVar = frozenset({"counts", "rows", "flag", "send", "recall", "meet", "again", "ready"})
    HEARD: ClassVar = frozenset({"end", "keep", "renew"})

    def __init__(self, case: Case) -> None:
        self._case = case
        self._behind_pc: list[list[int]] = [[] for _ in range(case.num_ranks)]
        self._first: list[dict[tuple[str, int], int]] = [{} for _ in range(case.num_ranks)]
        by_rank = NUM_ZONES * case.num_ranks
        super().__init__(case, case.wandering, PLACES + len(NAMES) * by_rank, NUM_ZONES)
        self._learned = self._own + CALL
        self._at = {name: self._own + PLACES + number * by_rank for number, name in enumerate(NAMES)}
        self._does: dict[str, Callable[[bytearray, int, Step], str]] = {
            "begin": self._begin,
            "counts": self._post_counts,
            "agree": self._agree,
            "rows": self._send_rows,
            "flag": self._post_flag,
            "send": self._send,
            "got": self._get,
            "take": self._take,
            "ran": self._end_run,
            "end": self._renew,
            "settle": self._settle_attempt,
            "keep": self._keep,
            "recall": self._recall,
            "meet": self._meet,
            "met": self._have_met,
            "clear": self._clear,
            "renew": self._renew,
            "again": self._meet,
            "met again": self._begin_again,
            "ready": self._post_ready,
            "heard": self._hear_results,
            "read": self._read,
            "sum": self._sum,
        }

    def start(self) -> State:
        """Nobody has done anything, but those who are gone."""
        state = bytearray(super().start())
        for gone, rank in itertools.product(self._case.gone, self._case.told):
            state[self._place(rank, "counts", 0, gone)] = entry(0, 0)
        return bytes(state)

    def _programme(self, rank: int) -> list[Step]:
        """A rank's steps. Who may stop writes to one rank after another; unless it dies beside a slow one."""
        case, steps = self._case, list[Step]()
        in_pieces = rank in (case.slow or case.dies)
        peers = tuple((rank + by) % case.num_ranks for by in range(1, case.num_ranks))
        done = {"D": 0, "C": 0}

        def add(of: tuple[int, str, int], *kinds: str) -> None:
            for kind in kinds:
                self._first[rank][kind, len(calls)] = len(steps)
                is_written = kind in self.WRITES or kind == "read"
                pieces = [(peer,) for peer in peers] if in_pieces and is_written else [peers]
                steps.extend(Step(kind, *of, to if is_written else (), len(calls)) for to in pieces)

        calls: list[str] = []
        for call, zone in zip(case.calls, case.zones, strict=True):
            number = done[call]
            done[call] += 1
            if call == "C":
                add((number, "combine", zone), "begin", "ready", "heard", "read", "sum")
            else:
                of = number, "dispatch", zone
                rows = ("rows", "flag") if in_pieces else ("send",)
                add(of, "begin", "counts", "agree", *rows, "got", "take", "ran", "end")
                end = len(steps) - 1
                aside = ["settle", "keep", "recall", "meet", "met", "clear", "renew", "again", "met again"]
                if case.without == "recall first":
                    aside = ["recall", "settle", "keep", *aside[3:]]
                add(of, *(kind for kind in aside if kind not in self._left_out))
                self._behind_pc[rank] += [*range(len(self._behind_pc[rank]) + 1, len(steps) + 1)]
                self._behind_pc[rank][end] = len(steps)
            self._behind_pc[rank] += [*range(len(self._behind_pc[rank]) + 1, len(steps) + 1)]
            calls.append(call)
        return steps

    @property
    def _left_out(self) -> Sequence[str]:
        """Kinds of steps that are not taken without a guard."""
        pairs = {"meet": ("meet", "met"), "meet again": ("again",)}
        return pairs.get(self._case.without, (self._case.without,))

    def _behind_step(self, rank: int, place: int) -> int:
        return self._behind_pc[rank][place]

    def _go_to(self, after: bytearray, rank: int, kind: str, step: Step) -> None:
        """The next step is another one of the same call."""
        after[rank * self._rank_bytes + PC] = self._first[rank][kind, step.slot]

    def _place(self, rank: int, name: str, zone: int, index: int) -> int:
        """Where something of a rank's window stands."""
        return rank * self._rank_bytes + self._at[name] + zone * len(self._ranks) + index

    def _of(self, after: State | bytearray, rank: int, what: int) -> int:
        return after[rank * self._rank_bytes + self._own + what]

    def _set(self, after: bytearray, rank: int, what: int, value: int) -> None:
        after[rank * self._rank_bytes + self._own + what] = value

    def _known(self, after: State | bytearray, rank: int) -> int:
        return after[rank * self._rank_bytes + KNOWN]

    def _zero(self, after: bytearray, rank: int, zone: int, *names: str) -> None:
        for name in names:
            first = self._place(rank, name, zone, 0)
            after[first : first + len(self._ranks)] = bytes(len(self._ranks))

    def _tag(self, source: int, number: int, attempt: int = 0) -> int:
        """Bytes of a source, of a dispatch's attempt, or of a combine."""
        return 1 + source + len(self._ranks) * (number * SEVERAL + attempt)

    def _named_tag(self, tag: int) -> str:
        if not tag:
            return "nothing"
        of, source = divmod(tag - 1, len(self._ranks))
        return f"bytes of rank {source} in {of // SEVERAL}, attempt {of % SEVERAL}"

    # Waits.

    def _awaited(self, state: State, rank: int, step: Step) -> int:
        known, call = self._known(state, rank), self._of(state, rank, CALL)
        if step.kind == "agree":
            missing = self._absent(state, rank, "counts", step.zone, call)
            if self._case.without == "gives up":
                return missing & ~known
            return missing if known == call else 0
        if step.kind == "got":
            return self._absent(state, rank, "flags", step.zone, known)
        if step.kind in ("met", "met again"):
            if self._case.without == "meet again" and step.kind == "met again":
                return 0
            return self._absent(state, rank, "barriers", self._of(state, rank, BARRIERS) % NUM_ZONES, known)
        if step.kind == "heard":
            return self._absent(state, rank, "ready", step.zone, known)
        return 0

    def _absent(self, state: State | bytearray, rank: int, name: str, zone: int, but: int) -> int:
        """Ranks of which no entry is there."""
        first = self._place(rank, name, zone, 0)
        return mask_of(
            peer for peer in self._ranks if peer != rank and not but >> peer & 1 and not state[first + peer]
        )

    def _received(
        self, after: bytearray, rank: int, name: str, zone: int, but: int, number: int
    ) -> dict[int, int]:
        """What the entries of ranks say that are there; clears all of them."""
        first, said = self._place(rank, name, zone, 0), {}
        for peer in self._ranks:
            if peer == rank or but >> peer & 1 or not after[first + peer]:
                continue
            of, said[peer] = divmod(after[first + peer] - 1, RECALLED + 1)
            if of != number:
                raise TroubleError(f"rank {rank} takes an entry of {name} {of} of rank {peer} for {number}")
        self._zero(after, rank, zone, name)
        return said

    def _is_nothing(self, after: bytearray, rank: int, step: Step) -> bool:
        if step.kind in ("end", "renew"):
            return not self._of(after, rank, CALL)
        if step.kind not in self.WRITES or len(step.to) != 1:
            return False
        (peer,) = step.to
        if not self._reaches(after, rank, peer):
            return True
        if step.kind == "rows":
            return not any(self._has_view(after, rank, peer, part, step.zone) for part in range(2))
        return self._is_ignored(after, rank, peer, step.kind)

    def _is_ignored(self, after: bytearray, rank: int, peer: int, kind: str) -> bool:
        """Whether a peer does not look at a rank's entries any more."""
        by = self._of(after, peer, CALL) if kind == "counts" else self._known(after, peer)
        return bool(by >> rank & 1)

    def _post(self, after: bytearray, rank: int, step: Step, name: str, zone: int, value: int) -> str:
        for peer in step.to:
            if self._reaches(after, rank, peer) and not self._is_ignored(after, rank, peer, step.kind):
                after[self._place(peer, name, zone, rank)] = value
        return f"posts its {step.kind} to {list(step.to)}"

    # Who is masked.

    def _forget(self, after: bytearray, rank: int, peer: int) -> None:
        for name, zone in itertools.product(("flags", "barriers", "ready"), range(NUM_ZONES)):
            after[self._place(rank, name, zone, peer)] = 0

    def _heard(self, after: bytearray, rank: int) -> None:
        """Calls learn of it between their launches."""

    def _learn(self, after: bytearray, rank: int) -> None:
        super()._learn(after, rank)
        for peer, zone in itertools.product(members(self._known(after, rank)), range(NUM_ZONES)):
            after[self._place(rank, "counts", zone, peer)] = 0

    def _learn_and_follow(self, after: bytearray, rank: int) -> bool:
        """Whether the call goes on."""
        self._learn(after, rank)
        self._follow(after, rank)
        return self._is_running(after, rank)

    def _renewed(self, after: bytearray, rank: int, part: int, zone: int) -> None:
        """All that is there stays: it is the user's."""

    # What they run.

    def _run(self, rank: int, step: Step, state: State) -> Iterator[Labelled]:
        after, at = bytearray(state), rank * self._rank_bytes
        after[at + PC] = self._behind_step(rank, state[at + PC])
        text = self._does[step.kind](after, rank, step)
        if self._is_running(after, rank) and after[at + PC] == len(self._programmes[rank]):
            self._end(after, rank, ENDED)
            text += ", and has ended"
        yield text, bytes(after)

    def _raise(self, after: bytearray, rank: int) -> str:
        if rank in self._case.innocent:
            raise TroubleError(f"rank {rank} raises without a fault")
        self._end(after, rank, RAISED)
        return "finds that others go on without it"

    def _begin(self, after: bytearray, rank: int, step: Step) -> str:
        if not self._learn_and_follow(after, rank):
            return "finds that it is masked"
        if step.operator == "dispatch":  # the user has given the zone's rows up
            self._set(after, rank, LIVE + step.zone, 0)
            self._zero(after, rank, step.zone, "rows", "stamps")
        else:
            self._leave_results(after, rank, step)
        return f"begins without {members(self._of(after, rank, CALL))}"

    def _post_counts(self, after: bytearray, rank: int, step: Step) -> str:
        value = entry(step.round, self._of(after, rank, CALL))
        return self._post(after, rank, step, "counts", step.zone, value)

    def _agree(self, after: bytearray, rank: int, step: Step) -> str:
        call = self._of(after, rank, CALL)
        missing = self._absent(after, rank, "counts", step.zone, call)
        if missing and self._case.without != "gives up":
            return self._give_up(after, rank, step, f"without counts of {members(missing)}")
        said = self._received(after, rank, "counts", step.zone, call, step.round)
        others = [peer for peer in said if said[peer] != call]
        if others and self._case.without not in ("sets", "sets of counts"):
            return self._give_up(after, rank, step, f"for {others} go without others")
        self._set(after, rank, SENT, call | missing)
        self._set(after, rank, HAS, self._everybody & ~(call | missing))
        self._write(after, rank, rank, step)
        return "has the counts of all others"

    def _give_up(self, after: bytearray, rank: int, step: Step, why: str) -> str:
        self._set(after, rank, GIVES_UP, 1)
        self._go_to(after, rank, "recall" if self._case.without == "recall first" else "settle", step)
        return f"gives up, {why}"

    def _send_rows(self, after: bytearray, rank: int, step: Step) -> str:
        for peer in step.to:
            self._write(after, rank, peer, step)
        return f"sends rows to {list(step.to)}"

    def _post_flag(self, after: bytearray, rank: int, step: Step) -> str:
        value = entry(step.round, self._of(after, rank, CALL))
        return self._post(after, rank, step, "flags", step.zone, value)

    def _send(self, after: bytearray, rank: int, step: Step) -> str:
        self._post_flag(after, rank, step)
        return self._send_rows(after, rank, step)

    def _write(self, after: bytearray, rank: int, peer: int, step: Step) -> None:
        """A row and its stamp, to the place behind the rows of those whose counts count and come before."""
        sent = self._of(after, rank, SENT)
        if sent >> peer & 1 or not self._reaches(after, rank, peer):
            return
        place = self._index(rank, ~sent)
        tag = self._tag(rank, step.round, self._of(after, rank, ATTEMPT))
        for part, name in enumerate(("rows", "stamps")):
            if not self._has_view(after, rank, peer, part, step.zone):
                continue
            if place < self._of(after, peer, LIVE + step.zone):
                raise TroubleError(f"{self._named_tag(tag)} come over {name} that rank {peer} has taken")
            after[self._place(peer, name, step.zone, place)] = tag

    def _index(self, rank: int, among: int) -> int:
        """How many of some ranks come before one."""
        return len(members(among & (1 << rank) - 1))

    def _get(self, after: bytearray, rank: int, step: Step) -> str:
        known, call = self._known(after, rank), self._of(after, rank, CALL)
        said = self._received(after, rank, "flags", step.zone, known, step.round)
        are_told = self._case.without not in ("sets", "sets of rows")
        others = [peer for peer in said if said[peer] == RECALLED or (are_told and said[peer] != call)]
        if others:
            return self._give_up(after, rank, step, f"as {others} do")
        return "has the flags of all others"

    def _take(self, after: bytearray, rank: int, step: Step) -> str:
        if self._known(after, rank) != self._of(after, rank, CALL):
            self._go_to(after, rank, "settle", step)
            return "stops, for ranks have been masked"
        has, attempt = members(self._of(after, rank, HAS)), self._of(after, rank, ATTEMPT)
        for place, source in enumerate(has):
            for name in ("rows", "stamps"):
                found = after[self._place(rank, name, step.zone, place)]
                if found != self._tag(source, step.round, attempt):
                    raise TroubleError(
                        f"rank {rank} takes {self._named_tag(found)} among its {name} for those of rank "
                        f"{source} in {step.round}, attempt {attempt}"
                    )
        self._set(after, rank, LIVE + step.zone, len(has))
        return f"takes rows of {has}"

    def _end_run(self, after: bytearray, rank: int, step: Step) -> str:
        changed = self._known(after, rank) != self._of(after, rank, CALL)
        if changed and not self._learn_and_follow(after, rank):
            return "finds that it is masked"
        return "ends the run"

    def _renew(self, after: bytearray, rank: int, step: Step) -> str:
        self._behind(after, rank, step.operator, step.zone)
        return "has other memory where that is due"

    # What becomes of a dispatch in which ranks are masked.

    def _settle_attempt(self, after: bytearray, rank: int, step: Step) -> str:
        if not self._learn_and_follow(after, rank):
            return "finds that it is masked"
        gives_up = bool(self._of(after, rank, GIVES_UP))
        self._set(after, rank, GIVES_UP, 0)
        number, attempt, without = step.round, self._of(after, rank, ATTEMPT), self._case.without
        if without == "attempt":
            attempt = 0
        is_repeated = gives_up
        if without != "first word":
            try:
                is_repeated = Outcomes(WORD, 0, self._exchange(after)).settle(
                    number, attempt, repeat=gives_up
                )
            except RankMaskedError:
                return self._raise(after, rank)
        if not is_repeated:
            self._go_to(after, rank, "keep", step)
            return "keeps what has come"
        aside = ("recall", "meet", "met", "clear")[without == "recall first" :]
        self._go_to(after, rank, next(kind for kind in aside if kind not in self._left_out), step)
        return "is to repeat it"

    def _exchange(self, after: bytearray) -> Callable[[int, int, int], int]:
        """Compares and exchanges words that are kept in a byte each."""

        def exchange(at: int, expected: int, desired: int) -> int:
            place = self._common + at // WORD_BYTES
            said = after[place] - 1
            number, attempt = divmod(said >> 1, SEVERAL)
            found = 0 if said < 0 else (number * MOST_ATTEMPTS + attempt + 1) << 1 | said & 1
            if found == expected:
                number, attempt = divmod(desired >> 1, MOST_ATTEMPTS)
                after[place] = 1 + (number * SEVERAL + attempt - 1 << 1 | desired & 1)
            return found

        return exchange

    def _keep(self, after: bytearray, rank: int, step: Step) -> str:
        """Takes out the rows of whom the call goes without by now."""
        self._behind(after, rank, step.operator, step.zone)
        self._go_to(after, rank, "take", step)
        has, call = self._of(after, rank, HAS), self._of(after, rank, CALL)
        if self._case.without == "out":
            return "keeps all rows"
        left = [source for source in members(has) if not call >> source & 1]
        for name in ("rows", "stamps"):
            first = self._place(rank, name, step.zone, 0)
            kept = [after[first + self._index(source, has)] for source in left]
            after[first : first + len(self._ranks)] = bytes([*kept, *[0] * (len(self._ranks) - len(kept))])
        self._set(after, rank, HAS, has & ~call)
        return f"takes rows of {members(has & call)} out"

    def _recall(self, after: bytearray, rank: int, step: Step) -> str:
        return self._post(after, rank, step, "flags", step.zone, entry(step.round, RECALLED))

    def _meet(self, after: bytearray, rank: int, step: Step) -> str:
        number = self._of(after, rank, BARRIERS)
        return self._post(after, rank, step, "barriers", number % NUM_ZONES, entry(number, 0))

    def _have_met(self, after: bytearray, rank: int, step: Step) -> str:
        number = self._of(after, rank, BARRIERS)
        self._received(after, rank, "barriers", number % NUM_ZONES, self._known(after, rank), number)
        self._set(after, rank, BARRIERS, number + 1)
        changed = self._known(after, rank) != self._of(after, rank, CALL)
        if changed and not self._learn_and_follow(after, rank):
            return "finds that it is masked"
        return "has met all others"

    def _clear(self, after: bytearray, rank: int, step: Step) -> str:
        self._zero(after, rank, step.zone, "counts", "flags")
        return "clears its entries"

    def _begin_again(self, after: bytearray, rank: int, step: Step) -> str:
        if self._case.without != "meet again":
            self._have_met(after, rank, step)
        if not self._is_running(after, rank) or not self._learn_and_follow(after, rank):
            return "finds that it is masked"
        attempt = self._of(after, rank, ATTEMPT) + 1
        if attempt == SEVERAL:
            raise TroubleError(f"rank {rank} repeats dispatch {step.round} for ever")
        self._set(after, rank, ATTEMPT, attempt)
        self._set(after, rank, SENT, 0)
        self._set(after, rank, HAS, 0)
        self._zero(after, rank, step.zone, "rows", "stamps")
        self._go_to(after, rank, "counts", step)
        return f"begins again without {members(self._of(after, rank, CALL))}"

    # Combine.

    def _leave_results(self, after: bytearray, rank: int, step: Step) -> None:
        """Where those look for them whose rows they answer."""
        has, sent = self._of(after, rank, HAS), self._of(after, rank, SENT)
        self._zero(after, rank, step.zone, "results")
        for source in members(has):
            index = self._index(source, has if self._case.without == "sent" else ~sent)
            after[self._place(rank, "results", step.zone, index)] = self._tag(source, step.round)

    def _post_ready(self, after: bytearray, rank: int, step: Step) -> str:
        return self._post(after, rank, step, "ready", step.zone, entry(step.round, 0))

    def _hear_results(self, after: bytearray, rank: int, step: Step) -> str:
        self._received(after, rank, "ready", step.zone, self._known(after, rank), step.round)
        changed = self._known(after, rank) != self._of(after, rank, CALL)
        if changed and not self._learn_and_follow(after, rank):
            return "finds that it is masked"
        return "can read the results of all others"

    def _read(self, after: bytearray, rank: int, step: Step) -> str:
        place = self._index(rank, ~self._of(after, rank, SENT))
        for peer in step.to:
            found = after[self._place(peer, "results", step.zone, place)]
            is_marked = self._of(after, rank, CALL) >> peer & 1
            if not is_marked and found != self._tag(rank, step.round):
                self._set(after, rank, MISREAD, 1)
        return f"reads results of {list(step.to)}"

    def _sum(self, after: bytearray, rank: int, step: Step) -> str:
        is_masked = any(self._known(after, peer) >> rank & 1 for peer in self._ranks)
        if is_masked and self._case.without != "read":
            return self._raise(after, rank)
        if self._of(after, rank, MISREAD):
            raise TroubleError(f"rank {rank} sums results in combine {step.round} that are not its own")
        changed = self._known(after, rank) != self._of(after, rank, CALL)
        if changed and not self._learn_and_follow(after, rank):
            return "finds that it is masked"
        for what in (ATTEMPT, SENT, HAS):
            self._set(after, rank, what, 0)
        return "sums them"

    def _end(self, after: bytearray, rank: int, status: int) -> None:
        """A window outlives its rank: others still read results there, and whom it has masked."""
        known, first = self._known(after, rank), self._place(rank, "results", 0, 0)
        results = after[first : first + NUM_ZONES * len(self._ranks)]
        super()._end(after, rank, status)
        after[first : first + len(results)] = results
        after[rank * self._rank_bytes + KNOWN] = known
