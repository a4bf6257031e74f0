"""The variables of HCCL's that decide what a group's calls may be."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moe_triton.core.errors import ArgumentError

INTRA_PCIE, INTRA_ROCE = "HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE"
BUFFSIZE = "HCCL_BUFFSIZE"
LOGIC_SUPERPOD_ID = "HCCL_LOGIC_SUPERPOD_ID"
"""A name for the super node that a rank is in: HCCL connects ranks of different ones by RoCE. What is here
goes by `Config.ranks_per_server`, and needs none.
"""
SWITCHES = {INTRA_PCIE: "1", INTRA_ROCE: "0"}
"""With which a group's default is its product's way between servers."""
SWITCHES_SET = " and ".join(f"{name}={value}" for name, value in SWITCHES.items())

VARIABLES = INTRA_PCIE, INTRA_ROCE, BUFFSIZE, LOGIC_SUPERPOD_ID

MEGABYTE = 1 << 20
DEFAULT_MEGABYTES = 200


def read_environment() -> dict[str, str]:
    """Those of them that are set now, by name."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def buffer_megabytes(environment: Mapping[str, str] = os.environ) -> int:
    """HCCL_BUFFSIZE: megabytes that a group's window may take, 200 where it is not set.

    Args:
        environment: that it is, or is not, set in.

    Raises:
        ArgumentError: it is no positive integer.
    """
    text = environment.get(BUFFSIZE, str(DEFAULT_MEGABYTES))
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(
            BUFFSIZE, repr(text), "it must be a positive number of megabytes", "Unset it, or set one."
        )
    return int(text)


def check_window_limit(limit: int | None, needed: int) -> None:
    """Checks the bytes of a data window against what HCCL_BUFFSIZE leaves for it, None for no bound.

    Raises:
        ArgumentError: it is too large.
    """
    if limit is not None and needed > limit:
        raise too_small(f"{limit // MEGABYTE} MB", f"these sizes need {needed} bytes", needed)


def too_small(value: str, rule: str, needed: int) -> ArgumentError:
    """The error of an HCCL_BUFFSIZE with which a window has no room for so many bytes."""
    remedy = f"Set HCCL_BUFFSIZE={-(-needed // MEGABYTE)} or more on every rank, or use smaller batches."
    return ArgumentError(BUFFSIZE, value, rule, remedy)
