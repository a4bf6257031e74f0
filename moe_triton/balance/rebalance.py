"""Where replicas go when a placement is made anew, from loads alone: as DeepSeek's EPLB does it.

Symbols: L layers, E experts of the model (logical), R replicas of them (physical: slots on ranks).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.balance.arguments import MOST_ELEMENTS, Ints, check_at_least, check_at_most, check_weight
from moe_triton.core.errors import ArgumentError

MOST_REPLICAS = 1 << 16
"""Of a layer: they are added and dealt one by one, and more than are on any cluster would take minutes."""

Float32s = npt.NDArray[np.float32]


class Rebalanced(NamedTuple):
    """What `rebalance_experts` returns.

    Attributes:
        phy2log: (L, R) int64, the expert in each slot.
        log2phy: (L, E, X) int64, the slots of each expert in the order in which its replicas were added, and
            -1 behind them; X is the most replicas that any expert has in any layer.
        logcnt: (L, E) int64, how many replicas each expert has.
    """

    phy2log: torch.Tensor
    log2phy: torch.Tensor
    logcnt: torch.Tensor


def rebalance_experts(
    weight: torch.Tensor | npt.NDArray[np.generic],
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
) -> Rebalanced:
    """Decides how many replicas each expert gets, and which rank holds which, whatever it was before.

    The algorithm is that of deepseek-ai/EPLB (``eplb.py`` at commit d52c72d), and so are names and order of
    the arguments. Where `num_groups` is a multiple of `num_nodes`, groups of experts are dealt to servers,
    then replicas are added inside each server, then they are dealt to its ranks. Otherwise there is one
    server with one group. A replica more goes to the expert whose replicas have most to do. Whatever is
    dealt goes from the heaviest to the lightest, each to where the sum is least and there is room.

    All of it is done in float32. Of two that are equal the one with the lower index comes first, in sorting
    too: where EPLB sorts 17 or more items, some of them equal, as replicas of an expert always are, its own
    order is not defined. The load of a
    group is added up in float64, one expert after the other, and then rounded: the same on every processor,
    and the same as EPLB's for counts whose sum is below 2**24.

    An expert may be on a rank twice, as in EPLB: `moe_triton.balance.refine_placement` repairs that.

    Args:
        weight: (L, E), any real dtype, on any device: the load of each expert, such as the rows that it got.
        num_replicas: R: at least E, and a multiple of `num_gpus`.
        num_groups: of experts with neighbouring numbers, as group-limited routing has them.
        num_nodes: servers.
        num_gpus: ranks that hold routed experts, on all servers.

    Returns:
        Where each replica is: slot p is on rank ``p // (R / num_gpus)`` of those ranks.

    Raises:
        ArgumentError: a load is negative or not finite, a layer's loads have a sum that float32 cannot hold,
            or the numbers do not divide each other.
    """
    loads: Float32s = check_weight("weight", weight, np.float32).astype(np.float32, copy=False)
    num_layers, num_experts = loads.shape
    num_replicas = check_at_least("num_replicas", num_replicas, 1)
    num_groups = check_at_least("num_groups", num_groups, 1)
    num_nodes = check_at_least("num_nodes", num_nodes, 1)
    num_gpus = check_at_least("num_gpus", num_gpus, 1)
    _check_sums(loads)
    if num_replicas < num_experts:
        rule = f"there are {num_experts} experts, and each needs a replica"
        raise ArgumentError("num_replicas", num_replicas, rule, f"Pass {num_experts} or more.")
    most = min(MOST_REPLICAS, MOST_ELEMENTS // num_layers)
    check_at_most("num_replicas", num_replicas, most, f"replicas in each of {num_layers} layers")
    check_at_most("num_gpus", num_gpus, num_replicas, "ranks that hold a replica each")
    _check_multiple("num_replicas", num_replicas, "num_gpus", num_gpus)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    else:
        _check_multiple("num_gpus", num_gpus, "num_nodes", num_nodes)
        if num_experts % num_groups:
            rule = f"it must divide the {num_experts} experts"
            raise ArgumentError("num_groups", num_groups, rule, "Pass the model's groups, or 1.")

    inside = _grouped(loads, num_groups, num_nodes)
    own = np.take_along_axis(loads, inside, axis=1).reshape(num_layers * num_nodes, -1)
    replicas = _replicate(own, num_replicas // num_nodes)
    shares: Float32s = np.divide(own, replicas.counts.astype(np.float32))
    pack, place = _pack(np.take_along_axis(shares, replicas.expert, axis=1), num_gpus // num_nodes)
    slots = _inverse(pack * (num_replicas // num_gpus) + place)

    first = np.arange(num_nodes).reshape(1, -1, 1) * (num_experts // num_nodes)
    expert = np.take_along_axis(replicas.expert, slots, axis=1).reshape(num_layers, num_nodes, -1) + first
    phy2log = np.take_along_axis(inside, expert.reshape(num_layers, -1), axis=1)
    number = np.take_along_axis(replicas.number, slots, axis=1).reshape(num_layers, -1)
    logcnt = np.take_along_axis(replicas.counts.reshape(num_layers, -1), _inverse(inside), axis=1)

    log2phy = np.full((num_layers, num_experts, int(logcnt.max())), -1, dtype=np.int64)
    log2phy[np.arange(num_layers)[:, None], phy2log, number] = np.arange(num_replicas)
    return Rebalanced(torch.from_numpy(phy2log), torch.from_numpy(log2phy), torch.from_numpy(logcnt))


def _check_sums(loads: Float32s) -> None:
    """The sum of a layer, and so that of any rank, is finite: a full rank's is set to infinity."""
    sums = loads.sum(axis=1, dtype=np.float64)
    layer = int(sums.argmax())
    if sums[layer] > np.finfo(np.float32).max / 2:
        rule = f"the loads of a layer must have a sum of at most {np.finfo(np.float32).max / 2:.3g}"
        found = f"{sums[layer]:.3g} in all in layer {layer}"
        raise ArgumentError("weight", found, rule, "Divide all loads by the same number.")


def _check_multiple(name: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        rule = f"it must be a multiple of {of}, {divisor}"
        nearest = (value // divisor + 1) * divisor
        raise ArgumentError(name, value, rule, f"Pass {nearest}, or another {of}.")


def _grouped(loads: Float32s, num_groups: int, num_nodes: int) -> Ints:
    """The experts in the order of servers, and of places in them: (L, E)."""
    num_layers, num_experts = loads.shape
    group_size = num_experts // num_groups
    sums = np.zeros((num_layers, num_groups))
    for member in range(group_size):  # in this order on every processor, which a sum of NumPy's is not
        sums += loads[:, member::group_size]
    pack, place = _pack(sums.astype(np.float32), num_nodes)
    order = _inverse(pack * (num_groups // num_nodes) + place)
    experts: Ints = order[:, :, None] * group_size + np.arange(group_size)
    return experts.reshape(num_layers, -1)


class _Replicas(NamedTuple):
    """Replicas of n experts, of many layers or servers at once.

    Attributes:
        expert: (rows, R), that each is of: first one of each expert, then those that were added.
        number: (rows, R), how many there were of that expert before.
        counts: (rows, n), of each expert.
    """

    expert: Ints
    number: Ints
    counts: Ints


def _replicate(loads: Float32s, num_replicas: int) -> _Replicas:
    """Adds replicas one by one, each of the expert whose replicas have most to do."""
    num_rows, num_experts = loads.shape
    rows = np.arange(num_rows)
    expert = np.tile(np.arange(num_replicas), (num_rows, 1))
    number = np.zeros_like(expert)
    count = np.ones((num_rows, num_experts), dtype=np.int64)
    shares = loads.copy()
    for replica in range(num_experts, num_replicas):
        heaviest = shares.argmax(axis=1)
        expert[:, replica] = heaviest
        number[:, replica] = count[rows, heaviest]
        count[rows, heaviest] += 1
        shares[rows, heaviest] = loads[rows, heaviest] / count[rows, heaviest].astype(np.float32)
    return _Replicas(expert, number, count)


def _pack(loads: Float32s, num_packs: int) -> tuple[Ints, Ints]:
    """Deals items to packs of the same size: the pack of each item, and its place there, (rows, n) both."""
    num_rows, num_items = loads.shape
    size = num_items // num_packs
    if size == 1:  # each has one, whichever; EPLB leaves them where they are
        return np.tile(np.arange(num_items), (num_rows, 1)), np.zeros((num_rows, num_items), dtype=np.int64)
    rows = np.arange(num_rows)
    order = np.argsort(-loads, axis=1, kind="stable")
    pack, place = np.empty_like(order), np.empty_like(order)
    sums = np.zeros((num_rows, num_packs), dtype=np.float32)
    filled = np.zeros((num_rows, num_packs), dtype=np.int64)
    for item in order.T:
        lightest = sums.argmin(axis=1)
        pack[rows, item] = lightest
        place[rows, item] = filled[rows, lightest]
        filled[rows, lightest] += 1
        is_full = filled[rows, lightest] == size
        sums[rows, lightest] += np.where(is_full, np.float32(np.inf), loads[rows, item])
    return pack, place


def _inverse(permutations: Ints) -> Ints:
    """Of each row of numbers from 0 on, where each number stands."""
    found = np.empty_like(permutations)
    np.put_along_axis(found, permutations, np.arange(permutations.shape[1])[None, :], axis=1)
    return found
