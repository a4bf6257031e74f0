"""Options that commands of the model share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.model.constants import REMEDY, Machine, machine_named
from autotune.selftest_reports.constants import read_machine
from moe_triton.core.errors import ArgumentError
from moe_triton.tools.cli.options import MOST_EXPERTS, MOST_HIDDEN

MARKDOWN = "--markdown"
Markdown = Annotated[bool, typer.Option(MARKDOWN, help="tables in Markdown, for a page")]
MOST_BLOCKS = 1 << 10
Hidden = Annotated[int, typer.Option(help="elements of a token's row", min=1, max=MOST_HIDDEN)]
Experts = Annotated[int, typer.Option(help="of the group; 256 or more if not given", min=0, max=MOST_EXPERTS)]
Seed = Annotated[int, typer.Option(help="of the routing", min=0)]


MACHINE = "A3, A2, a selftest's report, or a file of constants"


def machine_of(name: str) -> Machine:
    """A product's machine, or that in a file.

    Raises:
        ArgumentError: there is none of this name, or the file holds none.
    """
    products = ("A2", "A3")
    if name in products:
        return machine_named(name)
    try:
        return read_machine(Path(name))
    except OSError as error:
        why = "it is a folder" if Path(name).is_dir() else error.strerror
        rule = f"it must be one of {list(products)}, or a file ({why})"
        raise ArgumentError("machine", repr(name), rule, REMEDY) from None
