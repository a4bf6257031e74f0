"""Tables of one machine: where they lie, and which goes before which."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from moe_triton.core.tables import Table
from moe_triton.tables import kept, table_folders

CPU_WITH_TABLES = "cpu-amd-25-1"
"""The family whose shipped tables stand for CPUs that have none."""


def tables_of(
    kind: str, machine: str, folder: str | os.PathLike[str] | None, check: Callable[[Path], Table]
) -> Mapping[Path, Table]:
    """A machine's tables by file: of the first that has a row, the row counts.

    Args:
        kind: what the tables are of: the name before the machine's.
        machine: see `moe_triton.tables.machine_of`.
        folder: of tables that go before the package's; None for `moe_triton.tables.folder_of_user`.
        check: reads one.

    Raises:
        ArgumentError: one of them cannot be used; or a folder that the caller names does not exist.
    """
    folders = table_folders(folder)
    machines = dict.fromkeys((machine, CPU_WITH_TABLES)) if machine.startswith("cpu-") else [machine]
    for name in machines:
        paths = [each / f"{kind}-{name}.json" for each in folders]
        if tables := kept.read(paths, check):
            return tables
    return {}
