"""Dispatch on A3: every row straight into its expert's rank, a status entry for every expert.

The four steps: send, flag (both in `_send_rows`), wait, arrange. Entries, which carry counts, go out at once.
Each row has a flag of its own (``fullmesh_v1``), or one in every block of its slot (``fullmesh_v2``). A flag
is never visible before what it announces: the send kernels see to that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_triton.core import ascendc
from moe_triton.core.plan import Hole, Launch, Plan, Value, joined, launch, pipelined, split
from moe_triton.kernels.arrange import OwnRows, arrange_kernel
from moe_triton.kernels.returns import own_offsets_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout
from moe_triton.layout.call_word import call_word
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes.common import steps as local
from moe_triton.schemes.common.exchange import gather_steps
from moe_triton.schemes.common.flags import posting
from moe_triton.schemes.fullmesh.ascendc import (
    DISPATCH_RECEIVE,
    DISPATCH_ROWS,
    DISPATCH_SEND,
    DISPATCH_TAKE,
    FUSED,
    INBAND_COLLECT,
    INBAND_RECEIVE,
    INBAND_SEND,
)
from moe_triton.schemes.fullmesh.layout import WindowLayout
from moe_triton.schemes.fullmesh.posts import dispatch_post
from moe_triton.schemes.site import COMBINE_KIND, DISPATCH_WORD, Site, launch_matching, tokens_of

MAX_RECEIVED_BYTES = 24 * 1024
"""Most bytes of a row: a receiving block has two in local memory, beside its tables (dispatch_receive.h)."""


@dataclass(frozen=True)
class DispatchPlans:
    """Builds the plans of dispatch on one rank.

    Holes: x, topk_idx, expand_idx, num_tokens, num_ids, peers, window, recv_offsets, tokens_per_expert,
    tokens, origins, report; given_ids, mask, smooth_scales, topk_weights, scales, weights, performance_info
    and rank_table, exchange_counts, exchange_window and exchange_peers where the variant has them; and
    names of `Scheme.scratch`.

    Attributes:
        site: where they run.
        layout: of the window.
        inband: whether each row carries its flags.
    """

    site: Site
    layout: WindowLayout
    inband: bool = False

    def whole(self, variant: DispatchVariant, zone: int, parts: int = 1) -> Plan:
        """All of it: the launch that sends last goes on with the wait."""
        if self.site.by_readiness(parts) and not self.inband:
            return Plan("dispatch", zone, tuple(self._in_parts(variant, zone, parts)), self.site.overlaps)
        if self._receives_while_sending(variant, parts):
            launches = self._split(variant, zone)
            return Plan("dispatch", zone, tuple(launches), self.site.overlaps)
        received = self._receive(variant, zone, parts, is_same_launch=True)
        first = self._until_sent(variant, zone, parts, received)
        return Plan("dispatch", zone, (*first, *self._after_receiving(variant, zone)), self.site.overlaps)

    def setup(self, variant: DispatchVariant, zone: int, parts: int = 1) -> Plan:
        """Up to and including the flags; rows are quantised and sent in this many parts."""
        return Plan("dispatch", zone, tuple(self._until_sent(variant, zone, parts, [])), self.site.overlaps)

    def teardown(self, variant: DispatchVariant, zone: int) -> Plan:
        """From the wait on."""
        received = joined(self._receive(variant, zone, 1, is_same_launch=False), FUSED)
        return Plan("dispatch", zone, (*received, *self._after_receiving(variant, zone)))

    def _in_parts(self, variant: DispatchVariant, zone: int, parts: int) -> list[Launch]:
        """Each part sends rows, and takes those that have come for the launch that arranges them.

        Rows are packed before all that: packing in parts as well would take three launches for each.
        """
        counts = self._receive(variant, zone, 1, is_same_launch=True)[:-1]
        blocks = self.site.blocks("communication", parts)
        received = []
        for part in range(parts):
            phases = [self._send_rows(variant, zone, part, parts), *(counts if part == 0 else [])]
            phases.append(self._take_rows(variant, zone, part, parts))
            received.append(joined([replace(phase, blocks=blocks) for phase in phases], FUSED))
        arranged = [[self._arrange(variant, zone, part, parts)] for part in range(parts)]
        is_packed = variant.row_format.is_quantized
        first = (local.route_pack if is_packed else local.route)(self.site, variant)
        steps = [*self._before_packing(variant), first]
        return [*steps, *pipelined(received, arranged), *self._after_arranging(variant, zone)]

    def _receives_while_sending(self, variant: DispatchVariant, parts: int) -> bool:
        """Whether some blocks do nothing but receive: rows of this rank for itself would be in no slot."""
        fits = self._slot_of(variant).packed_bytes <= MAX_RECEIVED_BYTES
        is_whole = parts == 1 and not variant.keeps_own
        return is_whole and fits and self.site.receiving_blocks > 0

    def _split(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        """All four steps in one launch: some blocks wait and arrange while the others send and flag."""
        packs = (local.route_pack if variant.row_format.is_quantized else local.route)(self.site, variant)
        phases = [
            self._send_rows(variant, zone, 0, 1, begun=Hole("begun")),
            self._wait_status(variant, zone, is_same_launch=True),
            local.offsets(self.site, variant, zone, None, sees_all=True),
            self._receive_rows(variant, zone),
        ]
        together = split(phases, self.site.receiving_blocks, FUSED)
        return [*self._before_packing(variant), packs, *together, *self._after_arranging(variant, zone)]

    def _before_packing(self, variant: DispatchVariant) -> list[Launch]:
        steps = []
        if variant.mask != "none":
            steps.append(local.select(self.site, variant))
        if self.site.config.num_shared_experts:
            steps.append(local.share(self.site, variant))
        return steps

    def _until_sent(
        self, variant: DispatchVariant, zone: int, parts: int, phases: list[Launch]
    ) -> list[Launch]:
        """Up to the flags, and what the last launch goes on with."""
        steps = self._before_packing(variant)
        if not variant.row_format.is_quantized:  # nothing to compute that sending could hide
            steps.append(local.route(self.site, variant))
            send = self._send_rows(variant, zone, 0, 1)
            return [*steps, *joined([send, *self._post(variant, zone), *phases], FUSED)]
        packs = [[local.route_pack(self.site, variant, parts=parts)]]
        packs += [[local.pack(self.site, variant, part=part, parts=parts)] for part in range(1, parts)]
        sends = [[self._send_rows(variant, zone, part, parts)] for part in range(parts)]
        sends[-1] = joined([*sends[-1], *self._post(variant, zone), *phases], FUSED)
        return [*steps, *pipelined(packs, sends)]

    def _post(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        """To ranks that only queues reach, where there are any."""
        if not self.site.scheme.queued_peers:
            return []
        return [dispatch_post(self.site, self.layout, self._slot_of(variant), variant, zone)]

    def _receive(
        self, variant: DispatchVariant, zone: int, parts: int, *, is_same_launch: bool
    ) -> list[Launch]:
        """Step 3, and where rows belong: phases of one launch, or of the one that sends."""
        wait = self._wait_status(variant, zone, is_same_launch)
        slots = None if self.inband else self.layout.dispatch_slots
        offsets = local.offsets(self.site, variant, zone, slots, sees_all=True)
        phases = [wait, offsets] if self.inband else [wait, offsets, self._wait_rows(variant, zone)]
        blocks = self.site.blocks("communication", parts if variant.row_format.is_quantized else 1)
        return [replace(phase, blocks=blocks) for phase in phases]

    def _after_receiving(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        arrange = self._receive_inband(variant, zone) if self.inband else self._arrange(variant, zone, 0, 1)
        return [arrange, *self._after_arranging(variant, zone)]

    def _after_arranging(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        steps = []
        if self.site.keeps_own_tokens:
            steps.append(self._report_own_tokens())
        if variant.exchange:
            steps += gather_steps(self.site, self._slot_of(variant), variant, zone)
        if variant.waits:
            steps.append(local.record_waits(self.site, self.site.num_local_experts))
        return steps

    def _send_rows(
        self, variant: DispatchVariant, zone: int, part: int, parts: int, begun: Value = 0
    ) -> Launch:
        """Steps 1 and 2: rows to their slots; before the first part, an entry to every expert's rank."""
        c, slot, layout = self.site.config, self._slot_of(variant), self.layout
        posts = posting(self.site, "dispatch")
        return launch(
            "send",
            INBAND_SEND if self.inband else DISPATCH_SEND,
            "communication",
            self.site.blocks("communication", parts),
            **local.rows_to_send(self.site, variant, part, parts),
            row_bytes=slot.scaled_bytes if variant.row_format.is_quantized else slot.row_bytes,
            stamp_offset=slot.stamp_offset,
            expand_idx=Hole("expand_idx"),
            counts=Hole("counts"),
            shared_counts=Hole("shared_counts") if c.num_shared_experts else 0,
            **self.site.zone_of("dispatch", zone),
            kept_rank=self.site.rank if variant.keeps_own else -1,
            post_status=int(part == 0),
            call=call_word("dispatch", variant.kind),
            combine_kind=COMBINE_KIND,
            dispatch_word=DISPATCH_WORD,
            begun=begun,
            window=posts["window"],
            out_offset=posts["out_offset"],
            slots=layout.dispatch_slots.words(),
            status=layout.dispatch_status.words(),
        )

    def _wait_status(self, variant: DispatchVariant, zone: int, is_same_launch: bool) -> Launch:
        """Step 3: until an entry from every rank is there; in the launch that posts ours, or a later one."""
        return launch(
            "wait",
            ascendc.DISPATCH_WAIT,
            "communication",
            self.site.num_blocks,
            window=Hole("window"),
            recv_counts=Hole("recv_counts"),
            all_counts=Hole("all_counts"),
            waited_us=Hole("waited") if variant.waits else 0,
            num_local_experts=self.site.num_local_experts,
            count_end=0,
            **self.site.zone_of("dispatch", zone),
            timeout_us=self.site.timeout_us,
            call=call_word("dispatch", variant.kind),
            combine_kind=COMBINE_KIND if is_same_launch else 0,
            dispatch_word=0 if is_same_launch else DISPATCH_WORD,
            kept_zone=self.site.keeping_zone("dispatch"),
            turned=0,
            status=self.layout.dispatch_status_on(self.site.rank).words(),
            report=Hole("report"),
        )

    def _wait_rows(self, variant: DispatchVariant, zone: int) -> Launch:
        """Step 3: until every row that the entries counted is there."""
        values, blocks = self._of_flagged_rows(variant, zone), self.site.num_blocks
        return launch("rows", DISPATCH_ROWS, "communication", blocks, **values)

    def _take_rows(self, variant: DispatchVariant, zone: int, part: int, parts: int) -> Launch:
        """Step 3, of a part: the rows that are there, and in the last one all."""
        values = self._of_flagged_rows(variant, zone)
        values |= {"part": part, "num_parts": parts}
        values |= {"rows_before": self._taken_before(part), "rows_taken": self._taken_before(part + 1)}
        return launch("rows", DISPATCH_TAKE, "communication", self.site.num_blocks, **values)

    def _receive_rows(self, variant: DispatchVariant, zone: int) -> Launch:
        """Steps 3 and 4: each row as soon as it is there."""
        site, slot = self.site, self._slot_of(variant)
        return launch(
            "arrange",
            INBAND_COLLECT if self.inband else DISPATCH_RECEIVE,
            "communication",
            site.num_blocks,
            **self._of_flagged_rows(variant, zone),
            all_counts=Hole("all_counts"),
            max_count=site.config.num_max_tokens_per_rank,
            begun=Hole("begun"),
            turned=site.turning_zone("dispatch"),
            status=self.layout.dispatch_status_on(site.rank).words(),
            capacity=site.capacity,
            row_bytes=slot.row_bytes,
            scale_offset=slot.scale_offset,
            scale_bytes=slot.scale_bytes,
            out_rows=Hole("tokens"),
            out_scales=Hole("scales") if slot.num_scales else 0,
            out_origins=Hole("origins"),
            out_weights=Hole("weights") if variant.weights else 0,
        )

    def _of_flagged_rows(self, variant: DispatchVariant, zone: int) -> dict[str, Value]:
        site = self.site
        return {
            "window": Hole("window"),
            "recv_counts": Hole("recv_counts"),
            "waited_us": Hole("waited") if variant.waits else 0,
            "num_local_experts": site.num_local_experts,
            "num_ranks": site.config.num_ranks,
            "kept_rank": site.rank if variant.keeps_own else -1,
            "stamp_offset": self._slot_of(variant).stamp_offset,
            **site.zone_of("dispatch", zone),
            "timeout_us": site.timeout_us,
            "slots": self.layout.dispatch_slots.words(),
            "report": Hole("report"),
        }

    def _taken_before(self, part: int) -> Hole:
        """(EP, localE) how many of each entry's rows the parts before this one have taken."""
        return Hole("rows_taken", WORD_BYTES * self.site.num_entries * part)

    def _slot_of(self, variant: DispatchVariant) -> SlotLayout:
        return local.slot_of(self.site, variant, is_flagged=not self.inband)

    def _arrange(self, variant: DispatchVariant, zone: int, part: int, parts: int) -> Launch:
        """Step 4: to expert order, out of the window, or from where rows of this rank for itself are.

        Of a part, what it took. The first one clears the entries, the last one turns the zone. Those before
        the last share the rows of this rank for itself: nothing hides what the last one does.
        """
        c, site, slot = self.site.config, self.site, self._slot_of(variant)
        is_quantized, packed = variant.row_format.is_quantized, local.packed_of(variant)
        own = OwnRows(c.num_topk, c.num_results_per_token if variant.smooth else 1)
        own_parts = max(1, parts - 1)
        first_token, num_tokens = tokens_of(part, own_parts) if parts > 1 else (0, Hole("num_tokens"))
        status = self.layout.dispatch_status_on(self.site.rank)
        return launch_matching(
            "arrange",
            arrange_kernel(
                slot,
                variant.weights,
                own if variant.keeps_own and part < own_parts else None,
                site.zones_on_device,
                parted=parts > 1,
            ),
            "compute",
            site.blocks("compute", parts),
            {
                "slots": Hole("window"),
                "slot_scales": Hole("window"),
                "row_slots": Hole("row_slots"),
                "num_rows": local.last_offset(site),
                "entries": Hole("window", status.offset(zone=zone)),
                "num_entries": site.num_entries if part == 0 else 0,
                "rows_before": self._taken_before(part),
                "rows_taken": self._taken_before(part + 1),
                "zone_stride": status.stride("zone") // WORD_BYTES,
                "rows": packed if is_quantized else Hole("x"),
                "scales": Hole(packed.name, slot.scale_offset),
                "topk_idx": local.ids_of(variant),
                "topk_weights": Hole("topk_weights"),
                "expand_idx": Hole("expand_idx"),
                "recv_offsets": local.true_offsets(site),
                "first_expert": site.first_expert,
                "num_local_experts": site.num_local_experts,
                "num_ranks": c.num_ranks,
                "out_rows": Hole("tokens"),
                "out_scales": Hole("scales"),
                "out_origins": Hole("origins"),
                "out_weights": Hole("weights"),
                "kept_zone": site.kept_zone("dispatch"),
                "zone": site.zone_cell("dispatch") if part == parts - 1 else Hole("unread_zone"),
                "capacity": site.capacity,
                "row_stride": (slot.packed_bytes if is_quantized else slot.row_bytes) // WORD_BYTES,
                "rank": site.rank,
                "first_token": first_token,
                "num_tokens": num_tokens,
            },
        )

    def _receive_inband(self, variant: DispatchVariant, zone: int) -> Launch:
        """Steps 3 and 4 of fullmesh_v2: each row as soon as its own flags are there."""
        site, slot = self.site, self._slot_of(variant)
        return launch(
            "arrange",
            INBAND_RECEIVE,
            "communication",
            site.num_blocks,
            window=Hole("window"),
            recv_offsets=local.true_offsets(self.site),
            waited_us=Hole("waited") if variant.waits else 0,
            num_entries=site.num_entries,
            num_ranks=site.config.num_ranks,
            capacity=site.capacity,
            row_bytes=slot.row_bytes,
            scale_offset=slot.scale_offset,
            scale_bytes=slot.scale_bytes,
            stamp_offset=slot.stamp_offset,
            out_rows=Hole("tokens"),
            out_scales=Hole("scales") if slot.num_scales else 0,
            out_origins=Hole("origins"),
            out_weights=Hole("weights") if variant.weights else 0,
            **self.site.zone_of("dispatch", zone, kept=True),
            turned=self.site.turning_zone("dispatch"),
            timeout_us=site.timeout_us,
            status=self.layout.dispatch_status_on(self.site.rank).words(),
            slots=self.layout.dispatch_slots.words(),
            report=Hole("report"),
        )

    def _report_own_tokens(self) -> Launch:
        c, site = self.site.config, self.site
        return launch(
            "report own tokens",
            own_offsets_kernel(site.target),
            "compute",
            1,
            recv_offsets=Hole("true_offsets"),
            out=Hole("recv_offsets"),
            num_ranks=c.num_ranks,
            num_shared_ranks=c.num_shared_ranks,
            rank=site.rank,
            num_tokens=Hole("num_tokens"),
        )
