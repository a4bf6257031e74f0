"""What every plan of one rank is built from: the group's settings, this rank's place, facts of the scheme."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch

from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.plan import Launch, Placeholder, Stream
from moe_triton.core.region import Region
from moe_triton.core.tuning import POSTS, Posts, Tuning
from moe_triton.layout import NUM_ZONES, UB_ALIGN, Layout, SlotLayout, align
from moe_triton.layout.exchange import ExchangeLayout

BLOCK_QUANTIZE_ELEMENTS = 8
Memory = Mapping[str, torch.Tensor | int]
Operator = Literal["dispatch", "combine", "barrier"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine", "barrier")
COUNTED: tuple[Operator, ...] = ("dispatch", "combine")  # what is posted in them is
# Call words that this rank keeps for itself, in "call_words": a cache line for each.
COMBINE_KIND, DISPATCH_WORD = Placeholder("call_words", 0), Placeholder("call_words", 64)
CALL_WORDS = 32

USUAL_TOKENS = 64
"""Tokens of a part where launches are cheap, unless set."""
SENDING_BLOCKS = 24
"""Cores of a device with two rows under way each: as many as are published to gain almost nothing from 24
more (`autotune/model/constants.toml`, remote_writes_in_flight).
"""
POST_PARTS = 8
"""Parts in which blocks are made, unless set: more hide little more, and each is a look at all ids."""
MESSAGE_TOKENS = 8
"""Tokens of a message of a hierarchy: fewer keep the poster longer, more their receiver (docs/model.md)."""
MOST_WITHOUT_NEIGHBOURS = 0.75
"""Of its stride, that is used of a slot which is posted alone between hosts; int8 rows use half."""
PIECED_ROWS = 64
"""Partial rows of a rank for other servers from which results are returned in two pieces (docs/model.md)."""
MAX_RECEIVED_ENTRIES = 1024
"""Status entries of which a block that receives finds every row's place (dispatch_receive.h)."""


class PartTokens(NamedTuple):
    """The size of an operator's parts.

    Attributes:
        tokens: of a part, at most.
        source: who says so.
    """

    tokens: int
    source: str


class Peers(NamedTuple):
    """The ranks that reach a window of this rank.

    Attributes:
        num_ranks: how many, this one included.
        rank: this rank's number among them.
        group: of which group they are.
        prefix: of the placeholders that plans find the window by: ``{prefix}window``, this rank's bytes;
            ``{prefix}peers``, each rank's address.
        calls: what call words say of their flags; "" for the operator.
    """

    num_ranks: int
    rank: int
    group: Literal["expert", "tensor"] = "expert"
    prefix: str = ""
    calls: str = ""


@dataclass(frozen=True)
class RoundFacts:
    """What a scheme says of its zones.

    Attributes:
        num_zones: how many zones an operator's runs alternate among.
        waiting: operators that wait for every rank, and so separate the runs of those that do not.
        shared: operators that take turns in the same zones; the others have zones of their own.
        on_device: kernels look their zone up in device memory: plans are the same for all zones, and a graph
            may run any number of times.
        no_graph: why no graph may hold its operators; empty where one may.
    """

    num_zones: int = NUM_ZONES
    waiting: frozenset[Operator] = frozenset({"dispatch", "barrier"})
    shared: frozenset[Operator] = frozenset()
    on_device: bool = False
    no_graph: str = ""

    def sharing(self, operator: Operator) -> Collection[Operator]:
        """The operators that turn the zones of one, itself included."""
        return self.shared if operator in self.shared else (operator,)


class SchemeFacts(ABC):
    """What plans and waits of a rank ask of its scheme; each is a `moe_triton.schemes.scheme.Scheme`."""

    slot_layout: ClassVar[type[SlotLayout]] = SlotLayout
    """How a row of a dispatch is packed before it leaves, and in a slot of its own."""
    local_bypass: bool = False
    """Whether rows from this rank to itself need not go through its window."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """What lies where in the scheme's own window."""

    @property
    @abstractmethod
    def rounds(self) -> RoundFacts:
        """Its zones, and which of its operators wait for every rank."""

    @property
    @abstractmethod
    def sends_ahead(self) -> bool:
        """Whether rows of a round may be sent before the round ahead of it is arranged."""

    @property
    @abstractmethod
    def statuses(self) -> tuple[tuple[Operator, Region], ...]:
        """Entries that hold a call word, one for each rank, and the operator that posts them."""

    @property
    @abstractmethod
    def queued_peers(self) -> frozenset[int]:
        """Ranks that this one reaches by a queue, with what it posts in the window's out part."""

    def wordless_flags(
        self, flags: Callable[[Region], torch.Tensor], memory: Memory
    ) -> list[Collection[int]]:
        """Flags of the next combine that hold no call word: the ranks that may have posted each.

        Args:
            flags: the first word of each entry of a region: int32, of the region's extents.
            memory: what plans' placeholders hold, by their names.
        """
        return []

    @abstractmethod
    def peers_of(self, launch: Launch) -> Peers:
        """Who reaches the window that a launch looks at."""


@dataclass(frozen=True)
class RankContext:
    """Where plans run.

    Attributes:
        config: the group's settings.
        rank: this rank.
        num_blocks: blocks per kernel.
        timeout_us: deadline of each wait, in microseconds.
        capabilities: of the back end.
        exchange_rank: this rank's number among two tensor-parallel ranks, or None.
        tuning: how operators are cut into parts.
        sources: where settings come from that a table has filled in, by name.
        keeps_order: whether queues to peers keep the order of bytes inside a message.
        gathers_posts: whether they carry several messages at a time, so that one more costs little.
        stand_ins: by the rank that is lost, who passes on what that one did. It changes while plans run.
        scheme: how tokens travel; it sets itself when it is made (`moe_triton.schemes.make_scheme`).
    """

    config: Config
    rank: int
    num_blocks: int
    timeout_us: int
    capabilities: Capabilities
    exchange_rank: int | None = None
    tuning: Tuning = field(default_factory=Tuning)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    keeps_order: bool = True
    gathers_posts: bool = False
    stand_ins: dict[int, int] = field(default_factory=dict, compare=False)
    scheme: SchemeFacts = field(init=False, repr=False, compare=False)

    def of(self, scheme: SchemeFacts) -> RankContext:
        """The same with the scheme whose plans run here."""
        own = copy.copy(self)
        object.__setattr__(own, "scheme", scheme)
        return own

    def of_rank(self, rank: int) -> RankContext:
        """That of another rank of this server, whose plans run in this process."""
        return replace(self, rank=rank)

    @property
    def target(self) -> str:
        """Names the back end that Triton kernels are specialised for."""
        return self.capabilities.target

    @property
    def layout(self) -> Layout:
        """Where things lie in the scheme's own window."""
        return self.scheme.layout

    @property
    def zones_on_device(self) -> bool:
        """Tells whether kernels look their zone up in device memory."""
        return self.scheme.rounds.on_device

    @property
    def local_bypass(self) -> bool:
        """Tells whether rows from this rank to itself need not go through its window."""
        return self.scheme.local_bypass

    @cached_property
    def exchange(self) -> ExchangeLayout:
        """Where things lie in the window between tensor-parallel ranks."""
        c = self.config
        return ExchangeLayout(c.hidden, c.receive_capacity(self.rank), c.num_ranks)

    @property
    def peers(self) -> Peers:
        """The expert-parallel group."""
        return Peers(self.config.num_ranks, self.rank)

    @property
    def exchange_peers(self) -> Peers:
        """The two tensor-parallel ranks."""
        assert self.exchange_rank is not None
        return Peers(2, self.exchange_rank, "tensor", "exchange_", "tensor-parallel exchange")

    @property
    def overlaps(self) -> bool:
        """Whether computing and communicating have blocks of their own."""
        return self.tuning.communication_blocks > 0 and not self.spans_servers

    def by_readiness(self, parts: int) -> bool:
        """Whether a part of a combine is what is complete first, and not the next tokens."""
        return parts > 1 and self.overlaps and not self.is_version_1

    @cached_property
    def part_tokens(self) -> Mapping[str, PartTokens]:
        """The size of an operator's parts, by its name."""
        tuning = self.tuning
        given = {"dispatch": tuning.dispatch_tokens, "combine": tuning.combine_tokens}
        return {operator: self._part_tokens(f"{operator}_tokens", each) for operator, each in given.items()}

    def _part_tokens(self, name: str, given: int | None) -> PartTokens:
        """The size of an operator's parts, one for all calls: combine by readiness needs it on all ranks.

        Where a launch costs microseconds, parts only add launches unless cores of their own communicate
        meanwhile, and by the model even then: one part is fastest at all sizes (``moe-triton model parts``).
        """
        whole, is_cheap = self.config.num_max_tokens_per_rank, self.capabilities.launches_cheaply
        if self.spans_servers:
            return PartTokens(whole, "what is posted goes in one part")
        if not is_cheap and not self.tuning.communication_blocks:
            return PartTokens(whole, "without communication_blocks nothing overlaps")
        if given is not None:
            return PartTokens(given, self.sources.get(name, f"Tuning({name}={given})"))
        if is_cheap:
            return PartTokens(USUAL_TOKENS, f"{USUAL_TOKENS} tokens a part, unless set")
        return PartTokens(whole, "one part, unless set: the fastest by the model")

    @property
    def spans_servers(self) -> bool:
        """Whether the group has several servers: then no operator's tokens are cut into parts."""
        return self.config.topology.num_servers > 1

    def parts(self, operator: str, tokens: int) -> int:
        """The number of parts that an operator on these tokens is cut into."""
        each = self.part_tokens[operator].tokens
        return -(-tokens // each) if tokens > each else 1

    def blocks(self, stream: Stream, parts: int) -> int:
        """Blocks of a launch that is one of ``parts``."""
        if parts == 1 or not self.overlaps:
            return self.num_blocks
        communication = self.tuning.communication_blocks
        return communication if stream == "communication" else self.num_blocks - communication

    @property
    def receiving_blocks(self) -> int:
        """Blocks that put received rows in their places while the others send; 0: all do both in turn."""
        given = self.tuning.receiving_blocks
        if self.spans_servers:
            return 0
        if given is None:
            given = usual_receiving_blocks(self.capabilities, self.num_blocks)
        # Whose entries each of them has.
        return given if given <= self.num_entries <= MAX_RECEIVED_ENTRIES else 0

    @property
    def posts(self) -> Posts:
        """Who posts to other servers, where there is a choice."""
        return self.tuning.posts or POSTS[0]

    @property
    def message_tokens(self) -> int:
        """Neighbouring tokens that a message of a hierarchy has: all of a server's, if an AICPU posts."""
        most = self.config.num_max_tokens_per_rank
        if self.posts == "aicpu":
            return most
        return min(self.tuning.message_tokens or MESSAGE_TOKENS, most)

    def posts_alone(self, used: int, stride: int) -> bool:
        """Whether a slot is posted without its neighbours: what is empty between them costs more.

        Args:
            used: bytes of a slot that something is in.
            stride: bytes from one to the next.
        """
        return self.gathers_posts and self.posts == "aiv" and used <= MOST_WITHOUT_NEIGHBOURS * stride

    @property
    def return_pieces(self) -> int:
        """Pieces in which results are returned inside a server: one, where an AICPU posts what is summed."""
        if self.posts == "aicpu":
            return 1
        given = self.tuning.return_pieces or usual_return_pieces(self.config)
        return min(given, self.config.topology.num_servers)

    @property
    def post_parts(self) -> int:
        """Parts in which blocks for queued ranks are made: each is posted while the next one is made."""
        return min(self.tuning.post_parts or usual_post_parts(self.config.num_ranks), self.config.num_ranks)

    @property
    def num_local_experts(self) -> int:
        """Experts whose rows this rank receives."""
        return self.config.experts_on(self.rank)

    @property
    def num_entries(self) -> int:
        """Status entries that a dispatch waits for."""
        return self.num_local_experts * self.config.num_ranks

    @property
    def capacity(self) -> int:
        """Rows that a dispatch can deliver here."""
        return self.config.receive_capacity(self.rank)

    @property
    def capacity_per_rank(self) -> int:
        """The same of a dispatch that sends a token once to each rank."""
        return min(self.capacity, self.config.num_ranks * self.config.num_max_tokens_per_rank)

    @property
    def is_version_1(self) -> bool:
        """Whether V1's rules hold."""
        return self.config.version == 1

    @property
    def quantized_row_bytes(self) -> int:
        """Bytes of a row quantised in blocks: int8, then a 16-bit scale per block."""
        return quantized_bytes(self.config.hidden, BLOCK_QUANTIZE_ELEMENTS)


def usual_receiving_blocks(capabilities: Capabilities, num_blocks: int) -> int:
    """Blocks that only receive, where nobody says.

    Of a device's blocks more than `SENDING_BLOCKS` hardly send faster, and one that receives copies rows at
    half of the rate at which one sends them on average: there are at least as many.

    Args:
        capabilities: of the back end.
        num_blocks: of a rank.
    """
    is_split = capabilities.owns_cores and num_blocks >= 2 * SENDING_BLOCKS
    return num_blocks - SENDING_BLOCKS if is_split else 0


def usual_return_pieces(config: Config) -> int:
    """Pieces in which a hierarchy returns results, where nobody says: two where that hides more than it adds.

    Others' rows are on their way while this rank's server returns its own. That costs two more launches and
    a barrier.
    """
    others = config.topology.num_servers - 1
    return 2 if config.num_max_tokens_per_rank * others >= PIECED_ROWS else 1


def usual_post_parts(num_ranks: int) -> int:
    """Parts in which a rank makes its blocks for a group's other ranks, where nobody says."""
    return max(1, min(POST_PARTS, num_ranks - 1))


def quantized_bytes(hidden: int, elements: int) -> int:
    """Bytes of a row quantised in blocks of so many elements: int8, then a 16-bit scale per block."""
    return align(hidden, UB_ALIGN) + align(2 * (hidden // elements), UB_ALIGN)
