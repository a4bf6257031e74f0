"""Which replicas of experts tokens go to, and which experts are worth it: local work, without a group."""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor

from moe_triton.core.checks import check_integer, contiguous, not_plain_error
from moe_triton.core.errors import NULL_ARGUMENT, ArgumentError
from moe_triton.core.replicas import NO_EXPERT, ReplicaBy
from moe_triton.runtime.expert_mapping import mapping_kernel
from moe_triton.runtime.local_launches import LocalLaunches
from moe_triton.torch_npu_ops import settings
from moe_triton.torch_npu_ops.operators import operator

MAX_LOGICAL, MAX_TOPK = 1024, 16
LEAST_WORLD_SIZE, MAX_WORLD_SIZE = 2, 768
MODES: dict[int, ReplicaBy] = {0: "rank", 1: "token"}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ANY_EXPERT = NO_EXPERT  # values of a table are the caller's matter, as in the original

_lock = threading.Lock()
_launches: dict[settings.Settings, LocalLaunches] = {}


def _begin_anew() -> None:
    """In a child that has been forked: a thread that held the lock does not exist there."""
    global _lock
    _lock = threading.Lock()
    _launches.clear()


os.register_at_fork(after_in_child=_begin_anew)


def _fake(expert_ids: Tensor, eplb_table: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    ids = expert_ids.new_empty(expert_ids.shape)  # contiguous, whatever it is of
    return ids, ids.new_empty(ids.shape, dtype=torch.bool)


@operator(_fake)
def npu_moe_update_expert(
    expert_ids: Tensor,
    eplb_table: Tensor,
    *,
    expert_scales: Tensor | None = None,
    pruning_threshold: Tensor | None = None,
    active_mask: Tensor | None = None,
    local_rank_id: int = -1,
    world_size: int = -1,
    balance_mode: int = 0,
) -> tuple[Tensor, Tensor]:
    """Maps logical experts to physical ones, and prunes those of little weight. On A3.

    Args:
        expert_ids: (BS, K) int32 or int64, of logical experts; K at most 16, and as many as there are.
        eplb_table: (N, F) int32, N 1 to 1024: column 0 of a row is its expert's number of replicas, columns 1
            to that number are their ids. No value is checked. F is 2 to world_size
            + 1, with balance_mode 1 to 769.
        expert_scales: (BS, K) fp32, fp16 or bf16, routing weights; with pruning_threshold, or neither.
        pruning_threshold: (K,) or (1, K) fp32: an expert is kept whose scale is at least this share of the
            sum of its token's, ``scale >= sum(scales) * threshold[k]`` in fp32, k ascending.
        active_mask: (BS,) bool, which tokens take part; only with the two before.
        local_rank_id: with balance_mode 0, this rank.
        world_size: with balance_mode 0 ranks of the group, 2 to 768.
        balance_mode: 0: column ``local_rank_id // ceil(world_size / count) + 1``, a replica for each rank;
            1: column ``token % count + 1``.

    Returns:
        balanced_expert_ids (BS, K), of expert_ids' dtype: ids below 0 become -1; those of N and more, and
        entries whose row has no replica in its column, become ids that no expert has.
        balanced_active_mask (BS, K) bool, True everywhere where nothing is pruned.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.

    Examples:
        >>> table = torch.tensor([[2, 0, 1], [1, 2, -1]], dtype=torch.int32)
        >>> ids = torch.tensor([[0], [0], [1]], dtype=torch.int32)
        >>> torch_npu.npu_moe_update_expert(ids, table, balance_mode=1)[0].tolist()
        [[0], [1], [2]]
    """
    if settings.current().product != "A3":
        rule = "npu_moe_update_expert is of A3 (aclnnMoeUpdateExpert)"
        raise ArgumentError("product", settings.current().product, rule, "Use EPBuffer's eplb_table.")
    device = settings.host().device
    by = _mode(balance_mode)
    ids = contiguous(
        "expert_ids", expert_ids, shape=("BS", "K"), dtypes=(torch.int32, torch.int64), device=device
    )
    table = contiguous("eplb_table", eplb_table, shape=("N", "F"), dtypes=(torch.int32,), device=device)
    (num_tokens, topk), (num_logical, num_columns) = ids.shape, table.shape
    rank, ranks = check_integer("local_rank_id", local_rank_id), check_integer("world_size", world_size)
    _check_sizes(topk, num_logical, num_columns, by, rank, ranks)
    arguments: dict[str, Tensor | int] = {}
    prunes = expert_scales is not None or pruning_threshold is not None
    if prunes:
        scales = contiguous(
            "expert_scales", expert_scales, shape=(num_tokens, topk), dtypes=FLOATS, device=device
        )
        threshold = _threshold(pruning_threshold, topk, device)
        arguments |= {"scales": scales.to(torch.float32), "threshold": threshold}
    if active_mask is not None:
        if not prunes:
            rule = "it comes with expert_scales and pruning_threshold"
            raise ArgumentError("active_mask", "given", rule, "Pass them, or no mask.", code=NULL_ARGUMENT)
        mask = contiguous(
            "active_mask", active_mask, shape=(num_tokens,), dtypes=(torch.bool,), device=device
        )
        arguments["mask"] = mask.view(torch.int8)
    mapped = torch.empty(ids.shape, dtype=torch.int32, device=device)
    kept = torch.ones(ids.shape, dtype=torch.bool, device=device)
    arguments |= {
        "topk_idx": mapped,
        "kept": kept.view(torch.int8),
        "num_physical": ANY_EXPERT,
        "rank": rank,
        "world_size": ranks,
    }
    chosen = settings.current()
    with _lock:
        launches = _launches.get(chosen)
        if launches is None:
            backend = chosen.make_backend()
            launches = _launches[chosen] = LocalLaunches(backend, backend.num_blocks(backend.cores()))
        masked, plain = active_mask is not None, by == "token"
        kernel, given = mapping_kernel(ids, table, by, chosen.backend, prunes, masked, plain)
        launches.run(kernel, {**given, **arguments})
    return mapped.to(ids.dtype), kept


def _mode(value: object) -> ReplicaBy:
    """What chooses among replicas.

    Raises:
        ArgumentError: it is no mode.
    """
    number = check_integer("balance_mode", value)
    if number not in MODES:
        rule = "it is 0, by local_rank_id, or 1, by token"
        raise ArgumentError("balance_mode", number, rule, "Pass one of them.")
    return MODES[number]


def _threshold(value: Tensor | None, topk: int, device: torch.device) -> Tensor:
    """A threshold, (K,).

    Raises:
        ArgumentError: it is missing, or not as it must be.
    """
    error = not_plain_error("pruning_threshold", value, device)
    if error is not None:
        raise error
    shape = (1, topk) if value is not None and value.dim() == 2 else (topk,)
    checked = contiguous("pruning_threshold", value, shape=shape, dtypes=(torch.float32,), device=device)
    return checked.view(topk)


def _check_sizes(
    topk: int, num_logical: int, num_columns: int, by: ReplicaBy, rank: int, world_size: int
) -> None:
    """Checks sizes by the rules of the original's host (aclnnMoeUpdateExpert).

    Raises:
        ArgumentError: one is broken.
    """
    if not 1 <= num_logical <= MAX_LOGICAL:
        rule = f"it has a row for each of 1 to {MAX_LOGICAL} logical experts"
        raise ArgumentError("eplb_table", f"of {num_logical} rows", rule, "Pass the table of one layer.")
    most = min(MAX_TOPK, num_logical)
    if not 1 <= topk <= most:
        rule = f"a token has 1 to {most} experts: at most {MAX_TOPK}, and as many as there are"
        raise ArgumentError("expert_ids", f"of {topk} columns", rule, "Route to fewer.")
    if by == "rank":
        if not LEAST_WORLD_SIZE <= world_size <= MAX_WORLD_SIZE:
            rule = f"with balance_mode 0 it is {LEAST_WORLD_SIZE} to {MAX_WORLD_SIZE}"
            raise ArgumentError("world_size", world_size, rule, "Pass the ranks of the group.")
        if not 0 <= rank < world_size:
            rule = f"with balance_mode 0 it is 0 to {world_size - 1}"
            raise ArgumentError("local_rank_id", rank, rule, "Pass this rank's number in the group.")
    most = (world_size if by == "rank" else MAX_WORLD_SIZE) + 1
    if not 2 <= num_columns <= most:
        rule = f"it has a column for the count, and at most one for each rank: 2 to {most}"
        raise ArgumentError("eplb_table", f"of {num_columns} columns", rule, "Leave columns of -1 out.")
