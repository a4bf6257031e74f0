"""The machine that a command is asked about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_triton.model.constants import Machine

MACHINE = "A3, A2, or a file of constants, such as a selftest wrote"


def machine_of(name: str) -> Machine:
    """A product's machine, or that in a file.

    Raises:
        ArgumentError: there is none of this name, or the file holds none.
    """
    from moe_triton.core.errors import ArgumentError
    from moe_triton.model.constants import Machine, machine_named

    products = ("A2", "A3")
    if name in products:
        return machine_named(name)
    try:
        return Machine.from_json(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"it must be one of {list(products)}, or a file ({error.strerror})"
        raise ArgumentError("machine", repr(name), rule, "Name a file of Machine.to_json().") from None
