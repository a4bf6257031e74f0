"""Which ranks are masked: nothing is sent to them, and nothing awaited from them.

Kernels read it in the table of peers (`moe_triton.core.reach`), with the plans that they always have. Ids of
a masked rank's experts become ``-2 - id`` before kernels see them: no kernel knows such an expert, and
whoever asks what a mask has cost finds them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.core.handle import DispatchHandle
from moe_triton.core.plan import Phases
from moe_triton.core.reach import CHANGES_SHIFT, KNOWN_WORD, SET_WORD, known_word, masked_word, number_of
from moe_triton.operators.buffer import DISPATCHED
from moe_triton.schemes import scheme_type
from moe_triton.schemes.rank_context import OPERATORS
from moe_triton.schemes.scheme import KeptTables

_NOT_MASKED = -1
TOLD_WITHIN_S = 1.0
"""For listeners of a mask; who calls them may be a thread that does not run."""


@dataclass(frozen=True)
class Paths:
    """By whom a rank reaches others.

    What is asked goes by ranks that are masked, and by those of them that pass nothing on: all, or without
    those in whose place others do.

    Attributes:
        config: of the group, as kernels have it.
        rank: this one.
        relays: whether ranks of the own number pass on what goes to another server.
        are_heard: whether this rank hears whose results relays have summed without.
    """

    config: Config
    rank: int
    relays: bool
    are_heard: bool = True

    def relay(self, source: int, receiver: int) -> int:
        """The rank that passes on to a receiver what a source sends; the source itself where nobody does."""
        topology = self.config.topology
        if not self.relays:
            return source
        number = source - topology.neighbours(source).start
        return topology.neighbours(receiver).start + number

    def is_silent(self, source: int, masked: frozenset[int], relays: frozenset[int] | None = None) -> bool:
        """Whether nothing comes from a source any more."""
        return source in masked or self.relay(source, self.rank) in (masked if relays is None else relays)

    def is_lost(self, receiver: int, masked: frozenset[int], relays: frozenset[int] | None = None) -> bool:
        """Whether nothing gets to a rank any more, or none of its results back."""
        return receiver in masked or self.relay(self.rank, receiver) in (masked if relays is None else relays)

    def is_cut_off(self, receiver: int, masked: frozenset[int], relays: frozenset[int] | None = None) -> bool:
        """Whether none of a rank's results come back of what it has got already.

        Those of a masked rank may have come to the one that sums them before it was masked. That one says so.
        """
        if self.relays and self.are_heard:
            return self.relay(self.rank, receiver) in (masked if relays is None else relays)
        return self.is_lost(receiver, masked, relays)


class StandIn(NamedTuple):
    """A rank that passes on what another one did, which is lost.

    Attributes:
        rank: this one.
        since: the dispatch of the buffer that it does so from, and its combine.
    """

    rank: int
    since: int


def _marked(ids: torch.Tensor, is_lost: torch.Tensor | None) -> torch.Tensor:
    """Ids, those of some experts marked; the same tensor for None.

    Args:
        ids: of experts, and others.
        is_lost: (M,) bool, of each expert.
    """
    if is_lost is None:
        return ids
    last = len(is_lost) - 1
    are_lost = is_lost[ids.clamp(0, last).long()] & (ids >= 0) & (ids <= last)
    return torch.where(are_lost, -2 - ids, ids)


def whole_ids(ids: torch.Tensor) -> torch.Tensor:
    """Ids as they were before those of masked ranks were marked."""
    return torch.where(ids < _NOT_MASKED, -2 - ids, ids)


class State(NamedTuple):
    """Masks at one moment.

    Attributes:
        masked: ranks that are.
        word: what stands behind the ranks' words in the table of peers.
        relays: those of them that pass nothing on, nobody else in their place.
    """

    masked: frozenset[int]
    word: int
    relays: frozenset[int] = frozenset()


class Masks:
    """The masks of one communicator.

    A rank may be masked by any thread, also while a call waits for it: kernels that wait see it at once. The
    call itself learns of it between its launches, and goes by what it has `learn`-ed last.

    Args:
        words: (EP + 3,) int64, the table of peers on the device.
        paths: of its ranks.
        counts: runs of each operator so far.
        fence: orders what this thread writes before what it writes next.

    Attributes:
        known: what the running call, or the next one, goes by.
        reasons: why each rank is masked, and since when, as ``time.time()`` has it.
        on_change: is told who is masked, once no launch begins any more that does not go by that. On any
            thread.
        on_masked: each is called with each rank that is masked from now on, and why, by whom that does it.
        stand_ins: by the masked rank that they stand in for.
    """

    on_change: Callable[[frozenset[int]], None] | None = None

    def __init__(
        self, words: torch.Tensor, paths: Paths, counts: Mapping[str, int], fence: Callable[[], None]
    ) -> None:
        self._words, self._paths, self._counts, self._fence = words, paths, counts, fence
        self._tables = [words]
        self._plain: list[int] = []
        self._lock = threading.Lock()
        self._told, self._telling = threading.Condition(self._lock), 0
        self._now = self.known = State(frozenset(), 0)
        self._since: dict[int, tuple[int, ...]] = {}
        self.reasons: dict[int, tuple[str, float]] = {}
        self._lost: torch.Tensor | None = None
        words[paths.config.num_ranks + SET_WORD] = number_of(())
        self._cut_off_by: dict[frozenset[int], torch.Tensor] = {}
        self.stand_ins: Mapping[int, StandIn] = {}
        self._has_marks = False
        self.on_masked: list[Callable[[int, str], None]] = []

    @property
    def masked(self) -> frozenset[int]:
        """Ranks that are masked now."""
        return self._now.masked

    @property
    def has_changed(self) -> bool:
        """Whether calls have not learned yet what is masked now."""
        return self._now.word != self.known.word

    @property
    def is_used(self) -> bool:
        """Whether anybody has ever been masked, here or on a rank that has summed results for this one."""
        return self._now.word != 0 or self._has_marks

    def check(self, rank: int, masked: bool) -> None:
        """Checks that a rank can be masked, or un-masked.

        Raises:
            ArgumentError: there is no such rank, it is this one, or one of shared experts.
            BufferStateError: it has missed rounds.
        """
        num_ranks, own = self._paths.config.num_ranks, self._paths.rank
        if not 0 <= rank < num_ranks:
            raise ArgumentError("rank", rank, f"it must be 0 to {num_ranks - 1}", "Pass a rank of the group.")
        if self._paths.config.is_shared_rank(rank):
            rule = "every token goes to its shared expert, and has no sum without it"
            raise ArgumentError("rank", rank, rule, "Construct a buffer with lost_ranks.")
        if masked and (rule := scheme_type(self._paths.config).no_masks(self._paths.config)):
            raise ArgumentError("rank", rank, rule, "Construct a buffer with lost_ranks.")
        if rank == own and masked:
            rule = "it is this rank itself, which cannot go on without itself"
            raise ArgumentError("rank", rank, rule, "Close the buffer, or mask it on the other ranks.")
        if not masked and rank in self.masked and self._since[rank] != self._runs():
            raise BufferStateError(
                f"rank {rank} has missed rounds while it was masked, and what it would do next is another "
                f"call than the one that is next here. It stays masked in this buffer: construct a new one "
                f"with it."
            )

    def update(self, rank: int, masked: bool, why: str = "by hand") -> None:
        """Masks a rank, or un-masks it.

        Args:
            rank: of the group.
            masked: whether it takes no part.
            why: it is masked.

        Raises:
            ArgumentError, BufferStateError: see `check`.
        """
        with self._lock:
            self.check(rank, masked)
            if masked == (rank in self.masked):
                return
            if masked:
                self._since[rank] = self._runs()
                self.reasons[rank] = why, time.time()
            else:
                del self._since[rank], self.reasons[rank]
            self._change(self.masked ^ {rank})
            self._telling += masked
        if not masked:
            return
        try:
            for listener in self.on_masked:
                listener(rank, why)
        finally:
            with self._lock:
                self._telling -= 1
                self._told.notify_all()

    def clean(self) -> None:
        """Un-masks all ranks.

        Raises:
            BufferStateError: one has missed rounds. All stay masked then.
        """
        with self._lock:
            for rank in sorted(self.masked):
                self.check(rank, False)
            if self.masked:
                self._since.clear()
                self.reasons.clear()
                self._change(frozenset())

    def since_dispatch(self, number: int) -> bool:
        """Whether a rank that is masked was so only when this dispatch had begun, or so many had ended."""
        place = OPERATORS.index("dispatch")
        return any(runs[place] >= number for runs in list(self._since.values()))

    def _runs(self) -> tuple[int, ...]:
        return tuple(self._counts[operator] for operator in OPERATORS)

    def stand_in(self, stand_ins: Mapping[int, StandIn]) -> None:
        """Has ranks stand in for masked ones, as long as they are not masked themselves.

        For the thread that is in a call, where no launch runs: kernels wait for them from the next one on.

        Args:
            stand_ins: by the masked rank.
        """
        with self._lock:
            self.stand_ins = dict(stand_ins)
            self._change(self.masked)

    def lost_relays(self, masked: frozenset[int], dispatched: int | None = None) -> frozenset[int]:
        """Masked ranks that pass nothing on, nobody else in their place.

        Args:
            masked: ranks.
            dispatched: the dispatch of what is to be passed on; None for the latest.
        """
        return frozenset(
            rank
            for rank in masked
            if (other := self.stand_ins.get(rank)) is None
            or other.rank in masked
            or (dispatched is not None and dispatched < other.since)
        )

    def _change(self, masked: frozenset[int]) -> None:
        """Writes what has changed, and before and behind that the word that says so.

        Where a rank is masked already, kernels look at the words of ranks: those that have seen a part of a
        change have to end in a run that stops.
        """
        num_ranks, paths, relays = self._paths.config.num_ranks, self._paths, self.lost_relays(masked)
        if not self._plain:
            self._plain = self._words.tolist()
        one = 1 << CHANGES_SHIFT
        for table in self._tables:
            table[num_ranks] = self._now.word + one
        self._fence()
        for peer in range(num_ranks):
            is_silent = paths.is_silent(peer, masked, relays)
            word = masked_word(self._plain[peer], peer in masked, peer in relays, is_silent)
            if word != self._plain[peer]:
                self._plain[peer] = word
                for table in self._tables:
                    table[peer] = word
        changes = (self._now.word >> CHANGES_SHIFT) + 2
        now = State(masked, changes * one + len(masked), relays)
        self._fence()
        for table in self._tables:
            table[num_ranks] = now.word
        self._now = now
        if self.on_change is not None:
            self.on_change(masked)

    def make_table(self) -> torch.Tensor:
        """Another table of peers, for launches that run beside a call and learn of changes by themselves."""
        with self._lock:
            table = self._words.clone()
            self._tables.append(table)
            return table

    def drop_table(self, table: torch.Tensor) -> None:
        """It is not used any more."""
        with self._lock:
            self._tables = [each for each in self._tables if each is not table]

    def learn_in(self, table: torch.Tensor) -> State:
        """Has the launches of such a table go by what is masked now."""
        with self._lock:
            table[self._paths.config.num_ranks + KNOWN_WORD] = self._now.word
            return self._now

    def learn(self) -> State:
        """Has calls go by what is masked now. For the thread that is in a call, or where none is."""
        with self._lock:  # kernels have seen a change before it is noted here, and it has to be learned
            if self.has_changed:  # no call that goes by it returns before other windows know of it
                self._told.wait_for(lambda: self._telling == 0, TOLD_WITHIN_S)
            now = self._now
            if now.word == self.known.word:
                return now
            self._note_known(now)
        paths = self._paths
        self._lost = (
            self._of_experts(lambda rank: paths.is_lost(rank, now.masked, now.relays)) if now.masked else None
        )
        self._cut_off_by.clear()
        self.known = now
        return now

    def _cut_off(self, dispatched: int | None) -> torch.Tensor | None:
        """(M,) bool: experts whose results do not come back; None where nobody is masked.

        Args:
            dispatched: the dispatch that they have tokens of; None for the latest.
        """
        masked = self.known.masked
        if not masked:
            return None
        relays = self.lost_relays(masked, dispatched)
        if (found := self._cut_off_by.get(relays)) is None:
            found = self._of_experts(lambda rank: self._paths.is_cut_off(rank, masked, relays))
            self._cut_off_by[relays] = found
        return found

    def _of_experts(self, of_rank: Callable[[int], bool]) -> torch.Tensor:
        """(M,) bool: what is true of the rank of each expert."""
        config = self._paths.config
        each = [of_rank(config.rank_of_expert(expert)) for expert in range(config.num_experts)]
        return torch.tensor(each, device=self._words.device)

    def _note_known(self, now: State) -> None:
        """Says in the table what the call that begins goes by, and behind that that it knows it."""
        first = self._paths.config.num_ranks
        for peer in range(first):
            word = known_word(self._plain[peer], self._paths.is_silent(peer, now.masked, now.relays))
            if word != self._plain[peer]:
                self._words[peer] = self._plain[peer] = word
        self._words[first + SET_WORD] = number_of(now.masked)
        self._fence()
        self._words[first + KNOWN_WORD] = now.word

    def marked(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids, those of experts that cannot be reached marked; the same tensor where all can be."""
        return _marked(ids, self._lost)

    def marked_cut_off(self, ids: torch.Tensor, dispatched: int | None = None) -> torch.Tensor:
        """The same of ids that have been sent for, of those whose results do not come back.

        Args:
            ids: of experts.
            dispatched: the dispatch that sent them; None for the latest.
        """
        return _marked(ids, self._cut_off(dispatched))

    def mark_left_out(self, ids: torch.Tensor, ranks: frozenset[int]) -> None:
        """Marks what others have summed without, in place: experts of these ranks."""
        self._has_marks = True
        ids.copy_(_marked(ids, self._of_experts(ranks.__contains__)))

    def silent(self) -> list[int]:
        """Ranks that nothing comes from any more, as far as calls know."""
        ranks = range(self._paths.config.num_ranks)
        known = self.known
        return [rank for rank in ranks if self._paths.is_silent(rank, known.masked, known.relays)]

    def mark_handle(self, handle: DispatchHandle) -> None:
        """Marks what a combine will go by, in place: results of ranks that are masked will not come."""
        if self.known.masked:
            for ids in (handle.topk_idx, handle.results_idx):
                if ids is not None:
                    ids.copy_(self.marked_cut_off(ids, handle.dispatched))

    def mark_tables(
        self, tables: KeptTables, bindings: Mapping[str, Any], ran: Sequence[Phases] = ()
    ) -> None:
        """The same of what a scheme keeps for it.

        Args:
            tables: of the scheme.
            bindings: what all placeholders of the combine hold.
            ran: launches of it that have run.
        """
        self.mark_tables_of(self._paths.rank, self.known.masked, tables, bindings, ran)

    def mark_tables_of(
        self,
        rank: int,
        masked: frozenset[int],
        tables: KeptTables,
        bindings: Mapping[str, Any],
        ran: Sequence[Phases] = (),
    ) -> None:
        """The same of what the scheme keeps for a rank, this one or one that it stands in for.

        Args:
            rank: whose tables they are.
            masked: ranks that its launches go without.
            tables, bindings, ran: see `mark_tables`.
        """
        relays = self.lost_relays(masked, bindings.get(DISPATCHED))
        tables.mark_lost(bindings, rank, masked.__contains__, relays.__contains__, ran)

    def whole(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids without marks; the same tensor where nobody has ever masked."""
        return whole_ids(ids) if self.is_used else ids
