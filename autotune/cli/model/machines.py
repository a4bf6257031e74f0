"""The machine that a command is asked about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.model.constants import Machine

MACHINE = "A3, A2, a selftest's report, or a file of constants"


def machine_of(name: str) -> Machine:
    """A product's machine, or that in a file.

    Raises:
        ArgumentError: there is none of this name, or the file holds none.
    """
    from autotune.model.constants import REMEDY, machine_named
    from autotune.selftest_reports.constants import read_machine
    from moe_triton.core.errors import ArgumentError

    products = ("A2", "A3")
    if name in products:
        return machine_named(name)
    try:
        return read_machine(Path(name))
    except OSError as error:
        why = "it is a folder" if Path(name).is_dir() else error.strerror
        rule = f"it must be one of {list(products)}, or a file ({why})"
        raise ArgumentError("machine", repr(name), rule, REMEDY) from None
