"""What concerns a whole group of ranks: a barrier, and a reset of its windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_triton.core.checks import check_integer, check_tensor, not_plain_error
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import RANKS_PER_SERVER
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.torch_npu_ops import registry, servers, settings
from moe_triton.torch_npu_ops.declared import check_group
from moe_triton.torch_npu_ops.elastic import members_of, timeout_of, words_of
from moe_triton.torch_npu_ops.operators import operator

MAX_TIMEOUT_US = 2**31 - 1
LEAST_HIDDEN = 32


def _fake(*args: Any, **options: Any) -> None:
    """As operators these return nothing."""


@operator(_fake, mutates=("x_ref",))
def npu_distribute_barrier(
    x_ref: Tensor,
    group: str,
    world_size: int,
    *,
    time_out: Tensor | None = None,
    elastic_info: Tensor | None = None,
) -> None:
    """The barrier as an operator, which cannot return what it was given. See `_npu_distribute_barrier`."""
    if not isinstance(x_ref, Tensor):
        check_tensor("x_ref", x_ref, shape=(), dtypes=())
    _check_plain(time_out=time_out, elastic_info=elastic_info)
    world_size = check_integer("world_size", world_size)
    members = _members(group, "group", elastic_info, world_size=world_size)
    timeout_us = None
    if time_out is not None:
        timeout_us = timeout_of(time_out)
        if not 0 < timeout_us <= MAX_TIMEOUT_US:
            rule = "it is a positive number of microseconds"
            raise ArgumentError("time_out", timeout_us, rule, "Pass None for the default.")
    try:
        try:
            waiting = registry.waiting_communicator(_place(group, world_size, members))
        except registry.StalePlanError:  # the hosts of its ranks are known by now
            waiting = registry.waiting_communicator(_place(group, world_size, members))
    except ArgumentError as error:
        raise error.renamed({"num_ranks": "world_size"}) from None
    waiting.barrier(timeout_us)


def _place(group: str, world_size: int, members: tuple[int, ...] | None) -> registry.Place:
    """A window of its own, of the least size: a barrier has no shapes."""
    num_ranks, given = len(members) if members else world_size, settings.current().ranks_per_server
    fields = servers.fields_of_servers(registry.group_of(group, "group"), world_size, given)
    topology = settings.current().topology(world_size, of_hosts=fields[RANKS_PER_SERVER])
    fields[RANKS_PER_SERVER] = (topology.left(members) if members else topology).sizes
    least = Config(num_ranks, 1, LEAST_HIDDEN, 1, num_ranks, relaxed=True, **fields)
    return registry.Place(group, "", least, members)


def _npu_distribute_barrier(
    x_ref: Tensor,
    group: str,
    world_size: int,
    *,
    time_out: Tensor | None = None,
    elastic_info: Tensor | None = None,
) -> Tensor:
    """Waits until every rank of a group is here.

    Args:
        x_ref: any tensor. It is neither read nor written: what uses it afterwards is ordered behind the
            barrier in a traced graph.
        group: name of the group.
        world_size: its ranks.
        time_out: (1,) int32, microseconds that the wait may take, or None for `configure`'s.
        elastic_info: (4 + 2 * EP,) int32: which ranks are left.

    Returns:
        x_ref.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.
        CommunicationTimeoutError: some ranks did not come; it names them.

    Examples:
        >>> x = torch_npu._npu_distribute_barrier(x, *group[:2])
    """
    npu_distribute_barrier(x_ref, group, world_size, time_out=time_out, elastic_info=elastic_info)
    return x_ref


@operator(_fake)
def npu_moe_distribute_buffer_reset(
    elastic_info: Tensor, group_ep: str, ep_world_size: int, *, need_sync: int = 0
) -> None:
    """Gives up a group's windows, on every rank that is left; the next call makes new ones.

    It is what makes a group usable again after ranks were lost or a wait timed out. torch_npu has no such
    function; the arguments are those of the C interface (aclnnMoeDistributeBufferReset).

    Args:
        elastic_info: (4 + 2 * EP,) int32: which ranks are left; with 0 in front, all of them.
        group_ep: name of the expert-parallel group.
        ep_world_size: EP.
        need_sync: 1 to wait for the other ranks that are left.

    Raises:
        ArgumentError: an argument breaks a rule; it has the status code.
        CommunicationTimeoutError: with need_sync, some ranks did not come; it names them.

    Examples:
        >>> everyone = torch.zeros(8, dtype=torch.int32)
        >>> torch_npu.npu_moe_distribute_buffer_reset(everyone, *group[:2])
    """
    if elastic_info is None:
        check_tensor("elastic_info", elastic_info, shape=(), dtypes=())
    _check_plain(elastic_info=elastic_info)
    ep_world_size = check_integer("ep_world_size", ep_world_size)
    if check_integer("need_sync", need_sync) not in (0, 1):
        raise ArgumentError("need_sync", need_sync, "it must be 0 or 1", "Pass 1 to wait for the others.")
    members = _members(group_ep, "group_ep", elastic_info, ep_world_size=ep_world_size)
    registry.release(group_ep)
    if need_sync:
        group = registry.group_of(group_ep, "group_ep")
        meeting = Meeting(group, settings.current().timeout_s, members, "elastic_info")
        meeting.exchange({}, "buffer reset")


def _check_plain(**tensors: Tensor | None) -> None:
    """Checks that what is given of tensors that the host reads has memory.

    Raises:
        ArgumentError: it has none, or is no tensor (161002).
    """
    for name, value in tensors.items():
        error = None if value is None else not_plain_error(name, value)
        if error is not None:
            raise error


def _members(
    name: str, argument: str, elastic_info: Tensor | None, **world_size: int
) -> tuple[int, ...] | None:
    """The ranks that are left, None for all, with the group's name and size checked."""
    group = registry.check_membership(check_group(argument, name), argument, **world_size)
    words = None if elastic_info is None else words_of(elastic_info)
    members = members_of(words, group.size())
    if members is not None and group.rank() not in members:
        rule = "callers are in it"
        raise ArgumentError("elastic_info", f"one without rank {group.rank()}", rule, "Rebuild the table.")
    return members
