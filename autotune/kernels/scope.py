"""`Scope`: the machine and the sizes that kernels are tuned for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from autotune.model.constants import Machine, machine_named
from autotune.npu_compiler.socs import soc_named
from autotune.selftest_reports.constants import read_machine
from moe_triton.core.checks import check_choice, check_positive
from moe_triton.core.cpu_family import cpu_family
from moe_triton.core.errors import ArgumentError
from moe_triton.core.soc import SOC_OF_PRODUCT, Product

CPU = "cpu"


@dataclass(frozen=True)
class Scope:
    """The machine and the sizes that kernels are tuned for.

    Attributes:
        soc: chip or product, as "A3"; "cpu" for this machine, where kernels are measured.
        hidden: H, elements of a row.
        topk: K.
        ranks: EP.
        tokens: BS, tokens of each rank.
        dtypes: of tokens, "bf16" or "fp16".
        kernels: names; all if none.
        constants: file of a machine's constants (`Machine.to_json`); what is assumed if empty.
        seed: of the drawn experts.
        by_hidden: only kernels whose code depends on H.
        measure: on this machine's NPU, instead of by the model.

    Raises:
        ArgumentError: there is no such chip or dtype, or a size is none.
    """

    soc: str = "A3"
    hidden: tuple[int, ...] = (7168,)
    topk: tuple[int, ...] = (8,)
    ranks: tuple[int, ...] = (16,)
    tokens: tuple[int, ...] = (16, 128, 512)
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    kernels: tuple[str, ...] = ()
    constants: str = ""
    seed: int = 0
    by_hidden: bool = False
    measure: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "topk", "ranks", "tokens"):
            for size in getattr(self, name):
                check_positive(name, size)
        for dtype in self.dtypes:
            check_choice("dtype", dtype, ["bf16", "fp16"])
        if self.soc not in (CPU, *SOC_OF_PRODUCT, *SOC_OF_PRODUCT.values()):
            known = ", ".join(f"{product} ({chip})" for product, chip in SOC_OF_PRODUCT.items())
            rule = f"times are known of {known}, and of cpu"
            raise ArgumentError("soc", repr(self.soc), rule, "Name one of them.")

    @property
    def is_cpu(self) -> bool:
        """Whether candidates are measured here."""
        return self.soc == CPU

    @property
    def is_measured(self) -> bool:
        """Whether candidates run on this machine."""
        return self.is_cpu or self.measure

    @property
    def chip(self) -> str:
        """The processor's name; of the NPU, not of a CPU."""
        return soc_named(self.soc).name

    @property
    def machine(self) -> str:
        """What tables are of: `moe_triton.tables.machine_of`."""
        return f"cpu-{cpu_family()}" if self.is_cpu else self.chip

    def priced_on(self) -> Machine:
        """The constants of the model.

        Raises:
            ArgumentError: the file holds none, or those of another product.
        """
        product = cast(Product, soc_named(self.soc).product)
        if not self.constants:
            return machine_named(product)
        try:
            machine = read_machine(Path(self.constants))
        except OSError as error:
            rule = f"it must be a selftest's report or a file of Machine.to_json() ({error.strerror})"
            raise ArgumentError("machine", self.constants, rule, "Name a file.") from None
        if machine.product != product:
            rule = f"{self.soc} needs constants of {product}"
            raise ArgumentError("machine", machine.name, rule, "Name another file.")
        return machine
