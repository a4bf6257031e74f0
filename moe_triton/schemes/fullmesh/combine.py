"""Combine on A3: every result back to its token's rank, and summed there.

The four steps: send, flag, wait, arrange (the sum). V2 flags each row and waits for the results of its own
tokens, a part of them at a time; V1 names results by expert, so it flags once all rows of a rank are there
and waits for all ranks. Results for ranks of other servers are left in the out part of this rank's window,
and posted from there when all blocks have written theirs: each row, and then its flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_triton.core.abi import words_of
from moe_triton.core.plan import Launch, Placeholder, Plan, Value, joined, pipelined
from moe_triton.core.region import MAX_INT32, REGION_DIMS
from moe_triton.kernels.block_quantize import block_quantize_kernel
from moe_triton.kernels.const_experts import const_alphas_kernel
from moe_triton.kernels.returns import returns_kernel
from moe_triton.kernels.waits import waits_of_combine_kernel
from moe_triton.kernels.weighted_sum import SumFeatures
from moe_triton.layout import UB_ALIGN, WORD_BYTES, SlotLayout, align
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes.common.exchange import reduce_steps
from moe_triton.schemes.common.steps import CombineSteps, matching, tokens_of
from moe_triton.schemes.fullmesh.ascendc import COMBINE_POST, COMBINE_READY, COMBINE_SEND, COMBINE_WAIT, FUSED
from moe_triton.schemes.fullmesh.layout import WindowLayout
from moe_triton.schemes.rank_context import RankContext

# What a wait is given where it has nothing to send.
_NOTHING: dict[str, Value] = {
    arg.name: (0,) * words_of(arg) if arg.type in REGION_DIMS else 0 for arg in COMBINE_READY.args
}


class Combine(CombineSteps):
    """Builds the plans of combine on one rank.

    Holes: y, num_rows, recv_offsets, peers, window, topk_idx, num_tokens, out, report; origins (V2) or
    expand_idx (V1); topk_weights, mask, shared_x, ori_x, const_v, alpha1, alpha2, residual, gamma, eps,
    normed, rstd, exchange_counts, exchange_window, exchange_peers, performance_info and rank_table where the
    variant has them; and names of `Scheme.scratch`.
    """

    layout: WindowLayout

    def __init__(self, context: RankContext, variant: CombineVariant, zone: int, parts: int = 1) -> None:
        super().__init__(context, variant, zone, 1 if context.is_version_1 else parts)
        self.itemsize = 1 if variant.block_quantize else variant.dtype.itemsize
        self.tokens_of_part = context.part_tokens["combine"].tokens
        self.usual |= {
            "origins": Placeholder("return_origins" if context.is_version_1 else "origins"),
            "slots": self.layout.combine_slots,
            "status": self.layout.combine_status,
        }
        if variant.exchange:
            self.usual |= {"rows": Placeholder("reduced_rows"), "capacity": context.capacity}

    def whole(self) -> Plan:
        """All of it: the launch that sends goes on with the first wait."""
        return self._plan([*self._before_send(self.parts), *self._before_wait()], self._send())

    def setup(self) -> Plan:
        """Up to and including the flags, in one part."""
        return self.plan([*self._before_send(1), *joined(self._send(), FUSED)])

    def teardown(self) -> Plan:
        """From the wait on; tokens are waited for and summed in parts."""
        return self._plan(self._before_wait(), [])

    def _plan(self, steps: list[Launch], send: list[Launch]) -> Plan:
        parts = self.parts
        if send and self._quantizes_in_parts(parts):
            steps += self._quantized_in_parts(send)
        else:
            if self.context.by_readiness(parts):
                waits = self._by_readiness(send, [[part] for part in range(parts)])
            else:
                waits = [[self._wait(part, parts)] for part in range(parts)]
                waits[0] = joined([*send, *waits[0]], FUSED)
            steps += pipelined(waits, [[self._weighted_sum(part)] for part in range(parts)])
        return self.plan([*steps, *self.norm(), *self._record_waits()], self.context.overlaps)

    def _quantizes_in_parts(self, parts: int) -> bool:
        return self.variant.block_quantize and self.context.by_readiness(parts)

    def _quantized_in_parts(self, send: list[Launch]) -> list[Launch]:
        """Beside each part that is sent, the next one is quantised, and beside the last one what has come
        before it is summed: one launch beside each, as with results that travel as they are.
        """
        parts = self.parts
        summed = [list(range(parts - 1)), [parts - 1]]
        sent = self._by_readiness(send, summed)
        quantized = [[self._block_quantize(part, parts)] for part in range(parts)]
        early, last = (self._weighted_sum(group[0]) for group in summed)
        return [*pipelined(quantized, sent), replace(early, alongside=True), last]

    def _by_readiness(self, send: list[Launch], summed: Sequence[Sequence[int]]) -> list[list[Launch]]:
        """Launches that send a part of the results each, and wait for a part of this rank's tokens.

        Part p sends to tokens ``[p, p + 1) * RankContext.part_tokens`` of every rank. Then there are as many
        complete tokens here as part p sums, and which they are stands in ``ready_tokens``.

        Args:
            send: the launch that sends all results; empty if they have been sent.
            summed: parts that are summed by one launch, for each such launch.
        """
        blocks, wait = self.context.blocks("communication", self.parts), _values(self._wait(0, 1))
        first_of = {part: group[0] for group in summed for part in group}
        # What is quantised beside sending is not there yet, however long a wait takes.
        early = _values(send[0]) if send and not self.variant.block_quantize else {}
        launches = []
        for part in range(self.parts):
            of_part: dict[str, Value] = {
                "part": part,
                "num_parts": self.parts,
                "part_tokens": self.tokens_of_part,
                "progress": Placeholder("part_progress"),
            }
            sends = [self.launch("send", COMBINE_SEND, blocks, **_values(each) | of_part) for each in send]
            given = _NOTHING | early | wait | of_part
            given |= {
                "waited_us": Placeholder("waited"),
                "is_timed": int(self.variant.waits),
                "num_tokens": Placeholder("num_tokens"),
                "pending": Placeholder("pending_results"),
                "ready_tokens": Placeholder("ready_tokens"),
                "first_part": first_of[part],
                "bounds": _bounds_of(first_of[part]),
            }
            waits = self.launch("wait", COMBINE_READY, blocks, **matching(COMBINE_READY, given))
            launches.append(joined([*sends, waits], FUSED))
        return launches

    def _before_send(self, parts: int) -> list[Launch]:
        steps = reduce_steps(self) if self.variant.exchange else []
        if self.context.is_version_1:  # where each row goes, from the counts alone
            kernel = returns_kernel(self.config.is_shared_rank(self.context.rank), self.context.target)
            steps.append(self.launch("returns", kernel, capacity=self.context.capacity))
        if self.variant.block_quantize and not self._quantizes_in_parts(parts):
            steps.append(self._block_quantize(0, 1))
        return steps

    def _before_wait(self) -> list[Launch]:
        num_zero, num_copy, num_const = self.variant.special
        if not num_const:
            return self.select()
        c, first = self.config, self.config.num_experts + num_zero + num_copy
        sizes = c.hidden, c.num_topk, self.variant.const_per_element, self.context.target
        kernel = const_alphas_kernel(self.variant.dtype, *sizes)
        alphas = self.launch("const alphas", kernel, x=Placeholder("ori_x"), first_const=first)
        return [*self.select(), alphas]

    def _send(self) -> list[Launch]:
        """Steps 1 and 2, the phases of one launch."""
        sends = [self._send_results()]
        if self.posts:
            given = matching(COMBINE_POST, _values(sends[0]) | self.posting_on())
            payload, flags = self.config.hidden * self.itemsize, self.layout.out_flags
            sends.append(self.launch("post", COMBINE_POST, **given, payload_bytes=payload, out_flags=flags))
        return [*sends, self.post("flag", self.layout.peer_status)] if self.context.is_version_1 else sends

    def _wait(self, part: int, parts: int) -> Launch:
        """Step 3: until every result of these own tokens is there; in V1, those of every rank."""
        if self.context.is_version_1:
            return self.wait_for_ranks("wait", self.layout.peer_status, kept_zone=self.keeping)
        blocks = self.context.blocks("communication", parts) if part else None
        return self.launch("wait", COMBINE_WAIT, blocks, **tokens_of(part, parts))

    def _block_quantize(self, part: int, parts: int) -> Launch:
        """Rows for the tokens that `_by_readiness` sends results of in this part."""
        context, tokens, hidden = self.context, self.tokens_of_part, self.config.hidden
        row_bytes = context.quantized_row_bytes
        return self.launch(
            "quantize",
            block_quantize_kernel(self.variant.dtype, hidden, context.target, parted=parts > 1),
            context.blocks("compute", parts) if part else None,
            first_token=part * tokens,
            end_token=(part + 1) * tokens if part + 1 < parts else MAX_INT32,
            packed=Placeholder("quantized_rows"),
            packed_scales=Placeholder("quantized_rows", align(hidden, UB_ALIGN)),
            row_stride=row_bytes,
            scale_stride=row_bytes // self.variant.dtype.itemsize,
        )

    def _send_results(self) -> Launch:
        """Steps 1 and 2: each row to its token's slot; V2 sets its flag right after it."""
        is_flagged = not self.context.is_version_1
        values: dict[str, Value] = {"row_bytes": SlotLayout(self.config.hidden, 2).row_bytes}
        if self.variant.block_quantize:
            values = {"rows": Placeholder("quantized_rows"), "row_bytes": self.context.quantized_row_bytes}
        if not is_flagged:
            values["numbers"] = 0
        return self.launch(
            "send",
            COMBINE_SEND,
            **values,
            flag_rows=int(is_flagged),
            part=0,
            num_parts=1,
            part_tokens=0,
            progress=0,
            window=Placeholder("window") if self.posts else 0,
            out_rows=self.layout.out_rows,
        )

    def _weighted_sum(self, part: int) -> Launch:
        """Step 4: out of the window, summed by weight."""
        variant, slots, context = self.variant, self.layout.combine_slots, self.context
        is_listed = context.by_readiness(self.parts)
        window, itemsize = slots.offset(zone=self.zone), self.itemsize
        features = SumFeatures(
            masked=self.is_masked,
            clears=self.is_masked and not variant.norm,
            shared_x=variant.shared_x,
            special=any(variant.special),
            quantized=variant.block_quantize,
            by_expert=context.is_version_1,
            own=variant.local_bypass,
            placed=variant.local_bypass and variant.placed,
            fp32_out=variant.norm,
            zoned=context.zones_on_device,
            listed=is_listed,
            turns=context.zones_on_device and part == self.parts - 1 and not variant.norm,
        )
        token, k = slots.stride("token") // itemsize, slots.stride("k") // itemsize
        values: dict[str, Value] = {
            "slots": Placeholder("window", window),
            "slot_scales": Placeholder("window", window + align(self.config.hidden, UB_ALIGN)),
            "own_results": Placeholder("own_results", -(window // itemsize)),
            "tokens": Placeholder("ready_tokens"),
            "bounds": _bounds_of(part),
            "token_stride": token,
            "slot_stride": k,
            # V1's region counts a result's number at its expert as token, and experts as k.
            "index_stride": token,
            "expert_stride": k,
            **tokens_of(part, self.parts),
            **({"num_tokens": Placeholder("num_tokens")} if is_listed else {}),
            **self.in_memory(slots.stride("zone") // itemsize),
        }
        return self.total(features, context.blocks("compute", self.parts), **values)

    def _record_waits(self) -> list[Launch]:
        if not self.variant.waits:
            return []
        kernel = waits_of_combine_kernel(self.config.num_topk, self.context.target)
        local = self.config.num_local_experts
        return [self.launch("record waits", kernel, self.blocks_of_words, num_local_experts=local)]


def _bounds_of(part: int) -> Placeholder:
    """Where tokens begin and end in ``ready_tokens`` of the part, or of those that begin with it."""
    return Placeholder("ready_bounds", 2 * WORD_BYTES * part)


def _values(launch: Launch) -> dict[str, Value]:
    return {arg.name: value for arg, value in zip(launch.kernel.args, launch.values, strict=True)}
