"""Dispatch by hierarchy: each token once to each server, and from there to its experts' ranks.

Steps: what a mask leaves of the routing; route (with pack where rows are quantised), and the outer table;
tokens as they travel; send and flag on the rail; relay, which sends and flags inside the server; wait;
offsets; the inner table; arrange.
"""

from __future__ import annotations

from moe_triton.core.plan import Launch, Placeholder, Plan, Value, joined
from moe_triton.kernels.inner_table import inner_table_kernel
from moe_triton.kernels.outer_table import outer_table_kernel
from moe_triton.layout import WORD_BYTES
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes.common.steps import DispatchSteps, tokens_of
from moe_triton.schemes.hierarchy.ascendc import FUSED, RAIL_RELAY, RAIL_SEND, RAIL_TOKENS
from moe_triton.schemes.hierarchy.layout import HierarchyLayout, RailSlot
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.rank_context import RankContext

MADE_TOKENS = 32
"""Tokens that are made before they are posted, about, while others follow, where launches are cheap."""


RELAY_SHARE = 0.8
"""How much of the time-out a relay waits: it says for whom before the others give up."""


def of_rails(context: RankContext, layout: HierarchyLayout) -> dict[str, Value]:
    """Arguments of kernels that know of rails: which ranks there are, and where tables are.

    Inside one server they post to nobody, and write to this rank's own window and count what they move, too.
    """
    return {
        **RelayTables(context.config).placeholders,
        "num_servers": layout.num_servers,
        "ranks_per_server": layout.ranks_per_server,
        "server_experts": layout.server_experts,
        "out_offset": layout.in_bytes,
        "message_tokens": context.message_tokens,
        "first_place": 0,
        "num_places": layout.num_servers,
    }


def relay_timeout_us(timeout_us: int) -> int:
    """The deadline of a relay, where that of the others is given."""
    return int(timeout_us * RELAY_SHARE)


class Dispatch(DispatchSteps):
    """Builds the plans of dispatch on one rank.

    Holes: x, topk_idx, topk_weights, expand_idx, num_tokens, num_ids, peers, window, recv_offsets,
    tokens_per_expert, tokens, origins, weights, report; given_ids, mask and scales where the variant has
    them; tables, `RelayTables`; and names of `Scheme.scratch`.
    """

    layout: HierarchyLayout

    def __init__(self, context: RankContext, variant: DispatchVariant, zone: int, parts: int = 1) -> None:
        super().__init__(context, variant, zone, parts)
        self.rail_slot = RailSlot.of(self.config, variant.row_format, variant.dtype)
        self.usual |= {**of_rails(context, self.layout), "ends": self.layout.rail_flags}
        is_alone = context.posts_alone(self.rail_slot.slot_bytes, self.layout.rail_slots.stride("index"))
        if is_alone and context.tuning.message_tokens is None:
            self.usual["message_tokens"] = 1

    def whole(self) -> Plan:
        """All of it: what sends goes on with the relay and the wait."""
        return self.plan([*self._until_counted(), *self.arrangement()])

    def count(self) -> Plan:
        """Of a call in rounds: sends a round, and waits until it is known what has come of it."""
        return self.plan(self._until_counted(), phase="count")

    def mend(self) -> Plan:
        """Of a dispatch in which ranks were masked: from the counts on, which are without theirs now."""
        return self.plan([self._offsets(), self._inner_table(), *self.arrangement()], phase="mend")

    def pass_on(self) -> Plan:
        """What a rank does for others as their relay, by itself."""
        return self.plan([self._relay(), self._inner_table()], phase="pass_on")

    def _until_counted(self) -> list[Launch]:
        c, context = self.config, self.context
        outer = outer_table_kernel(c.num_topk, self.layout.num_servers, context.target)
        parts = range(self._made_in)
        made, sent = map(self._make, parts), map(self._send, parts)
        *ahead, (make, send) = zip(made, sent, strict=True)
        return [
            *self.before_routing(),
            *self.route_or_pack(),
            self.launch("outer table", outer, self.blocks_of_words),  # which servers each token goes to
            *(launch for both in ahead for launch in both),
            make,
            *joined([send, self._relay(), *self._receive()], FUSED),
            self._inner_table(),
        ]

    @property
    def _made_in(self) -> int:
        """Parts in which tokens are made, each posted while the next one is made, if launches are cheap."""
        is_cheap = self.context.capabilities.launches_cheaply and self.context.posts == "aiv"
        is_cheap &= self.layout.num_servers > 1
        return -(-self.config.num_max_tokens_per_rank // MADE_TOKENS) if is_cheap else 1

    def arrangement(self) -> list[Launch]:
        """To expert order."""
        return [self.arrange(self.slot)]  # the wait has cleared its entries

    @property
    def _in_slot(self) -> dict[str, Value]:
        names = "topk", "row_bytes", "words_offset", "weights_offset", "scale_offset", "slot_bytes"
        return {name: getattr(self.rail_slot, name) for name in names}

    def _make(self, part: int) -> Launch:
        """What goes by the rail, before any of it is posted: each token is loaded once."""
        rows = self.rows_to_send()
        return self.launch(
            "tokens",
            RAIL_TOKENS,
            rows=rows["rows"],
            row_stride=rows["row_stride"],
            row_scale=self.slot.scale_offset if self.is_quantized else 0,
            topk_weights=Placeholder("topk_weights"),
            **tokens_of(part, self._made_in),
            **self._in_slot,
            slots=self.layout.rail_slots,
        )

    def _send(self, part: int) -> Launch:
        """Steps 1 and 2, on the rail."""
        sizes = {name: self._in_slot[name] for name in ("row_bytes", "slot_bytes")}
        return self.launch(
            "send",
            RAIL_SEND,
            **tokens_of(part, self._made_in),
            is_last=int(part == self._made_in - 1),
            **sizes,
            adds_traffic=1 if part else self.has_posted,
            slots=self.layout.rail_slots,
        )

    def _relay(self) -> Launch:
        """Steps 1 and 2, inside the server."""
        return self.launch(
            "relay",
            RAIL_RELAY,
            slot_scale=self.slot.scale_offset if self.slot.num_scales else 0,
            stamp_offset=self.slot.stamp_offset,
            timeout_us=relay_timeout_us(self.context.timeout_us),
            in_series=int(self.context.posts == "aicpu"),
            **self._in_slot,
            rails=self.layout.rail_slots,
            slots=self.layout.forward_slots,
            status=self.layout.token_counts,
        )

    def _receive(self) -> list[Launch]:
        """Step 3, and where rows belong and are."""
        wait = self.wait_for_ranks(
            "wait",
            self.layout.token_counts,
            num_local_experts=self.context.num_local_experts,
            recv_counts=Placeholder("recv_counts"),
            count_end=self.config.num_max_tokens_per_rank + 1,
            is_relayed=1,
            kept_zone=self.keeping,
        )
        return [wait, self._offsets()]

    def _offsets(self) -> Launch:
        return self.offsets(self.layout.forward_slots, sees_all=False)

    def _inner_table(self) -> Launch:
        """Which experts of this server the tokens have that came by the rail."""
        context, layout, rails = self.context, self.layout, self.layout.rail_slots
        return self.launch(
            "inner table",
            inner_table_kernel(self.config.num_topk, context.target, context.zones_on_device),
            tokens=Placeholder("window", rails.offset(zone=self.zone) + self.rail_slot.words_offset),
            max_tokens=rails.extent("index"),
            first_expert=context.rank // layout.ranks_per_server * layout.server_experts,
            server_stride=rails.stride("server") // WORD_BYTES,
            token_stride=rails.stride("index") // WORD_BYTES,
            **self.in_memory(rails.stride("zone") // WORD_BYTES),
        )
