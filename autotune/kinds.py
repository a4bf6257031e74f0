"""The kinds of tables: how each is read, which command writes it, and where those of a machine lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.tables import Table
from moe_triton.schemes import SCHEMES
from moe_triton.tables import found, pipelines, schemes

KERNELS = "kernels"


@dataclass(frozen=True)
class Kind:
    """One kind of table.

    Attributes:
        name: what files' names begin with.
        command: that writes it.
        check: reads one; raises an `ArgumentError` where it is damaged or of another kind.
    """

    name: str
    command: str
    check: Callable[[Path], Table]

    def used(self, machine: str) -> Mapping[Path, Table]:
        """The tables that buffers on a machine go by, those first that win.

        Raises:
            ArgumentError: one is damaged.
        """
        if self.name != KERNELS:  # on a CPU those of another family may stand in
            return found.tables_of(self.name, machine, None, self.check)
        paths = (folder / self.file(machine) for folder in tables.table_folders(None))
        return {path: self.check(path) for path in paths if os.path.lexists(path)}

    def shipped(self, machine: str) -> Path:
        """Where the package's table of a machine lies, if there is one."""
        return tables.FOLDER / self.file(machine)

    def file(self, machine: str) -> str:
        """The name of a machine's table."""
        return f"{self.name}-{machine}.json"


def _schemes(path: Path) -> Table:
    return schemes.checked_table(path, [name for names in SCHEMES.values() for name in names])


KINDS = (
    Kind(KERNELS, tables.COMMAND, tables.checked_table),
    Kind(schemes.KIND, schemes.COMMAND, _schemes),
    Kind(pipelines.KIND, pipelines.COMMAND, pipelines.checked_table),
)


def kind_named(name: str) -> Kind:
    """A kind by its name."""
    return next(kind for kind in KINDS if kind.name == name)


def read(path: Path) -> Table:
    """A table of any kind, which its file's name begins with.

    Raises:
        ArgumentError: there is none, it is damaged, or of no kind.
    """
    kind = next((kind for kind in KINDS if path.name.startswith(f"{kind.name}-")), None)
    if kind is None or not path.is_file():
        names = ", ".join(f"{kind.name}-..." for kind in KINDS)
        rule = f"it must be a file, with the name that it was written with: {names}"
        raise ArgumentError("table", path, rule, "Name a table; moe-triton tune show lists them.")
    return kind.check(path)
