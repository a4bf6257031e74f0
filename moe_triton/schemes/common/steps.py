"""Launches that several schemes have, and what the arguments of kernels are wherever one has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

import torch

from moe_triton.core import traffic
from moe_triton.core.ascendc import DISPATCH_WAIT, POST_STATUS
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import NEXT, OF_ROUND, Launch, Part, Placeholder, Plan, Stream, Value, joined
from moe_triton.core.reach import PEER_BYTES
from moe_triton.core.records import CALL_HEADER, TRAFFIC
from moe_triton.core.region import Region, fields_of
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.kernels.one_per_rank import local_counts_kernel, local_ids_kernel, one_per_rank_kernel
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.places import add_counts_kernel, move_rows_kernel, places_kernel, starts_kernel
from moe_triton.kernels.rms_norm import rms_norm_kernel
from moe_triton.kernels.route import route_kernel
from moe_triton.kernels.route_pack import route_pack_kernel
from moe_triton.kernels.select import select_kernel
from moe_triton.kernels.share import share_kernel
from moe_triton.kernels.waits import waits_of_dispatch_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout import NUM_ZONES, ORIGIN, UB_ALIGN, WORD_BYTES, CallRegions, SlotLayout
from moe_triton.layout.call_word import call_word, combine_bits
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes.common.ascendc import CALL_POST, DISPATCH_OFFSETS, FUSED, TABLES_SEND
from moe_triton.schemes.rank_context import COMBINE_KIND, COUNTED, OPERATORS, Operator, Peers, RankContext

NO_SLOTS = (0,) * len(fields_of("dispatch_slots"))
ZONE_BYTES = 4  # of one operator's zone, in device memory


def numbers_of(operator: Operator) -> Placeholder:
    """Where the number of an operator's round before stands, by zone."""
    return Placeholder("round_numbers", NUM_ZONES * WORD_BYTES * COUNTED.index(operator))


def tokens_of(part: int, parts: int) -> dict[str, Value]:
    """First token of a part, and how many it has."""
    count = Part("num_tokens", 0, part, parts, is_count=True)
    return {"first_token": Part("num_tokens", 0, part, parts), "num_tokens": count}


def matching(kernel: AscendCKernel, values: dict[str, Value]) -> dict[str, Value]:
    """What a kernel has arguments for, of values by argument name."""
    return {arg.name: values[arg.name] for arg in kernel.args if arg.name in values}


def of_next_round(launch: Launch) -> Launch:
    """The same launch on what the round behind this one binds."""

    def renamed(value: Value) -> Value:
        if isinstance(value, Placeholder) and value.name in OF_ROUND:
            return replace(value, name=f"{NEXT}{value.name}")
        return value

    return replace(launch, values=tuple(map(renamed, launch.values)))


def words_from(rank: int) -> Placeholder:
    """The table of peers from a rank's word on (`moe_triton.core.reach`)."""
    return Placeholder("peers", PEER_BYTES * rank)


class Steps:
    """What the plan of one operator is built of.

    Args:
        context: where it runs.
        variant: what the operator is specialised for; None for a barrier.
        zone: that it is built for; 0 where kernels look it up.
        parts: that its tokens are cut into.

    Attributes:
        zone_cell: where its zone stands in device memory, where kernels look it up.
        kept_zone: where the zone of its run is kept by its wait: what turns the zone must not read it.
        turning, keeping: the same; 0 where hosts know zones.
        ids: of the experts of this rank's tokens, without those that a mask leaves out.
        usual: by name, what arguments of kernels are unless a step says otherwise. A pointer that is not
            among them is the placeholder of its own name.
    """

    variant: Variant | None
    has_posted: Value = 0
    """1 where something has been posted before what it posts first, in the same call."""

    def __init__(self, context: RankContext, variant: Variant | None, zone: int, parts: int = 1) -> None:
        self.context, self.variant, self.zone, self.parts = context, variant, zone, parts
        self.config = c = context.config
        self.layout = context.scheme.layout
        self.operator: Operator = "dispatch" if isinstance(variant, DispatchVariant) else "combine"
        if variant is None:
            self.operator = "barrier"
        self.kind = variant.kind if variant else None
        first = min(map(OPERATORS.index, context.scheme.rounds.sharing(self.operator)))
        self.zone_cell = Placeholder("zones", ZONE_BYTES * first)
        self.kept_zone = Placeholder("zones", ZONE_BYTES * (first + len(OPERATORS)))
        is_looked_up = context.zones_on_device
        self.keeping: Value = self.kept_zone if is_looked_up else 0
        self.turning: Value = self.zone_cell if is_looked_up else 0
        self.usual: dict[str, Value | Region] = {
            "num_ranks": c.num_ranks,
            "changes": words_from(c.num_ranks),
            "rank": context.rank,
            "topk": c.num_topk,
            "num_experts": c.num_experts,
            "num_shared_experts": c.num_shared_experts,
            "num_shared_ranks": c.num_shared_ranks,
            "first_expert": (context.rank - c.num_shared_ranks) * c.num_local_experts,
            "num_local_experts": context.num_local_experts,
            "num_entries": context.num_entries,
            "capacity": context.capacity,
            "max_count": c.num_max_tokens_per_rank,
            "max_index": c.num_max_tokens_per_rank,
            "first_token": 0,
            "num_tokens": Placeholder("num_tokens"),
            "timeout_us": context.timeout_us,
            "combine_kind": COMBINE_KIND,
            "table": Placeholder("rank_table"),
            "num_table": Placeholder("num_performance_entries"),
            "call": call_word(self.operator, self.kind),
            "zone": zone,
            "zone_at": self.turning,
            "kept_zone": self.keeping,
            "turned": self.turning,
            "traffic": 0,
            "places": 0,
            "is_relayed": 0,
            "known": 0,
            "agreed": 0,
        }
        if variant is None:
            return
        counters = COUNTED.index(self.operator) * context.num_blocks * TRAFFIC.num_bytes
        self.is_masked = variant.mask != "none"
        # A copy of the caller's ids holds none that a mask leaves out: what combine does with it is the same.
        is_plain = not self.is_masked or getattr(variant, "given_ids", None)
        self.ids = Placeholder("topk_idx" if is_plain else "active_ids")
        self.usual |= {
            "numbers": numbers_of(self.operator),
            "traffic": Placeholder(traffic.PLACEHOLDER, counters),
            "topk_idx": self.ids,
            "topk_weights": Placeholder("topk_weights") if variant.weights else 0,
            "active_index": Placeholder("active_index") if self.is_masked else 0,
            "waited_us": Placeholder("waited") if variant.waits else 0,
            "kept_rank": context.rank if variant.local_bypass else -1,
            "places": Placeholder("places") if variant.placed else 0,
        }

    def launch(
        self,
        step: str,
        kernel: TritonKernel | AscendCKernel,
        blocks: int | None = None,
        /,
        **values: Value | Region,
    ) -> Launch:
        """A launch of a kernel, on the context's blocks unless others are given.

        Args:
            step: what it does in the operator.
            kernel: what to launch. A Triton kernel comes in variants that have some of the arguments each.
            blocks: of it.
            values: arguments that are not as `usual`.

        Raises:
            ValueError: an argument without a value, or a value without an argument.
        """
        is_triton = isinstance(kernel, TritonKernel)
        if not is_triton and (unknown := values.keys() - set(map(attrgetter("name"), kernel.args))):
            raise ValueError(f"{kernel.name} has no arguments {sorted(unknown)}")
        known, filled = self.usual | values, []
        for arg in kernel.args:
            if (value := known.get(arg.name)) is None:
                if not arg.is_pointer:
                    raise ValueError(f"{kernel.name}: nothing is known of {arg.name}")
                value = Placeholder(arg.name)
            filled.append(value.words() if isinstance(value, Region) else value)
        stream: Stream = "compute" if is_triton else "communication"
        return Launch(
            step, kernel, tuple(filled), self.context.num_blocks if blocks is None else blocks, stream
        )

    def plan(self, launches: Iterable[Launch], overlap: bool = False, phase: str = "") -> Plan:
        """The plan of these launches; of one phase of a call in rounds, or all of an operator, or a half."""
        return Plan(self.operator, self.zone, tuple(launches), overlap, phase)

    def in_memory(self, stride: int, *, kept: bool = True) -> dict[str, Value]:
        """How a Triton kernel that is given zone 0 finds the right one, ``stride`` elements from it."""
        return {"zone": self.kept_zone if kept else self.zone_cell, "zone_stride": stride}

    @property
    def posts(self) -> bool:
        """Whether some peers are reached by queues, with what lies in the out part of this rank's window."""
        return bool(self.context.scheme.queued_peers)

    @property
    def blocks_of_words(self) -> int:
        """Blocks of a kernel of few words (ids, counts): one where another thread takes too long to start."""
        return self.context.num_blocks if self.context.capabilities.owns_cores else 1

    def posting(self, peers: Peers | None = None) -> dict[str, Value]:
        """Arguments of a kernel that posts to the queued ones of these peers; None for all of the group."""
        if (peers or self.context.peers).group != "expert" or not self.posts:
            return {"window": 0, "out_offset": 0, "timeout_us": 0, "traffic": 0}
        return {"out_offset": self.layout.in_bytes}

    def posting_on(self) -> dict[str, Value]:
        """`posting` of a kernel before which another one may have posted in the same call."""
        return {**self.posting(), "adds_traffic": self.has_posted if self.posts else 0}

    def post(
        self,
        step: str,
        status: Region,
        blocks: int | None = None,
        *,
        keep: bool = False,
        peers: Peers | None = None,
        count: Value = 0,
    ) -> Launch:
        """A flag to every rank, this one included: what earlier launches wrote is there.

        Args:
            step: what it is called.
            status: whose entries it writes.
            blocks: that post.
            keep: whether the next dispatch has to hear of it.
            peers: to whom; None for all ranks of the group.
            count: that goes with it.
        """
        peers = peers or self.context.peers
        return self.launch(
            step,
            POST_STATUS,
            blocks,
            peers=Placeholder(f"{peers.prefix}peers"),
            num_ranks=peers.num_ranks,
            count=count,
            call=call_word(peers.calls or self.operator, self.kind),
            kind=combine_bits(self.kind) if keep and self.kind else 0,
            combine_kind=COMBINE_KIND if keep else 0,
            rank=peers.rank,
            **self.posting(peers),
            status=status,
        )

    def wait_for_ranks(
        self,
        step: str,
        status: Region,
        blocks: int | None = None,
        *,
        peers: Peers | None = None,
        first_rank: int = 0,
        **others: Value,
    ) -> Launch:
        """Until every rank's flag is there, of the same kind of call.

        Args:
            step: what it is called.
            status: whose entries it looks at.
            blocks: that look.
            peers: whose flags; None for all ranks of the group.
            first_rank: of these, where they are some of the group's.
            others: arguments of the kernel for flags that say more, or a wait that does.
        """
        peers = peers or self.context.peers
        usual: dict[str, Value] = {
            "window": Placeholder(f"{peers.prefix}window"),
            "peers": Placeholder(f"{peers.prefix}peers", PEER_BYTES * first_rank),
            **({} if peers.group == "expert" else {"changes": 0}),
            "recv_counts": Placeholder("barrier_counts"),
            "num_local_experts": 1,
            "call": call_word(peers.calls or self.operator, self.kind),
            **dict.fromkeys(("all_counts", "waited_us", "count_end", "combine_kind"), 0),
            **dict.fromkeys(("dispatch_word", "kept_zone", "turned"), 0),
        }
        return self.launch(step, DISPATCH_WAIT, blocks, status=status, **usual | others)

    def select(self) -> list[Launch]:
        """What an active mask leaves of the routing, where there is one; dispatch and combine each ask."""
        if not self.is_masked:
            return []
        assert self.variant is not None
        given, per_entry = getattr(self.variant, "given_ids", None), self.variant.mask == "entries"
        kernel = select_kernel(self.config.num_topk, per_entry, self.context.target, given == torch.int64)
        ids = Placeholder("given_ids" if given else "topk_idx")
        return [self.launch("select", kernel, 1, expert_ids=ids, topk_idx=self.ids)]

    def record_waits(self, num_local_experts: int) -> list[Launch]:
        """How long each rank was waited for, of so many entries each, where somebody asks."""
        if self.variant is None or not self.variant.waits:
            return []
        kernel, blocks = waits_of_dispatch_kernel(self.context.target), self.blocks_of_words
        return [self.launch("record waits", kernel, blocks, num_local_experts=num_local_experts)]


def barrier_plan(context: RankContext, status: Region, zone: int, timeout_us: int | None) -> Plan:
    """A flag to every rank, and the wait for every rank's; None for the context's deadline."""
    steps = Steps(context, None, zone)
    timeout_us = context.timeout_us if timeout_us is None else timeout_us
    flag = steps.post("flag", status, 1)
    wait = steps.wait_for_ranks("wait", status, 1, turned=steps.turning, timeout_us=timeout_us)
    return steps.plan(joined([flag, wait], FUSED))


class DispatchSteps(Steps):
    """What the plan of a dispatch is built of.

    Attributes:
        slot: how a row is packed.
        packed: where `pack` leaves rows: one for each token, or with smooth scales one for each result.
        true_offsets: where the blocks of received rows end, whatever is reported of them.
        num_rows: where the number of received rows stands.
        recv_stats: to which the rows of each expert are added where they are counted.
    """

    variant: DispatchVariant
    has_flagged_stamps = False
    """Whether the stamp of a row is its flag."""

    def __init__(self, context: RankContext, variant: DispatchVariant, zone: int, parts: int = 1) -> None:
        super().__init__(context, variant, zone, parts)
        formats = self.config.hidden, variant.row_format, variant.dtype
        self.slot = context.scheme.slot_layout.of(*formats, is_flagged=self.has_flagged_stamps)
        self.is_quantized = variant.row_format.is_quantized
        packed = "packed_results" if variant.smooth else "packed"
        # A round that is sent ahead is packed while the one before it still has own rows to arrange.
        ahead = variant.placed and context.scheme.sends_ahead
        self.packed = Placeholder(f"{packed}_{zone}" if ahead else packed)
        if variant.placed:
            self.has_posted = Placeholder("is_later_round")
        # A rank of V1's shared expert reports its own tokens split into pieces.
        self.keeps_own_tokens = context.is_version_1 and self.config.is_shared_rank(context.rank)
        self.true_offsets = Placeholder("true_offsets" if self.keeps_own_tokens else "recv_offsets")
        self.num_rows = Placeholder(self.true_offsets.name, WORD_BYTES * (context.num_entries - 1))
        has_shared = self.config.num_shared_experts > 0
        self.usual |= {
            "shared_ranks": Placeholder("shared_ranks") if has_shared else 0,
            "shared_slots": Placeholder("shared_slots") if has_shared else 0,
            "shared_counts": Placeholder("shared_counts") if has_shared else 0,
            "recv_offsets": self.true_offsets,
            "num_rows": self.num_rows,
            "row_bytes": self.slot.row_bytes,
            "scale_offset": self.slot.scale_offset,
            "scale_bytes": self.slot.scale_bytes,
            "stamp_offset": self.slot.stamp_offset,
            "out_rows": Placeholder("tokens"),
            "out_scales": Placeholder("scales") if self.slot.num_scales else 0,
            "out_origins": Placeholder("origins"),
            "out_weights": Placeholder("weights") if variant.row_weights else 0,
        }
        if variant.routed or variant.placed:
            self.usual["counts"] = Placeholder("send_counts")
        self.recv_stats = Placeholder("recv_stats") if variant.recv_stats else 0
        if variant.per_rank:
            self.usual |= {
                "topk_idx": Placeholder("results_idx"),
                "topk_weights": 0,
                "capacity": context.capacity_per_rank,
            }

    def posting_on(self) -> dict[str, Value]:
        """Tables go ahead of rows."""
        return {**super().posting_on(), **({"adds_traffic": 1} if self.variant.per_rank else {})}

    def rows_to_send(self) -> dict[str, Value]:
        """Where the rows that are sent are."""
        return {
            "rows": self.packed if self.is_quantized else Placeholder("x"),
            "row_stride": self.slot.packed_bytes if self.is_quantized else self.slot.row_bytes,
            "rows_per_token": self.config.num_results_per_token if self.variant.smooth else 1,
        }

    def before_routing(self) -> list[Launch]:
        """What a mask leaves, and which rank of shared experts each token goes to."""
        if self.variant.per_rank:
            ranks = [] if self.variant.routed else [self._once_per_rank()]
            return [*self.select(), *ranks, self._send_tables()]
        if not self.config.num_shared_experts:
            return self.select()
        kernel = share_kernel(self.context.is_version_1, self.is_masked, self.context.target)
        return [*self.select(), self.launch("share", kernel, self.blocks_of_words)]

    def _once_per_rank(self) -> Launch:
        """Which ranks each token goes to."""
        kernel = one_per_rank_kernel(self.config.num_topk, **self._taking)
        local = self.config.num_local_experts
        return self.launch("ranks", kernel, num_local_experts=local, topk_idx=self.ids, **self._routing)

    def _send_tables(self) -> Launch:
        """For the ranks that tokens go to, which of their experts each is for."""
        tables = self.layout.row_tables
        assert tables is not None
        weights = Placeholder("topk_weights") if self.variant.weights else 0
        given = {"row_ids": self.ids, "row_weights": weights, "tables": tables}
        return self.launch("tables", TABLES_SEND, **given, **super().posting_on())

    def local_ids(self) -> list[Launch]:
        """Of rows that came once for each rank, which of its experts each is for, and how many each has.

        Rows that have places are counted once all of a call are there (`local_counts`).
        """
        tables, variant = self.layout.row_tables, self.variant
        if not variant.per_rank or tables is None:
            return []
        first = tables.offset(zone=self.zone)
        topk, zoned = self.config.num_topk, self.context.zones_on_device
        ids = self.launch(
            "local ids",
            local_ids_kernel(topk, variant.weights, zoned, variant.placed),
            row_ids=Placeholder("window", first),
            row_weights=Placeholder("window", first + tables.stride("table")),
            origins=Placeholder("origins"),
            local_idx=Placeholder("local_topk_idx"),
            local_weights=Placeholder("local_topk_weights"),
            source_stride=tables.stride("source") // WORD_BYTES,
            num_places=Placeholder("num_places"),
            **self.in_memory(tables.stride("zone") // WORD_BYTES),
        )
        return [ids] if variant.placed else [ids, self._local_counts()]

    def _local_counts(self, **values: Value) -> Launch:
        """How many rows each expert of this rank has, of those that came once for each rank."""
        return self.launch(
            "local counts",
            local_counts_kernel(self.config.num_topk, self.variant.recv_stats),
            local_idx=Placeholder("local_topk_idx"),
            recv_stats=self.recv_stats,
            **values,
        )

    def route(self) -> Launch:
        """Numbers the results of each expert, and counts them."""
        kernel = route_kernel(self.context.target, **self._taking_to_route)
        return self.launch("route", kernel, self.blocks_of_words, **self._routing)

    @property
    def _taking(self) -> dict[str, bool]:
        """Whether the first kernel behind `select` copies the ids: with a mask, that has. And what of."""
        given = None if self.is_masked else self.variant.given_ids
        return {"takes": given is not None, "int64": given == torch.int64}

    @property
    def _taking_to_route(self) -> dict[str, bool]:
        """The same of the kernel that routes: where rows come once for each rank, an earlier one has."""
        return {} if self.variant.per_rank else self._taking

    @property
    def _routing(self) -> dict[str, Value]:
        return {"given": Placeholder("given_ids"), "num_entries": Placeholder("num_ids")}

    def pack(self, part: int, scales: Placeholder | None = None) -> Launch:
        """Quantises rows; their scales go to ``scales`` one after the other, or behind each row."""
        kernel = pack_kernel(self.variant.dtype, self.config.hidden, *self._rows_to_pack)
        blocks = self.context.blocks("compute", self.parts)
        return self.launch("pack", kernel, blocks, **self._packing(part, self.parts, scales))

    def route_and_pack(self, parts: int = 1, scales: Placeholder | None = None) -> Launch:
        """`route`, and with it `pack` of the first part: neither reads what the other writes."""
        if not self.is_quantized:
            return self.route()
        kernel = route_pack_kernel(
            self.variant.dtype, self.config.hidden, *self._rows_to_pack, **self._taking_to_route
        )
        return self.launch("route + pack", kernel, **self._packing(0, parts, scales), **self._routing)

    def route_or_pack(self, parts: int = 1, scales: Placeholder | None = None) -> list[Launch]:
        """`route_and_pack`, or what is left of it where the routing is known."""
        if not self.variant.routed:
            return [self.route_and_pack(parts, scales)]
        if not self.is_quantized:
            return []
        kernel = pack_kernel(self.variant.dtype, self.config.hidden, *self._rows_to_pack)
        return [self.launch("pack", kernel, **self._packing(0, parts, scales))]

    @property
    def _rows_to_pack(self) -> tuple[int, bool, str, int, int]:
        """Which rows are packed: shared experts may have their own, and some elements share a scale."""
        c, variant = self.config, self.variant
        shared = c.num_shared_experts if variant.smooth else 0
        return (
            c.num_topk,
            variant.smooth,
            self.context.target,
            shared,
            variant.row_format.elements_per_scale or 0,
        )

    def _packing(self, part: int, parts: int, scales: Placeholder | None) -> dict[str, Value]:
        shared, slot = self.config.num_shared_experts, self.slot
        return {
            "scale_row_offset": shared,
            "num_scale_rows": shared + self.config.num_experts,
            "rows": self.packed,
            "scales": scales or Placeholder(self.packed.name, slot.scale_offset),
            "row_stride": slot.packed_bytes,
            "scale_stride": 1 if scales else slot.packed_bytes // WORD_BYTES,
            **tokens_of(part, parts),
        }

    def offsets(self, slots: Region | None, *, sees_all: bool, by_source: bool = False) -> Launch:
        """Where each block of received rows ends, and, given the region of slots, in which slot each row is.

        With ``sees_all`` it follows a wait whose every block has seen all counts; otherwise one in which each
        has seen its share, and all have ended it. With ``by_source`` rows of a source lie one after the
        other, in slots that the region has as those of one expert.
        """
        return self.launch(
            "offsets",
            DISPATCH_OFFSETS,
            recv_counts=Placeholder("all_counts" if sees_all else "recv_counts"),
            recv_stats=0 if self.variant.per_rank else self.recv_stats,
            trailer=Placeholder("origins", ORIGIN.num_bytes * self.context.capacity),
            row_slots=Placeholder("row_slots") if slots else 0,
            cumulative=int(self.variant.cumulative),
            by_source=int(by_source),
            slots=slots.in_units(UB_ALIGN) if slots else NO_SLOTS,
        )

    def arrange(self, slot: SlotLayout) -> Launch:
        """Step 4: to expert order, out of slots in the window, where there are no entries to clear."""
        weights, zones = self.variant.row_weights, self.context.zones_on_device
        kernel = arrange_kernel(slot, weights, None, zones, placed=self.variant.placed)
        window: dict[str, Value] = dict.fromkeys(("slots", "slot_scales", "entries"), Placeholder("window"))
        nothing: dict[str, Value] = {"num_entries": 0, "zone_stride": 0}
        return self.launch("arrange", kernel, zone=self.zone_cell, **window, **nothing)

    # What a call in rounds is run by, phase by phase (`moe_triton.runtime.placed_calls`).

    def routing(self) -> Plan:
        """Routes a round's tokens, and adds its counts to those of the call."""
        c = self.config
        totals = [("send_counts", "call_counts", c.num_experts)]
        if c.num_shared_ranks:
            totals.append(("shared_counts", "call_shared_counts", c.num_shared_ranks))
        kept: dict[str, Value] = {"kept": Placeholder("is_later_round")}
        added = [
            self.launch(
                "add counts",
                add_counts_kernel(),
                1,
                counts=Placeholder(counts),
                totals=Placeholder(total),
                number=number,
                **kept,
            )
            for counts, total, number in totals
        ]
        before = self.before_routing()
        if self.variant.per_rank:  # tables go out with each round's rows
            before = [*self.select(), self._once_per_rank()]
        return self.plan([*before, self.route(), *added], phase="routing")

    def ask(self) -> Plan:
        """Of a call in which this rank has one round: all up to where every rank is heard, in one plan."""
        # The first launch has left the ids as all others read them.
        sent = type(self)(self.context, replace(self.variant, given_ids=None), self.zone, self.parts)
        sent.has_posted = 1
        routed, counted = self.routing().launches, sent.count().launches
        return self.plan([*routed, self._post_call(), *counted, self._hear()], phase="ask")

    def ring(self) -> Plan:
        """Of a call in which this rank has more: the same, once rows of all its rounds are counted.

        The first round goes ahead of what ranks say: those that expect no more are waiting for it.
        """
        sent = type(self)(self.context, replace(self.variant, routed=False), self.zone, self.parts)
        sent.has_posted = 1
        return self.plan([self._post_call(), *sent.count().launches, self._hear()], phase="ring")

    def place(self) -> Plan:
        """`starts` and `fill` of a call that has one round on every rank."""
        counts = self.local_counts().launches if self.variant.per_rank else ()
        steps = [*self.starts().launches, self.find_places(), *self.arrangement()]
        return self.plan([*steps, *counts], phase="place")

    def local_counts(self) -> Plan:
        """Of a call whose rows came once for each rank, and are all there: how many each expert has."""
        counts = self._local_counts(
            num_rows=Placeholder("call_offsets", WORD_BYTES * (self.context.num_entries - 1)),
            tokens_per_expert=Placeholder("call_tokens_per_expert"),
            capacity=Placeholder("num_places"),
        )
        return self.plan([counts], phase="local_counts")

    def count(self) -> Plan:
        """Of a call in rounds: sends a round, and waits until it is known what has come of it."""
        raise NotImplementedError

    def announce(self) -> Plan:
        """Says to every rank what the call has, and waits for what they say."""
        return self.plan([self._post_call(adds_traffic=1), self._hear()], phase="announce")

    def _post_call(self, adds_traffic: int = 0) -> Launch:
        """What the call has, to every rank: before all else, but where its first round is over."""
        calls = self._calls
        shared = Placeholder("call_shared_counts") if self.config.num_shared_ranks else 0
        return self.launch(
            "announce",
            CALL_POST,
            # Of what it posts every block counts its own, as it does behind it.
            self.context.num_blocks if self.posts else self.blocks_of_words,
            header=Placeholder("call_header"),
            counts=Placeholder("call_counts"),
            shared_counts=shared,
            bell=Placeholder("bell"),
            **self.posting(),
            adds_traffic=adds_traffic,
            slots=calls.counts,
            status=calls.status,
            bells=calls.bell,
        )

    def _hear(self) -> Launch:
        """Until every rank has said what the call has."""
        return self.wait_for_ranks("wait for calls", self._calls.status)

    def starts(self) -> Plan:
        """Finds where rows of the call belong, once all ranks are heard."""
        calls, context = self._calls, self.context
        shared, rank = self.config.num_shared_ranks, context.rank
        column = rank if rank < shared else shared + (rank - shared) * self.config.num_local_experts
        starts = self.launch(
            "starts",
            starts_kernel(context.zones_on_device),
            1,
            counts=Placeholder("window", calls.counts.offset(zone=self.zone)),
            recv_offsets=Placeholder("call_offsets"),
            tokens_per_expert=Placeholder("call_tokens_per_expert"),
            source_stride=calls.counts.stride("source") // WORD_BYTES,
            first_column=CALL_HEADER.num_words + column,
            alignment=Placeholder("alignment"),
            stride=Placeholder("expert_stride"),
            **self.in_memory(calls.counts.stride("zone") // WORD_BYTES, kept=False),
        )
        return self.plan([starts, self._copied("starts", "first_starts")], phase="starts")

    def restart(self) -> Plan:
        """The same for a call whose routing is known: where rows belong is what it was."""
        return self.plan([self._copied("first_starts", "starts")], phase="restart")

    def _copied(self, source: str, to: str) -> Launch:
        """Begins of entries, of which rounds make use."""
        numbers = {"number": self.context.num_entries, "kept": 0}
        tables = {"counts": Placeholder(source), "totals": Placeholder(to)}
        return self.launch("copy starts", add_counts_kernel(), 1, **tables, **numbers)

    def round(self) -> Plan:
        """All of a round once places are known: it is routed here, whatever was counted before."""
        sent = type(self)(self.context, replace(self.variant, routed=False), self.zone, self.parts)
        launches = [*sent.count().launches, self.find_places(), *self.arrangement_of_round()]
        return self.plan(launches, self.context.overlaps, "round")

    def fill(self) -> Plan:
        """Brings a round's rows to their places."""
        return self.plan([self.find_places(), *self.arrangement_of_round()], phase="fill")

    def arrangement_of_round(self) -> list[Launch]:
        """The same of one round of several: experts come to its rows when those of all rounds are there."""
        c, rows_of_token = self.config, self.config.num_topk
        if self.variant.per_rank:
            rows_of_token = min(rows_of_token, c.num_ranks)
        two_rounds = 2 * c.num_max_tokens_per_rank * rows_of_token * self.slot.row_bytes
        return [
            replace(launch, kernel=replace(launch.kernel, streamed_bytes=two_rounds))
            if isinstance(launch.kernel, TritonKernel) and launch.step == "arrange"
            else launch
            for launch in self.arrangement()
        ]

    def arrangement(self) -> list[Launch]:
        """What brings received rows to where they belong, and what follows."""
        raise NotImplementedError

    def find_places(self) -> Launch:
        """The place of each row of a round."""
        return self.launch(
            "places",
            places_kernel(),
            self.blocks_of_words,
            recv_offsets=self.true_offsets,
            capacity=Placeholder("num_places"),
            room=self.context.capacity,
        )

    def late_fill(self) -> Plan:
        """To their places what a round has delivered before anybody knew that there are more."""
        moved = [("rows", self.slot.row_bytes // WORD_BYTES, "round_tokens", "tokens")]
        if self.slot.num_scales:
            moved.append(("scales", self.slot.num_scales, "round_scales", "scales"))
        if self.variant.row_weights:
            moved.append(("weights", 1, "round_weights", "weights"))
        of_row = self.config.num_topk
        if self.variant.per_rank:
            moved.append(("local ids", of_row, "round_local_topk_idx", "local_topk_idx"))
        if self.variant.local_weights:
            moved.append(("local weights", of_row, "round_local_topk_weights", "local_topk_weights"))
        moves = [
            self.launch(
                f"move {name}",
                move_rows_kernel(words, False),
                rows=Placeholder(rows),
                out=Placeholder(out),
                room=self.context.capacity,
                capacity=Placeholder("num_places"),
            )
            for name, words, rows, out in moved
        ]
        return self.plan([self.find_places(), *moves], phase="late_fill")

    @property
    def _calls(self) -> CallRegions:
        calls = self.layout.calls
        assert calls is not None
        return calls


class CombineSteps(Steps):
    """What the plan of a combine is built of."""

    variant: CombineVariant

    def __init__(self, context: RankContext, variant: CombineVariant, zone: int, parts: int = 1) -> None:
        super().__init__(context, variant, zone, parts)
        num_zero, num_copy, num_const = variant.special
        self.has_posted = int(variant.adds_traffic)
        self.usual |= {
            "rows": Placeholder("y"),
            "capacity": Placeholder("num_rows"),
            "kind": combine_bits(variant.kind),
            "ori_x": Placeholder("ori_x") if num_copy or num_const else 0,
            "alphas": Placeholder("alphas") if num_const else 0,
            "const_v": Placeholder("const_v") if num_const else 0,
            "num_zero": num_zero,
            "num_copy": num_copy,
            "num_const": num_const,
        }

    def gather(self) -> Plan:
        """A round's results one after the other, from the places that rows of its dispatch had."""
        words = self.config.hidden * self.variant.dtype.itemsize // WORD_BYTES
        last = WORD_BYTES * (self.context.num_entries - 1)
        gather = self.launch(
            "gather",
            move_rows_kernel(words, True),
            places=Placeholder("places"),
            num_rows=Placeholder("recv_offsets", last),
            out=Placeholder("gathered"),
            room=Placeholder("room_of_gathered"),
        )
        return self.plan([gather], phase="gather")

    def total(self, features: SumFeatures, blocks: int | None = None, /, **values: Value) -> Launch:
        """Step 4: results, summed by weight: where a norm follows to its sums, elsewhere to the output."""
        c, variant = self.config, self.variant
        sizes = variant.dtype, c.hidden, c.num_topk, c.num_shared_experts
        kernel = weighted_sum_kernel(*sizes, variant.weights, self.context.target, features=features)
        return self.launch("sum", kernel, blocks, **{"out": self.sums, **values})

    @property
    def sums(self) -> Placeholder:
        """Where sums go: to the norm, if there is one."""
        return Placeholder("sums" if self.variant.norm else "out")

    def norm(self) -> list[Launch]:
        """Adds the residual to the sums, and normalises them, where that is asked for."""
        if not self.variant.norm:
            return []
        hidden, context = self.config.hidden, self.context
        kernel = rms_norm_kernel(hidden, context.target, masked=self.is_masked, turns=context.zones_on_device)
        acc, y, out = map(Placeholder, ("sums", "normed", "out"))
        return [self.launch("norm", kernel, zone=self.kept_zone, acc=acc, y=y, x_out=out)]
