"""Combine of a whole deployment: every expert's output rows to every token's sum.

Shapes: BS tokens of a rank, H hidden, K experts per token, S shared experts, C constant experts, n rows
that a rank received. Sums are fp32, in the order of docs/operators.md, "Arithmetic of combine".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from moe_triton.reference.arithmetic import (
    Floats,
    Mask,
    add_rms_norm,
    as_floats,
    rounded,
    softmax_of_two,
    sum_of_row,
    through_blocks,
    weighted_sum,
)
from moe_triton.reference.deployment import Deployment
from moe_triton.reference.dispatch import (
    DispatchReference,
    ids_that_take_part,
    present,
    tokens_that_take_part,
)

Indices: TypeAlias = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class CombineInputs:
    """What one rank passes, by torch_npu's names.

    Attributes:
        expand_x: (n, H) at least: expert outputs in the order of dispatch's rows; with a tensor-parallel
            peer, partial sums for its rows too.
        expert_ids: (BS, K) int32, as dispatched.
        expert_scales: (BS, K) fp32, or None for a sum without weights.
        x_active_mask: as dispatched.
        shared_expert_x: (BS, H) in the dtype of expand_x.
        ori_x: (BS, H), for copy and constant experts.
        const_expert_alpha_1: (C,) or (C, H).
        const_expert_alpha_2: like const_expert_alpha_1.
        const_expert_v: (C, H).
        residual_x: (BS, 1, H), for `combine_add_rms_norm_all` only.
        gamma: (H,), likewise.
    """

    expand_x: torch.Tensor
    expert_ids: torch.Tensor
    expert_scales: torch.Tensor | None = None
    x_active_mask: torch.Tensor | None = None
    shared_expert_x: torch.Tensor | None = None
    ori_x: torch.Tensor | None = None
    const_expert_alpha_1: torch.Tensor | None = None
    const_expert_alpha_2: torch.Tensor | None = None
    const_expert_v: torch.Tensor | None = None
    residual_x: torch.Tensor | None = None
    gamma: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CombineReference:
    """What one rank gets.

    Attributes:
        written: (BS,) bool: the tokens that take part. The others' output is zeros.
        x: their sums, (number of them, H) in expand_x's dtype.
        performance_ranks: entries of performance_info that may be raised; the others stay as they were.
    """

    written: torch.Tensor
    x: torch.Tensor
    performance_ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AddRmsNormReference:
    """What one rank gets of a combine that ends in a residual and a norm.

    Attributes:
        written: (BS,) bool: the tokens that take part. The others' outputs are zeros.
        y: their normalised sums, (number of them, H) bf16.
        rstd: (number of them,) fp32.
        x: their sums, (number of them, H) bf16.
    """

    written: torch.Tensor
    y: torch.Tensor
    rstd: torch.Tensor
    x: torch.Tensor


@dataclass(frozen=True)
class Results:
    """What experts return for one rank's tokens.

    Attributes:
        values: (BS, K + S, H) fp32.
        sources: the ranks that they come from.
    """

    values: Floats
    sources: frozenset[int]


def combine_all(
    deployment: Deployment,
    dispatched: Sequence[DispatchReference | None],
    inputs: Sequence[CombineInputs | None],
    *,
    comm_quant_mode: int = 0,
) -> list[CombineReference | None]:
    """What every process gets.

    Args:
        deployment: what all pass alike.
        dispatched: what `dispatch_all` returned.
        inputs: by process, None for ranks that are lost.
        comm_quant_mode: 0, or 2 where results travel as int8 in blocks of 8.

    Returns:
        By process, None for ranks that are lost.

    Examples:
        >>> deployment = reference.Deployment(ep_world_size=2, moe_expert_num=32)
        >>> ours = reference.DispatchInputs(x=x, expert_ids=expert_ids)
        >>> sent = reference.dispatch_all(deployment, [ours] * 2)
        >>> given = dict(expert_ids=expert_ids, expert_scales=expert_scales)
        >>> inputs = [reference.CombineInputs(expand_x=rank.expand_x, **given) for rank in sent]
        >>> reference.combine_all(deployment, sent, inputs)[0].x.shape
        torch.Size([16, 7168])
    """
    outputs = {}
    for process, (given, results) in _return_all(deployment, dispatched, inputs, comm_quant_mode).items():
        written, sums = weighted_sums(deployment.after_losses(), given, results)
        waited_for = tuple(deployment.survivors[source] for source in sorted(results.sources))
        x = rounded(sums, given.expand_x.dtype)
        outputs[process] = CombineReference(written=written, x=x, performance_ranks=waited_for)
    return [outputs.get(process) for process in range(len(inputs))]


def combine_add_rms_norm_all(
    deployment: Deployment,
    dispatched: Sequence[DispatchReference | None],
    inputs: Sequence[CombineInputs | None],
    *,
    comm_quant_mode: int = 0,
    norm_eps: float = 1e-6,
) -> list[AddRmsNormReference | None]:
    """What every process gets of a combine whose sums are added to residual_x and normalised.

    Args:
        deployment: what all pass alike.
        dispatched: what `dispatch_all` returned.
        inputs: by process, with residual_x and gamma.
        comm_quant_mode: as in `combine_all`.
        norm_eps: added to the mean square.

    Examples:
        >>> deployment = reference.Deployment(ep_world_size=2, moe_expert_num=32)
        >>> ours = reference.DispatchInputs(x=x, expert_ids=expert_ids)
        >>> sent = reference.dispatch_all(deployment, [ours] * 2)
        >>> norm = dict(residual_x=x[:, None], gamma=torch.ones(7168).bfloat16())
        >>> given = dict(expert_ids=expert_ids, expert_scales=expert_scales)
        >>> inputs = [reference.CombineInputs(expand_x=rank.expand_x, **given, **norm) for rank in sent]
        >>> reference.combine_add_rms_norm_all(deployment, sent, inputs)[0].rstd.shape
        torch.Size([16])
    """
    outputs = {}
    for process, (given, results) in _return_all(deployment, dispatched, inputs, comm_quant_mode).items():
        assert given.residual_x is not None
        assert given.gamma is not None
        written, sums = weighted_sums(deployment.after_losses(), given, results)
        y, rstd, x = add_rms_norm(sums, given.residual_x[written, 0], given.gamma, norm_eps)
        outputs[process] = AddRmsNormReference(written=written, y=y, rstd=rstd, x=x)
    return [outputs.get(process) for process in range(len(inputs))]


def _return_all(
    deployment: Deployment,
    dispatched: Sequence[DispatchReference | None],
    inputs: Sequence[CombineInputs | None],
    comm_quant_mode: int,
) -> dict[int, tuple[CombineInputs, Results]]:
    """What every process that takes part passes, and what comes back to it."""
    tp, shared = deployment.num_tp_ranks, deployment.after_losses().num_shared_experts
    returned = {}
    for tp_rank in range(tp):
        processes = [rank * tp + tp_rank for rank in deployment.survivors]
        group = [present(inputs[process]) for process in processes]
        origins, rows = [], []
        for process, given in zip(processes, group, strict=True):
            own = present(dispatched[process])
            y = given.expand_x[: len(own.assist_info)]
            if tp == 2:
                y = _add_peers_half(own, y, present(dispatched[process ^ 1]), present(inputs[process ^ 1]))
            origins.append(own.assist_info)
            rows.append(through_blocks(y) if comm_quant_mode == 2 else y)
        for rank, (process, given) in enumerate(zip(processes, group, strict=True)):
            returned[process] = given, results_of(rank, origins, rows, given.expert_ids.shape, shared)
    return returned


def _add_peers_half(
    own: DispatchReference, y: torch.Tensor, peer: DispatchReference, given: CombineInputs
) -> torch.Tensor:
    """Own rows and what the peer has for them, added and rounded; they lie behind the peer's own rows."""
    start = len(peer.assist_info)
    theirs = given.expand_x[start : start + len(own.assist_info)]
    with np.errstate(over="ignore", invalid="ignore"):
        return rounded(as_floats(y) + as_floats(theirs), y.dtype)


def results_of(
    rank: int,
    origins: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    batch_and_topk: Sequence[int],
    num_shared_experts: int,
) -> Results:
    """What comes back to one rank of an expert-parallel group.

    Args:
        rank: whose tokens.
        origins: (n, 3) int32 by rank: source rank, token, k of each row.
        rows: (n, H) by rank.
        batch_and_topk: BS of this rank, and K.
        num_shared_experts: S.
    """
    batch, topk = batch_and_topk
    values = np.zeros((batch, topk + num_shared_experts, rows[0].shape[1]), dtype=np.float32)
    sources = set()
    for holder, (of_rows, y) in enumerate(zip(origins, rows, strict=True)):
        mine = of_rows[:, 0] == rank
        if mine.any():
            _, tokens, ks = of_rows[mine].T.numpy()
            values[tokens, ks] = as_floats(y[mine])
            sources.add(holder)
    return Results(values, frozenset(sources))


def weighted_sums(
    deployment: Deployment, inputs: CombineInputs, results: Results
) -> tuple[torch.Tensor, Floats]:
    """The sums of one rank's tokens.

    ``k`` ascending, each value times its weight rounded and then added; the shared experts ascending, then
    shared_expert_x, both without weight.

    Returns:
        written (BS,) bool, and the fp32 sums of the tokens that are, (number of them, H).
    """
    ids = ids_that_take_part(inputs.expert_ids, inputs.x_active_mask)
    written = tokens_that_take_part(ids, inputs.x_active_mask)
    tokens = written.nonzero().flatten().numpy()

    def entries() -> Iterator[tuple[Mask | None, Floats, Floats | None]]:
        scales = None if inputs.expert_scales is None else as_floats(inputs.expert_scales)[tokens]
        for k in range(ids.shape[1]):
            applies, values = _entry(deployment, inputs, results, tokens, k, ids[tokens, k].numpy())
            yield applies, values, None if scales is None else scales[:, k]
        for shared in range(ids.shape[1], results.values.shape[1]):
            yield None, results.values[tokens, shared], None
        if inputs.shared_expert_x is not None:
            yield None, as_floats(inputs.shared_expert_x)[tokens], None

    return written, weighted_sum((len(tokens), results.values.shape[2]), entries())


def _entry(
    deployment: Deployment, inputs: CombineInputs, results: Results, tokens: Indices, k: int, experts: Indices
) -> tuple[Mask, Floats]:
    """Which tokens' entries ``k`` add something, and what, before its weight.

    That is a routed expert's result, a copy of the token, or what a constant expert makes of it.
    """
    copy = experts - deployment.moe_expert_num - deployment.zero_expert_num
    const = copy - deployment.copy_expert_num
    assert (const < deployment.const_expert_num).all()
    values = results.values[tokens, k]
    for row in np.flatnonzero(copy >= 0):
        assert inputs.ori_x is not None
        x = as_floats(inputs.ori_x[tokens[row]])
        values[row] = x if const[row] < 0 else _constant(inputs, x, const[row])
    return (experts >= 0) & ((experts < deployment.moe_expert_num) | (copy >= 0)), values


def _constant(inputs: CombineInputs, x: Floats, const: int) -> Floats:
    """``a1 * x + a2 * v``: alphas of (C,) are the factors, of (C, H) softmax of their products with x."""
    assert inputs.const_expert_alpha_1 is not None
    assert inputs.const_expert_alpha_2 is not None
    assert inputs.const_expert_v is not None
    a1, a2 = as_floats(inputs.const_expert_alpha_1[const]), as_floats(inputs.const_expert_alpha_2[const])
    if a1.ndim:
        a1, a2 = softmax_of_two(sum_of_row(a1 * x), sum_of_row(a2 * x))
    value: Floats = a1 * x + a2 * as_floats(inputs.const_expert_v[const])
    return value
