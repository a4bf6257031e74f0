"""What concerns a whole group of ranks: a barrier, and a reset of its windows."""

from __future__ import annotations

from torch import Tensor

from moe_triton.torch_npu_ops.calls.group import run_barrier, run_reset
from moe_triton.torch_npu_ops.fakes import fake_barrier, fake_reset
from moe_triton.torch_npu_ops.operators import operator


@operator(fake_barrier, mutates=("x_ref",))
def npu_distribute_barrier(
    x_ref: Tensor,
    group: str,
    world_size: int,
    *,
    time_out: Tensor | None = None,
    elastic_info: Tensor | None = None,
) -> None:
    """The barrier as an operator, which cannot return what it was given. See `_npu_distribute_barrier`."""
    run_barrier(x_ref, group, world_size, time_out, elastic_info)


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
    """
    npu_distribute_barrier(x_ref, group, world_size, time_out=time_out, elastic_info=elastic_info)
    return x_ref


@operator(fake_reset)
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
    """
    run_reset(elastic_info, group_ep, ep_world_size, need_sync)
