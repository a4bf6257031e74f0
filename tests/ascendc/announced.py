"""Ranks that tell all ranks something, round after round, and wait until they have heard all of them.

What they tell is a call's words (call_post) or a dispatch's tables (tables_send).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from moe_triton.backends.cpu.nic import NicSettings
from moe_triton.core.config import Config
from moe_triton.core.reach import Queues
from moe_triton.core.records import CALL_HEADER, TRAFFIC
from moe_triton.core.region import Region
from moe_triton.layout import NUM_ZONES, STATUS_ENTRY_BYTES
from moe_triton.schemes.fullmesh.layout import WindowLayout

from .call_words import NOT_POSTING, expecting, posting, word_of
from .case import PATIENT_US, WrongResultError, check_reports
from .library import Library, address
from .memory import GARBAGE, Guarded, across_lines
from .nics import Nics
from .ranks import Ranks

HIDDEN = 32


@dataclass(frozen=True)
class AnnouncedCase(ABC):
    """What the ranks do.

    Attributes:
        num_ranks: W.
        servers: ranks of each, with queues between them; None: there are no queues.
        straggle: chance that a rank sleeps between hearing and looking.
    """

    num_ranks: int = 3
    servers: tuple[int, ...] | None = None
    blocks: int = 2
    rounds: int = 4
    straggle: float = 0.3
    timeout_us: int = PATIENT_US

    @property
    @abstractmethod
    def config(self) -> Config:
        """Of a buffer: its windows have room for what is told."""


@dataclass(frozen=True)
class CallCase(AnnouncedCase):
    """Words of calls.

    Attributes:
        experts: routed ones, of all ranks together.
        shared: ranks of shared experts.
        rings: whether calls ring: in each round one rank does.
    """

    experts: int = 6
    shared: int = 0
    rings: bool = True

    @property
    def config(self) -> Config:
        sizes = self.num_ranks, 4, HIDDEN, 2, self.experts, min(self.shared, 1), self.shared
        return Config(*sizes, is_of_buffer=True, relaxed=True, ranks_per_server=self.servers)


@dataclass(frozen=True)
class TablesCase(AnnouncedCase):
    """Ids and weights of tokens.

    Attributes:
        tokens: T of every rank.
        topk: K.
        weighted: whether there are weights.
    """

    tokens: int = 3
    topk: int = 8
    weighted: bool = True

    @property
    def config(self) -> Config:
        sizes = self.num_ranks, self.tokens + 1, HIDDEN, self.topk, self.topk * self.num_ranks
        return Config(*sizes, is_of_buffer=True, relaxed=True, ranks_per_server=self.servers)


C = TypeVar("C", bound=AnnouncedCase)


class AnnouncedWorld(ABC, Generic[C]):
    """All ranks of one case."""

    def __init__(self, library: Library, case: C, seed: int = 0) -> None:
        self.library, self.case, self.seed = library, case, seed
        self.layout = WindowLayout(case.config)
        self.windows = [Guarded((self.layout.window_bytes,), align=512) for _ in range(case.num_ranks)]
        for rank in range(case.num_ranks):
            for entry in self._entries(rank):
                entry[:] = 0
        addresses = [address(window.array) for window in self.windows]
        self.traffic = [Guarded((case.blocks, TRAFFIC.num_words), np.int64, align=64) for _ in self.windows]
        self._nics = self._make_nics(addresses) if case.servers else None
        tables = self._nics.words if self._nics else [addresses] * case.num_ranks
        self.peers = [across_lines(words) for words in tables]
        self._ranks = Ranks(library, seed, case.num_ranks)

    @property
    @abstractmethod
    def status(self) -> Region:
        """Of the entries that announce what is told."""

    @abstractmethod
    def tell(self, rank: int, number: int, zone: int) -> None:
        """Tells all ranks, and announces it."""

    @abstractmethod
    def told(self, source: int, number: int) -> dict[int, np.ndarray]:
        """What a rank tells in a round, by its place in windows."""

    def _make_nics(self, addresses: list[int]) -> Nics:
        topology, everyone = self.layout.config.topology, frozenset(range(len(addresses)))
        queued = [everyone - frozenset(topology.neighbours(rank)) for rank in sorted(everyone)]
        queues = [Queues(peers, topology.servers, self.layout.in_bytes) for peers in queued]
        seeds = [1 + self.seed * len(addresses) + rank for rank in sorted(everyone)]
        settings = [NicSettings(seed=seed, ring_items=3) for seed in seeds]
        return Nics(self.library, addresses, self.layout.window_bytes, queues, settings)

    def _entries(self, rank: int) -> list[np.ndarray]:
        """A rank's, of all zones and sources."""
        places = [
            self.status.offset(zone=zone, source=source)
            for zone, source in np.ndindex(NUM_ZONES, self.case.num_ranks)
        ]
        return [self.windows[rank].array[at : at + STATUS_ENTRY_BYTES] for at in places]

    def run(self) -> None:
        """Every round on all ranks, and then what is left, when all that was posted is delivered."""
        try:
            self._ranks.run(self._rounds)
        finally:
            if self._nics:
                self._nics.close()
        for rank, window in enumerate(self.windows):
            window.check_guards()
            self.traffic[rank].check_guards()
            self.check_left(rank)
        for rank in range(self.case.num_ranks):
            self._check_untouched(rank)

    def _rounds(self, rank: int) -> None:
        rng = np.random.default_rng((self.seed, rank))
        if self._nics:
            self._nics.use(rank)
        for number in range(self.case.rounds):
            zone = number % NUM_ZONES
            self.tell(rank, number, zone)
            check_reports(self._wait(rank, number, zone))
            if rng.random() < self.case.straggle:
                time.sleep(0.002)
            self.check(rank, number)

    def _wait(self, rank: int, number: int, zone: int) -> np.ndarray:
        return self.library.launch(
            "dispatch_wait",
            self.case.blocks,
            window=self.windows[rank].array,
            recv_counts=np.zeros(self.case.num_ranks, dtype=np.int32),
            waited_us=0,
            num_local_experts=1,
            zone=zone,
            timeout_us=self.case.timeout_us,
            status=self.status,
            **expecting("B", number),
        )

    def check(self, rank: int, number: int) -> None:
        """What a rank has heard."""
        for source in range(self.case.num_ranks):
            for at, want in self.told(source, number).items():
                found = self.windows[rank].array[at : at + want.nbytes]
                wrong = np.flatnonzero(found != want.reshape(-1).view(np.uint8))
                if len(wrong):
                    what = f"byte {wrong[0]} of {want.nbytes} from rank {source}"
                    raise WrongResultError(f"{what} differs on rank {rank} in round {number}")

    def check_left(self, rank: int) -> None:
        """What the last rounds have left is forgotten, entries too."""
        for number in range(max(0, self.case.rounds - NUM_ZONES), self.case.rounds):
            self.check(rank, number)
            for source in range(self.case.num_ranks):
                for at, want in self.told(source, number).items():
                    self.windows[rank].array[at : at + want.nbytes] = GARBAGE
        for entry in self._entries(rank):
            if entry.any():
                raise WrongResultError(f"rank {rank} has the entry {entry.view(np.int32)} left")
            entry[:] = GARBAGE

    def _check_untouched(self, rank: int) -> None:
        """All that peers can write, but for what was told."""
        memory = self.windows[rank].array[: self.layout.in_bytes]
        if (memory != GARBAGE).any():
            raise WrongResultError(f"byte {np.flatnonzero(memory != GARBAGE)[0]} of rank {rank} was written")

    def posting(self, rank: int) -> dict[str, object]:
        """Arguments of a kernel that may post."""
        if self._nics is None:
            return NOT_POSTING
        return {
            "window": self.windows[rank].array,
            "out_offset": self.layout.in_bytes,
            "timeout_us": self.case.timeout_us,
            "traffic": self.traffic[rank].array,
        }


class CallWorld(AnnouncedWorld[CallCase]):
    """Ranks that say before each call what they have for it."""

    @property
    def status(self) -> Region:
        calls = self.layout.calls
        assert calls is not None
        return calls.status

    def words(self, source: int, number: int) -> np.ndarray:
        """A header and counts."""
        rng = np.random.default_rng((self.seed, number, source))
        total = CALL_HEADER.num_words + self.case.shared + self.case.experts
        return rng.integers(0, 1 << 30, total, dtype=np.int32)

    def told(self, source: int, number: int) -> dict[int, np.ndarray]:
        calls, zone = self.layout.calls, number % NUM_ZONES
        assert calls is not None
        return {calls.counts.offset(zone=zone, source=source): self.words(source, number)}

    def tell(self, rank: int, number: int, zone: int) -> None:
        case, calls, shared = self.case, self.layout.calls, self.case.shared
        assert calls is not None
        first = CALL_HEADER.num_words
        header, shared_counts, counts = np.split(self.words(rank, number), [first, first + shared])
        report = self.library.launch(
            "call_post",
            case.blocks,
            header=header.copy(),
            counts=counts.copy(),
            shared_counts=shared_counts.copy() if shared else 0,
            num_experts=case.experts,
            num_shared_ranks=shared,
            peers=self.peers[rank],
            num_ranks=case.num_ranks,
            rank=rank,
            bell=self.bell(number) if case.rings and rank == number % case.num_ranks else 0,
            call=word_of("B", number),
            zone=zone,
            slots=calls.counts,
            status=calls.status,
            bells=calls.bell,
            **self.posting(rank),
        )
        check_reports(report)

    def bell(self, number: int) -> int:
        """The word that a round rings with."""
        return number + 1

    def check(self, rank: int, number: int) -> None:
        """What it has heard, and the bell of the round before: that round's launches have ended."""
        super().check(rank, number)
        if number == 0 or not self.case.rings:
            return
        before = number - 1
        # Who has heard this round already may ring for the next one, in the zone of the one before.
        may_be = self.bell(before), self.bell(number + 1)
        word = int(self._bell(rank, before)[0])
        if word not in may_be:
            raise WrongResultError(f"rank {rank} has the bell {word}, not one of {may_be}")

    def _bell(self, rank: int, number: int) -> np.ndarray:
        calls = self.layout.calls
        assert calls is not None
        at = calls.bell.offset(zone=number % NUM_ZONES)
        words: np.ndarray = self.windows[rank].array[at : at + STATUS_ENTRY_BYTES].view(np.int32)
        return words

    def check_left(self, rank: int) -> None:
        """As above, and the bells of the last rounds."""
        super().check_left(rank)
        for number in range(max(0, self.case.rounds - NUM_ZONES), self.case.rounds):
            bell = self._bell(rank, number)
            if self.case.rings and set(bell.tolist()) != {self.bell(number)}:
                raise WrongResultError(f"rank {rank} has the bell {bell} left of round {number}")
            if self.case.rings:
                bell.view(np.uint8)[:] = GARBAGE
            self._forget_padding(rank, number % NUM_ZONES)

    def _forget_padding(self, rank: int, zone: int) -> None:
        """Whole units go to a queue."""
        calls, topology = self.layout.calls, self.layout.config.topology
        assert calls is not None
        for source in range(self.case.num_ranks):
            if self.case.servers and rank not in topology.neighbours(source):
                at = calls.counts.offset(zone=zone, source=source)
                self.windows[rank].array[at : at + calls.counts.stride("source")] = GARBAGE


class TablesWorld(AnnouncedWorld[TablesCase]):
    """Ranks that send their tables, which the entries of a later launch announce."""

    @property
    def status(self) -> Region:
        return self.layout.barrier_status

    def tables(self, source: int, number: int) -> list[np.ndarray]:
        """Ids, and weights where there are any."""
        rng = np.random.default_rng((self.seed, number, source))
        shape = self.case.tokens, self.case.topk
        tables = [rng.integers(-1, 64, shape, dtype=np.int32), rng.random(shape, dtype=np.float32)]
        return tables if self.case.weighted else tables[:1]

    def told(self, source: int, number: int) -> dict[int, np.ndarray]:
        tables, zone = self.layout.row_tables, number % NUM_ZONES
        assert tables is not None
        return {
            tables.offset(zone=zone, source=source, table=table): words
            for table, words in enumerate(self.tables(source, number))
        }

    def tell(self, rank: int, number: int, zone: int) -> None:
        case, (ids, *weights) = self.case, self.tables(rank, number)
        common = {"peers": self.peers[rank], "num_ranks": case.num_ranks, "rank": rank, "zone": zone}
        report = self.library.launch(
            "tables_send",
            case.blocks,
            row_ids=ids,
            row_weights=weights[0] if weights else 0,
            num_tokens=case.tokens,
            topk=case.topk,
            tables=self.layout.row_tables,
            **common,
            **self.posting(rank),
        )
        check_reports(report)
        report = self.library.launch(
            "post_status",
            case.blocks,
            count=0,
            status=self.status,
            **posting("B", number),
            **common,
            **self.posting(rank),
        )
        check_reports(report)
