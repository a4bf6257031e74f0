"""What chooses among the replicas of an expert."""

from __future__ import annotations

from typing import Literal, get_args

ReplicaBy = Literal["rank", "token", "server", "row"]
"""The words of eplb_mode (`moe_triton.EPBuffer.dispatch`)."""
REPLICA_BY: tuple[ReplicaBy, ...] = get_args(ReplicaBy)
