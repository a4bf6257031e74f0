"""Load balance: rows of each expert, which rank holds which replicas, and the tables by which rows find them.

It stands above `EPBuffer`, and the rest of `moe_triton` does not import it. Placements are plain torch and
NumPy, on the CPU: every rank that calls for one with the same arguments gets the same.
"""

from moe_triton.balance.adopted import AdoptedWeights, adopt
from moe_triton.balance.counts import ExpertCounts, ExpertLoad
from moe_triton.balance.eplb_communicator import EplbCommunicator
from moe_triton.balance.files import (
    read_expert_location,
    read_expert_map,
    read_logical_count,
    write_expert_location,
    write_expert_map,
    write_logical_count,
)
from moe_triton.balance.loads import rank_loads, rank_loads_by_source, skew
from moe_triton.balance.mover import Mover
from moe_triton.balance.placement import Placement
from moe_triton.balance.rebalance import Rebalanced, rebalance_experts
from moe_triton.balance.refine import Move, MovePrice, Refinement, refine_placement
from moe_triton.balance.training import RedundantExperts, allocate_redundant_experts
from moe_triton.balance.weights import ExpertWeights, allocate

__all__ = [
    "AdoptedWeights",
    "EplbCommunicator",
    "ExpertCounts",
    "ExpertLoad",
    "ExpertWeights",
    "Move",
    "MovePrice",
    "Mover",
    "Placement",
    "Rebalanced",
    "RedundantExperts",
    "Refinement",
    "adopt",
    "allocate",
    "allocate_redundant_experts",
    "rank_loads",
    "rank_loads_by_source",
    "read_expert_location",
    "read_expert_map",
    "read_logical_count",
    "rebalance_experts",
    "refine_placement",
    "skew",
    "write_expert_location",
    "write_expert_map",
    "write_logical_count",
]
