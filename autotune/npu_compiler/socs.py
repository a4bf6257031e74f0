"""The chips that kernels are compiled for, and which compiler of ascendnpu-ir knows each."""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.core.errors import ArgumentError
from moe_triton.core.soc import SOC_OF_PRODUCT

__all__ = ["SOCS", "SOC_OF_PRODUCT", "Soc", "soc_named"]


@dataclass(frozen=True)
class Soc:
    """One target of the NPU compiler.

    Attributes:
        name: as ``--target`` takes it.
        product: of the chip.
        compiler: program of ascendnpu-ir that compiles for it.
        options: of this compiler.
        left_out: options that it usually gets.
        is_outlook: not supported by this project. Nothing is estimated for it: its vector cores work on
            registers, for which the constants of `autotune.model` do not hold.
    """

    name: str
    product: str
    compiler: str = "bin/bishengir-compile"
    options: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_outlook: bool = False


# Without tuning mode the compiler for 950 treats the missing hivmc as a failed plan and tries five times.
_ONE_ATTEMPT = "--enable-tuning-mode=true"

SOCS = {
    soc.name: soc
    for soc in (
        Soc(SOC_OF_PRODUCT["A2"], "A2"),
        Soc(SOC_OF_PRODUCT["A3"], "A3"),
        Soc("Ascend950PR_9589", "950", "bin/bishengir-compile-a5", (_ONE_ATTEMPT,), is_outlook=True),
    )
}


def soc_named(name: str) -> Soc:
    """A target by its name or its product.

    Raises:
        ArgumentError: there is none of that name.
    """
    matches = [soc for soc in SOCS.values() if name in (soc.name, soc.product)]
    if not matches:
        choices = ", ".join(f"{soc.name} ({soc.product})" for soc in SOCS.values())
        raise ArgumentError("soc", repr(name), f"must be one of {choices}", "Choose one of them.")
    return matches[0]
