"""What chooses among the replicas of an expert."""

from __future__ import annotations

from typing import Literal, get_args

CountedBy = Literal["rank", "token"]
"""Those by which the loads of ranks follow from how many rows each expert gets."""
ReplicaBy = Literal[CountedBy, "server", "row"]
"""The words of eplb_mode (`moe_triton.EPBuffer.dispatch`)."""
NO_EXPERT = 1 << 24
"""What an entry becomes that has no replica: more than there can be experts, and a whole number in fp32."""
REPLICA_BY: tuple[ReplicaBy, ...] = get_args(ReplicaBy)
COUNTED_BY: tuple[CountedBy, ...] = get_args(CountedBy)
