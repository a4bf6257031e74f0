"""A3 fullmesh: the plans of one rank.

Zones (see `moe_triton.runtime.communicator` for who turns them): dispatch waits for an entry from every rank,
empty ones included, so a rank that starts dispatch i + 2 knows that nobody still reads what dispatch i
left. V2's combine waits for its own tokens only; a full wait between combine i and i + 2 separates those
two. V1's combine waits for every rank, and shares zones and toggle with its dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.records import PART_PROGRESS, STATUS_ENTRY
from moe_triton.core.region import Region
from moe_triton.core.space import Settings, Space
from moe_triton.layout import NUM_ZONES
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes.common.steps import numbers_of
from moe_triton.schemes.common.waits import ENTRY_FINDERS, held_by, next_number
from moe_triton.schemes.fullmesh.combine import Combine
from moe_triton.schemes.fullmesh.dispatch import Dispatch, InbandDispatch
from moe_triton.schemes.fullmesh.layout import ExpertSlotsLayout, InbandLayout, InbandSlot, WindowLayout
from moe_triton.schemes.fullmesh.limits import FORMULAS, INBAND_FORMULAS, INBAND_RULES
from moe_triton.schemes.fullmesh.waits import FINDERS
from moe_triton.schemes.rank_context import (
    OPERATORS,
    USUAL_TOKENS,
    Memory,
    Operator,
    RankContext,
    RoundFacts,
    usual_receiving_blocks,
)
from moe_triton.schemes.scheme import OTHER_OR_ONE_SERVER, Refusal, Scratch, SplitScheme, WindowSpec

PART_TOKENS = (16, 32, 64, 128, 256, 512)
SHARES = (1 / 4, 1 / 3, 1 / 2, 2 / 3)
"""Shares of a device's cores that may do nothing but receive."""


class Fullmesh(SplitScheme):
    """fullmesh_v1: builds the plans of one rank.

    Ranks of other servers are reached by queues.
    """

    posts_are_loose: ClassVar = True
    formulas: ClassVar = FORMULAS
    finders: ClassVar = ENTRY_FINDERS | FINDERS
    crosses_servers: ClassVar = True
    goes_on: ClassVar = frozenset({"dispatch", "combine"})
    recounts: ClassVar = True
    inband: ClassVar = False
    """Whether each row carries its flags."""
    plans: ClassVar = {DispatchVariant: Dispatch, CombineVariant: Combine}
    layout: WindowLayout

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        is_plain = (
            not self.inband and not context.is_version_1 and context.capabilities.sums_across_allocations
        )
        # Blocks that receive take rows out of slots only.
        is_plain = is_plain and not context.receiving_blocks
        self.local_bypass = is_plain and not context.config.is_shared_rank(context.rank)

    @property
    def sends_ahead(self) -> bool:
        """Tells that rows may, where hosts know zones: entries follow, so zones are safe as ever.

        Where nothing computes meanwhile, it would only take longer until rows that have come are arranged,
        and they would be in no cache any more.
        """
        return self.context.overlaps and not (self.context.zones_on_device or self.queued_peers)

    @property
    def sums_placed(self) -> bool:
        """Tells that results are sent from wherever they are."""
        return True

    @classmethod
    def space(cls, config: Config, capabilities: Capabilities, cores: int) -> Space:
        """Lists settings to search. Operators are cut as well, into parts or by blocks, unless they post."""
        space = super().space(config, capabilities, cores)
        if config.topology.num_servers > 1:
            return space
        return _with_receivers(_with_parts(space, config, capabilities, cores), capabilities, cores)

    @staticmethod
    def layout_of(config: Config) -> WindowLayout:
        """Lays a window out by V1's rules, with results by expert, or by V2's, with results by token."""
        return ExpertSlotsLayout(config) if config.version == 1 else WindowLayout(config)

    @cached_property
    def windows(self) -> tuple[WindowSpec, ...]:
        """The group's, and that between two tensor-parallel ranks where there are two."""
        if self.context.exchange_rank is None:
            return super().windows
        layout, peers = self.context.exchange, self.context.exchange_peers
        return (*super().windows, WindowSpec(layout.window_bytes, layout.data_bytes, peers))

    @cached_property
    def rounds(self) -> RoundFacts:
        """Says that in V1 all operators wait for every rank, and that dispatch and combine share zones."""
        facts = super().rounds
        if not self.context.is_version_1:
            return facts
        return replace(facts, waiting=frozenset(OPERATORS), shared=frozenset({"dispatch", "combine"}))

    @property
    def statuses(self) -> tuple[tuple[Operator, Region], ...]:
        """Names the entries of a barrier, of a dispatch to this rank, and of V1's combine."""
        layout = self.layout
        return (
            ("barrier", layout.barrier_status),
            ("dispatch", layout.dispatch_status_on(self.context.rank)),
            ("combine", layout.peer_status),
        )

    def scratch(self) -> dict[str, Scratch]:
        """Adds quantised rows, progress of parts, ready tokens and the like to what schemes share."""
        context, tokens = self.context, self.context.config.num_max_tokens_per_rank
        return super().scratch() | {
            "quantized_rows": Scratch(context.capacity * context.quantized_row_bytes, torch.uint8),
            "return_origins": Scratch(3 * context.capacity),
            "pending_results": Scratch(tokens, torch.int64),
            "rows_taken": Scratch((1 + context.parts("dispatch", tokens)) * context.num_entries),
            "unread_zone": Scratch(1),
            "ready_tokens": Scratch(tokens),
            "ready_bounds": Scratch(2 * tokens),
            "part_progress": Scratch(context.num_blocks * PART_PROGRESS.num_words),
            "begun": Scratch(MAX_BLOCKS * STATUS_ENTRY.num_words, torch.float32, is_zeroed=True),
            "alphas": Scratch(2 * tokens * context.config.num_topk, torch.float32),
        }

    def wordless_flags(
        self, flags: Callable[[Region], torch.Tensor], memory: Memory
    ) -> list[Collection[int]]:
        """V2's combine has a flag for each result."""
        if self.context.is_version_1:
            return []
        placeholder, latest = numbers_of("combine"), 0
        if placeholder.name in memory:  # before the first combine nobody keeps them
            latest = int(held_by(memory, placeholder).view(torch.int32)[:NUM_ZONES].max())
        is_next = flags(self.layout.combine_status) == next_number(latest)
        ks = is_next.any(dim=0).any(dim=0).nonzero().flatten().tolist()
        return [self._senders(k) for k in ks]

    def _senders(self, k: int) -> Collection[int]:
        """Who may send result ``k`` of a token of this rank."""
        config = self.context.config
        if k >= config.num_topk:
            return (config.rank_of_shared_expert(k - config.num_topk, self.context.rank),)
        return range(config.num_shared_ranks, config.num_ranks)


class InbandFullmesh(Fullmesh):
    """fullmesh_v2: each row is received as soon as its own flags are there."""

    rules: ClassVar = INBAND_RULES
    formulas: ClassVar = INBAND_FORMULAS
    crosses_servers: ClassVar = False
    inband: ClassVar = True
    plans: ClassVar = {DispatchVariant: InbandDispatch, CombineVariant: Combine}
    slot_layout: ClassVar = InbandSlot
    refuses: ClassVar = {
        "several servers": Refusal(
            "with comm_alg='fullmesh_v2' a flag and the 480 bytes before it land together, which queues "
            "between servers do not promise",
            OTHER_OR_ONE_SERVER,
        )
    }

    @staticmethod
    def layout_of(config: Config) -> WindowLayout:
        """Lays a window out with dispatch slots cut into blocks that carry their flags."""
        return InbandLayout(config)


def _with_parts(space: Space, config: Config, capabilities: Capabilities, cores: int) -> Space:
    """A space with the sizes of parts, one part among them, and the blocks that communicate meanwhile.

    Where launches are costly there are parts only where blocks of their own communicate.
    """
    most = config.num_max_tokens_per_rank
    sizes = (*(tokens for tokens in PART_TOKENS if tokens < most), most)
    names = "dispatch_tokens", "combine_tokens"
    is_cheap = capabilities.launches_cheaply
    usual = min(USUAL_TOKENS, most) if is_cheap else most

    def allows(values: Settings) -> bool:
        communicating = values.get("communication_blocks", 0)
        if not communicating:
            return is_cheap or all(values.get(name, most) == most for name in names)
        return communicating < values.get("num_blocks", MAX_BLOCKS + 1)

    choices = {**dict.fromkeys(names, sizes), "communication_blocks": (0, max(1, cores // 2))}
    return _extended(space, choices, {**dict.fromkeys(names, usual), "communication_blocks": 0}, allows)


def _with_receivers(space: Space, capabilities: Capabilities, cores: int) -> Space:
    """A space with the blocks that do nothing but receive while the others send."""
    name = "receiving_blocks"
    counts = {0, *(max(1, int(cores * share)) for share in SHARES)}

    def allows(values: Settings) -> bool:
        return values.get(name, 0) < values.get("num_blocks", MAX_BLOCKS + 1)

    usual = {name: usual_receiving_blocks(capabilities, cores)}
    return _extended(space, {name: tuple(sorted(counts))}, usual, allows)


def _extended(
    space: Space, choices: dict[str, tuple[int, ...]], usual: Settings, allows: Callable[[Settings], bool]
) -> Space:
    """A space with more settings, and what goes together of them."""
    return replace(
        space,
        choices={**choices, **space.choices},
        usual={**space.usual, **usual},
        allows=lambda values: space.allows(values) and allows(values),
    )
