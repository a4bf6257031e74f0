"""How many rows each rank gets under a placement.

Symbols: L layers, E experts of the model, W ranks of the group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.balance.arguments import Floats, Ints, check_at_least, check_weight
from moe_triton.balance.placement import Placement, check_placement
from moe_triton.core.checks import check_choice
from moe_triton.core.errors import ArgumentError
from moe_triton.core.replicas import COUNTED_BY

Loads = torch.Tensor | npt.NDArray[np.generic]


def rank_loads(placement: Placement, weight: Loads, mode: str = "token") -> torch.Tensor:
    """The load of each rank.

    Args:
        placement: where replicas are.
        weight: (L, E), the load of each expert.
        mode: who has which replica. "token": the rows of every rank go to all replicas alike, so that each
            gets as much. "rank": a rank sends all its rows for an expert to one replica, see
            `rank_loads_by_source`, and every rank has as many of them.

    Returns:
        (L, W) float64; 0 for ranks of shared experts.

    Raises:
        ArgumentError: loads are negative, not finite, or of other layers or experts, or there is no such
            mode.
    """
    loads = check_loads(placement, weight)
    if check_choice("mode", mode, COUNTED_BY) == "token":
        shares = loads / placement.logcnt.numpy()
        return _by_rank(placement, np.take_along_axis(shares, placement.phy2log.numpy(), axis=1))
    slots = placement.log2phy.numpy()
    counts, replicas = placement.logcnt.numpy()[:, :, None], np.arange(slots.shape[2])
    rows = loads[:, :, None] * senders_of(replicas, counts, placement.num_ranks) / placement.num_ranks
    by_slot = np.empty((placement.num_layers, placement.num_replicas))
    layers, *_ = np.nonzero(slots >= 0)
    by_slot[layers, slots[slots >= 0]] = rows[slots >= 0]
    return _by_rank(placement, by_slot)


def most_senders(counts: Ints | np.int64, num_ranks: int) -> Ints:
    """How many ranks send to the first of an expert's replicas, and at most to another one.

    Args:
        counts: how many replicas the expert has.
        num_ranks: of the group.
    """
    most: Ints = -(-num_ranks // counts)
    return most


def senders_of(replicas: Ints, counts: Ints | np.int64, num_ranks: int) -> Ints:
    """How many ranks send to a replica, where each sends to number ``rank // most_senders(...)``.

    Args:
        replicas: numbers of an expert's replicas, in ascending order of slots.
        counts: how many the expert has.
        num_ranks: of the group.
    """
    most = most_senders(counts, num_ranks)
    senders: Ints = np.clip(num_ranks - replicas * most, 0, most)
    return senders


def rank_loads_by_source(placement: Placement, counts: Loads) -> torch.Tensor:
    """The rows of each rank where the rank that sends decides which replica they go to.

    All rows of rank s for an expert with n replicas go to number ``s // ceil(W / n)``, in ascending order of
    slots: ``npu_moe_update_expert`` with ``balance_mode=0`` (torch_npu; W is its ``world_size``). Where n
    does not divide W, replicas get different numbers of ranks; of 5 replicas and 16 ranks the last gets none.

    Args:
        placement: where replicas are.
        counts: (L, W, E), the rows that each rank has for each expert.

    Returns:
        (L, W) float64.

    Raises:
        ArgumentError: counts are negative, not finite, or of other layers, ranks or experts.
    """
    placement = check_placement(placement)
    rows = check_weight("counts", counts, np.float64, num_dims=3)
    wanted = (placement.num_layers, placement.num_ranks, placement.num_experts)
    _check_shape("counts", rows, wanted)
    _check_sums("counts", rows, 1)
    most = most_senders(placement.logcnt.numpy(), placement.num_ranks)
    replica = np.arange(placement.num_ranks)[None, :, None] // most[:, None, :]
    layers = np.arange(placement.num_layers)[:, None, None]
    slots = placement.log2phy.numpy()[layers, np.arange(placement.num_experts), replica]
    size = placement.num_layers * placement.num_replicas
    by_slot = np.bincount((layers * placement.num_replicas + slots).ravel(), rows.ravel(), minlength=size)
    return _by_rank(placement, by_slot.reshape(placement.num_layers, -1))


def skew(loads: torch.Tensor, num_shared_ranks: int = 0) -> torch.Tensor:
    """The load of the most loaded rank over the mean of all that hold routed experts.

    Args:
        loads: (L, W), see `rank_loads`.
        num_shared_ranks: the first ones, which hold none.

    Returns:
        (L,) float64; 1 for a layer without loads.

    Raises:
        ArgumentError: there are no such ranks.
    """
    num_shared_ranks = check_at_least("num_shared_ranks", num_shared_ranks, 0)
    found = check_weight("loads", loads, np.float64)[:, num_shared_ranks:]
    if not found.size:
        rule = f"there are {loads.shape[1]} ranks in all"
        raise ArgumentError("num_shared_ranks", num_shared_ranks, rule, "Pass those of the placement.")
    _check_sums("loads", found, 1)
    mean = found.mean(axis=1)
    return torch.from_numpy(np.where(mean > 0, found.max(axis=1) / np.where(mean > 0, mean, 1.0), 1.0))


def check_loads(placement: Placement, weight: Loads) -> npt.NDArray[np.float64]:
    """Checks a placement, and loads that are to be those of its experts: (L, E), as float64.

    Raises:
        ArgumentError: they are not.
    """
    placement = check_placement(placement)
    loads: npt.NDArray[np.float64] = check_weight("weight", weight, np.float64).astype(np.float64, copy=False)
    _check_shape("weight", loads, (placement.num_layers, placement.num_experts))
    _check_sums("weight", loads, placement.num_ranks)
    return loads


def _check_sums(name: str, loads: Floats, factor: int) -> None:
    """The sum of a layer, and so many times that, is finite: what a rank gets is no more."""
    most = float(np.finfo(np.float64).max) / 2 / factor
    with np.errstate(over="ignore"):
        sums = loads.reshape(len(loads), -1).sum(axis=1)
    layer = int(sums.argmax())
    if sums[layer] > most:
        rule = f"the loads of a layer must have a sum of at most {most:.3g}"
        found = f"{sums[layer]:.3g} in all in layer {layer}"
        raise ArgumentError(name, found, rule, "Divide all loads by the same number.")


def _check_shape(name: str, loads: Floats, wanted: tuple[int, ...]) -> None:
    if loads.shape != wanted:
        rule = f"it must be {wanted}, as the placement is"
        raise ArgumentError(name, f"of shape {loads.shape}", rule, "Pass loads of the same experts.")


def _by_rank(placement: Placement, by_slot: npt.NDArray[Any]) -> torch.Tensor:
    """Sums over the slots of each rank, one after the other: the same on every processor."""
    loads = np.zeros((placement.num_layers, placement.num_ranks))
    held = by_slot.reshape(placement.num_layers, -1, placement.slots_per_rank)
    for slot in range(placement.slots_per_rank):
        loads[:, placement.num_shared_ranks :] += held[:, :, slot]
    return torch.from_numpy(loads)
