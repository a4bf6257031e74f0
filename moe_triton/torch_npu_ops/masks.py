"""Masks of a group that is known by its name: they hold for all of its windows (docs/from-torch-npu.md).

`moe_triton.runtime.masks` has those of one window.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from moe_triton.core.checks import check_flag, check_integer, check_tensor, contiguous, not_plain_error
from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.runtime.communicator import Communicator
from moe_triton.torch_npu_ops import registry, settings
from moe_triton.torch_npu_ops.elastic import members_of, words_of

_IDS = torch.int32, torch.int64


def update_mask(name: str, rank: int, masked: bool) -> None:
    """Masks a rank of a group: nothing is sent to it and nothing awaited from it until it is un-masked.

    It holds for every window of the group, halves, barriers and calls with elastic_info included. Entries of
    expert_ids for its experts count as -1: their weight is missing from the sum, and nothing is renormalised;
    `lost` says which. Its rows count as none. With "hierarchy" what it would have passed on is lost as well.

    Every rank that goes on masks the same ones before the same call; or, from another thread, while a call
    waits for them: the wait ends, and the call goes on without them. While a rank is masked no new window
    that it would be part of can be made: run every shape once before.

    Args:
        name: of the expert-parallel group (`group_name`).
        rank: of the group, as ep_rank_id counts; with elastic_info, too, its original number.
        masked: whether it takes no part. NIXL EP's update_mask_buffer and DeepEP's low-latency mask have the
            same polarity; FlashInfer's mask says who is active.

    Raises:
        ArgumentError: no group, or no rank of it; this rank itself, one of shared experts, or a group with
            tensor parallelism.
        BufferStateError: calls have run since the rank was masked, or one is under way, so that it cannot be
            un-masked; a setup has no teardown yet; or a graph has captured calls. Nothing changes.
        CommunicationTimeoutError: on an NPU, of an earlier call; that window is then broken. Call again.

    Examples:
        >>> name, other = torch_npu.group_name(), 1 - dist.get_rank()
        >>> torch_npu.update_mask(name, other, True)
        >>> torch_npu.query_mask(name).tolist().count(1)
        1
        >>> torch_npu.update_mask(name, other, False)
    """
    group = registry.group_of(name, "name")
    rank, masked = _rank_of(group, rank), check_flag("masked", masked)
    if rank == group.rank() and masked:
        rule = "it is this rank itself, which cannot go on without itself"
        raise ArgumentError("rank", rank, rule, "Mask it on the other ranks.")
    if registry.is_tensor_parallel(name):
        rule = "of tensor-parallel ranks one cannot go on without the other"
        raise ArgumentError("name", name, rule, "Mask ranks of groups without tp_world_size=2.")
    if masked != (rank in registry.masked_ranks(name)):
        _change(name, [rank], masked)


def query_mask(name: str, out: Tensor | None = None) -> Tensor:
    """Which ranks of a group are masked.

    Args:
        name: of the expert-parallel group.
        out: (EP,) int32, which is written and returned; None for a new tensor.

    Returns:
        (EP,) int32 on the back end's device: 1 for a masked rank, 0 for one that takes part.

    Raises:
        ArgumentError: no group; or another shape, dtype or device of ``out``.

    Examples:
        >>> torch_npu.query_mask(torch_npu.group_name()).tolist()
        [0, 0]
    """
    size, device = registry.group_of(name, "name").size(), settings.host().device
    masked = registry.masked_ranks(name)
    said = torch.tensor([int(rank in masked) for rank in range(size)], dtype=torch.int32, device="cpu")
    if out is None:
        return said.to(device)
    check_tensor("out", out, shape=(size,), dtypes=(torch.int32,), device=device)
    return out.copy_(said)


def query_fault(name: str) -> tuple[bool, Tensor]:
    """Whether ranks of a group have been masked or un-masked since the last query, and which are masked now.

    It is what vLLM's managers of an all-to-all that outlives faults ask after each step.

    Args:
        name: of the expert-parallel group.

    Returns:
        Whether that has changed, and `query_mask`.

    Raises:
        ArgumentError: no group.

    Examples:
        >>> torch_npu.query_fault(torch_npu.group_name())[0]
        False
    """
    registry.group_of(name, "name")
    return registry.have_masks_changed(name), query_mask(name)


def clean_mask(name: str) -> None:
    """Un-masks all ranks of a group.

    Args:
        name: of the expert-parallel group.

    Raises:
        ArgumentError: no group.
        BufferStateError: as `update_mask`; all of them stay masked then.

    Examples:
        >>> torch_npu.clean_mask(torch_npu.group_name())
    """
    registry.group_of(name, "name")
    _change(name, registry.masked_ranks(name), False)


def lost(
    name: str,
    expert_ids: Tensor,
    x_active_mask: Tensor | None = None,
    *,
    elastic_info: Tensor | None = None,
    moe_expert_num: int | None = None,
) -> Tensor:
    """Which results a combine by these ids is without, as ranks are masked now.

    It asks no other rank. Ask between a dispatch and its combine, or after it, while the masks are the same.

    Args:
        name: of the expert-parallel group.
        expert_ids: (BS, K) int32 or int64, as dispatched. Ids that name no expert are not lost.
        x_active_mask: (BS,) or (BS, K) bool, as dispatched. What it leaves out is not lost.
        elastic_info: (4 + 2 * EP,) int32, as in the call; ids are then of experts that are left.
        moe_expert_num: M, needed where calls of the group differ in it; elastic_info says it by itself.

    Returns:
        (BS, K + S) bool on the back end's device. The S columns of shared experts are False: their ranks
        cannot be masked.

    Raises:
        ArgumentError: no group; an argument is not as above; or no call of the group had such ids, or several
            did that differ in whom experts are on.
        BufferStateError: no call has run in this group, or all its windows are broken.

    Examples:
        >>> outputs = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, *group)
        >>> torch_npu.lost(group[0], expert_ids).any().item()
        False
    """
    group, device = registry.group_of(name, "name"), settings.host().device
    ids = contiguous("expert_ids", expert_ids, shape=("BS", "K"), dtypes=_IDS, device=device)
    for argument, tensor in (("elastic_info", elastic_info), ("x_active_mask", x_active_mask)):
        if tensor is not None and (error := not_plain_error(argument, tensor)):
            raise error
    members = None if elastic_info is None else members_of(words_of(elastic_info), group.size())
    if moe_expert_num is not None:
        moe_expert_num = check_integer("moe_expert_num", moe_expert_num)
    made = _alike(name, members, ids.shape[1], moe_expert_num)
    made.participants.learn_told()
    # What else an id may be, like -5 where a mask leaves it out, is no mark.
    missing = made.masks.marked(ids) != ids
    if x_active_mask is not None:
        shape = ids.shape if x_active_mask.dim() == 2 else ids.shape[:1]
        mask = contiguous("x_active_mask", x_active_mask, shape=shape, dtypes=(torch.bool,), device=device)
        missing &= mask.view(len(ids), -1)
    return torch.cat([missing, missing.new_zeros(len(ids), made.config.num_shared_experts)], 1)


def _rank_of(group: dist.ProcessGroup, rank: int) -> int:
    """A rank of a group.

    Raises:
        ArgumentError: there is none of that number.
    """
    rank = check_integer("rank", rank)
    if not 0 <= rank < group.size():
        raise ArgumentError("rank", rank, f"it must be 0 to {group.size() - 1}", "Pass a rank of the group.")
    return rank


def _change(name: str, ranks: Collection[int], masked: bool) -> None:
    """Masks or un-masks ranks in every window of a group, or in none.

    Raises:
        ArgumentError, BufferStateError: see `update_mask`.
    """
    if not masked:
        registry.check_unmaskable(name, ranks)
    # One that is broken refuses every call, until the group's windows are given back.
    usable = [(place, made) for place, made in registry.windows(name) if made.is_whole]
    changes = [
        (rank, number, made)
        for place, made in usable
        for rank in ranks
        if (number := place.number_of(rank)) is not None
    ]
    for rank, number, made in changes:
        _check_change(name, made, rank, number, masked)
    before = registry.windows_of(name)
    # What fails from here on is an earlier call, which the next try does not find any more.
    for _, number, made in changes:
        made.participants.update_mask(number, masked)
    registry.note_masked(name, ranks, masked, before)


def _check_change(name: str, made: Communicator, rank: int, number: int, masked: bool) -> None:
    """Checks that a rank, of this number in a window, can be masked there, or un-masked.

    Raises:
        ArgumentError, BufferStateError: see `update_mask`.
    """
    recapture = "Call npu_moe_distribute_buffer_reset, pass elastic_info, and capture anew."
    end = "Call {}_teardown before masks change.".format
    made.participants.check_quiet(f"the group {name!r}", end, recapture)
    try:
        made.masks.check(number, masked)
    except ArgumentError as error:  # of shared experts
        raise ArgumentError("rank", rank, error.rule, "Leave it out by elastic_info.") from None
    if made.is_busy and not masked:
        raise BufferStateError(
            f"a call of the group {name!r} is under way, and rank {rank} has missed it. Un-mask between "
            f"calls."
        )


def _alike(name: str, members: tuple[int, ...] | None, topk: int, num_experts: int | None) -> Communicator:
    """A window whose ranks have the experts that ids name, as all have that the call may have been in.

    Raises:
        ArgumentError: they differ, or the call was in none.
        BufferStateError: there is none.
    """
    found = [made for place, made in registry.windows(name) if place.members == members and made.is_whole]
    if not found:
        raise BufferStateError(
            f"no call of the group {name!r} has run, or none with this elastic_info, or its windows are "
            f"broken: nobody knows which ranks experts are on. Ask after such a call."
        )
    columns = sorted({made.config.num_topk for made in found})
    if topk not in columns:
        rule = f"tokens have had {columns} experts in calls of the group {name!r}"
        raise ArgumentError("expert_ids", f"of {topk} columns", rule, "Pass the ids of a call.")
    found = [made for made in found if made.config.num_topk == topk]
    numbers = sorted({made.config.num_experts for made in found})
    if members is None and num_experts not in ([None, *numbers] if len(numbers) == 1 else numbers):
        rule = f"calls of the group {name!r} have had {numbers}"
        raise ArgumentError("moe_expert_num", num_experts, rule, "Pass that of the call.")
    if members is None and num_experts is not None:
        found = [made for made in found if made.config.num_experts == num_experts]
    if len(set(map(_kind, found))) > 1:
        rule = "its calls differ in comm_alg or shared experts, and so in what is lost"
        raise ArgumentError("name", name, rule, "Make calls of one kind in a group, after release.")
    return found[0]


def _kind(made: Communicator) -> tuple[object, ...]:
    """What else decides which entries are lost, and how many columns say so."""
    config = made.config
    servers = config.topology.sizes if made.scheme.relays else ()
    return config.num_shared_experts, config.num_shared_ranks, servers
