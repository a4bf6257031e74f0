"""Runs cases of torch_npu's operators as `EPBuffer` spells them: the same names for what comes out.

What only `EPBuffer` has is drawn from a case's seed: halves, outputs of the caller's, ids of 64 bits, strided
ids and masks, weights of 16 bits.
"""

from __future__ import annotations

import io
import random
from typing import Any

import torch

from moe_triton import EPBuffer, Pending
from moe_triton.torch_npu_ops import registry
from tests.distributed.operator_cases import SPECIAL, OperatorCase, Tensors, experts_of, tensors_of
from tests.distributed.operator_runs import (
    _combine_tensors,
    _dispatch_tensors,
    _groups,
    _performance_info,
)
from tests.patience import seconds

NAMES = {"scales": "smooth_scales", "x_active_mask": "active_mask", "expert_scales": "topk_weights"}


def given_to(case: OperatorCase, process: int, number: int) -> Tensors:
    """`tensors_of`, with weights that 16 bits can hold where the case takes such."""
    tensors = tensors_of(case, process, number)
    if case.seed & 8:
        tensors["expert_scales"] = tensors["expert_scales"].bfloat16().float()
    return tensors


def buffer_of(case: OperatorCase, process: int, **options: Any) -> EPBuffer:
    """The buffer of a case. Collective among the ranks that are left."""
    group_ep, group_tp = _groups(case.ranks, max(case.tp, 1))
    num_zero, num_copy, num_const = SPECIAL[case.special]
    return EPBuffer(
        registry.process_group(group_ep),
        num_max_tokens_per_rank=case.batch + (case.tokens == "fewer"),
        hidden=case.hidden,
        num_topk=case.topk,
        num_experts=case.num_experts,
        num_shared_experts=case.shared[0],
        num_shared_ranks=case.shared[1],
        num_zero_experts=num_zero,
        num_copy_experts=num_copy,
        num_const_experts=num_const,
        tp_group=registry.process_group(group_tp) if case.tp == 2 else None,
        lost_ranks=case.lost,
        comm_alg=case.comm_alg,
        product=case.product,
        ranks_per_server=case.servers or None,
        relaxed=True,
        timeout_s=seconds(30.0),
        num_blocks=case.num_blocks,
        kernels=case.kernels,
        **options,
    )


def run_rank(process: int, num_processes: int, case: OperatorCase, backend: str = "cpu") -> bytes:
    """What `tests.distributed.operator_runs.run_rank` returns, by way of a buffer."""
    rounds: list[Tensors] = []
    if process in case.lost:
        _groups(case.ranks, max(case.tp, 1))
    else:
        with buffer_of(case, process, backend=backend) as buffer:
            for number in range(case.rounds):
                rounds.append(_one_round(case, process, buffer, number))
    file = io.BytesIO()
    torch.save(rounds, file)
    return file.getvalue()


def ended(answer: Any) -> Any:
    """What a call returns in the end."""
    return answer.wait() if isinstance(answer, Pending) else answer


def _one_round(case: OperatorCase, process: int, buffer: EPBuffer, number: int) -> Tensors:
    tensors = given_to(case, process, number)
    halves, own_out, long_ids, half_weights = (bool(case.seed & bit) for bit in (1, 2, 4, 8))
    members = [rank for rank in range(case.ranks) if rank not in case.lost]
    out: Tensors = {}

    def performance(operator: str) -> Tensors:
        if not case.performance_info:
            return {}
        info = _performance_info(case)
        out[f"{operator} performance_info"] = info
        return {"performance_info": info[members]}

    def keep(operator: str, given: Tensors) -> None:
        if given:
            out[f"{operator} performance_info"][members] = given["performance_info"]

    ids, weights = tensors["expert_ids"], tensors["expert_scales"]
    ids = ids.long() if long_ids else ids.t().contiguous().t()
    weights = weights.bfloat16() if half_weights else weights
    options: dict[str, Any] = {NAMES[n]: t for n, t in _dispatch_tensors(case, tensors).items()}
    if "topk_weights" in options:
        options["topk_weights"] = weights
    if case.mask == "entries":
        options["active_mask"] = options["active_mask"].t().contiguous().t()
    if "smooth_scales" in options:  # a row for each expert that is left
        rows = buffer.config.num_shared_experts + buffer.config.num_experts
        options["smooth_scales"] = options["smooth_scales"][:rows]
    quantize = case.row_format.name
    if own_out:
        rows = buffer.capacity * max(case.tp, 1)
        options["out"] = torch.empty(rows, case.hidden, dtype=torch.int8 if quantize else case.dtype)
    if case.seed & 16:
        before = torch.arange(buffer.num_local_experts, dtype=torch.int32)
        options["cumulative_local_expert_recv_stats"] = stats = before.clone()
    waits = performance("dispatch")
    call: Any = buffer.dispatch
    received = ended(call(tensors["x"], ids, quantize=quantize, wait=not halves, **options, **waits))
    buffer.synchronize()
    keep("dispatch", waits)
    if own_out and received.tokens is not options["out"]:
        raise AssertionError("tokens are elsewhere")
    handle = received.handle
    if case.seed & 16:
        counts = received.tokens_per_expert
        if case.tp == 2:  # one expert, and the peer's rows are there too
            counts = handle.exchange_counts[process % 2].view(1)
        if not torch.equal(stats, before + counts):
            raise AssertionError(f"{stats} is not {before} + {counts}")
    nothing = torch.empty(0)
    out |= {
        "expand_x": received.tokens,
        "dynamic_scales": nothing if received.scales is None else received.scales,
        "index": handle.assist_info,
        "expert_token_nums": received.tokens_per_expert,
        "ep_recv_counts": handle.recv_offsets,
        "tp_recv_counts": nothing.int() if handle.exchange_counts is None else handle.exchange_counts,
        "expand_scales": nothing if received.weights is None else received.weights,
    }
    y = experts_of(case, process, received.tokens, received.scales)
    more: dict[str, Any] = _combine_tensors(case, tensors)
    more.pop("x_active_mask", None)  # the handle has it
    batch = len(tensors["x"])
    if case.shared_expert_x == "3-D":
        split = (2, batch // 2) if batch % 2 == 0 else (batch, 1)
        more["shared_expert_x"] = tensors["shared_expert_x"].view(*split, case.hidden)
    if case.comm_quant_mode:
        more["comm_quantize"] = "int8"
    if own_out:
        more["out"] = torch.zeros(batch, case.hidden, dtype=case.dtype)
    waits = performance("combine")
    order = random.Random(case.seed + number)
    combine: Any = buffer.combine
    given = weights if case.combine_weights else None
    answer = combine(y, handle, given, wait=order.random() < 0.5, **more, **waits)
    out["x"] = ended(answer)
    buffer.synchronize()
    keep("combine", waits)
    return out
