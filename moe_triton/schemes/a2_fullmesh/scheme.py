"""A2 fullmesh: a block for every peer. The plans of one rank.

Of each rank one block comes in every round, with all that it has for this one: a receiver waits for as many
flags as there are ranks, and a sender needs one write for each peer, which is what queues between servers are
made for. Inside a server blocks are written straight into the peers' windows. In a group of several servers
each is made in the out part of this rank's own, and posted as one message, while others are still made.

What guards what, in zone z of round i:

- FLAG1, the number of the round, guards the counts, which say where FLAG2 is; FLAG2 guards the rows.
- Where queues keep no order inside a message, FLAG2 is one of its own and guards the counts, too.
- Nothing is cleared: numbers of rounds differ, and nothing but a header is ever where FLAG1 is.

Dispatch and combine share zones and toggle. Two zones are enough because either waits for every rank: a rank
that has ended round i + 1 has seen every peer's flags of i + 1, which that peer posted after it ended i. So
whoever writes blocks of round i + 2 comes after the last read of what i left in the same zone. The same flags
say that what this rank posted in round i has arrived: its place in the out part is free.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.region import Region
from moe_triton.core.space import Space
from moe_triton.layout import UB_ALIGN, WORD_BYTES
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes.a2_fullmesh.combine import Combine
from moe_triton.schemes.a2_fullmesh.dispatch import Dispatch
from moe_triton.schemes.a2_fullmesh.layout import BlocksLayout
from moe_triton.schemes.a2_fullmesh.limits import FORMULAS, RULES
from moe_triton.schemes.a2_fullmesh.waits import FINDERS
from moe_triton.schemes.common.waits import ENTRY_FINDERS
from moe_triton.schemes.rank_context import OPERATORS, Operator, RoundFacts, usual_post_parts
from moe_triton.schemes.scheme import REFUSED_ON_A2, Refusal, Scratch, SplitScheme


class A2Fullmesh(SplitScheme):
    """fullmesh of A2: builds the plans of one rank."""

    layout_of = BlocksLayout
    layout: BlocksLayout
    posts_are_loose: ClassVar = True
    plans: ClassVar = {DispatchVariant: Dispatch, CombineVariant: Combine}
    rules: ClassVar = RULES
    formulas: ClassVar = FORMULAS
    finders: ClassVar = ENTRY_FINDERS | FINDERS
    goes_on: ClassVar = frozenset({"dispatch", "combine"})
    settings: ClassVar = frozenset({"post_parts"})
    crosses_servers: ClassVar[bool] = True
    refuses: ClassVar = {
        "torch_npu halves": Refusal(
            "torch_npu's halves are those of A3", "Use EPBuffer with wait=False, or the whole operators."
        ),
        **REFUSED_ON_A2,
    }

    @classmethod
    def space(cls, config: Config, capabilities: Capabilities, cores: int) -> Space:
        """Lists settings to search, between servers the parts in which blocks are made as well."""
        space, ranks = super().space(config, capabilities, cores), config.num_ranks
        if config.topology.num_servers == 1:
            return space
        usual = usual_post_parts(ranks)
        parts = tuple(sorted({usual, *(min(each, ranks) for each in (1, 2, 4, 8, 16))}))
        choices = {"post_parts": parts, **space.choices}
        return replace(space, choices=choices, usual={**space.usual, "post_parts": usual})

    @cached_property
    def rounds(self) -> RoundFacts:
        """Says that all operators wait for every rank, and that dispatch and combine share zones."""
        return RoundFacts(
            waiting=frozenset(OPERATORS),
            shared=frozenset({"dispatch", "combine"}),
            on_device=self.context.capabilities.captures_graphs,
        )

    @cached_property
    def queued_peers(self) -> frozenset[int]:
        """Names who takes posts: in a group of several servers those of this one too, as in the original."""
        c = self.context.config
        others = frozenset(range(c.num_ranks)) - {self.context.rank}
        return others if c.topology.num_servers > 1 else frozenset()

    @property
    def statuses(self) -> tuple[tuple[Operator, Region], ...]:
        """Names the entries of a barrier: dispatch and combine post none."""
        return (("barrier", self.layout.barrier_status),)

    def scratch(self) -> dict[str, Scratch]:
        """Adds what blocks tell each other of parts, and numbers of rows by rank, to what schemes share."""
        return super().scratch() | {
            "part_lines": Scratch(MAX_BLOCKS * (UB_ALIGN // WORD_BYTES), is_zeroed=True),
            "rows_to": Scratch(self.context.config.num_ranks),
            "expected_rows": Scratch(self.context.config.num_ranks),
        }
