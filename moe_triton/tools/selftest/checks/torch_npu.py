"""One round by torch_npu's names, against the reference model of those operators."""

from __future__ import annotations

import dataclasses

from moe_triton import reference, torch_npu_ops
from moe_triton.core.records import ORIGIN
from moe_triton.core.row_formats import BY_QUANT_MODE
from moe_triton.tools.selftest.cases import Inputs, experts_of, inputs_of
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
    everyone = [inputs_of(case, rank, 0) for rank in range(place.num_ranks)]
    own = everyone[place.rank].to(place.backend.device)
    try:
        received = torch_npu_ops.npu_moe_distribute_dispatch_v2(
            own.x, own.topk_idx, *group, quant_mode=quant_mode
        )
        expand_x, scales, assist_info, token_nums, recv_counts = received[:5]
        y = experts_of(case, place.rank, expand_x)
        out = torch_npu_ops.npu_moe_distribute_combine_v2(
            y, own.topk_idx, assist_info, recv_counts, own.topk_weights, *group
        )
        place.backend.synchronize()
        dispatched, combined = _expected(place, case_inputs=everyone, quant_mode=quant_mode)
        want = dispatched[place.rank]
        sums = combined[place.rank]
        assert want is not None
        assert sums is not None
        rows, words = len(want.assist_info), ORIGIN.num_words
        pairs = {
            "expand_x": (expand_x[:rows], want.expand_x),
            "dynamic_scales": (scales[:rows], want.dynamic_scales),
            "assist_info_for_combine": (assist_info[: words * rows].view(-1, words), want.assist_info),
            "expert_token_nums": (token_nums, want.expert_token_nums),
            "ep_recv_counts": (recv_counts[: len(want.ep_recv_counts)], want.ep_recv_counts),
            "combined": (out, sums.x),
        }
        found = [difference(n, have.cpu(), ref) for n, (have, ref) in pairs.items() if ref is not None]
        return Finding(wrong=tuple(text for text in found if text))
    finally:
        torch_npu_ops.release(group_name)
        torch_npu_ops.configure()


def _expected(
    place: Place, case_inputs: list[Inputs], quant_mode: int
) -> tuple[list[reference.DispatchReference | None], list[reference.CombineReference | None]]:
    case = plain_case(place.settings, place.num_ranks)
    deployment = reference.Deployment(
        ep_world_size=place.num_ranks, moe_expert_num=case.config.num_experts, shared_expert_num=1
    )
    inputs = [reference.DispatchInputs(x=i.x, expert_ids=i.topk_idx) for i in case_inputs]
    dispatched = reference.dispatch_all(deployment, inputs, row_format=BY_QUANT_MODE[quant_mode])
    results = []
    for rank, (i, received) in enumerate(zip(case_inputs, dispatched, strict=True)):
        assert received is not None
        results.append(
            reference.CombineInputs(
                expand_x=experts_of(case, rank, received.expand_x),
                expert_ids=i.topk_idx,
                expert_scales=i.topk_weights,
            )
        )
    return dispatched, reference.combine_all(deployment, dispatched, results)
