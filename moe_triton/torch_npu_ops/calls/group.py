"""Calls that concern a whole group: waiting for it, and giving its windows up."""

from __future__ import annotations

import torch

from moe_triton.core.checks import check_integer
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.torch_npu_ops import registry, settings
from moe_triton.torch_npu_ops.calls import combine, dispatch
from moe_triton.torch_npu_ops.calls.common import check_plain, check_required
from moe_triton.torch_npu_ops.declared import check_group
from moe_triton.torch_npu_ops.plans.elastic import members_of, timeout_of, words_of

Tensor = torch.Tensor

MAX_TIMEOUT_US = 2**31 - 1
LEAST_HIDDEN = 32


def run_barrier(
    x_ref: Tensor, group: str, world_size: int, time_out: Tensor | None, elastic_info: Tensor | None
) -> None:
    """Waits for every rank of a group that is left."""
    check_required(x_ref=x_ref)
    check_plain([("time_out", time_out), ("elastic_info", elastic_info)])
    world_size = check_integer("world_size", world_size)
    members = _members(group, "group", world_size, "world_size", elastic_info)
    timeout_us = None
    if time_out is not None:
        timeout_us = timeout_of(time_out)
        if not 0 < timeout_us <= MAX_TIMEOUT_US:
            raise ArgumentError(
                "time_out",
                timeout_us,
                "it is a positive number of microseconds",
                "Pass None for the default.",
            )
    # A window of its own, of the least size: a barrier has no shapes.
    num_ranks = len(members) if members else world_size
    least = Config(num_ranks, 1, LEAST_HIDDEN, 1, num_ranks, relaxed=True)
    place = registry.Place(group, "", least, members)
    try:
        waiting = registry.communicator(place)
    except ArgumentError as error:
        raise error.renamed({"num_ranks": "world_size"}) from None
    waiting.barrier(timeout_us)


def run_reset(elastic_info: Tensor, group_ep: str, ep_world_size: int, need_sync: int) -> None:
    """Gives a group's windows up, on the ranks that are left, and waits for them if asked to."""
    check_required(elastic_info=elastic_info)
    check_plain([("elastic_info", elastic_info)])
    ep_world_size = check_integer("ep_world_size", ep_world_size)
    if check_integer("need_sync", need_sync) not in (0, 1):
        raise ArgumentError("need_sync", need_sync, "it must be 0 or 1", "Pass 1 to wait for the others.")
    members = _members(group_ep, "group_ep", ep_world_size, "ep_world_size", elastic_info)
    registry.release(group_ep)
    dispatch.clear_plans()
    combine.clear_plans()
    if need_sync:
        group = registry.group_of(group_ep, "group_ep")
        Meeting(group, settings.current().timeout_s, members).exchange({}, "buffer reset")


def _members(
    group: str, group_argument: str, world_size: int, size_argument: str, elastic_info: Tensor | None
) -> tuple[int, ...] | None:
    """The ranks that are left, None for all, with the group's name and size checked."""
    group = check_group(group_argument, group)
    found = registry.group_of(group, group_argument)
    if found.size() != world_size:
        raise ArgumentError(
            size_argument,
            world_size,
            f"it is {found.size()} in the group {group!r}",
            f"Pass {size_argument}={found.size()}.",
        )
    words = None if elastic_info is None else words_of(elastic_info)
    members = members_of(words, world_size)
    if members is not None and found.rank() not in members:
        raise ArgumentError(
            "elastic_info", f"one without rank {found.rank()}", "callers are in it", "Rebuild the table."
        )
    return members
