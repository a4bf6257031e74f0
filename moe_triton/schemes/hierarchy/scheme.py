"""hierarchy: each token once to each server, and inside the server to its experts. The plans of one rank.

Ranks of the same number on all servers are a rail: between servers only they exchange messages. A token goes
along the rail once for each server that it has experts on; who gets it relays it to the ranks of its server
that hold them. Results come back to the relay, which sums them by weight and sends one partial row along the
rail. The sums' order is by expert in a server, then by server: bits differ from those of fullmesh.

What guards what, in zone z of round i of an operator:

- dispatch: tokens of a message on the rail are believed when the next one's first head, or the end flag, has
  the number of the round: messages of a queue come one after the other, and their insides in any order. The
  entry of a source guards its rows, which the relay wrote before.
- combine: the flag of a rank for a piece guards its results of that piece at the relay; the end flag guards
  the partial rows.

Heads and end flags are numbers of rounds, which differ: nothing is cleared but entries.

Dispatch and combine have zones and toggles of their own, and two are enough for each. A rank ends dispatch
i with entries of every rank, each of which was made, by whomever relayed it, after that rank began dispatch
i: so who begins dispatch i + 2 has seen that every rank began i + 1, and so ended i. It ends combine i with
end flags of its rail, each of which came after its sender had flags of all ranks of its server: so all
ranks have begun combine i. The same holds for rails, forwarded rows, results, partial rows, and the out
part. One zone of forwarded rows is not enough: a relay may be in dispatch i + 1 while a neighbour arranges
what it got in i.

Who is missing is named across both hops: a relay that gives up says for whom, in entries of a count that no
dispatch has (`LOST_COUNT`), or in the end flag, and its deadline is earlier than that of those who wait for
it. One whose waits are stopped, by Ctrl-C or `close`, says nothing: it is missing itself. An end flag says of
a rank that made another call, too, which calls differ (`lost_call`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.plan import Plan
from moe_triton.core.records import MAX_LEFT_OUT
from moe_triton.core.region import Region
from moe_triton.core.space import Settings, Space
from moe_triton.core.tuning import POSTS
from moe_triton.layout import UB_ALIGN, WORD_BYTES, align
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes.hierarchy.combine import Combine
from moe_triton.schemes.hierarchy.dispatch import RELAY_SHARE, Dispatch
from moe_triton.schemes.hierarchy.layout import HierarchyLayout
from moe_triton.schemes.hierarchy.left_out import ranks_of
from moe_triton.schemes.hierarchy.limits import (
    FORMULAS,
    FORMULAS_ON_A3,
    NO_SMOOTH_SCALES,
    RULES,
    RULES_ON_A3,
)
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.hierarchy.waits import FINDERS
from moe_triton.schemes.rank_context import (
    MESSAGE_TOKENS,
    OPERATORS,
    Operator,
    RoundFacts,
    usual_return_pieces,
)
from moe_triton.schemes.scheme import CONST_ARGUMENTS, REFUSED_ON_A2, Refusal, Scheme, Scratch

MESSAGES = 1, 2, 4, 8, 16, 32
"""Tokens of a message that are searched."""


def _refused(other: str) -> dict[str, Refusal]:
    """What hierarchy lacks on every product.

    Args:
        other: the product's scheme that has it.
    """
    use = f"Use comm_alg={other!r} for it."
    return {
        "torch_npu halves": Refusal("comm_alg='hierarchy' has no halves", "Use the whole operators."),
        "wait": Refusal(
            "with comm_alg='hierarchy' a rank relays others' rows while it is in the call itself",
            f"Leave it out, or use comm_alg={other!r}.",
        ),
        "smooth_scales": Refusal(NO_SMOOTH_SCALES, f"Pass None, or use {other}."),
        "special experts": Refusal("comm_alg='hierarchy' has none", use),
        "ori_x": Refusal("comm_alg='hierarchy' has no special experts", use),
        "performance_info": Refusal("comm_alg='hierarchy' waits for ranks through others", use),
        "several scales": Refusal(
            "with comm_alg='hierarchy' a row has one scale on its way", f"Pass 'int8', or use {other!r}."
        ),
    }


class Hierarchy(Scheme):
    """hierarchy of A2: builds the plans of one rank."""

    layout_of = HierarchyLayout
    layout: HierarchyLayout
    plans: ClassVar = {DispatchVariant: Dispatch, CombineVariant: Combine}
    tables_of = RelayTables
    rules: ClassVar = RULES
    formulas: ClassVar = FORMULAS
    between_servers: ClassVar[bool] = True
    finders: ClassVar = FINDERS
    settings: ClassVar = frozenset({"posts", "message_tokens", "return_pieces"})
    crosses_servers: ClassVar[bool] = True
    sums_alike: ClassVar[bool] = False
    goes_on: ClassVar = frozenset({"dispatch", "combine"})
    marks_in_handle: ClassVar = True
    goes_on_in_rounds: ClassVar = False
    recounts: ClassVar = True
    relay_share: ClassVar = RELAY_SHARE
    refuses: ClassVar = {**_refused("fullmesh"), **REFUSED_ON_A2}

    @classmethod
    def no_masks(cls, config: Config) -> str:
        """Says where servers have more ranks than an end flag has bits."""
        if max(config.topology.sizes) <= MAX_LEFT_OUT:
            return ""
        return f"comm_alg='hierarchy' can go on without ranks where servers have at most {MAX_LEFT_OUT}"

    @property
    def relays(self) -> bool:
        """Tells that tokens of other servers come from ranks of this one."""
        return True

    @classmethod
    def space(cls, config: Config, capabilities: Capabilities, cores: int) -> Space:
        """Lists settings to search: who posts to other servers, where several can, and in what messages."""
        space, servers = super().space(config, capabilities, cores), config.topology.num_servers
        if servers == 1:
            return space
        posters = tuple(map(POSTS.index, capabilities.posters))
        usual = {
            "message_tokens": MESSAGE_TOKENS,
            "return_pieces": usual_return_pieces(config),
        }
        choices = {
            **({"posts": posters} if len(posters) > 1 else {}),
            "message_tokens": MESSAGES,
            "return_pieces": tuple(sorted({1, min(2, servers), servers, usual["return_pieces"]})),
            **space.choices,
        }

        def allows(values: Settings) -> bool:
            by_cores = POSTS[values.get("posts", 0)] == "aiv"
            return by_cores or all(values[name] == value for name, value in usual.items())

        return replace(space, choices=choices, usual={**space.usual, **usual}, allows=allows)

    def whole(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """Builds the plan of an operator, in one part: a relay takes a rank's tokens together."""
        return super().whole(variant, zone)

    def phase(self, name: str, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """Builds the plan of one phase of an operator in rounds, in one part as well."""
        return super().phase(name, variant, zone)

    @cached_property
    def rounds(self) -> RoundFacts:
        """Says that dispatch, combine and barrier all wait for every rank."""
        return RoundFacts(waiting=frozenset(OPERATORS), on_device=self.context.capabilities.captures_graphs)

    @property
    def statuses(self) -> tuple[tuple[Operator, Region], ...]:
        """Names the entries that hold a call word: those of a barrier and of a dispatch."""
        return (("barrier", self.layout.barrier_status), ("dispatch", self.layout.token_counts))

    def scratch(self) -> dict[str, Scratch]:
        """Adds words of routes, sums for each server and what was seen of rails to what schemes share."""
        c = self.context.config
        tokens, servers = c.num_max_tokens_per_rank, c.topology.num_servers
        return super().scratch() | {
            "route_words": Scratch(tokens * align(c.num_topk, UB_ALIGN // WORD_BYTES)),
            "server_sums": Scratch(servers * tokens * c.hidden, torch.int16),
            "quantized_sums": Scratch(servers * tokens * self.context.quantized_row_bytes, torch.uint8),
            "rail_seen": Scratch(servers),
            # Masked ranks that sums for each server at its place, and of each server, are without.
            "left_out": Scratch(servers, is_zeroed=True),
            "rail_left_out": Scratch(servers, is_zeroed=True),
        }

    def left_out(self, memory: Mapping[str, Any]) -> frozenset[int]:
        """Reads it from what end flags have said."""
        words: list[int] = memory["rail_left_out"].tolist()
        return frozenset(ranks_of(self.context.config, words)) if any(words) else frozenset()


class A3Hierarchy(Hierarchy):
    """hierarchy of A3, between machines whose dies reach each other's memory: builds the plans of one rank.

    A group inside one machine is a hierarchy too, which posts nothing.
    """

    rules: ClassVar = RULES_ON_A3
    formulas: ClassVar = FORMULAS_ON_A3
    between_servers: ClassVar[bool] = False
    compares_super_nodes: ClassVar[bool] = True
    refuses: ClassVar = {
        **_refused("fullmesh_v1"),
        "shared experts": Refusal(
            "comm_alg='hierarchy' has no ranks of shared experts",
            "Compute them on every rank, or use comm_alg='fullmesh_v1'.",
        ),
        "tp_group": Refusal(
            "comm_alg='hierarchy' has no tensor parallelism", "Leave it out, or use comm_alg='fullmesh_v1'."
        ),
        **dict.fromkeys(
            CONST_ARGUMENTS,
            Refusal("comm_alg='hierarchy' has no special experts", "Use comm_alg='fullmesh_v1' for it."),
        ),
    }
