"""The Ascend processors that this package knows: products, cores and architectures, in one place.

Names are those of ``torch.npu.get_device_name()`` and of the compilers' ``--target``. A2 and A3 have two
vector cores (AIV) beside each matrix core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_triton.core.errors import ArgumentError, ToolchainError

Product = Literal["A2", "A3"]

UB_BYTES = 192 * 1024
"""Unified buffer of one AI vector core, A2 and A3."""


@dataclass(frozen=True)
class Soc:
    """One processor.

    Attributes:
        name: as ``Ascend910B3``.
        product: "A2" or "A3".
        vector_cores: of one die: the most blocks that may meet in SyncAll.
        arch: for ``bisheng --npu-arch``.
    """

    name: str
    product: Product
    vector_cores: int
    arch: str = "dav-2201"


_CORES: dict[Product, dict[str, int]] = {
    "A2": {"910B1": 48, "910B2": 48, "910B2C": 48, "910B3": 40, "910B4": 40, "910B4-1": 40},
    "A3": {"910_9362": 40, "910_9372": 40, "910_9381": 48, "910_9382": 48, "910_9391": 48, "910_9392": 48},
}
SOCS: dict[str, Soc] = {
    f"Ascend{model}": Soc(f"Ascend{model}", product, cores)
    for product, models in _CORES.items()
    for model, cores in models.items()
}
SOC_OF_PRODUCT: dict[str, str] = {"A2": "Ascend910B3", "A3": "Ascend910_9391"}
"""The processor that stands for each product."""

ARCHS: tuple[str, ...] = tuple(sorted({soc.arch for soc in SOCS.values()}))


def soc_of(name: str) -> Soc:
    """The processor of this name, with or without ``Ascend``, in any case.

    Raises:
        ToolchainError: it is none that this package knows.
    """
    bare = name.strip().lower().removeprefix("ascend")
    for soc in SOCS.values():
        if soc.name.lower() == f"ascend{bare}":
            return soc
    raise ToolchainError(
        f"SoC is {name!r}, but it must be one of A2's or A3's: {', '.join(SOCS)}. "
        "Run on one of them, or add the processor to moe_triton/core/soc.py if its cores are alike."
    )


def check_blocks(blocks: int, soc: Soc) -> None:
    """Checks a launch's blocks against a processor's cores.

    Args:
        blocks: of one launch, or of all launches that overlap.
        soc: the processor.

    Raises:
        ArgumentError: more blocks than vector cores, or none. Those that start first would wait forever in
            SyncAll for the others, which get no core.
    """
    if not 1 <= blocks <= soc.vector_cores:
        rule = f"it must be 1 to {soc.vector_cores}, the vector cores of {soc.name}: "
        rule += "blocks that meet in SyncAll need a core each"
        raise ArgumentError("num_blocks", blocks, rule, f"Pass at most {soc.vector_cores}.")
