"""The variables of HCCL's that decide what a group's calls may be."""

from __future__ import annotations

import os

INTRA_PCIE, INTRA_ROCE = "HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE"
BUFFSIZE = "HCCL_BUFFSIZE"


def read_environment() -> dict[str, str]:
    """Those of them that are set now, by name."""
    return {name: os.environ[name] for name in (INTRA_PCIE, INTRA_ROCE, BUFFSIZE) if name in os.environ}
