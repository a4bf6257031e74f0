"""Load balance: which rank holds which replicas of which expert, and the tables by which rows find them.

It stands beside the rest of `moe_triton`, which does not import it: plain torch and NumPy, on the CPU. Every
rank of a group that calls it with the same arguments gets the same result.
"""

from moe_triton.balance.files import (
    read_expert_location,
    read_expert_map,
    read_logical_count,
    write_expert_location,
    write_expert_map,
    write_logical_count,
)
from moe_triton.balance.loads import rank_loads, rank_loads_by_source, skew
from moe_triton.balance.placement import Placement
from moe_triton.balance.rebalance import Rebalanced, rebalance_experts
from moe_triton.balance.refine import Move, MovePrice, Refinement, refine_placement

__all__ = [
    "Move",
    "MovePrice",
    "Placement",
    "Rebalanced",
    "Refinement",
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
