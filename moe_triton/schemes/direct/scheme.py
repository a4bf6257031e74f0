"""Direct dispatch and pull combine: rows go to their final place, results are read where they are.

Dispatch: each rank sends its counts to all others (counts, flag, wait). From the counts of all it finds
where its rows begin in every receiver's output, writes them there, and raises one flag for all of them; all
in one launch, which ends when every rank's rows are here.
Combine: each rank says that its results are in its window, waits for every rank's word, and reads the rows
that it needs out of the peers' windows as it sums them.

What guards what, in zone z of round i:

- the counts flag guards a source's counts. The same flag says that the receiver has entered dispatch i and
  given up the output of dispatch i - 2, which lies in the same zone: no row is written before it is seen.
- the rows flag guards all rows and stamps of a source.
- the results flag guards all results of a rank, for those that it does not mask. Who is masked may be late
  and find later results there: so whoever has read them looks whether a peer masks it.

Where a rank is masked while a dispatch runs, its counts may have come to some of the others only. So counts
say which ranks their source has masked, rows are sent by the counts of all that were not masked when the
call began, or not at all, and who sends none calls upon all others to repeat it (docs/protocol.md, "Direct").

Two zones are enough because each of these waits is for every rank: a rank that has ended operator i + 1 has
seen every peer's flag of i + 1, which that peer posted after it ended i. So whoever posts flags or counts of
i + 2, or writes results for i + 2, comes after the last read of what i left in the same zone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from moe_triton.core.plan import Launch, Placeholder, Plan, Value, joined
from moe_triton.core.reach import KNOWN_WORD, SET_WORD
from moe_triton.core.region import Region
from moe_triton.kernels.stamps import stamps_kernel
from moe_triton.kernels.weighted_sum import SumFeatures
from moe_triton.layout import WORD_BYTES
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes.common.ascendc import EXCHANGE_SEND
from moe_triton.schemes.common.steps import CombineSteps, DispatchSteps, words_from
from moe_triton.schemes.direct.ascendc import COUNTS_SEND, DIRECT_SEND, FUSED
from moe_triton.schemes.direct.layout import DirectLayout
from moe_triton.schemes.rank_context import COMBINE_KIND, OPERATORS, Operator, RoundFacts
from moe_triton.schemes.scheme import CONST_ARGUMENTS, OTHER_OR_ONE_SERVER, Output, Refusal, Scheme, Scratch

FULLMESH = (
    "Use comm_alg='fullmesh_v1' or 'fullmesh_v2' for it, or outputs='own' where 'auto' has chosen 'direct'."
)
WAIT_FOR_COUNTS = "wait for counts"
# Features of `EPBuffer` that no plan of this scheme has.
LACKS = (
    *("active_mask", "special experts", "tp_group", "comm_quantize", "shared_expert_x", "performance_info"),
    *("ori_x", *CONST_ARGUMENTS),
)


class Dispatch(DispatchSteps):
    """Builds the plans of dispatch on one rank.

    Holes: x, topk_idx, expand_idx, num_tokens, num_ids, peers, window, recv_offsets, tokens_per_expert,
    origins, report; given_ids, smooth_scales, topk_weights, scales, weights where the variant has them; and
    names of `Scheme.scratch`.
    """

    layout: DirectLayout

    def whole(self) -> Plan:
        """All of it, in one part."""
        counts, rows = self.layout.counts_status, self.layout.rows_status
        # Where scales lie closely packed that travel in stamps: those of formats with one for each row.
        scales = Placeholder("packed_scales") if self.slot.num_scales == 1 else None
        phases = [
            self._send_counts(),
            self.wait_for_ranks(
                WAIT_FOR_COUNTS, counts, combine_kind=COMBINE_KIND, known=self._known, agreed=self._agreed
            ),
            self._send_rows(scales or 0),
            self.post("flag", rows, count=self._agreed),
            self.offsets(None, sees_all=False),
            self.wait_for_ranks("wait", rows, agreed=self._agreed),
        ]
        steps = [*self.before_routing(), self.route_and_pack(scales=scales)]
        return self.plan([*steps, *joined(phases, FUSED), self._stamps()])

    def recall(self) -> Plan:
        """Flags in the place of those of rows, and not taken for them: the dispatch is to be repeated."""
        return self.plan([self.post("recall", self.layout.rows_status)])

    @property
    def _known(self) -> Value:
        return self._of_masks(KNOWN_WORD)

    @property
    def _agreed(self) -> Value:
        return self._of_masks(SET_WORD)

    def _of_masks(self, word: int) -> Value:
        """A word behind those of the peers; none where no rank is masked while a call runs."""
        if self.context.capabilities.is_asynchronous:
            return 0
        return words_from(self.config.num_ranks + word)

    def _send_counts(self) -> Launch:
        shared = Placeholder("shared_counts") if self.config.num_shared_ranks else 0
        regions = {"slots": self.layout.counts, "status": self.layout.counts_status}
        return self.launch("send counts", COUNTS_SEND, shared_counts=shared, agreed=self._agreed, **regions)

    def _send_rows(self, scales: Value) -> Launch:
        layout, slot = self.layout, self.slot
        has_several = slot.num_scales > 1
        return self.launch(
            "send",
            DIRECT_SEND,
            **self.rows_to_send(),
            known=self._known,
            scales=scales,
            scale_bytes=slot.scale_stride if has_several else 0,
            num_local_experts=self.config.num_local_experts,
            counts=layout.counts,
            result_bytes=layout.row_bytes,
            slots=layout.rows(slot.itemsize),
            scale_slots=layout.scales(slot) if has_several else (0,) * 5,
            stamps=layout.stamps,
        )

    def _stamps(self) -> Launch:
        stamps = Placeholder("window", self.layout.stamps.offset(zone=self.zone))
        scales = self.layout.scales(self.slot)
        return self.launch(
            "stamps",
            stamps_kernel(self.variant.weights, self.slot.num_scales, self.context.target),
            stamps=stamps,
            stamp_floats=stamps,
            scales=Placeholder("window", scales.offset(zone=self.zone)),
            scale_stride=scales.stride("index") // WORD_BYTES,
        )


class Combine(CombineSteps):
    """Builds the plans of combine on one rank.

    Holes: topk_idx, num_tokens, out, topk_weights, and y where results have to be copied; and names of
    `Scheme.scratch`.
    """

    layout: DirectLayout
    fused: ClassVar = FUSED
    """Kernels of several phases, among which its are."""

    def whole(self) -> Plan:
        """All of it, in one part."""
        results = self.layout.results_status
        phases = [self.post("flag", results, keep=True), self.wait_for_ranks("wait", results)]
        copy = [] if self.variant.in_place else [self.copy_results()]
        total = self.total(
            SumFeatures(by_offset=True),
            slots=Placeholder("window", self.layout.results.offset(zone=self.zone)),
            offsets=Placeholder("result_offsets"),
        )
        return replace(self.plan([*joined([*copy, *phases], self.fused), total]), reads_peers=True)

    @property
    def num_results(self) -> Placeholder:
        """Where the number of this rank's results stands."""
        return Placeholder("recv_offsets", WORD_BYTES * (self.context.num_entries - 1))

    def copy_results(self) -> Launch:
        """To our own window, where experts left them elsewhere: as many bytes as a push would move."""
        nothing = "scales", "scale_offset", "scale_bytes", "first_row", "header", "header_words"
        return self.launch(
            "copy",
            EXCHANGE_SEND,
            row_bytes=self.layout.row_bytes,
            num_rows=self.num_results,
            peer=self.context.rank,
            slots=self.layout.results,
            headers=(0,) * 5,
            **dict.fromkeys(nothing, 0),
        )


class Direct(Scheme):
    """Tokens go to their final place, and results are read where they are."""

    layout_of = DirectLayout
    layout: DirectLayout
    plans: ClassVar = {DispatchVariant: Dispatch, CombineVariant: Combine}
    goes_on: ClassVar = frozenset({"dispatch", "combine"})
    sends_by_all_counts: ClassVar = True
    refuses: ClassVar = dict.fromkeys(LACKS, Refusal("comm_alg='direct' has none", FULLMESH)) | {
        "torch_npu": Refusal(
            "torch_npu's functions have no way to place results in a window",
            "Use EPBuffer for it, or comm_alg='fullmesh_v1' here.",
        ),
        "wait": Refusal("comm_alg='direct' has no halves", FULLMESH),
        "rounds": Refusal(
            "with comm_alg='direct' rows arrive in the window, which has room for one round", FULLMESH
        ),
        "out": Refusal("with comm_alg='direct' rows arrive in the window", FULLMESH),
        "several servers": Refusal(
            "with comm_alg='direct' results are read where they are, in memory that a server's ranks share",
            OTHER_OR_ONE_SERVER,
        ),
    }

    @property
    def statuses(self) -> tuple[tuple[Operator, Region], ...]:
        """Names the entries of a barrier, of a dispatch's counts and rows, and of a combine's results."""
        layout = self.layout
        of_dispatch: tuple[tuple[Operator, Region], ...]
        of_dispatch = ("dispatch", layout.counts_status), ("dispatch", layout.rows_status)
        return (("barrier", layout.barrier_status), *of_dispatch, ("combine", layout.results_status))

    @cached_property
    def rounds(self) -> RoundFacts:
        """Says that dispatch, combine and barrier all wait for every rank, and why no graph may hold them."""
        return RoundFacts(
            waiting=frozenset(OPERATORS),
            no_graph=f"comm_alg={self.context.config.scheme!r} cannot be captured: its outputs are another "
            "tensor in every other call. Use 'fullmesh_v1' or 'fullmesh_v2'.",
        )

    def received(self, variant: DispatchVariant) -> tuple[Region, ...]:
        """Rows, their stamps, and scales where each has several."""
        slot, layout = Dispatch(self.context, variant, 0).slot, self.layout
        scales = (layout.scales(slot),) if slot.num_scales > 1 else ()
        return (layout.rows(slot.itemsize), layout.stamps, *scales)

    def place(self, output: Output, itemsize: int) -> Region:
        """Returns where dispatched rows, or the results that combine takes, lie in this rank's window."""
        return self.layout.rows(itemsize) if output == "rows" else self.layout.results

    def scratch(self) -> dict[str, Scratch]:
        """Adds the scales that travel in stamps, closely packed, to what schemes share."""
        c = self.context.config
        results = c.num_max_tokens_per_rank * c.num_results_per_token
        return super().scratch() | {"packed_scales": Scratch(results, torch.float32)}
