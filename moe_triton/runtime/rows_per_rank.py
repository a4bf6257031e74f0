"""Dispatches that send a token once to each rank of its experts (``do_expand=False``): what does not go with
them, and what their combine takes.

Each check raises `ArgumentError` before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_triton.core.checks import check_tensor, shown
from moe_triton.core.errors import ArgumentError
from moe_triton.core.handle import DispatchHandle
from moe_triton.runtime.communicator import Communicator

EXPANDED = "Pass do_expand=True"
# Arguments of a dispatch that go with rows of single experts only.
_OF_EXPERTS = "smooth_scales", "layout", "expert_alignment", "do_zero_padding"


def check(communicator: Communicator, special: tuple[int, int, int], asked: Mapping[str, Any]) -> None:
    """Checks that a dispatch can send one row to each rank.

    Args:
        communicator: which calls.
        special: numbers of the buffer's zero, copy and constant experts.
        asked: arguments of the call, by name; None where they are not given.

    Raises:
        ArgumentError: its buffer has experts or a scheme that need a row for each expert, or such an argument
            is given.
    """
    config = communicator.config
    _, num_copy, num_const = special
    rules = (
        (config.num_shared_experts, "the buffer has shared experts, which get rows of their own"),
        (
            num_copy,
            "the buffer has copy experts, whose weights are summed with the results of single experts",
        ),
        (num_const, "the buffer has constant experts, which are summed with the results of single experts"),
        (
            communicator.context.exchange_rank is not None,
            "the buffer has a tp_group, whose ranks exchange rows of single experts",
        ),
    )
    for is_given, rule in rules:
        if is_given:
            raise ArgumentError("do_expand", False, rule, f"{EXPANDED}, or make a buffer without them.")
    if communicator.layout.row_tables is None:
        rule = f"comm_alg={config.scheme!r} sends a row to each expert"
        schemes = "'fullmesh'" if config.product == "A2" else "'fullmesh_v1' or 'fullmesh_v2'"
        raise ArgumentError(
            "do_expand", False, rule, f"{EXPANDED}, or make a buffer with comm_alg={schemes}."
        )
    for name in _OF_EXPERTS:
        if asked.get(name) is not None:
            rule = "with do_expand=False a row is for all experts of a rank, and they are for single ones"
            raise ArgumentError(name, "given", rule, f"Leave {name} out, or pass do_expand=True.")


def check_combine(handle: DispatchHandle, topk_weights: object) -> None:
    """Checks what a combine is given besides results, and what kernels do not read of its handle.

    Raises:
        ArgumentError: weights, which its results already have; or something that dispatch has not left.
    """
    if topk_weights is not None:
        rule = "after do_expand=False each result is a sum over a rank's experts, already weighted"
        remedy = "Leave it out, and weigh results by handle.local_topk_weights."
        raise ArgumentError("topk_weights", "given", rule, remedy)
    results_idx, mask = handle.results_idx, handle.active_mask
    if not isinstance(results_idx, torch.Tensor) or results_idx.dim() != 2:
        rule = "a handle is passed as dispatch made it"
        raise ArgumentError("handle.results_idx", shown(results_idx), rule, "Pass output.handle.")
    shape, device = tuple(results_idx.shape), results_idx.device
    check_tensor("handle.topk_idx", handle.topk_idx, shape=shape, dtypes=(torch.int32,), device=device)
    if mask is not None:
        shape = shape[: mask.dim()] if isinstance(mask, torch.Tensor) and mask.dim() == 1 else shape
        check_tensor("handle.active_mask", mask, shape=shape, dtypes=(torch.bool,), device=device)


def capacity_of(handle: DispatchHandle, communicator: Communicator) -> int:
    """Rows that the dispatch of a handle could deliver at most."""
    if handle.results_idx is None:
        return communicator.capacity
    return communicator.context.capacity_per_rank
