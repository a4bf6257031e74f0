"""What `moe_triton.balance` is compared with: the same by plain loops, and loads to try it with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.balance import Placement

Float32s = Sequence[np.float32]


def zipf(
    num_layers: int, num_experts: int, exponent: float, seed: int, rows: int = 1_000_000
) -> npt.NDArray[np.int64]:
    """(L, E), rows of experts whose popularity falls by Zipf's law, in another order in each layer."""
    random = np.random.default_rng(seed)
    popularity = np.arange(1, num_experts + 1) ** -exponent
    popularity /= popularity.sum()
    return np.stack([random.multinomial(rows, random.permutation(popularity)) for _ in range(num_layers)])


def pack(loads: Float32s, num_packs: int) -> list[tuple[int, int]]:
    """The pack and the place in it of each item: heaviest first, each to the lightest pack with room."""
    size = len(loads) // num_packs
    if size == 1:
        return [(item, 0) for item in range(len(loads))]
    sums, filled = [np.float32(0)] * num_packs, [0] * num_packs
    found = [(0, 0)] * len(loads)
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        lightest = min((p for p in range(num_packs) if filled[p] < size), key=lambda p: sums[p])
        found[item] = lightest, filled[lightest]
        sums[lightest] += loads[item]
        filled[lightest] += 1
    return found


def rebalance_layer(
    loads: Float32s, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[list[int], list[list[int]]]:
    """The expert in each slot, and the slots of each expert, of one layer."""
    num_experts = len(loads)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    size = num_experts // num_groups
    sums = [np.float32(sum(map(float, loads[g * size : (g + 1) * size]))) for g in range(num_groups)]
    places = pack(sums, num_nodes)
    phy2log: list[int] = [-1] * num_replicas
    slots: dict[tuple[int, int], int] = {}
    for node in range(num_nodes):
        groups = sorted((place, group) for group, (p, place) in enumerate(places) if p == node)
        experts = [group * size + member for _, group in groups for member in range(size)]
        count = dict.fromkeys(experts, 1)
        replicas = [(expert, 0) for expert in experts]
        while len(replicas) < num_replicas // num_nodes:
            heaviest = max(experts, key=lambda expert: loads[expert] / np.float32(count[expert]))
            replicas.append((heaviest, count[heaviest]))
            count[heaviest] += 1
        shares = [loads[expert] / np.float32(count[expert]) for expert, _ in replicas]
        first, per_rank = node * num_replicas // num_nodes, num_replicas // num_gpus
        for replica, (rank, place) in zip(replicas, pack(shares, num_gpus // num_nodes), strict=True):
            slot = first + rank * per_rank + place
            phy2log[slot] = replica[0]
            slots[replica] = slot
    by_expert = [[slots[e, n] for n in range(num_replicas) if (e, n) in slots] for e in range(num_experts)]
    return phy2log, by_expert


def loads_of_ranks(placement: Placement, weight: npt.NDArray[np.generic]) -> list[list[float]]:
    """An expert's load split evenly among its replicas, for each layer and rank."""
    found = [[0.0] * placement.num_ranks for _ in range(placement.num_layers)]
    for layer, experts in enumerate(placement.phy2log.tolist()):
        for slot, expert in enumerate(experts):
            found[layer][placement.rank_of(slot)] += float(weight[layer, expert]) / experts.count(expert)
    return found


def on_ranks(placement: Placement, layer: int) -> list[list[int]]:
    """The experts on each rank, slot by slot."""
    experts: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    for slot, expert in enumerate(placement.phy2log[layer].tolist()):
        experts[placement.rank_of(slot)].append(expert)
    return experts


def random_placement(
    random: np.random.Generator,
    num_layers: int,
    num_experts: int,
    slots_per_rank: int,
    num_ranks: int,
    num_shared_ranks: int = 0,
) -> Placement:
    """Every expert somewhere, and any of them in the other slots."""
    num_slots = slots_per_rank * (num_ranks - num_shared_ranks)
    more = random.integers(num_experts, size=(num_layers, num_slots - num_experts))
    layers = [random.permutation(np.concatenate([np.arange(num_experts), row])) for row in more]
    return Placement(torch.from_numpy(np.stack(layers)), num_experts, num_ranks, num_shared_ranks)
