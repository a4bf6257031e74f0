"""Dispatch by hierarchy: each token once to each server, and from there to its experts' ranks.

Steps: what a mask leaves of the routing; route (with pack where rows are quantised), and the outer table;
send and flag on the rail; relay, which sends and flags inside the server; wait; offsets; the inner table;
arrange.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moe_triton.core.plan import Hole, Launch, Plan, Value, joined, launch
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.kernels.inner_table import inner_table_kernel
from moe_triton.kernels.outer_table import outer_table_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout
from moe_triton.layout.call_word import call_word
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes.common import steps as local
from moe_triton.schemes.common.flags import posting, wait_for_ranks
from moe_triton.schemes.hierarchy.ascendc import FUSED, RAIL_RELAY, RAIL_SEND
from moe_triton.schemes.hierarchy.layout import HierarchyLayout, RailSlot
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.hierarchy.steps import by_token, of_rail, of_round, relay_timeout_us
from moe_triton.schemes.site import Site, launch_matching


@dataclass(frozen=True)
class DispatchPlans:
    """Builds the plans of dispatch on one rank.

    Holes: x, topk_idx, topk_weights, expand_idx, num_tokens, num_ids, peers, window, recv_offsets,
    tokens_per_expert, tokens, origins, weights, report; given_ids, mask and scales where the variant has
    them; tables, `RelayTables`; and names of `Scheme.scratch`.

    Attributes:
        site: where they run.
        layout: of the window.
    """

    site: Site
    layout: HierarchyLayout

    @cached_property
    def tables(self) -> dict[str, Hole]:
        """Where each of them is."""
        return RelayTables(self.site.config).holes

    def whole(self, variant: DispatchVariant, zone: int) -> Plan:
        """All of it: what sends goes on with the relay and the wait."""
        first = local.route_pack if variant.row_format.is_quantized else local.route
        phases = [self._send(variant, zone), self._relay(variant, zone), *self._receive(variant, zone)]
        after = [self._inner_table(variant, zone), self._arrange(variant, zone)]
        masked = [local.select(self.site, variant)] if variant.mask != "none" else []
        steps = [
            *masked,
            first(self.site, variant),
            self._outer_table(variant),
            *joined(phases, FUSED),
            *after,
        ]
        return Plan("dispatch", zone, tuple(steps))

    def _outer_table(self, variant: DispatchVariant) -> Launch:
        """Which servers each token goes to."""
        c, site = self.site.config, self.site
        return launch_matching(
            "outer table",
            outer_table_kernel(c.num_topk, self.layout.num_servers, site.target),
            "compute",
            local.blocks_of_words(site),
            {
                "topk_idx": local.ids_of(variant),
                "expand_idx": Hole("expand_idx"),
                "outer_ids": self.tables["outer_ids"],
                "outer_rows": self.tables["outer_rows"],
                "outer_counts": self.tables["outer_counts"],
                "route_words": Hole("route_words"),
                "num_tokens": Hole("num_tokens"),
                "num_experts": c.num_experts,
                "server_experts": self.layout.server_experts,
            },
        )

    def _in_slot(self, variant: DispatchVariant) -> dict[str, Value]:
        slot = RailSlot.of(self.site.config, variant.row_format, variant.dtype)
        return {
            "topk": slot.topk,
            "row_bytes": slot.row_bytes,
            "words_offset": slot.words_offset,
            "weights_offset": slot.weights_offset,
            "scale_offset": slot.scale_offset,
            "slot_bytes": slot.slot_bytes,
        }

    def _send(self, variant: DispatchVariant, zone: int) -> Launch:
        """Steps 1 and 2, on the rail."""
        site, packed = self.site, local.slot_of(self.site, variant)
        is_quantized = variant.row_format.is_quantized
        return launch(
            "send",
            RAIL_SEND,
            "communication",
            site.num_blocks,
            rows=local.packed_of(variant) if is_quantized else Hole("x"),
            row_stride=packed.packed_bytes if is_quantized else packed.row_bytes,
            row_scale=packed.scale_offset if is_quantized else 0,
            topk_weights=Hole("topk_weights"),
            outer_ids=self.tables["outer_ids"],
            route_words=Hole("route_words"),
            num_tokens=Hole("num_tokens"),
            by_token=by_token(site),
            **of_rail(site, self.layout),
            **of_round(site, "dispatch", zone, call_word("dispatch", variant.kind)),
            **self._in_slot(variant),
            **posting(site, "dispatch"),
            slots=self.layout.rail_slots.words(),
            ends=self.layout.rail_flags.words(),
            report=Hole("report"),
        )

    def _relay(self, variant: DispatchVariant, zone: int) -> Launch:
        """Steps 1 and 2, inside the server."""
        site, slot = self.site, self._slot_of(variant)
        return launch(
            "relay",
            RAIL_RELAY,
            "communication",
            site.num_blocks,
            window=Hole("window"),
            rail_counts=self.tables["rail_counts"],
            num_local_experts=site.num_local_experts,
            slot_scale=slot.scale_offset if slot.num_scales else 0,
            stamp_offset=slot.stamp_offset,
            timeout_us=relay_timeout_us(site.timeout_us),
            by_token=by_token(site),
            **of_rail(site, self.layout),
            **of_round(site, "dispatch", zone, call_word("dispatch", variant.kind)),
            **self._in_slot(variant),
            traffic=site.traffic("dispatch"),
            rails=self.layout.rail_slots.words(),
            ends=self.layout.rail_flags.words(),
            slots=self.layout.forward_slots.words(),
            status=self.layout.token_counts.words(),
            report=Hole("report"),
        )

    def _receive(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        """Step 3, and where rows belong and are."""
        site = self.site
        wait = wait_for_ranks(
            site,
            "wait",
            self.layout.token_counts,
            "dispatch",
            zone,
            variant.kind,
            blocks=site.num_blocks,
            num_local_experts=site.num_local_experts,
            counts="recv_counts",
            count_end=site.config.num_max_tokens_per_rank + 1,
            keeps_zone=True,
        )
        return [wait, local.offsets(site, variant, zone, self.layout.forward_slots, sees_all=False)]

    def _inner_table(self, variant: DispatchVariant, zone: int) -> Launch:
        """Which experts of this server the tokens have that came by the rail."""
        site, rails = self.site, self.layout.rail_slots
        slot = RailSlot.of(site.config, variant.row_format, variant.dtype)
        window = rails.offset(zone=zone) + slot.words_offset
        return launch_matching(
            "inner table",
            inner_table_kernel(slot.topk, site.target, site.zones_on_device),
            "compute",
            site.num_blocks,
            {
                "tokens": Hole("window", window),
                "rail_counts": self.tables["rail_counts"],
                "inner_ids": self.tables["inner_ids"],
                "inner_positions": self.tables["inner_positions"],
                "inner_weights": self.tables["inner_weights"],
                "inner_active": self.tables["inner_active"],
                "num_servers": self.layout.num_servers,
                "max_tokens": rails.extent("index"),
                "first_expert": site.rank // self.layout.ranks_per_server * self.layout.server_experts,
                "server_experts": self.layout.server_experts,
                "server_stride": rails.stride("server") // WORD_BYTES,
                "token_stride": rails.stride("index") // WORD_BYTES,
                **site.zone_in_memory("dispatch", rails.stride("zone") // WORD_BYTES),
            },
        )

    def _slot_of(self, variant: DispatchVariant) -> SlotLayout:
        """How the slot of a forwarded row is packed."""
        return local.slot_of(self.site, variant)

    def _arrange(self, variant: DispatchVariant, zone: int) -> Launch:
        """Step 4: to expert order, out of the window."""
        site = self.site
        return launch_matching(
            "arrange",
            arrange_kernel(self._slot_of(variant), variant.weights, None, site.zones_on_device),
            "compute",
            site.num_blocks,
            {
                "slots": Hole("window"),
                "slot_scales": Hole("window"),
                "row_slots": Hole("row_slots"),
                "num_rows": local.last_offset(site),
                "entries": Hole("window"),
                "num_entries": 0,  # the wait has cleared its own
                "zone_stride": 0,
                "out_rows": Hole("tokens"),
                "out_scales": Hole("scales"),
                "out_origins": Hole("origins"),
                "out_weights": Hole("weights"),
                "kept_zone": site.kept_zone("dispatch"),
                "zone": site.zone_cell("dispatch"),
                "capacity": site.capacity,
            },
        )
