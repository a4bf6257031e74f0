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
- the results flag guards all results of a rank.

Two zones are enough because each of these waits is for every rank: a rank that has ended operator i + 1 has
seen every peer's flag of i + 1, which that peer posted after it ended i. So whoever posts flags or counts of
i + 2, or writes results for i + 2, comes after the last read of what i left in the same zone.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch

from moe_triton.core.plan import Hole, Launch, Plan, Value, joined, launch
from moe_triton.core.region import Region
from moe_triton.kernels.stamps import stamps_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout import WORD_BYTES
from moe_triton.layout.call_word import call_word
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes.common import steps as local
from moe_triton.schemes.common.ascendc import EXCHANGE_SEND
from moe_triton.schemes.common.flags import barrier_plan, post, wait_for_ranks
from moe_triton.schemes.common.scratch import Scratch
from moe_triton.schemes.direct.ascendc import COUNTS_SEND, DIRECT_SEND, FUSED
from moe_triton.schemes.direct.layout import DirectLayout
from moe_triton.schemes.scheme import (
    CONST_ARGUMENTS,
    OTHER_OR_ONE_SERVER,
    Output,
    Refusal,
    Scheme,
)
from moe_triton.schemes.site import COMBINE_KIND, OPERATORS, Operator, RoundFacts, launch_matching

FULLMESH = (
    "Use comm_alg='fullmesh_v1' or 'fullmesh_v2' for it, or outputs='own' where 'auto' has chosen 'direct'."
)
# Features of `EPBuffer` that no plan of this scheme has.
LACKS = (
    *("active_mask", "special experts", "tp_group", "comm_quantize", "shared_expert_x", "performance_info"),
    *("ori_x", *CONST_ARGUMENTS),
)


class Direct(Scheme):
    """Builds the plans of one rank.

    Holes: x, topk_idx, expand_idx, num_tokens, num_ids, peers, window, recv_offsets, tokens_per_expert,
    origins, report; given_ids, smooth_scales, topk_weights, scales, weights where the variant has
    them; combine: topk_idx, num_tokens, out, topk_weights, and y where results have to be copied; and names
    of `Scheme.scratch`.
    """

    layout_of = DirectLayout
    refuses: ClassVar = dict.fromkeys(LACKS, Refusal("comm_alg='direct' has none", FULLMESH)) | {
        "torch_npu": Refusal(
            "torch_npu's functions have no way to place results in a window",
            "Use EPBuffer for it, or comm_alg='fullmesh_v1' here.",
        ),
        "wait": Refusal("comm_alg='direct' has no halves", FULLMESH),
        "out": Refusal("with comm_alg='direct' rows arrive in the window", FULLMESH),
        "several servers": Refusal(
            "with comm_alg='direct' results are read where they are, in memory that a server's ranks share",
            OTHER_OR_ONE_SERVER,
        ),
    }

    @cached_property
    def layout(self) -> DirectLayout:
        """Tells what lies where in a window of direct."""
        return DirectLayout(self.site.config)

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
            no_graph=f"comm_alg={self.site.config.scheme!r} cannot be captured: its outputs are another "
            "tensor in every other call. Use 'fullmesh_v1' or 'fullmesh_v2'.",
        )

    def place(self, output: Output, itemsize: int) -> Region:
        """Returns where dispatched rows, or the results that combine takes, lie in this rank's window."""
        return self.layout.rows(itemsize) if output == "rows" else self.layout.results

    def whole(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """The plan of the whole operator, in one part."""
        if isinstance(variant, DispatchVariant):
            return Plan("dispatch", zone, tuple(self._dispatch(variant, zone)))
        return Plan("combine", zone, tuple(self._combine(variant, zone)))

    def scratch(self) -> dict[str, Scratch]:
        """Adds the scales that travel in stamps, closely packed, to what schemes share."""
        c = self.site.config
        results = c.num_max_tokens_per_rank * c.num_results_per_token
        return super().scratch() | {"packed_scales": Scratch(results, torch.float32)}

    def barrier(self, zone: int, timeout_us: int | None = None) -> Plan:
        """Plans a flag to every rank, and the wait for every rank's; None stands for the site's deadline."""
        return barrier_plan(self.site, self.layout.barrier_status, zone, timeout_us)

    def _dispatch(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        counts, rows = self.layout.counts_status, self.layout.rows_status
        steps = [local.share(self.site, variant)] if self.site.config.num_shared_experts else []
        if variant.row_format.is_quantized:
            steps.append(local.route_pack(self.site, variant, self._stamped_scales(variant)))
        else:
            steps.append(local.route(self.site, variant))
        phases = [
            self._send_counts(variant, zone),
            self._wait("wait for counts", counts, variant, zone, before=COMBINE_KIND),
            self._send_rows(variant, zone),
            self._post("flag", rows, variant, zone),
            local.offsets(self.site, variant, zone, None, sees_all=False),
            self._wait("wait", rows, variant, zone),
        ]
        return [*steps, *joined(phases, FUSED), self._stamps(variant, zone)]

    def _combine(self, variant: CombineVariant, zone: int) -> list[Launch]:
        results = self.layout.results_status
        phases = [self._post("flag", results, variant, zone), self._wait("wait", results, variant, zone)]
        copy = [] if variant.in_place else [self._copy_results(zone)]
        return [*joined([*copy, *phases], FUSED), self._pull(variant, zone)]

    def _post(self, step: str, status: Region, variant: Variant, zone: int) -> Launch:
        operator, blocks = _operator_of(variant), self.site.num_blocks
        keep = operator == "combine"
        return post(self.site, step, status, operator, zone, variant.kind, keep=keep, blocks=blocks)

    def _wait(
        self, step: str, status: Region, variant: Variant, zone: int, before: Hole | None = None
    ) -> Launch:
        operator, blocks = _operator_of(variant), self.site.num_blocks
        return wait_for_ranks(
            self.site, step, status, operator, zone, variant.kind, before=before, blocks=blocks
        )

    def _send_counts(self, variant: DispatchVariant, zone: int) -> Launch:
        c, layout = self.site.config, self.layout
        return launch(
            "send counts",
            COUNTS_SEND,
            "communication",
            self.site.num_blocks,
            counts=Hole("counts"),
            shared_counts=Hole("shared_counts") if c.num_shared_ranks else 0,
            num_experts=c.num_experts,
            num_shared_ranks=c.num_shared_ranks,
            peers=Hole("peers"),
            num_ranks=c.num_ranks,
            rank=self.site.rank,
            zone=zone,
            call=call_word("dispatch", variant.kind),
            combine_kind=COMBINE_KIND,
            slots=layout.counts.words(),
            status=layout.counts_status.words(),
            report=Hole("report"),
        )

    def _send_rows(self, variant: DispatchVariant, zone: int) -> Launch:
        c, layout, slot = self.site.config, self.layout, local.slot_of(self.site, variant)
        values: dict[str, Value] = {
            **local.rows_to_send(self.site, variant),
            "row_bytes": slot.row_bytes,
            "scales": self._stamped_scales(variant) or 0,
            "scale_offset": slot.scale_offset,
            "scale_bytes": slot.scale_stride if slot.num_scales > 1 else 0,
            "expand_idx": Hole("expand_idx"),
            "first_token": 0,
            "num_tokens": Hole("num_tokens"),
            "num_local_experts": c.num_local_experts,
            "num_ranks": c.num_ranks,
            "window": Hole("window"),
            "counts": layout.counts.words(),
            "max_count": c.num_max_tokens_per_rank,
            "recv_counts": Hole("recv_counts"),
            "result_offsets": Hole("result_offsets"),
            "result_bytes": layout.row_bytes,
            "zone": zone,
            "slots": layout.rows(slot.itemsize).words(),
            "scale_slots": layout.scales(slot).words() if slot.num_scales > 1 else (0,) * 5,
            "stamps": layout.stamps.words(),
        }
        return launch("send", DIRECT_SEND, "communication", self.site.num_blocks, **values)

    def _stamped_scales(self, variant: DispatchVariant) -> Hole | None:
        """Where scales lie closely packed that travel in stamps: those of formats with one for each row."""
        num_scales = variant.row_format.num_scales(self.site.config.hidden)
        return Hole("packed_scales") if num_scales == 1 else None

    def _stamps(self, variant: DispatchVariant, zone: int) -> Launch:
        site, stamps = self.site, Hole("window", self.layout.stamps.offset(zone=zone))
        slot = local.slot_of(site, variant)
        scales = self.layout.scales(slot)
        return launch_matching(
            "stamps",
            stamps_kernel(variant.weights, slot.num_scales, site.target),
            "compute",
            site.num_blocks,
            {
                "stamps": stamps,
                "stamp_floats": stamps,
                "scales": Hole("window", scales.offset(zone=zone)),
                "num_rows": Hole("recv_offsets", WORD_BYTES * (site.num_entries - 1)),
                "out_origins": Hole("origins"),
                "out_weights": Hole("weights"),
                "out_scales": Hole("scales"),
                "capacity": site.capacity,
                "scale_stride": scales.stride("index") // WORD_BYTES,
            },
        )

    def _copy_results(self, zone: int) -> Launch:
        """To our own window, where experts left them elsewhere: as many bytes as a push would move."""
        site, layout = self.site, self.layout
        no_header: Value = (0,) * 5
        return launch(
            "copy",
            EXCHANGE_SEND,
            "communication",
            site.num_blocks,
            rows=Hole("y"),
            row_bytes=layout.row_bytes,
            scales=0,
            scale_offset=0,
            scale_bytes=0,
            first_row=0,
            num_rows=Hole("recv_offsets", WORD_BYTES * (site.num_entries - 1)),
            capacity=Hole("num_rows"),
            header=0,
            header_words=0,
            peers=Hole("peers"),
            peer=site.rank,
            **site.zone_of("combine", zone),
            slots=layout.results.words(),
            headers=no_header,
            report=Hole("report"),
        )

    def _pull(self, variant: CombineVariant, zone: int) -> Launch:
        c, site = self.site.config, self.site
        return launch_matching(
            "sum",
            weighted_sum_kernel(
                variant.dtype,
                c.hidden,
                c.num_topk,
                c.num_shared_experts,
                variant.weights,
                site.target,
                features=SumFeatures(by_offset=True),
            ),
            "compute",
            site.num_blocks,
            {
                "slots": Hole("window", self.layout.results.offset(zone=zone)),
                "topk_idx": Hole("topk_idx"),
                "topk_weights": Hole("topk_weights") if variant.weights else 0,
                "offsets": Hole("result_offsets"),
                "out": Hole("out"),
                "first_token": 0,
                "num_tokens": Hole("num_tokens"),
                "num_experts": c.num_experts,
            },
        )


def _operator_of(variant: Variant) -> Operator:
    return "dispatch" if isinstance(variant, DispatchVariant) else "combine"
