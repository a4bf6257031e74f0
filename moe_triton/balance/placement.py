"""`Placement`: which expert each slot of each rank holds, and the tables by which rows find it.

Symbols: L layers, E experts of the model (logical), P slots on ranks (physical experts), X the most replicas
that any expert has in any layer, F columns of a table.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from functools import cached_property

import numpy as np
import torch

from moe_triton.balance.arguments import MOST_ELEMENTS, check_at_least, check_at_most, check_ids, check_layer
from moe_triton.core.checks import CPU, check_flag, check_tensor, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError

ROUTING_ROWS = 1024
"""Rows of vllm-ascend's table (EXPERT_REPLICA_ROUTING_TABLE_NUM_ROWS in its ops/fused_moe/eplb.py)."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert each slot holds, in every layer. Two are equal where all their fields are.

    Slot p is on rank ``num_shared_ranks + p // slots_per_rank``: ranks of shared experts come first, and hold
    no routed one. None of the tensors may be written to.

    Attributes:
        phy2log: (L, P) int64, the expert in each slot.
        num_experts: E: every one of them has a slot in every layer.
        num_ranks: of the group, those of shared experts among them.
        num_shared_ranks: that hold shared experts.

    Args:
        phy2log: a tensor on any device, or an array, of any integer dtype. It is copied.
        num_experts: see above.
        num_ranks: see above. P is a multiple of those that hold routed experts.
        num_shared_ranks: see above.
        allow_repeats: whether an expert may be on a rank twice, as `rebalance_experts` has it at times: such
            a replica takes memory and relieves nobody.

    Raises:
        ArgumentError: an id is out of range, an expert has no slot in a layer, or is on a rank twice where
            that is not allowed; or P does not fit the ranks. It names layer, expert, slot and rank.
    """

    phy2log: torch.Tensor
    num_experts: int
    num_ranks: int
    num_shared_ranks: int = 0
    allow_repeats: InitVar[bool] = True

    def __post_init__(self, allow_repeats: bool) -> None:
        ids = check_ids("phy2log", self.phy2log)
        num_experts = check_at_least("num_experts", self.num_experts, 1)
        num_ranks = check_at_least("num_ranks", self.num_ranks, 1)
        check_at_most("num_ranks", num_ranks, MOST_ELEMENTS // len(ids), "ranks")
        num_shared_ranks = check_at_least("num_shared_ranks", self.num_shared_ranks, 0)
        if num_shared_ranks >= num_ranks:
            rule = f"of {num_ranks} ranks at least one must hold routed experts"
            raise ArgumentError("num_shared_ranks", num_shared_ranks, rule, "Use fewer shared ranks.")
        if ids.shape[1] % (num_ranks - num_shared_ranks):
            rule = f"the {num_ranks - num_shared_ranks} ranks of routed experts must have as many slots each"
            found = f"of {ids.shape[1]} slots"
            raise ArgumentError("phy2log", found, rule, "Pass a multiple of those ranks, or other ranks.")
        if num_experts > ids.shape[1]:
            rule = f"phy2log has {ids.shape[1]} slots, and every expert must have one"
            raise ArgumentError("num_experts", num_experts, rule, "Pass the model's experts, or more slots.")
        for name, value in (
            ("phy2log", torch.from_numpy(ids)),
            ("num_experts", num_experts),
            ("num_ranks", num_ranks),
            ("num_shared_ranks", num_shared_ranks),
        ):
            object.__setattr__(self, name, value)
        self._check_experts()
        if not check_flag("allow_repeats", allow_repeats) and (repeats := self.repeats()):
            layer, rank, expert = repeats[0]
            found = f"a placement with expert {expert} twice on rank {rank} in layer {layer}"
            remedy = "Pass it to refine_placement, or allow_repeats=True."
            raise ArgumentError("phy2log", found, "no expert may be on a rank twice", remedy)

    def _check_experts(self) -> None:
        ids = self.phy2log.numpy()
        wrong = (ids < 0) | (ids >= self.num_experts)
        if wrong.any():
            layer, slot = map(int, np.argwhere(wrong)[0])
            found = f"{ids[layer, slot]} in slot {slot} of layer {layer}, on rank {self.rank_of(slot)}"
            rule = f"experts are numbered 0 to {self.num_experts - 1}"
            raise ArgumentError("phy2log", found, rule, "Pass the expert that each slot holds.")
        absent = self.logcnt.numpy() == 0
        if absent.any():
            layer, expert = map(int, np.argwhere(absent)[0])
            found = f"a placement without expert {expert} in layer {layer}"
            rule = "every expert must have a slot in every layer"
            raise ArgumentError("phy2log", found, rule, "Give it the slot of an expert that has several.")

    @staticmethod
    def initial(
        num_layers: int, num_experts: int, num_replicas: int, num_ranks: int, num_shared_ranks: int = 0
    ) -> Placement:
        """The placement before anything is known of loads: all experts, and then 0, 1, ... again.

        That is what vLLM and sglang begin with.

        Args:
            num_layers: L.
            num_experts: E.
            num_replicas: P, at least E.
            num_ranks: of the group.
            num_shared_ranks: that hold shared experts.

        Raises:
            ArgumentError: a number is too small, or P does not fit the ranks.
        """
        num_experts = check_at_least("num_experts", num_experts, 1)
        num_replicas = check_at_least("num_replicas", num_replicas, num_experts)
        check_at_most("num_replicas", num_replicas, MOST_ELEMENTS, "replicas of a layer")
        num_layers = check_at_least("num_layers", num_layers, 1)
        check_at_most("num_layers", num_layers, MOST_ELEMENTS // num_replicas, "layers of so many replicas")
        layers = np.tile(np.arange(num_replicas) % num_experts, (num_layers, 1))
        return Placement(torch.from_numpy(layers), num_experts, num_ranks, num_shared_ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self._numbers == other._numbers and torch.equal(self.phy2log, other.phy2log)

    def __hash__(self) -> int:
        return hash((self._numbers, self.phy2log.numpy().tobytes()))

    @property
    def _numbers(self) -> tuple[int, ...]:
        return (*self.phy2log.shape, self.num_experts, self.num_ranks, self.num_shared_ranks)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.phy2log.shape[0]

    @property
    def num_replicas(self) -> int:
        """P."""
        return self.phy2log.shape[1]

    @property
    def slots_per_rank(self) -> int:
        """Of each rank that holds routed experts."""
        return self.num_replicas // (self.num_ranks - self.num_shared_ranks)

    def rank_of(self, slot: int) -> int:
        """The rank that a slot is on."""
        return self.num_shared_ranks + slot // self.slots_per_rank

    @cached_property
    def ranks(self) -> torch.Tensor:
        """(P,) int64, the rank that each slot is on."""
        return self.num_shared_ranks + torch.arange(self.num_replicas) // self.slots_per_rank

    @cached_property
    def logcnt(self) -> torch.Tensor:
        """(L, E) int64, how many replicas each expert has."""
        counts = np.zeros((self.num_layers, self.num_experts), dtype=np.int64)
        np.add.at(counts, (np.arange(self.num_layers)[:, None], self.phy2log.numpy()), 1)
        return torch.from_numpy(counts)

    @cached_property
    def log2phy(self) -> torch.Tensor:
        """(L, E, X) int64, the slots of each expert, ascending, and -1 behind them."""
        experts, counts = self.phy2log.numpy(), self.logcnt.numpy()
        slots = np.argsort(experts, axis=1, kind="stable")  # by expert, and of each expert ascending
        in_order = np.take_along_axis(experts, slots, axis=1)
        first = np.cumsum(counts, axis=1) - counts
        number = np.arange(self.num_replicas) - np.take_along_axis(first, in_order, axis=1)
        found = np.full((self.num_layers, self.num_experts, int(counts.max())), -1, dtype=np.int64)
        found[np.arange(self.num_layers)[:, None], in_order, number] = slots
        return torch.from_numpy(found)

    def repeats(self) -> list[tuple[int, int, int]]:
        """Layer, rank and expert of each expert that is on a rank more than once, ascending."""
        held = self.phy2log.numpy().reshape(self.num_layers, -1, self.slots_per_rank)
        in_order = np.sort(held, axis=2)
        again = np.argwhere(in_order[:, :, 1:] == in_order[:, :, :-1])
        found = {
            (int(layer), self.num_shared_ranks + int(rank), int(in_order[layer, rank, place]))
            for layer, rank, place in again
        }
        return sorted(found)

    def table(
        self, layer: int, num_columns: int | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The table by which a layer's rows choose a replica: torch_npu's ``npu_moe_update_expert`` takes it.

        Args:
            layer: of those that are placed.
            num_columns: F; None for one more than the most replicas of an expert in this layer. Tables of
                several layers have the same shape where it is given, and no later one needs another kernel.
            mask: (num_ranks,) int32 on any device, as `moe_triton.EPBuffer.query_mask` has it: 1 for a rank
                whose slots are left out, 0 for others. The table is as large as without it. None: all slots
                are in it.

        Returns:
            (E, F) int32: how many replicas an expert has, then their slots, ascending, then -1.

        Raises:
            ArgumentError: there is no such layer, the table has too few columns for it, or an expert has
                replicas on masked ranks only.
        """
        layer = check_layer(layer, self.num_layers)
        counts = self.logcnt[layer]
        least = int(counts.max()) + 1
        columns = least if num_columns is None else check_at_least("num_columns", num_columns, 2)
        if columns < least:
            rule = f"expert {int(counts.argmax())} has {least - 1} replicas in layer {layer}"
            raise ArgumentError("num_columns", columns, rule, f"Pass {least} or more.")
        check_at_most("num_columns", columns, MOST_ELEMENTS // self.num_experts, "columns of so many experts")
        counts, slots = self._left(layer, mask)
        table = torch.full((self.num_experts, columns), -1, dtype=torch.int32)
        table[:, 0] = counts
        table[:, 1:least] = slots[:, : least - 1]
        return table

    def routing_table(
        self, layer: int, ep_rank: int, num_rows: int = ROUTING_ROWS, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The slot for each expert and token on a rank, as vllm-ascend's ``expert_replica_routing_table``.

        A rank's token t takes row ``t % num_rows``. The replica is number
        ``(row + ep_rank + expert) % count`` of the expert's, in ascending order of slots (vllm-ascend,
        ``ops/fused_moe/eplb.py``).

        Args:
            layer: of those that are placed.
            ep_rank: the rank whose tokens they are.
            num_rows: of the table.
            mask: see `table`.

        Returns:
            (num_rows, E) int32, slots.

        Raises:
            ArgumentError: there is no such layer or rank, or an expert has replicas on masked ranks only.
        """
        layer = check_layer(layer, self.num_layers)
        rank = check_at_least("ep_rank", ep_rank, 0)
        if rank >= self.num_ranks:
            rule = f"ranks are 0 to {self.num_ranks - 1}"
            raise ArgumentError("ep_rank", rank, rule, "Pass this process's rank in the group.")
        num_rows = check_at_least("num_rows", num_rows, 1)
        check_at_most("num_rows", num_rows, MOST_ELEMENTS // self.num_experts, "rows of so many experts")
        rows = torch.arange(num_rows)[:, None]
        experts = torch.arange(self.num_experts)
        counts, slots = self._left(layer, mask)
        replica = (rows + rank + experts) % counts
        return slots[experts, replica].to(torch.int32)

    def _left(self, layer: int, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """How many replicas of each expert are on ranks that take part, (E,), and their slots, (E, X).

        Raises:
            ArgumentError: an expert has none there, or it is no mask of these ranks.
        """
        slots = self.log2phy[layer]
        if mask is None:
            return self.logcnt[layer], slots
        device = mask.device if isinstance(mask, torch.Tensor) else CPU
        checked = check_tensor("mask", mask, shape=(self.num_ranks,), dtypes=(torch.int32,), device=device)
        masked = checked.cpu()
        if not ((masked == 0) | (masked == 1)).all():
            rule = "it must have 1 for ranks that are masked, and 0 for others"
            raise ArgumentError("mask", masked.tolist(), rule, "Pass what query_mask returns.")
        is_left = (slots >= 0) & (masked[self.ranks[slots]] == 0)
        counts = is_left.sum(dim=1)
        if not counts.all():
            expert = int(counts.argmin())
            ranks = sorted(set(self.ranks[slots[expert][slots[expert] >= 0]].tolist()))
            found = f"1 for rank(s) {ranks}, the only ones with expert {expert} in layer {layer}"
            remedy = "Keep two replicas of each expert on different ranks, or load it elsewhere first."
            raise ArgumentError("mask", found, "every expert must have a replica left", remedy)
        # Those that are left first, in the order in which they were.
        in_order = (~is_left).to(torch.int8).sort(dim=1, stable=True).indices
        return counts, torch.where(is_left, slots, -1).gather(1, in_order)


def check_placement(value: object) -> Placement:
    """Checks that a value is a placement, and returns it.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, Placement):
        return value
    rule, remedy = "it must be a Placement", "Pass moe_triton.balance.Placement(phy2log, ...)."
    raise ArgumentError("placement", shown(value), rule, remedy, code=INVALID_ARGUMENT)
