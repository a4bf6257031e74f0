"""Three ranks that go on without who is lost: every order of their steps, with the rules that run.

A rank makes rounds of a dispatch and a combine. In a dispatch it posts an entry to every rank, and waits for
one of each. In a combine it writes results into slots that are now one rank's to write and now another's, in
each zone. What ranks do that are lost, and how others hear of it, is in `tests.lost_model`.

All that a wait takes is compared with what it should be. A step of another rank may come between any two, but
where it can change nothing: a rank that is not slow writes all that it sends at once, for nobody misses it in
between.

Whom a rank masks is said by the library's `OnLostRanks` and `MaskedSets`, where windows have other memory by
its `Renewals`, the zones by its `Rounds`. The model's are: the ranks' programmes, and what lies in windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from moe_triton.layout import Wandering
from tests.lost_model import (
    ENDED,
    KNOWN,
    PC,
    RAISED,
    STATUS,
    Faults,
    Labelled,
    LostRanks,
    State,
    Step,
    TroubleError,
)
from tests.lost_rules import NUM_ZONES, mask_of, members

RANKS = (0, 1, 2)
SLOTS = 2


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


@dataclass(frozen=True)
class Case(Faults):
    """What is tried.

    Attributes:
        form: of combine.
        without: also: that a zone has other memory only behind the "run's end"; "numbers" of rounds in flags;
            "leave out" what has come of a masked rank in a dispatch.
    """

    form: Form


TORN = 255
"""An entry whose bytes went elsewhere."""


class Model(LostRanks):
    """All steps of a case.

    Args:
        case: which.

    A step's kind: "begin" a run; "post" entries; "send" results; "write" a result's bytes, then its "flag";
    "look" which entries have come, as the first block of a dispatch does; "take" them; "sum" a result, when
    all have come; "end" the run, behind which a zone may have other memory.
    """

    WRITES: ClassVar = frozenset({"post", "write", "flag"})
    HEARD: ClassVar = frozenset({"end"})

    def __init__(self, case: Case) -> None:
        self._case, self._form = case, case.form
        by_rank, by_slot = NUM_ZONES * len(RANKS), NUM_ZONES * SLOTS
        super().__init__(case, case.form.wandering, 1 + by_rank + by_slot + by_rank)
        self._seen = self._own
        self._entries = self._seen + 1  # by zone and source: the number of a round
        self._bytes = self._entries + by_rank  # by zone and slot: whose, of which round
        self._flags = self._bytes + by_slot  # by zone and slot, or source: the number of a round

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

    def _is_nothing(self, after: bytearray, rank: int, step: Step) -> bool:
        if step.kind == "begin":
            return not after[rank * self._rank_bytes + KNOWN]
        if step.kind not in ("post", "write", "flag"):
            return False
        (peer,) = step.to if len(step.to) == 1 else (None,)
        if peer is None:
            return False
        is_ignored = step.kind == "post" and self._is_ignored(after, rank, peer)
        return is_ignored or not self._reaches(after, rank, peer)

    def _is_ignored(self, after: bytearray, rank: int, peer: int) -> bool:
        """Whether a peer does not look at a rank's entries any more."""
        return bool(after[peer * self._rank_bytes + KNOWN] >> rank & 1) and self._case.without != "leave out"

    def _awaited(self, state: State, rank: int, step: Step) -> int:
        at = rank * self._rank_bytes
        known, wanted = state[at + KNOWN], step.round + 1
        found = 0
        if step.kind in ("look", "take"):
            places = [(peer, at + self._entries + step.zone * len(RANKS) + peer) for peer in RANKS]
        elif step.kind != "sum":
            return 0
        elif self._form.waits_for_all:
            places = (
                [(peer, at + self._flags + step.zone * len(RANKS) + peer) for peer in RANKS]
                if step.slot == 0
                else []
            )
        else:
            places = [
                (self._form.writer(step.round, rank, slot), at + self._flags + step.zone * len(RANKS) + slot)
                for slot in range(step.slot, SLOTS)
            ]
        numbered = self._case.without != "numbers"
        for peer, place in places:
            if known >> peer & 1:
                continue
            if state[place] not in (wanted, TORN) if numbered else not state[place]:
                found |= 1 << peer
        return found

    def _forget(self, after: bytearray, rank: int, peer: int) -> None:
        if self._case.without != "leave out":
            for zone in range(NUM_ZONES):
                after[rank * self._rank_bytes + self._entries + zone * len(RANKS) + peer] = 0

    def _heard(self, after: bytearray, rank: int) -> None:
        """Waits go on at once, by whom the rank masks now."""
        self._learn(after, rank)
        if self._case.without == "run's end":
            for zone in range(NUM_ZONES):
                self._behind(after, rank, "combine", zone)
        self._follow(after, rank)

    def _renewed(self, after: bytearray, rank: int, part: int, zone: int) -> None:
        """Nobody needs what was there."""
        at = rank * self._rank_bytes
        if part == 0:
            after[at + self._bytes + zone * SLOTS : at + self._bytes + (zone + 1) * SLOTS] = bytes(SLOTS)
        else:
            first = at + self._flags + zone * len(RANKS)
            after[first : first + len(RANKS)] = bytes(len(RANKS))

    def _run(self, rank: int, step: Step, state: State) -> Iterator[Labelled]:
        after, at = bytearray(state), rank * self._rank_bytes
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

    def _post(self, after: bytearray, rank: int, peer: int, step: Step) -> None:
        at = peer * self._rank_bytes
        if self._reaches(after, rank, peer) and not self._is_ignored(after, rank, peer):
            in_view = not self._form.waits_for_all or self._has_view(after, rank, peer, 0, step.zone)
            place = at + self._entries + step.zone * len(RANKS) + rank
            after[place] = step.round + 1 if in_view else TORN

    def _write(self, after: bytearray, rank: int, peer: int, slot: int, step: Step) -> None:
        if self._reaches(after, rank, peer) and self._has_view(after, rank, peer, 0, step.zone):
            place = peer * self._rank_bytes + self._bytes + step.zone * SLOTS + slot
            after[place] = self._tag(rank, step.round)

    def _flag(self, after: bytearray, rank: int, peer: int, number: int, step: Step) -> None:
        is_renewed = len(self._form.wandering) > 1
        if self._reaches(after, rank, peer) and (
            not is_renewed or self._has_view(after, rank, peer, 1, step.zone)
        ):
            after[peer * self._rank_bytes + self._flags + step.zone * len(RANKS) + number] = step.round + 1

    def _tag(self, rank: int, number: int) -> int:
        return 1 + rank + len(RANKS) * number

    def _take(self, after: bytearray, rank: int, step: Step) -> None:
        """The first block sees what has come, and then the second, which takes it."""
        at = rank * self._rank_bytes
        first = at + self._entries + step.zone * len(RANKS)
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
                after[at + self._seen] = seen
            return
        if self._case.without == "leave out" and after[at + self._seen] != seen:
            sets = members(after[at + self._seen]), members(seen)
            raise TroubleError(
                f"rank {rank} takes rows of {sets[0]} and of {sets[1]} in dispatch {step.round}"
            )
        after[at + self._seen] = 0
        if self._case.without == "numbers":
            after[first : first + len(RANKS)] = bytes(
                0 if not known >> peer & 1 else numbers[peer] for peer in RANKS
            )

    def _sum(self, after: bytearray, rank: int, step: Step) -> None:
        at, slot = rank * self._rank_bytes, step.slot
        writer = self._form.writer(step.round, rank, slot)
        place = at + self._bytes + step.zone * SLOTS + slot
        if not after[at + KNOWN] >> writer & 1:
            wanted = self._tag(writer, step.round)
            if after[place] != wanted:
                raise TroubleError(
                    f"rank {rank} sums {self._named_tag(after[place])} instead of {self._named_tag(wanted)}"
                )
            if self._case.without == "numbers" and not self._form.waits_for_all:
                after[at + self._flags + step.zone * len(RANKS) + slot] = 0
        if slot == SLOTS - 1 and self._case.without == "numbers" and self._form.waits_for_all:
            for peer in RANKS:
                if not after[at + KNOWN] >> peer & 1:
                    after[at + self._flags + step.zone * len(RANKS) + peer] = 0

    def _named_tag(self, tag: int) -> str:
        if not tag:
            return "empty memory"
        number, rank = divmod(tag - 1, len(RANKS))
        return f"rank {rank}'s bytes of round {number}"
