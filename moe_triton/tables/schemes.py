"""Which scheme takes the least time, by machine: the tables behind ``comm_alg="auto"``.

A row's time is that of a dispatch and a combine on the slowest rank, of a call with as many tokens as there
may be: of int8 rows and of rows as they are, both added.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from moe_triton.core.config import Config
from moe_triton.core.tables import Table, damaged
from moe_triton.tables import read_with, said
from moe_triton.tables.found import tables_of

Outputs = Literal["own", "window"]
OUTPUTS: tuple[Outputs, ...] = ("own", "window")
KIND = "schemes"
COMMAND = "moe-triton tune pipeline"
KEYS, SIZES = ("outputs",), ("hidden", "topk", "ranks", "tokens")
VALUES = ("scheme", "ns", "default_ns")


class Named(NamedTuple):
    """A scheme that a table names.

    Attributes:
        scheme: its name.
        source: where it stands.
    """

    scheme: str
    source: str


def sizes_of(config: Config) -> tuple[int, int, int, int]:
    """The sizes of a group whose `Config` keeps every rule."""
    return config.hidden, config.num_topk, config.num_ranks, config.num_max_tokens_per_rank


def checked_table(path: Path, schemes: Collection[str]) -> Table:
    """A table of schemes.

    Args:
        path: of the file.
        schemes: that there are.

    Raises:
        ArgumentError: it is missing, damaged, of another kind, or names what there is not.
    """
    table = read_with(path, COMMAND, KEYS, SIZES, VALUES)
    for row in table.rows:
        if row.keys[0] not in OUTPUTS or row.values[0] not in schemes:
            rule = f"outputs are {list(OUTPUTS)} and schemes {list(schemes)}"
            raise damaged(path, COMMAND, f"row {[*row.keys, *row.sizes, *row.values]}: {rule}")
    return table


def named(
    machine: str,
    config: Config,
    outputs: Outputs,
    schemes: Mapping[str, Collection[str]],
    folder: str | os.PathLike[str] | None = None,
) -> Iterator[Named]:
    """The schemes that a machine's tables name for a group, the fastest first.

    Args:
        machine: see `moe_triton.tables.machine_of`.
        config: of the group.
        outputs: where they may lie. What serves callers with outputs of their own serves the others too.
        schemes: that there are, by product. Tables of a CPU serve all products.
        folder: of tables that go before the package's.

    Raises:
        ArgumentError: a table cannot be used.
    """
    known = [scheme for each in schemes.values() for scheme in each]
    tables = tables_of(KIND, machine, folder, lambda path: checked_table(path, known))
    for where in OUTPUTS[OUTPUTS.index(outputs) :: -1]:
        for path, table in tables.items():
            row = table.nearest((where,), sizes_of(config))
            if row and row.values[0] in schemes[config.product]:
                yield Named(str(row.values[0]), said(path, table, row))
                break
