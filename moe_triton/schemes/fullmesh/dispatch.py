"""Dispatch on A3: every row straight into its expert's rank, a status entry for every expert.

The four steps: send, flag (both in `_send_rows`), wait, arrange. Entries, which carry counts, go out at once.
Each row has a flag of its own (``fullmesh_v1``), or one in every block of its slot (``fullmesh_v2``). A flag
is never visible before what it announces: the send kernels see to that.

Rows for ranks of other servers, which only queues reach, are left in the out part of this rank's window. When
all blocks have written theirs, one core for each queue posts it: all rows for an expert in one message, then
the rank's entries in another. Between hosts, where a NIC gathers what it sends, a row that leaves much of its
slot empty has a message of its own, as its stamp has. Receivers look at flags as ever.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from moe_triton.core.ascendc import DISPATCH_WAIT
from moe_triton.core.plan import Launch, Placeholder, Plan, Stream, Value, joined, pipelined, split
from moe_triton.kernels.arrange import OwnRows, arrange_kernel
from moe_triton.kernels.returns import own_offsets_kernel
from moe_triton.layout import STAMP_BYTES, WORD_BYTES
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes.common.exchange import gather_steps
from moe_triton.schemes.common.steps import DispatchSteps, of_next_round, tokens_of
from moe_triton.schemes.fullmesh.ascendc import (
    DISPATCH_POST,
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
from moe_triton.schemes.rank_context import DISPATCH_WORD, RankContext

STREAMS: tuple[Stream, Stream] = ("communication", "compute")
MAX_RECEIVED_BYTES = 24 * 1024
"""Most bytes of a row: a receiving block has two in local memory, beside its tables (dispatch_receive.h)."""


class Dispatch(DispatchSteps):
    """Builds the plans of fullmesh_v1's dispatch.

    Holes: x, topk_idx, expand_idx, num_tokens, num_ids, peers, window, recv_offsets, tokens_per_expert,
    tokens, origins, report; given_ids, mask, smooth_scales, topk_weights, scales, weights, performance_info
    and rank_table, exchange_counts, exchange_window and exchange_peers where the variant has them; and
    names of `Scheme.scratch`.
    """

    layout: WindowLayout
    inband: ClassVar[bool] = False
    """Whether each row carries its flags."""
    has_flagged_stamps = True

    def __init__(self, context: RankContext, variant: DispatchVariant, zone: int, parts: int = 1) -> None:
        super().__init__(context, variant, zone, parts)
        self.status = self.layout.dispatch_status_on(context.rank)
        self.slots = self.layout.dispatch_slots.on(context.rank)
        self.usual |= {"dispatch_word": DISPATCH_WORD, "slots": self.slots}

    def whole(self) -> Plan:
        """All of it: the launch that sends last goes on with the wait."""
        if self.context.by_readiness(self.parts) and not self.inband:
            return self.plan(self._in_parts(), self.context.overlaps)
        if self._receives_while_sending():
            return self.plan(self._split(), self.context.overlaps)
        first = self._until_sent(self._receive(self.parts, is_same_launch=True))
        return self.plan([*first, *self.arrangement()], self.context.overlaps)

    def setup(self) -> Plan:
        """Up to and including the flags; rows are quantised and sent in parts."""
        return self.plan(self._until_sent([]), self.context.overlaps)

    def teardown(self) -> Plan:
        """From the wait on, in one part."""
        return self.plan([*joined(self._receive(1, is_same_launch=False), FUSED), *self.arrangement()])

    def count(self) -> Plan:
        """Of a call in rounds: sends a round, and waits until it is known what has come of it."""
        return self.plan([*self._until_sent(self._receive(self.parts, is_same_launch=True))], phase="count")

    def mend(self) -> Plan:
        """Of a dispatch in which ranks were masked: from the counts on, which are without theirs now."""
        offsets = self.offsets(None if self.inband else self.slots, sees_all=True)
        return self.plan([offsets, *self.arrangement()], phase="mend")

    def recount(self) -> Plan:
        """Of a call in rounds, the same without what follows: its rows have places."""
        return self.plan([self.offsets(None if self.inband else self.slots, sees_all=True)], phase="recount")

    def fill_ahead(self) -> Plan:
        """Of a call in rounds: `fill`, beside rows of the next round, whose `entries` follow.

        What the two rounds do lies in the slots of different zones, and in memory of their own.
        """
        zone = (self.zone + 1) % self.context.scheme.rounds.num_zones
        behind = type(self)(self.context, self.variant, zone)
        communicating, computing = (self.context.blocks(stream, 2) for stream in STREAMS)
        steps = [*behind.before_routing(), *behind.route_or_pack(), behind._send_rows(0, 1, posts=False)]
        *packed, sent = (of_next_round(launch) for launch in steps)
        arranged, *others = self.arrangement_of_round()
        if arranged.stream != sent.stream:  # where rows are arranged as they are received, nothing computes
            sent = replace(sent, blocks=communicating)
            arranged = replace(arranged, blocks=computing, alongside=True)
        launches = [*packed, self.find_places(), sent, arranged, *others]
        return self.plan(launches, self.context.overlaps, "fill_ahead")

    def entries(self) -> Plan:
        """Of a call in rounds: what follows rows that were sent ahead, once the round before is arranged."""
        phases = [self._send_rows(0, 1, sends=False), *self._receive(1, is_same_launch=True)]
        return self.plan(joined(phases, FUSED), phase="entries")

    def _in_parts(self) -> list[Launch]:
        """Each part sends rows, and takes those that have come for the launch that arranges them.

        Rows are packed before all that: packing in parts as well would take three launches for each.
        """
        counts = self._receive(1, is_same_launch=True)[:-1]
        blocks = self.context.blocks("communication", self.parts)
        received = []
        for part in range(self.parts):
            phases = [self._send_rows(part, self.parts), *(counts if part == 0 else [])]
            phases.append(self._take_rows(part))
            received.append(joined([replace(phase, blocks=blocks) for phase in phases], FUSED))
        arranged = [[self._arrange(part, self.parts)] for part in range(self.parts)]
        steps = [*self.before_routing(), *self.route_or_pack()]
        return [*steps, *pipelined(received, arranged), *self._after_arranging()]

    def _receives_while_sending(self) -> bool:
        """Whether some blocks do nothing but receive: rows of this rank for itself would be in no slot."""
        fits = self.slot.packed_bytes <= MAX_RECEIVED_BYTES
        is_whole = self.parts == 1 and not self.variant.local_bypass
        return is_whole and fits and self.context.receiving_blocks > 0

    def _split(self) -> list[Launch]:
        """All four steps in one launch: some blocks wait and arrange while the others send and flag."""
        phases = [
            self._send_rows(0, 1, begun=Placeholder("begun")),
            self._wait_status(is_same_launch=True),
            self.offsets(None, sees_all=True),
            # Steps 3 and 4: each row as soon as it is there.
            self.launch("arrange", INBAND_COLLECT if self.inband else DISPATCH_RECEIVE, status=self.status),
        ]
        together = split(phases, self.context.receiving_blocks, FUSED)
        return [*self.before_routing(), *self.route_or_pack(), *together, *self._after_arranging()]

    def _until_sent(self, phases: list[Launch]) -> list[Launch]:
        """Up to the flags, and what the last launch goes on with."""
        phases, steps = [*self._post(), *phases], self.before_routing()
        if not self.is_quantized:  # nothing to compute that sending could hide
            return [*steps, *self.route_or_pack(), *joined([self._send_rows(0, 1), *phases], FUSED)]
        packs = [self.route_or_pack(self.parts), *([self.pack(part)] for part in range(1, self.parts))]
        sends = [[self._send_rows(part, self.parts)] for part in range(self.parts)]
        sends[-1] = joined([*sends[-1], *phases], FUSED)
        return [*steps, *pipelined(packs, sends)]

    def _post(self) -> list[Launch]:
        """Rows and entries to ranks that only queues reach, where there are any."""
        if not self.posts:
            return []
        status, front = self.layout.dispatch_status, self._front_bytes
        is_alone = self.context.posts_alone(front + STAMP_BYTES, self.slots.stride("index"))
        sizes: dict[str, Value] = {
            "slot_bytes": self.slot.stamp_offset + STAMP_BYTES,
            "front_bytes": front if is_alone else 0,
        }
        return [self.launch("post", DISPATCH_POST, status=status, **sizes, **self.posting_on())]

    @property
    def _front_bytes(self) -> int:
        """Bytes of a row, with its scales where it has any."""
        return self.slot.scaled_bytes if self.is_quantized else self.slot.row_bytes

    def _receive(self, parts: int, *, is_same_launch: bool) -> list[Launch]:
        """Step 3, and where rows belong: phases of one launch, or of the one that sends."""
        wait = self._wait_status(is_same_launch)
        offsets = self.offsets(None if self.inband else self.slots, sees_all=True)
        # Step 3 of rows with flags of their own: until all that the entries counted are there.
        rows = [] if self.inband else [self.launch("rows", DISPATCH_ROWS)]
        blocks = self.context.blocks("communication", parts if self.is_quantized else 1)
        return [replace(phase, blocks=blocks) for phase in (wait, offsets, *rows)]

    def arrangement(self) -> list[Launch]:
        """Step 4 in one part, and what follows."""
        return [self._receive_inband() if self.inband else self._arrange(0, 1), *self._after_arranging()]

    def _after_arranging(self) -> list[Launch]:
        steps = self.local_ids()
        if self.keeps_own_tokens:
            kernel = own_offsets_kernel(self.context.target)
            steps.append(self.launch("report own tokens", kernel, 1, out=Placeholder("recv_offsets")))
        if self.variant.exchange:
            steps += gather_steps(self)
        return [*steps, *self.record_waits(self.context.num_local_experts)]

    def _send_rows(
        self, part: int, parts: int, begun: Value = 0, *, sends: bool = True, posts: bool = True
    ) -> Launch:
        """Steps 1 and 2: rows to their slots; before the first part, an entry to every expert's rank.

        Args:
            part: which one.
            parts: of how many.
            begun: where blocks note that they have begun.
            sends: False to post entries alone.
            posts: False to send rows alone.
        """
        return self.launch(
            "send",
            INBAND_SEND if self.inband else DISPATCH_SEND,
            self.context.blocks("communication", parts),
            **self.rows_to_send(),
            **(tokens_of(part, parts) if sends else {"num_tokens": 0}),
            row_bytes=self._front_bytes,
            post_status=int(part == 0 and posts),
            begun=begun,
            window=Placeholder("window") if self.posts else 0,
            out_offset=self.layout.in_bytes if self.posts else 0,
            status=self.layout.dispatch_status,
        )

    def _wait_status(self, is_same_launch: bool) -> Launch:
        """Step 3: until an entry from every rank is there; in the launch that posts ours, or a later one."""
        words: dict[str, Value] = {"dispatch_word": 0} if is_same_launch else {"combine_kind": 0}
        return self.launch("wait", DISPATCH_WAIT, count_end=0, turned=0, status=self.status, **words)

    def _take_rows(self, part: int) -> Launch:
        """Step 3, of a part: the rows that are there, and in the last one all."""
        taken = {"rows_before": self._taken_before(part), "rows_taken": self._taken_before(part + 1)}
        return self.launch("rows", DISPATCH_TAKE, part=part, num_parts=self.parts, **taken)

    def _taken_before(self, part: int) -> Placeholder:
        """(EP, localE) how many of each entry's rows the parts before this one have taken."""
        return Placeholder("rows_taken", WORD_BYTES * self.context.num_entries * part)

    def _arrange(self, part: int, parts: int) -> Launch:
        """Step 4: to expert order, out of the window, or from where rows of this rank for itself are.

        Of a part, what it took. The first one clears the entries, the last one turns the zone. Those before
        the last share the rows of this rank for itself: nothing hides what the last one does.
        """
        c, context, slot = self.config, self.context, self.slot
        own = OwnRows(c.num_topk, c.num_results_per_token if self.variant.smooth else 1)
        own_parts = max(1, parts - 1)
        is_owning = self.variant.local_bypass and part < own_parts
        kernel = arrange_kernel(
            slot,
            self.variant.row_weights,
            own if is_owning else None,
            context.zones_on_device,
            parted=parts > 1,
            placed=self.variant.placed,
        )
        values: dict[str, Value] = {
            "slots": Placeholder("window"),
            "slot_scales": Placeholder("window"),
            "entries": Placeholder("window", self.status.offset(zone=self.zone)),
            "num_entries": context.num_entries if part == 0 else 0,
            "rows_before": self._taken_before(part),
            "rows_taken": self._taken_before(part + 1),
            "zone_stride": self.status.stride("zone") // WORD_BYTES,
            "rows": self.packed if self.is_quantized else Placeholder("x"),
            "scales": Placeholder(self.packed.name, slot.scale_offset),
            "zone": self.zone_cell if part == parts - 1 else Placeholder("unread_zone"),
            "row_stride": (slot.packed_bytes if self.is_quantized else slot.row_bytes) // WORD_BYTES,
            **(tokens_of(part, own_parts) if parts > 1 else {}),
        }
        return self.launch("arrange", kernel, context.blocks("compute", parts), **values)

    def _receive_inband(self) -> Launch:
        """Steps 3 and 4 of fullmesh_v2: each row as soon as its own flags are there."""
        return self.launch("arrange", INBAND_RECEIVE, zone_at=self.keeping, status=self.status)


class InbandDispatch(Dispatch):
    """Builds the plans of fullmesh_v2's dispatch."""

    inband = True
    has_flagged_stamps = False
