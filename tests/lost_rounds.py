"""Three ranks that go on without who is lost: every order of their steps, with the rules that run.

A rank makes rounds of a dispatch and a combine. In a dispatch it posts an entry to every rank, and waits for
one of each. In a combine it writes results into slots that are now one rank's to write and now another's, in
each zone. Some ranks are *slow*: others may miss them at any of their steps, whether they go on or not; so
what they still write comes late, at any step of the others, as it was computed. Some *die* at any step.

All that a wait takes is compared with what it should be. Nobody waits for ever, and no rank is masked but the
slow and the dead. A step of another rank may come between any two, but where it can change nothing: a rank
that is not slow writes all that it sends at once, for nobody misses it in between.

Whom a rank masks is said by the library's `OnLostRanks` and `MaskedSets`, where windows have other memory by
its `Renewals`, the zones by its `Rounds`. The model's are: the ranks' programmes, what lies in windows, that
a deadline passes only where all who are missing are slow, dead or wait themselves, and what notes say then.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast
from unittest import mock

from moe_triton.core.errors import RankMaskedError
from moe_triton.layout import Wandering
from moe_triton.rendezvous.masked_sets import MaskedSets
from moe_triton.rendezvous.stores import Store
from moe_triton.runtime import on_lost
from moe_triton.runtime.renewals import Renewals

RANKS = (0, 1, 2)
EVERYBODY = 0b111
NUM_ZONES = 2
SLOTS = 2
MOST_SETS = 4

RUNS, TOLD, ENDED, RAISED, DEAD = range(5)
"""What a rank is. TOLD: it knows that it is masked, and raises behind its writes that are under way."""


class Form(NamedTuple):
    """How a combine works.

    Attributes:
        name: of the schemes.
        waits_for_all: combine waits for every rank, and slots have no flags; otherwise it waits for the
            results of its own tokens, each of which has a flag.
        wandering: parts of a window that have no writer of their own.
        calls: that each rank makes, D a dispatch and C a combine.
        zones: of each call.
        repeats_after: combines until one has the same zone again.
        shift: by how many ranks a slot's writer is further on then.
        is_sparse: each rank needs a result of another one and one of its own, instead of one of each other.
    """

    name: str
    waits_for_all: bool
    wandering: tuple[Wandering, ...]
    calls: str
    zones: tuple[int, ...]
    repeats_after: int
    shift: int = 2
    is_sparse: bool = False

    def writer(self, round_: int, rank: int, slot: int) -> int:
        """Who writes a slot of a rank: another one when the zone is used again."""
        if self.is_sparse and slot:
            return rank
        return (rank + 1 + slot + self.shift * (round_ // self.repeats_after)) % len(RANKS)


class Case(NamedTuple):
    """What is tried.

    Attributes:
        form: of combine.
        slow: ranks that others may miss at any step.
        dies: ranks that may die at any step.
        gone: ranks that have died before anything else, and nobody knows.
        cut: ranks from which on and to which nothing is written any more, from any step on.
        without: a guard that is taken away; "" for none:
            "new memory" of any zone, or of "zone 0", "zone 1", "part 0" or "part 1" alone; peers "follow";
            that a zone has it only behind the "run's end", when all have "heard" of the mask; that who is
            masked is "refused"; "numbers" of rounds in flags; "compare_set" of the store; that who is masked
            "names nobody", and shall "raise"; "leave out" what has come of a masked rank in a dispatch;
            "notes" of those who wait.
    """

    form: Form
    slow: tuple[int, ...] = ()
    dies: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    without: str = ""

    @property
    def innocent(self) -> list[int]:
        """Ranks that nobody may mask."""
        return (
            [] if self.cut else [rank for rank in RANKS if rank not in (*self.slow, *self.dies, *self.gone)]
        )


class Step(NamedTuple):
    """What a rank does at a time.

    Attributes:
        kind: "begin" a run; "post" entries; "send" results; "write" a result's bytes, then its "flag"; "look"
            which entries have come, as the first block of a dispatch does; "take" them; "sum" a result, when
            all have come; "end" the run, behind which a zone may have other memory.
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


def members(mask: int) -> list[int]:
    """The ranks of a set."""
    return [rank for rank in RANKS if mask >> rank & 1]


def mask_of(ranks: Iterable[int]) -> int:
    """A set of ranks, a bit for each."""
    return sum(1 << rank for rank in set(ranks))


class MemoryStore:
    """The group's store: of each number the set that was named.

    Args:
        sets: in the order of their numbers.
        last_wins: who writes a value later replaces it.
    """

    meanwhile: Callable[[], object] | None = None
    """What another rank does before the first write."""

    def __init__(self, sets: Sequence[int], last_wins: bool = False) -> None:
        self.sets, self._last_wins = list(sets), last_wins

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's stores."""
        at = int(key.rpartition("/")[2]) - 1
        if not expected and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if not expected and (at == len(self.sets) or self._last_wins):
            self.sets[at:] = [mask_of(json.loads(desired)), *self.sets[at + 1 :]]
        return json.dumps(members(self.sets[at])).encode() if at < len(self.sets) else expected.encode()


class KnownMasks:
    """A rank's masks, as far as `OnLostRanks` needs them."""

    def __init__(self, masked: Iterable[int]) -> None:
        self.masked = frozenset(masked)

    def update(self, rank: int, masked: bool, why: str) -> None:
        assert masked, why
        self.masked |= {rank}


Sets = TypeVar("Sets", bound=MaskedSets)


class Wished(MaskedSets):
    """Sets that keep who is to be named next, for a later step."""

    ranks: frozenset[int] = frozenset()

    def add(self, ranks: Collection[int]) -> frozenset[int]:
        self.ranks |= frozenset(ranks)
        return self.masked


class Said(NamedTuple):
    """What a rank goes by once it has asked the store, and what is there.

    Attributes:
        known: whom it masks.
        number: of the sets that it has read.
        told: whether it has found itself in one.
        wish: whom it is going to name.
        sets: in the store.
    """

    known: int
    number: int
    told: bool
    wish: int
    sets: tuple[int, ...]


class Asking:
    """One rank that asks the store, by the library's rules.

    Args:
        rank: this one.
        known: whom it masks.
        number: of the sets that it has read.
        store: of the ranks.
        stuck: ranks that wait for others, by their notes.
        knows_itself: whether it sees that it is in a set before it names others.
    """

    def __init__(
        self,
        rank: int,
        known: int,
        number: int,
        store: MemoryStore,
        stuck: int = 0,
        knows_itself: bool = True,
    ) -> None:
        self._store, self._is_told, self._rank = store, False, rank if knows_itself else -1
        read = functools.reduce(int.__or__, store.sets[:number], 0)
        self._masks = KnownMasks(members(known))
        self._sets = self._made(MaskedSets, number, read)
        self._wished = self._made(Wished, number, read)
        context, notes, waits = mock.Mock(rank=rank), mock.Mock(), mock.Mock(stop=self._stop)
        notes.holding_up = lambda ranks, *_: [each for each in ranks if not stuck >> each & 1]
        with mock.patch.object(on_lost, "in_thread"):  # nothing runs by itself here
            rest = notes, waits, 1.0, {"dispatch": 0}
            self._deciding = on_lost.OnLostRanks(context, cast(Any, self._masks), self._wished, *rest)
            self._naming = on_lost.OnLostRanks(context, cast(Any, self._masks), self._sets, *rest)

    def _made(self, kind: type[Sets], number: int, masked: int) -> Sets:
        made = kind(lambda: cast(Store, self._store), len(RANKS), self._rank)
        made.number, made.masked = number, frozenset(members(masked))
        return made

    def _stop(self, why: object) -> None:
        self._is_told = True

    def _said(self, sets: MaskedSets) -> Said:
        wish, known = mask_of(self._wished.ranks), mask_of(self._masks.masked)
        return Said(known, sets.number, self._is_told, wish, tuple(self._store.sets))

    def hear(self) -> Said:
        """Reads what others have named."""
        self._naming._apply(self._sets.follow())
        return self._said(self._sets)

    def decide(self, missing: int) -> Said:
        """A deadline has passed; says whom the rank is going to name."""
        self._deciding._decide(members(missing))
        return self._said(self._wished)

    def notice(self, dead: int) -> Said:
        """A rank has died; says that the rank is going to name it."""
        with mock.patch.object(on_lost, "in_thread", lambda run, _: run()):
            self._deciding.lost(dead, "")
        return self._said(self._wished)

    def name(self, ranks: int) -> Said:
        """Names who is to be named."""
        self._naming._agree(members(ranks))
        return self._said(self._sets)


class Kept(NamedTuple):
    """What a rank's `Renewals` has in it between two steps, as sets in their order."""

    suspects: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    due: tuple[tuple[int, int], ...] = ()


class SeenWindow:
    """A window that says what is asked of it."""

    page_bytes = 1

    def __init__(self, masks: Sequence[int]) -> None:
        self._masks = masks
        self.renewed: list[int] = []
        self.followed: list[tuple[int, int]] = []

    why_not_let_go = ""

    def is_mapped(self, rank: int) -> bool:
        return True

    def let_go(self, rank: int) -> None:
        raise AssertionError("all ranks are of one host")

    def renew(self, number: int, at: int, num_bytes: int, keeps: bool) -> None:
        self.renewed.append(number)

    def follow(self, rank: int, number: int, at: int, num_bytes: int) -> None:
        self.followed.append((rank, number))

    def say_masked(self, ranks: Collection[int]) -> None:
        raise AssertionError("the model knows")

    def masked_by(self, rank: int) -> frozenset[int]:
        return frozenset(members(self._masks[rank]))


class Renewing:
    """One rank's `Renewals` for the length of a step.

    Args:
        form: of combine.
        rank: this one.
        kept: what there was in it.
        quiet: ranks that certainly write nothing any more.
        masks: of each rank, as its window says.
    """

    def __init__(
        self, form: Form, rank: int, kept: Kept, quiet: int = 0, masks: Sequence[int] = (0, 0, 0)
    ) -> None:
        self.window = SeenWindow(masks)
        of_ranks = rank, len(RANKS), lambda each: bool(quiet >> each & 1)
        self.renewals = Renewals(self.window, form.wandering, NUM_ZONES, *of_ranks)
        self.renewals._suspects, self.renewals._due = set(kept.suspects), set(kept.due)
        self.renewals._masked = frozenset(kept.masked)

    def kept(self) -> Kept:
        """What there is in it now."""
        made = self.renewals
        return Kept(*(tuple(sorted(each)) for each in (made._suspects, made._masked, made._due)))


PC, STATUS, KNOWN, NUMBER, KEPT, WISH, DEAD_WISH, NOTICED, SEEN = range(9)
VIEWS = 9  # of each part and zone of the window: the ranks that have its memory mapped
ENTRIES = VIEWS + 2 * NUM_ZONES  # by zone and source: the number of a round
BYTES = ENTRIES + NUM_ZONES * len(RANKS)  # by zone and slot: whose, of which round
FLAGS = BYTES + NUM_ZONES * SLOTS  # by zone and slot, or source: the number of a round
RANK_BYTES = FLAGS + NUM_ZONES * len(RANKS)
CUT = RANK_BYTES * len(RANKS)
NUM_SETS = CUT + 1
SETS = NUM_SETS + 1
STATE_BYTES = SETS + MOST_SETS
TORN = 255  # an entry whose bytes went elsewhere

State = bytes
Labelled = tuple[str, State]


class Model:
    """All steps of a case.

    Args:
        case: which.
    """

    def __init__(self, case: Case) -> None:
        self._case, self._form = case, case.form
        self._programmes = [self._programme(rank) for rank in RANKS]
        self._all_kept = [Kept()]
        self._numbers = {Kept(): 0}
        self._asked: dict[tuple[Any, ...], Any] = {}

    def start(self) -> State:
        """Nobody has done anything."""
        state = bytearray(STATE_BYTES)
        for rank in RANKS:
            views = rank * RANK_BYTES + VIEWS
            state[views : views + 2 * NUM_ZONES] = [EVERYBODY] * 2 * NUM_ZONES
        for rank in self._case.gone:
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

    def _programme(self, rank: int) -> list[Step]:
        """A rank's steps. Who may stop writes to one rank after another, and a flag behind its bytes."""
        form, case = self._form, self._case
        in_pieces = rank in case.slow or rank in case.dies
        peers = [(rank + by) % len(RANKS) for by in RANKS]
        steps: list[Step] = []
        done = {"D": 0, "C": 0}
        for call, zone in zip(form.calls, form.zones, strict=True):
            number = done[call]
            done[call] += 1
            if call == "D":
                of = number, "dispatch", zone
                steps.append(Step("begin", *of))
                steps += (
                    [Step("post", *of, (peer,)) for peer in peers]
                    if in_pieces
                    else [Step("post", *of, RANKS)]
                )
                # What the first block has seen matters where that may be taken.
                steps += [Step("look", *of)] if case.without == "leave out" else []
                steps += [Step("take", *of), Step("end", *of)]
                continue
            of = number, "combine", zone
            steps.append(Step("begin", *of))
            if in_pieces:
                for peer in peers:
                    slots = [slot for slot in range(SLOTS) if form.writer(number, peer, slot) == rank]
                    for slot in slots:
                        steps.append(Step("write", *of, (peer,), slot))
                        steps += [] if form.waits_for_all else [Step("flag", *of, (peer,), slot)]
                    steps += [Step("flag", *of, (peer,), rank)] if form.waits_for_all else []
            else:
                steps.append(Step("send", *of, RANKS))
            steps += [Step("sum", *of, slot=slot) for slot in range(SLOTS)]
            steps.append(Step("end", *of))
        return steps

    # What ranks do.

    def _steps(self, state: State) -> Iterator[Labelled]:
        """What may happen next."""
        case = self._case
        missing = [self._missing(state, rank) for rank in RANKS]
        moves = [False] * len(RANKS)
        for rank in RANKS:
            for text, after in self._steps_of(rank, state, missing):
                moves[rank] |= "suspects" not in text or self._names(rank, after) != state
                yield f"rank {rank} {text}", self._skipped(bytearray(after))
        if case.cut and not state[CUT]:
            cut = bytearray(state)
            cut[CUT] = 1
            yield f"rank(s) {list(case.cut)} are cut off", self._skipped(cut)
        for rank in case.dies:
            if state[rank * RANK_BYTES + STATUS] in (RUNS, TOLD):
                dead = bytearray(state)
                self._end(dead, rank, DEAD)
                yield f"rank {rank} dies", self._skipped(dead)
        self._check_end(state, missing, moves)

    def _skipped(self, after: bytearray) -> State:
        """Past steps that do nothing, now or later."""
        for rank in RANKS:
            at = rank * RANK_BYTES
            if after[at + STATUS] not in (RUNS, TOLD):
                continue
            steps = self._programmes[rank]
            while self._is_nothing(after, rank, steps[after[at + PC]]):
                after[at + PC] += 1
        return bytes(after)

    def _is_nothing(self, after: bytearray, rank: int, step: Step) -> bool:
        if step.kind == "begin":
            return not after[rank * RANK_BYTES + KNOWN]
        if step.kind not in ("post", "write", "flag"):
            return False
        (peer,) = step.to if len(step.to) == 1 else (None,)
        if peer is None:
            return False
        is_ignored = step.kind == "post" and self._is_ignored(after, rank, peer)
        return is_ignored or not self._reaches(after, rank, peer)

    def _is_ignored(self, after: bytearray, rank: int, peer: int) -> bool:
        """Whether a peer does not look at a rank's entries any more."""
        return bool(after[peer * RANK_BYTES + KNOWN] >> rank & 1) and self._case.without != "leave out"

    def _check_end(self, state: State, missing: Sequence[int], moves: Sequence[bool]) -> None:
        """Nobody waits for ever, and who is left agrees."""
        status = [state[rank * RANK_BYTES + STATUS] for rank in RANKS]
        innocent = self._case.innocent
        if not any(
            moves[rank] for rank in RANKS if rank not in self._case.slow
        ):  # who is slow need not go on
            for rank in innocent:
                if status[rank] != ENDED:
                    raise TroubleError(f"rank {rank} waits for ever, for {members(missing[rank])}")
        if any(moves):
            return
        for rank in RANKS:
            if status[rank] in (RUNS, TOLD):
                raise TroubleError(f"rank {rank} waits for ever, for {members(missing[rank])}")
        sets, dead = (
            tuple(state[SETS : SETS + state[NUM_SETS]]),
            mask_of(r for r in RANKS if status[r] == DEAD),
        )
        all_said = [self._ask("hear", rank, state, sets) for rank in RANKS if status[rank] == ENDED]
        known = {said.known | dead for said in all_said if not said.told}
        if len(known) != 1:
            masked = [members(each) for each in known]
            raise TroubleError(f"who has ended has masked {masked}" if masked else "nobody goes on")

    def _steps_of(self, rank: int, state: State, missing: Sequence[int]) -> Iterator[Labelled]:
        at = rank * RANK_BYTES
        status, sets = state[at + STATUS], tuple(state[SETS : SETS + state[NUM_SETS]])
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
        for dead in RANKS:
            is_dead = state[dead * RANK_BYTES + STATUS] == DEAD
            if is_dead and not state[at + NOTICED] >> dead & 1 and status != TOLD:
                said = self._ask("notice", rank, state, sets, dead)
                after = bytearray(state)
                after[at + NOTICED] |= 1 << dead
                after[at + DEAD_WISH] |= said.wish & ~self._named(sets)
                yield f"notices the death of rank {dead}", self._apply(after, rank, said)
        if status not in (RUNS, TOLD) or wish:
            return
        step = self._programmes[rank][state[at + PC]]
        if status == TOLD and step.kind not in ("post", "write", "flag"):
            after = bytearray(state)
            self._end(after, rank, RAISED)
            yield "raises that it is masked", bytes(after)
        elif not missing[rank]:
            for kind, after in self._run(rank, step, state):
                yield f"{kind} in {step.operator} {step.round}", after
        elif all(self._is_missed(rank, peer, state, missing) for peer in members(missing[rank])):
            stuck = 0 if self._case.without == "notes" else self._stuck(rank, state, missing)
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
        at = rank * RANK_BYTES
        if state[at + STATUS] not in (RUNS, TOLD):
            return 0
        step = self._programmes[rank][state[at + PC]]
        known, wanted = state[at + KNOWN], step.round + 1
        found = 0
        if step.kind in ("look", "take"):
            places = [(peer, at + ENTRIES + step.zone * len(RANKS) + peer) for peer in RANKS]
        elif step.kind == "end":
            return self._unheard(state, rank, step)
        elif step.kind != "sum":
            return 0
        elif self._form.waits_for_all:
            places = (
                [(peer, at + FLAGS + step.zone * len(RANKS) + peer) for peer in RANKS]
                if step.slot == 0
                else []
            )
        else:
            places = [
                (self._form.writer(step.round, rank, slot), at + FLAGS + step.zone * len(RANKS) + slot)
                for slot in range(step.slot, SLOTS)
            ]
        numbered = self._case.without != "numbers"
        for peer, place in places:
            if known >> peer & 1:
                continue
            if state[place] not in (wanted, TORN) if numbered else not state[place]:
                found |= 1 << peer
        return found

    def _unheard(self, state: State, rank: int, step: Step) -> int:
        """Ranks that have yet to hear whom this one masks, before a zone has other memory."""
        at = rank * RANK_BYTES
        known = state[at + KNOWN]
        if not known or self._case.without == "heard":
            return 0
        masks = tuple(state[peer * RANK_BYTES + KNOWN] for peer in RANKS)
        ended = mask_of(
            peer for peer in RANKS if state[peer * RANK_BYTES + STATUS] == ENDED
        )  # they have left
        quiet, kept = state[at + NOTICED] | ended, state[at + KEPT]
        key = "unheard", rank, kept, quiet, step.operator, step.zone, masks
        if (found := self._asked.get(key)) is None:
            renewals = Renewing(self._form, rank, self._all_kept[kept], quiet, masks).renewals
            found = mask_of(renewals.unheard(step.operator, step.zone, members(known)))
            self._asked[key] = found
        return int(found)

    def _is_missed(self, rank: int, peer: int, state: State, missing: Sequence[int]) -> bool:
        """Whether a wait for a peer may last longer than the time-out."""
        at = peer * RANK_BYTES
        is_end = self._programmes[rank][state[rank * RANK_BYTES + PC]].kind == "end"
        if is_end:
            return peer in self._case.slow or state[at + STATUS] in (RAISED, DEAD)
        return (
            peer in self._case.slow
            or state[at + STATUS] in (RAISED, DEAD)
            or self._is_blocked(peer, rank, state, missing[peer])
            or bool(state[at + KNOWN] >> rank & 1)
            or self._is_cut(rank, peer, state)
        )

    def _is_blocked(self, rank: int, by: int, state: State, missing: int) -> bool:
        """Whether a rank waits, and not only until others have heard of a set, as they will."""
        if not missing or self._programmes[rank][state[rank * RANK_BYTES + PC]].kind != "end":
            return bool(missing)
        late = (RAISED, DEAD)
        return not missing >> by & 1 and all(
            peer in self._case.slow or state[peer * RANK_BYTES + STATUS] in late for peer in members(missing)
        )

    def _stuck(self, rank: int, state: State, missing: Sequence[int]) -> int:
        """Ranks that say that they wait for others than this one."""
        return mask_of(
            peer
            for peer in RANKS
            if peer not in self._case.slow and missing[peer] and missing[peer] & ~(1 << rank)
        )

    def _is_cut(self, rank: int, peer: int, state: State) -> bool:
        return bool(state[CUT]) and (rank in self._case.cut) != (peer in self._case.cut)

    # What they ask the store.

    def _ask(
        self, how: str, rank: int, state: State, sets: tuple[int, ...], about: int = 0, stuck: int = 0
    ) -> Said:
        at = rank * RANK_BYTES
        return self._answer(how, rank, state[at + KNOWN], state[at + NUMBER], sets, about, stuck)

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
        store = MemoryStore(sets, last_wins=self._case.without == "compare_set")

        def asking(rank: int, known: int, number: int) -> Asking:
            knows_itself = self._case.without != "names nobody"
            return Asking(rank, known, number, store, stuck, knows_itself)

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
        at = rank * RANK_BYTES
        mine = rank, state[at + KNOWN], state[at + NUMBER], sets, state[at + kind], 0
        said, _ = self._answer("name", *mine)
        yield (
            self._text_of(rank, state[at + kind], said),
            self._settle(bytearray(state), [(rank, kind, said)]),
        )
        for other in RANKS:
            of = other * RANK_BYTES
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
        at = rank * RANK_BYTES
        sets = tuple(state[SETS : SETS + state[NUM_SETS]])
        return next(self._name(rank, WISH, state, sets))[1] if state[at + WISH] else state

    def _text_of(self, rank: int, ranks: int, said: Said) -> str:
        told = " finds itself in it, and" if said.told else ""
        return f"names {members(ranks)},{told} has set {said.number} of {self._listed(said.sets)}"

    def _settle(self, after: bytearray, all_said: Sequence[tuple[int, int, Said]]) -> State:
        for rank, kind, said in all_said:
            after[rank * RANK_BYTES + kind] = 0
            before = tuple(after[SETS : SETS + after[NUM_SETS]])
            for ranks in said.sets:
                wrong = [each for each in members(ranks) if each in self._case.innocent]
                if wrong:
                    raise TroubleError(f"{wrong} is masked without a fault")
            if said.sets != before:
                after[NUM_SETS] = len(said.sets)
                after[SETS : SETS + len(said.sets)] = bytes(said.sets)
            self._apply(after, rank, said)
        return bytes(after)

    def _apply(self, after: bytearray, rank: int, said: Said) -> State:
        """Goes by what the store has said."""
        at = rank * RANK_BYTES
        if after[at + STATUS] == RAISED:
            return bytes(after)
        after[at + NUMBER] = said.number
        if said.told and self._case.without != "raise":
            if after[at + STATUS] == ENDED:
                self._end(after, rank, RAISED)
                return bytes(after)
            after[at + STATUS] = TOLD
        newly = said.known & ~after[at + KNOWN]
        after[at + KNOWN] = said.known
        for peer in members(newly):
            of = peer * RANK_BYTES
            both_go_on = after[of + STATUS] in (RUNS, ENDED) and after[at + STATUS] in (RUNS, ENDED)
            if both_go_on and after[of + KNOWN] >> rank & 1:
                raise TroubleError(f"ranks {rank} and {peer} have masked each other, and both go on")
            if self._case.without != "leave out":  # nobody looks there any more
                for zone in range(NUM_ZONES):
                    after[at + ENTRIES + zone * len(RANKS) + peer] = 0
        if newly and after[at + STATUS] in (RUNS, TOLD):
            self._learn(after, rank)
        return bytes(after)

    # What is renewed, and followed.

    def _learn(self, after: bytearray, rank: int) -> None:
        at = rank * RANK_BYTES
        number, known = after[at + KEPT], after[at + KNOWN]
        key = "learn", rank, number, known
        if (found := self._asked.get(key)) is None:
            made = Renewing(self._form, rank, self._all_kept[number])
            made.renewals.learn(frozenset(members(known)))
            found = self._asked[key] = self._number_of(made.kept())
        after[at + KEPT] = found
        if self._case.without == "run's end":
            for zone in range(NUM_ZONES):
                self._behind(after, rank, "combine", zone)
        self._follow(after, rank)

    def _number_of(self, kept: Kept) -> int:
        if kept not in self._numbers:
            self._numbers[kept] = len(self._all_kept)
            self._all_kept.append(kept)
        return self._numbers[kept]

    def _behind(self, after: bytearray, rank: int, operator: str, zone: int) -> None:
        """A run has ended: windows have other memory where that is due."""
        at = rank * RANK_BYTES
        if not after[at + KNOWN]:
            return
        found = self._renews(after, rank, operator, zone)
        after[at + KEPT] = found[0]
        for number in found[1]:
            part, of_zone = divmod(number, NUM_ZONES)
            if self._case.without in ("new memory", f"zone {of_zone}", f"part {part}"):
                continue
            after[at + VIEWS + number] = 1 << rank
            if part == 0:
                after[at + BYTES + of_zone * SLOTS : at + BYTES + (of_zone + 1) * SLOTS] = bytes(SLOTS)
            if part == 1:
                first = at + FLAGS + of_zone * len(RANKS)
                after[first : first + len(RANKS)] = bytes(len(RANKS))

    def _renews(self, after: State | bytearray, rank: int, operator: str, zone: int) -> Any:
        at = rank * RANK_BYTES
        key = "behind", rank, after[at + KEPT], after[at + NOTICED], operator, zone
        if (found := self._asked.get(key)) is None:
            made = Renewing(self._form, rank, self._all_kept[after[at + KEPT]], after[at + NOTICED])
            made.renewals.behind(operator, zone)
            found = self._asked[key] = self._number_of(made.kept()), made.window.renewed
        return found

    def _follow(self, after: bytearray, rank: int) -> None:
        """A run begins, or goes on. Who finds that a peer masks it raises."""
        at = rank * RANK_BYTES
        known = after[at + KNOWN]
        if not known or self._case.without == "follow":
            return
        is_careless = self._case.without == "refused"
        masks = (0, 0, 0) if is_careless else tuple(after[peer * RANK_BYTES + KNOWN] for peer in RANKS)
        key = "before", rank, known, masks
        if key not in self._asked:
            made = Renewing(self._form, rank, Kept(), masks=masks)
            try:
                made.renewals.before(set(RANKS) - set(members(known)) - {rank})
                self._asked[key] = made.window.followed
            except RankMaskedError:
                self._asked[key] = None
        if (found := self._asked[key]) is None:
            self._end(after, rank, RAISED)
            return
        for peer, number in found:
            if after[peer * RANK_BYTES + STATUS] in (RUNS, TOLD):
                after[peer * RANK_BYTES + VIEWS + number] |= 1 << rank

    # What they run.

    def _run(self, rank: int, step: Step, state: State) -> Iterator[Labelled]:
        after, at = bytearray(state), rank * RANK_BYTES
        text = step.kind
        if step.kind == "begin":
            self._follow(after, rank)
            if after[at + STATUS] == RAISED:
                yield "finds that it is masked", bytes(after)
                return
            text = "begins"
        elif step.kind == "post":
            for peer in step.to:
                self._post(after, rank, peer, step)
            text = f"posts to {list(step.to)}"
        elif step.kind == "send":
            for peer, slot in self._slots_of(rank, step.round):
                self._write(after, rank, peer, slot, step)
                if not self._form.waits_for_all:
                    self._flag(after, rank, peer, slot, step)
            if self._form.waits_for_all:
                for peer in RANKS:
                    self._flag(after, rank, peer, rank, step)
            text = "sends"
        elif step.kind == "write":
            self._write(after, rank, step.to[0], step.slot, step)
            text = f"writes bytes to slot {step.slot} of rank {step.to[0]}"
        elif step.kind == "flag":
            self._flag(after, rank, step.to[0], step.slot, step)
            text = f"writes flag {step.slot} of rank {step.to[0]}"
        elif step.kind == "end":
            self._behind(after, rank, step.operator, step.zone)
            text = "ends the call"
        elif step.kind in ("look", "take"):
            self._take(after, rank, step)
            text = "sees what has come" if step.kind == "look" else "takes what has come"
        else:
            self._sum(after, rank, step)
            text = f"sums slot {step.slot}"
        after[at + PC] += 1
        if after[at + PC] == len(self._programmes[rank]):
            self._end(after, rank, ENDED)
            text += ", and has ended"
        yield text, bytes(after)

    def _slots_of(self, rank: int, number: int) -> Iterator[tuple[int, int]]:
        for peer in RANKS:
            for slot in range(SLOTS):
                if self._form.writer(number, peer, slot) == rank:
                    yield peer, slot

    def _reaches(self, after: bytearray, rank: int, peer: int) -> bool:
        """Whether a rank writes to another one, and whether anybody looks there."""
        return (
            not after[rank * RANK_BYTES + KNOWN] >> peer & 1
            and after[peer * RANK_BYTES + STATUS] in (RUNS, TOLD)
            and not self._is_cut(rank, peer, after)
        )

    def _has_view(self, after: bytearray, rank: int, peer: int, part: int, zone: int) -> bool:
        return bool(after[peer * RANK_BYTES + VIEWS + part * NUM_ZONES + zone] >> rank & 1)

    def _post(self, after: bytearray, rank: int, peer: int, step: Step) -> None:
        at = peer * RANK_BYTES
        if self._reaches(after, rank, peer) and not self._is_ignored(after, rank, peer):
            in_view = not self._form.waits_for_all or self._has_view(after, rank, peer, 0, step.zone)
            place = at + ENTRIES + step.zone * len(RANKS) + rank
            after[place] = step.round + 1 if in_view else TORN

    def _write(self, after: bytearray, rank: int, peer: int, slot: int, step: Step) -> None:
        if self._reaches(after, rank, peer) and self._has_view(after, rank, peer, 0, step.zone):
            place = peer * RANK_BYTES + BYTES + step.zone * SLOTS + slot
            after[place] = self._tag(rank, step.round)

    def _flag(self, after: bytearray, rank: int, peer: int, number: int, step: Step) -> None:
        is_renewed = len(self._form.wandering) > 1
        if self._reaches(after, rank, peer) and (
            not is_renewed or self._has_view(after, rank, peer, 1, step.zone)
        ):
            after[peer * RANK_BYTES + FLAGS + step.zone * len(RANKS) + number] = step.round + 1

    def _tag(self, rank: int, number: int) -> int:
        return 1 + rank + len(RANKS) * number

    def _take(self, after: bytearray, rank: int, step: Step) -> None:
        """The first block sees what has come, and then the second, which takes it."""
        at = rank * RANK_BYTES
        first = at + ENTRIES + step.zone * len(RANKS)
        known, numbers = after[at + KNOWN], after[first : first + len(RANKS)]
        seen = mask_of(peer for peer in RANKS if numbers[peer] == step.round + 1)
        for peer in RANKS:
            if not known >> peer & 1 and numbers[peer] != step.round + 1:
                what = (
                    "an entry without rows"
                    if numbers[peer] == TORN
                    else f"an entry of round {numbers[peer] - 1}"
                )
                raise TroubleError(f"rank {rank} takes {what} of rank {peer} in dispatch {step.round}")
        if step.kind == "look":
            if self._case.without == "leave out":
                after[at + SEEN] = seen
            return
        if self._case.without == "leave out" and after[at + SEEN] != seen:
            sets = members(after[at + SEEN]), members(seen)
            raise TroubleError(
                f"rank {rank} takes rows of {sets[0]} and of {sets[1]} in dispatch {step.round}"
            )
        after[at + SEEN] = 0
        if self._case.without == "numbers":
            after[first : first + len(RANKS)] = bytes(
                0 if not known >> peer & 1 else numbers[peer] for peer in RANKS
            )

    def _sum(self, after: bytearray, rank: int, step: Step) -> None:
        at, slot = rank * RANK_BYTES, step.slot
        writer = self._form.writer(step.round, rank, slot)
        place = at + BYTES + step.zone * SLOTS + slot
        if not after[at + KNOWN] >> writer & 1:
            wanted = self._tag(writer, step.round)
            if after[place] != wanted:
                raise TroubleError(
                    f"rank {rank} sums {self._named_tag(after[place])} instead of {self._named_tag(wanted)}"
                )
            if self._case.without == "numbers" and not self._form.waits_for_all:
                after[at + FLAGS + step.zone * len(RANKS) + slot] = 0
        if slot == SLOTS - 1 and self._case.without == "numbers" and self._form.waits_for_all:
            for peer in RANKS:
                if not after[at + KNOWN] >> peer & 1:
                    after[at + FLAGS + step.zone * len(RANKS) + peer] = 0

    def _named_tag(self, tag: int) -> str:
        if not tag:
            return "empty memory"
        number, rank = divmod(tag - 1, len(RANKS))
        return f"rank {rank}'s bytes of round {number}"

    def _end(self, after: bytearray, rank: int, status: int) -> None:
        """Nothing of a rank counts any more but what others may still ask it for."""
        at = rank * RANK_BYTES
        kept = (KNOWN, NUMBER, NOTICED, WISH, DEAD_WISH)
        values = [after[at + each] for each in kept] if status in (ENDED, RAISED) else []
        after[at : at + RANK_BYTES] = bytes(RANK_BYTES)
        for each, value in zip(kept, values, strict=False):
            after[at + each] = value
        after[at + STATUS] = status
        if status in (RAISED, DEAD):
            for peer in RANKS:
                first = peer * RANK_BYTES + VIEWS
                for place in range(first, first + 2 * NUM_ZONES):
                    after[place] &= ~(1 << rank)
