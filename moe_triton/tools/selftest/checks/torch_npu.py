"""One round by torch_npu's names, against the reference model."""

from __future__ import annotations

import dataclasses

from moe_triton import torch_npu_ops
from moe_triton.core.records import ORIGIN
from moe_triton.core.row_formats import BY_QUANT_MODE
from moe_triton.tools.selftest.cases import expected_round, experts_of, inputs_of
from moe_triton.tools.selftest.check import Check, Finding, Place
from moe_triton.tools.selftest.checks.operators import FIRST, plain_case
from moe_triton.tools.selftest.comparison import difference

STAGE = "torch_npu"


def torch_npu_checks(ranks: int) -> list[Check]:
    """Not quantised and quantised."""
    return [
        Check(f"quant_mode {mode}", STAGE, compare_round, (mode,), ranks=ranks, needs=(FIRST,))
        for mode in BY_QUANT_MODE
    ]


def compare_round(place: Place, quant_mode: int) -> Finding:
    """Dispatch and combine of the second version."""
    plain = plain_case(place.settings, place.num_ranks)
    case = dataclasses.replace(plain, quantize=BY_QUANT_MODE[quant_mode].name)
    settings = place.settings
    torch_npu_ops.configure(backend=settings.backend, relaxed=True, timeout_s=settings.wait_s)
    group_name = torch_npu_ops.group_name()
    group = (group_name, place.num_ranks, place.rank, case.config.num_experts)
    own = inputs_of(case, place.rank, 0).to(place.backend.device)
    try:
        expand_x, scales, assist_info, token_nums, recv_counts, *_ = (
            torch_npu_ops.npu_moe_distribute_dispatch_v2(own.x, own.topk_idx, *group, quant_mode=quant_mode)
        )
        y = experts_of(case, place.rank, expand_x)
        out = torch_npu_ops.npu_moe_distribute_combine_v2(
            y, own.topk_idx, assist_info, recv_counts, own.topk_weights, *group
        )
        place.backend.synchronize()
        received, sums = expected_round(case, 0)
        want = received[place.rank]
        rows, words = len(want.origins), ORIGIN.num_words
        pairs = {
            "expand_x": (expand_x[:rows], want.tokens),
            "dynamic_scales": (scales[:rows], want.scales),
            "assist_info_for_combine": (assist_info[: words * rows].view(-1, words), want.origins),
            "expert_token_nums": (token_nums, want.tokens_per_expert),
            "ep_recv_counts": (recv_counts[: len(want.recv_offsets)], want.recv_offsets),
            "combined": (out, sums[place.rank]),
        }
        found = [difference(n, have.cpu(), ref) for n, (have, ref) in pairs.items() if ref is not None]
        return Finding(wrong=tuple(text for text in found if text))
    finally:
        torch_npu_ops.release(group_name)
        torch_npu_ops.configure()
