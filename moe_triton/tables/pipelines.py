"""Which settings of a rank take the least time, by machine and scheme: tables of what `Tuning` leaves open.

A row counts only where as many ranks share as many cores as it is of; of those the one of the nearest sizes.
What the caller sets goes before it, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.config import Config
from moe_triton.core.space import settings_of
from moe_triton.core.tables import Row, Table, damaged
from moe_triton.core.tuning import OPEN_FIELDS, Tuning, fields_of
from moe_triton.tables import read_with, said
from moe_triton.tables.found import tables_of
from moe_triton.tables.schemes import sizes_of

KIND = "pipelines"
COMMAND = "moe-triton tune pipeline"
KEYS, SIZES = ("scheme",), ("cores", "ranks", "hidden", "topk", "tokens")
VALUES = ("settings", "ns", "default_ns")
BLOCKS, COMMUNICATION, RECEIVING = "num_blocks", "communication_blocks", "receiving_blocks"


@dataclass(frozen=True)
class Pipeline:
    """The settings of one rank.

    Attributes:
        tuning: with what the caller left open filled in, where a table has a row.
        num_blocks: blocks per kernel, None for the machine's default.
        sources: who says so, by the name of each setting that a table has filled in.
    """

    tuning: Tuning
    num_blocks: int | None
    sources: Mapping[str, str] = field(default_factory=dict)


def columns_of(config: Config, cores: int) -> tuple[int, ...]:
    """The sizes of a row: cores that ranks share or, on an NPU, that each has; and those of the group."""
    hidden, topk, ranks, tokens = sizes_of(config)
    return cores, ranks, hidden, topk, tokens


def checked_table(path: Path) -> Table:
    """A table of settings.

    Raises:
        ArgumentError: it is missing, damaged, of another kind, or has settings that there are not.
    """
    table = read_with(path, COMMAND, KEYS, SIZES, VALUES)
    for row in table.rows:
        try:
            _check(settings_of(str(row.values[0])))
        except (ValueError, TypeError) as error:  # an ArgumentError is a ValueError
            raise damaged(path, COMMAND, f"row {[*row.keys, *row.sizes]}: {error}") from None
    return table


def _check(settings: Mapping[str, int]) -> None:
    blocks = settings.get(BLOCKS, MAX_BLOCKS)
    if not 1 <= blocks <= MAX_BLOCKS:
        raise ValueError(f"{BLOCKS} must be 1 to {MAX_BLOCKS}")
    fields = {name: value for name, value in settings.items() if name != BLOCKS}
    if unknown := fields.keys() - {*OPEN_FIELDS, COMMUNICATION}:
        raise ValueError(f"there is no setting {min(unknown)}")
    Tuning(**fields_of(fields)).check(blocks)


def _row(machine: str, config: Config, cores: int, folder: Any) -> tuple[Row, str] | None:
    sizes = columns_of(config, cores)
    for path, table in tables_of(KIND, machine, folder, checked_table).items():
        row = table.nearest((config.scheme,), sizes)
        if row is not None and row.sizes[:2] == sizes[:2]:
            return row, said(path, table, row)
    return None


def filled(
    machine: str, config: Config, cores: int, tuning: Tuning | None, num_blocks: int | None
) -> Pipeline:
    """What the caller set, and a table's settings for what is left open.

    Blocks that communicate or receive are part of a rank's blocks: a table's are taken only where the caller
    gives none, and those that communicate only where there is no `Tuning` either, whose default is 0.

    Args:
        machine: see `moe_triton.tables.machine_of`.
        config: of the group.
        cores: see `columns_of`.
        tuning: the caller's, None where there is none.
        num_blocks: the caller's, None where there are none.

    Raises:
        ArgumentError: a table cannot be used.
    """
    given = Tuning() if tuning is None else tuning
    row_and_source = _row(machine, config, cores, given.tables)
    if row_and_source is None:
        return Pipeline(given, num_blocks)
    settings, source = settings_of(str(row_and_source[0].values[0])), row_and_source[1]
    taken = {name: value for name, value in settings.items() if getattr(given, name, 0) is None}
    if num_blocks is not None:
        taken.pop(RECEIVING, None)
    elif tuning is None and COMMUNICATION in settings:
        taken[COMMUNICATION] = settings[COMMUNICATION]
    blocks = settings.get(BLOCKS) if num_blocks is None else num_blocks
    sources = dict.fromkeys(taken, source)
    if blocks != num_blocks:
        sources[BLOCKS] = source
    return Pipeline(replace(given, **fields_of(taken)), blocks, sources)
