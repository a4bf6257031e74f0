"""What cost models know of a machine: its constants, and where each of them comes from."""

from __future__ import annotations

from moe_triton.costs.assumed import MACHINES, assumed_constants
from moe_triton.costs.constants import FIELDS, MachineConstants

__all__ = ["FIELDS", "MACHINES", "MachineConstants", "assumed_constants"]
