"""A placement made better from where it is: as few experts as possible move, and only where that pays.

Symbols: L layers, E experts of the model, P slots on ranks, W ranks of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.balance.arguments import Ints, check_at_least, check_at_most
from moe_triton.balance.layer_search import LayerSearch, Units
from moe_triton.balance.loads import Loads, check_loads, rank_loads
from moe_triton.balance.placement import Placement
from moe_triton.core.checks import check_choice, check_number, check_positive
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import REMEDY, RanksPerServer
from moe_triton.core.replicas import COUNTED_BY
from moe_triton.core.topology import Topology, check_ranks_per_server, fits

ENOUGH_SKEW = 1.02
"""Better balance is not worth a move: loads change more than that from one count to the next."""

MOST_EXPERT_BYTES = 1 << 48
_AS_MEASURED = "Pass seconds, bytes per second and steps as they are measured."


class Move(NamedTuple):
    """A copy of an expert's weights, from a slot of the old placement to one of the new.

    Attributes:
        layer: of the expert.
        expert: its number in the model.
        source: the slot that holds it: on the same server where one does, and where several do on the rank
            that has sent least so far.
        target: the slot that is to hold it, on a rank that does not yet.
    """

    layer: int
    expert: int
    source: int
    target: int


@dataclass(frozen=True)
class MovePrice:
    """What a move costs and what it brings, in seconds.

    A layer takes as long as its most loaded rank: each row less there saves `seconds_per_row` in every step.
    Layers are moved one after the other, each as long as the rank that receives most takes.

    Attributes:
        seconds_per_row: of a rank's experts in one layer, all that a row costs: movement and computation.
        bytes_per_second: at which a rank receives weights.
        num_steps: for which the placement is expected to stay.
        counted_steps: over which the loads were counted.

    Raises:
        ArgumentError: one of them is not a positive number, or what a row saves is not finite.
    """

    seconds_per_row: float
    bytes_per_second: float
    num_steps: float
    counted_steps: float = 1.0

    def __post_init__(self) -> None:
        for name in ("seconds_per_row", "bytes_per_second", "num_steps", "counted_steps"):
            value = check_number(name, getattr(self, name))
            check_positive(name, value)
            object.__setattr__(self, name, value)
        saved = self.seconds_per_row * self.num_steps / self.counted_steps
        if not isfinite(saved):
            rule = "what a row saves, seconds_per_row * num_steps / counted_steps, must be a finite time"
            raise ArgumentError("num_steps", self.num_steps, rule, _AS_MEASURED)


@dataclass(frozen=True, eq=False)
class Refinement:
    """What `refine_placement` found.

    Attributes:
        placement: the new one; the old one where nothing is worth a move.
        moved: what has to be copied, by layer and target; nothing else has.
        moved_bytes: of all of it.
        moved_bytes_between_servers: of what is copied from one server to another.
        loads_before: (L, W) float64, the load of each rank as it was, see `rank_loads`.
        loads_after: (L, W) float64, as it is to be.
        saved_s: predicted seconds that are saved while the placement stays, without those of the move; None
            without a price.
        move_s: predicted seconds of the move; None without a price.
    """

    placement: Placement
    moved: tuple[Move, ...]
    moved_bytes: int
    moved_bytes_between_servers: int
    loads_before: torch.Tensor
    loads_after: torch.Tensor
    saved_s: float | None
    move_s: float | None


def refine_placement(
    placement: Placement,
    weight: Loads,
    *,
    expert_bytes: int = 1,
    max_moved_bytes: int | None = None,
    price: MovePrice | None = None,
    enough_skew: float = ENOUGH_SKEW,
    mode: str = "token",
    ranks_per_server: RanksPerServer = None,
) -> Refinement:
    """Balances loads by few changes to a placement.

    An expert that is on a rank twice is taken off it once. Then, layer by layer, the most loaded rank is
    relieved again and again: one of its experts gets a replica elsewhere, in the slot of an expert that needs
    its own less, or changes places with a lighter one; first whichever relieves more for a copy. How far that
    is followed in each layer is chosen for all layers together: what relieves more for a byte comes first,
    until the bytes are used up. What stays keeps its slot, and every expert keeps at least one.

    With a price each layer goes as far as it saves most, the move's own time taken off: if nothing pays, the
    old placement is returned, with whatever experts it has twice on a rank. Without one all that helps is
    done, and repairs whether or not they do, both as far as `max_moved_bytes` reaches.

    Of 5 replicas in mode "rank" on 16 ranks one would get nothing: there the search goes by what the most
    loaded replica of an expert gets, so that numbers of replicas are chosen that divide the ranks well.

    The same arguments give the same result on every rank and processor.

    Args:
        placement: as it is.
        weight: (L, E), any real dtype, the load of each expert, such as the rows that it got.
        expert_bytes: of an expert's weights in a layer. Each copy on a rank that did not hold the expert
            counts once.
        max_moved_bytes: that may be copied in all layers and to all ranks; None for any number.
        price: weighs what is saved against what is moved; None for whatever helps.
        enough_skew: a layer whose most loaded rank has at most so much of the mean is left alone.
        mode: who has which replica, "token" or "rank": see `rank_loads`.
        ranks_per_server: how many ranks a server has, or a list of them; None for one server.

    Returns:
        The new placement, what is to be copied for it, and what it comes to.

    Raises:
        ArgumentError: loads are negative, not finite, or of other layers or experts than the placement; a
            rank has more slots than there are experts; a setting is out of range; or by the price a time is
            not finite.
    """
    loads = check_loads(placement, weight)
    expert_bytes = check_at_least("expert_bytes", expert_bytes, 1)
    check_at_most("expert_bytes", expert_bytes, MOST_EXPERT_BYTES, "bytes of an expert")
    most = None
    if max_moved_bytes is not None:
        most = check_at_least("max_moved_bytes", max_moved_bytes, 0) // expert_bytes
    enough_skew = check_number("enough_skew", enough_skew)
    if enough_skew < 1:
        raise ArgumentError("enough_skew", enough_skew, "no rank has less than the mean", "Pass 1 or more.")
    if price is not None and not isinstance(price, MovePrice):
        given, rule = f"a {type(price).__name__}", "it must be a MovePrice or None"
        raise ArgumentError("price", given, rule, "Pass moe_triton.balance.MovePrice(...).")
    senders = placement.num_ranks if check_choice("mode", mode, COUNTED_BY) == "rank" else 0
    topology = _topology(placement, ranks_per_server)
    if placement.slots_per_rank > placement.num_experts:
        rule = f"a rank of it has {placement.slots_per_rank} slots for {placement.num_experts} experts"
        remedy = "Place fewer replicas: no expert can be on a rank twice."
        raise ArgumentError("placement", "one that repeats experts", rule, remedy)

    units = Units.of(loads)
    old = placement.phy2log.numpy()
    num_ranks = placement.num_ranks - placement.num_shared_ranks
    searches = [
        LayerSearch(layer, num_ranks, loads_of, enough_skew, senders)
        for layer, loads_of in zip(old, units.loads, strict=True)
    ]
    paths = [_Path.of(search, units, expert_bytes, price) for search in searches]
    if price is not None and not all(np.isfinite([*path.saved, *path.spent]).all() for path in paths):
        rule = "what moves save and what they take must be finite times"
        raise ArgumentError("price", price, rule, _AS_MEASURED)
    ends = _chosen(paths, most)
    new = [_after(old[n], search.slots_at(ends[n]), num_ranks) for n, search in enumerate(searches)]
    found = replace(placement, phy2log=torch.from_numpy(np.stack(new)), allow_repeats=True)
    if found == placement:
        found = placement
    moved = _moves(placement, found, topology)
    between = sum(
        topology.servers[placement.rank_of(move.source)] != topology.servers[placement.rank_of(move.target)]
        for move in moved
    )
    at_ends = list(zip(paths, ends, strict=True))
    return Refinement(
        found,
        moved,
        expert_bytes * len(moved),
        expert_bytes * between,
        rank_loads(placement, loads, mode),
        rank_loads(found, loads, mode),
        None if price is None else float(sum(path.saved[end] for path, end in at_ends)),
        None if price is None else float(sum(path.spent[end] for path, end in at_ends)),
    )


def _topology(placement: Placement, ranks_per_server: RanksPerServer) -> Topology:
    given = check_ranks_per_server(ranks_per_server)
    if not fits(placement.num_ranks, given):
        rule = f"it must be of {placement.num_ranks} ranks in all"
        raise ArgumentError("ranks_per_server", given, rule, REMEDY)
    return Topology.of(placement.num_ranks, given, 0)


# How far each layer goes.


class _Path(NamedTuple):
    """What the states of a layer's search are worth, and what they cost.

    Attributes:
        num_repairs: states that have to be passed whatever they are worth.
        moved: copies on ranks that did not hold them.
        saved, spent: seconds with a price; otherwise rows of the most loaded rank, and nothing.
    """

    num_repairs: int
    moved: Ints
    saved: npt.NDArray[np.float64]
    spent: npt.NDArray[np.float64]

    @staticmethod
    def of(search: LayerSearch, units: Units, expert_bytes: int, price: MovePrice | None) -> _Path:
        """That of a layer."""
        worst = np.array([state.worst for state in search.states])
        moved = np.array([state.moved for state in search.states])
        rows = np.ldexp((worst[0] - worst).astype(np.float64), -units.exponent)
        if price is None:
            return _Path(search.num_repairs, moved, rows, np.zeros(len(rows)))
        received = np.array([state.received for state in search.states])
        with np.errstate(over="ignore", invalid="ignore"):  # the caller is told
            saved = rows * price.seconds_per_row * price.num_steps / price.counted_steps
            spent = received * float(expert_bytes) / price.bytes_per_second
        return _Path(0, moved, saved, spent)

    @property
    def net(self) -> npt.NDArray[np.float64]:
        """What is left of what is saved."""
        return self.saved - self.spent

    def best(self) -> int:
        """The state that is worth most, and of these the one that moves least."""
        net = self.net[self.num_repairs :]
        return self.num_repairs + int(np.lexsort((self.moved[self.num_repairs :], -net))[0])

    def next(self, state: int, most: int) -> tuple[float, int]:
        """Where to go on from a state with so many copies more: what that is worth for a copy, and the state.

        Worth 0 if nothing helps.
        """
        copies, gains = self.moved - self.moved[state], self.net - self.net[state]
        is_possible = (gains > 0) & (copies <= most)
        is_possible[: self.num_repairs] = False
        worth = np.where(is_possible, gains / np.maximum(copies, 0.5), 0.0)
        return float(worth.max()), int(worth.argmax())


def _chosen(paths: Sequence[_Path], most: int | None) -> list[int]:
    """The state of each layer; with a limit, those that are worth most for a copy."""
    if most is None:
        return [path.best() for path in paths]
    ends = []
    for path in paths:
        reached = np.flatnonzero(path.moved[: path.num_repairs + 1] <= most)
        ends.append(int(reached[-1]))
        most -= int(path.moved[ends[-1]])
    going_on = [n for n, path in enumerate(paths) if ends[n] >= path.num_repairs]
    best = {n: paths[n].next(ends[n], most) for n in going_on}
    while best:
        layer = max(best, key=lambda n: (best[n][0], -n))
        worth, state = best[layer]
        if not worth > 0:
            break
        copies = int(paths[layer].moved[state] - paths[layer].moved[ends[layer]])
        if copies <= most:
            ends[layer] = state
            most -= copies
        # Of the others only what no longer fits is looked at again, when its turn comes.
        again = going_on if copies < 0 else [layer]
        best |= {n: paths[n].next(ends[n], most) for n in again}
    return ends


# What moves.


def _after(old: Ints, changed: Ints, num_ranks: int) -> Ints:
    """The same experts on each rank of a layer, those that it held before where they were."""
    size = len(old) // num_ranks
    new = np.empty_like(old)
    for first in range(0, len(old), size):
        left = Counter(changed[first : first + size].tolist())
        free = []
        for slot in range(first, first + size):
            expert = int(old[slot])
            if left[expert] > 0:
                left[expert] -= 1
                new[slot] = expert
            else:
                free.append(slot)
        new[free] = sorted(left.elements())
    return new


def _moves(before: Placement, after: Placement, topology: Topology) -> tuple[Move, ...]:
    """What has to be copied, and from where."""
    old, new = before.phy2log.numpy(), after.phy2log.numpy()
    sent: Counter[int] = Counter()
    moves = []
    for layer, target in np.argwhere(old != new).tolist():
        expert, rank = int(new[layer, target]), before.rank_of(target)
        slots = before.log2phy[layer, expert]

        def cost(slot: int, rank: int = rank) -> tuple[bool, int, int]:
            source = before.rank_of(slot)
            return topology.servers[source] != topology.servers[rank], sent[source], slot

        source = min(slots[slots >= 0].tolist(), key=cost)
        sent[before.rank_of(source)] += 1
        moves.append(Move(layer, expert, source, target))
    return tuple(moves)
