"""Settings of kernels that were found to be fastest, by machine, as `moe-triton tune kernels` writes them.

A user's own table goes before the one that this package ships. A setting changes no result, and a kernel that
no row is of keeps its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from moe_triton.core.config import Config
from moe_triton.core.cpu_family import cpu_family
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Launch, Plan
from moe_triton.core.soc import SOC_OF_PRODUCT
from moe_triton.core.space import Settings, settings_of, text_of
from moe_triton.core.tables import Row, Table, damaged, load_table
from moe_triton.tables import fits, kept
from moe_triton.tables.installed import source_said

COMMAND = "moe-triton tune kernels"
KEYS, SIZES = ("kernel", "variant", "dtype"), ("hidden", "topk", "ranks", "tokens")
VALUES = ("settings", "ns", "default_ns")
FOLDER = Path(__file__).parent
ENVIRONMENT = "MOE_TRITON_TABLES"
ANY_DTYPE = "any"
"""In place of a dtype: a row of code that does not depend on it, or of dtypes that have the same values."""


class Chosen(NamedTuple):
    """The settings of one kernel.

    Attributes:
        settings: those that are not the kernel's own.
        source: who says so.
    """

    settings: Settings
    source: str


OWN = Chosen({}, "the kernel's own: no table has a row")


def machine_of(target: str, product: str) -> str:
    """What a table is of: a processor, or a family of CPUs.

    Args:
        target: name of the back end.
        product: of the group's config.
    """
    return SOC_OF_PRODUCT[product] if target == "npu" else f"cpu-{cpu_family()}"


def name_of(machine: str) -> str:
    """The name of a machine's table, and of its file."""
    return f"kernels-{machine}"


def folder_of_user() -> Path | None:
    """$MOE_TRITON_TABLES, else $XDG_CONFIG_HOME/moe_triton, else ~/.config/moe_triton; None without home."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    if base := os.environ.get("XDG_CONFIG_HOME"):
        return Path(base) / "moe_triton"
    try:
        return Path.home() / ".config" / "moe_triton"
    except RuntimeError:
        return None


def table_folders(given: str | os.PathLike[str] | None) -> list[Path]:
    """Where tables lie, those first that win.

    Args:
        given: the folder that goes before the package's; None for `folder_of_user`.

    Raises:
        ArgumentError: a folder that the caller or `ENVIRONMENT` names does not exist.
    """
    named = os.environ.get(ENVIRONMENT) if given is None else os.fspath(given)
    if named and not kept.is_folder(Path(named)):
        rule, remedy = "it must be a folder", "Make it, or write tables there: moe-triton tune."
        raise ArgumentError(ENVIRONMENT if given is None else "tuning.tables", named, rule, remedy)
    first = folder_of_user() if given is None else Path(given)
    return [folder for folder in (first, FOLDER) if folder]


def read_with(path: Path, command: str, *columns: tuple[str, ...]) -> Table:
    """A table of these columns: keys, sizes, values.

    Raises:
        ArgumentError: it is missing, damaged, of another kind, or of another version of this package.
    """
    table = load_table(path, command)  # a user may write it again while this process runs
    if (table.keys, table.sizes, table.values) != columns:
        names = ", ".join(name for names in columns for name in names)
        raise damaged(path, command, f"its columns must be {names}")
    return table


def said(path: Path, table: Table, row: Row) -> str:
    """Where a row stands, its folder if that is not the package's, and what its table was made from."""
    folder = "" if path.parent == FOLDER else f" in {path.parent}"
    return f"{table.said(row)}{folder} ({source_said(table)})"


def keys_of(kernel: TritonKernel) -> tuple[str, str, str]:
    """What tables know a kernel by."""
    assert kernel.space is not None, kernel.name
    return kernel.name, kernel.space.variant or "plain", kernel.space.dtype or ANY_DTYPE


def sizes_of(kernel: TritonKernel, config: Config) -> tuple[int, int, int, int]:
    """Hidden size and K, 1 where the code does not depend on them, ranks, and most tokens of a rank."""
    sizes = kernel.space.sizes if kernel.space else {}
    ranks, tokens = config.num_ranks, max(config.num_max_tokens_per_rank, 1)
    return sizes.get("hidden", 1), sizes.get("topk", 1), ranks, tokens


def checked_table(path: Path) -> Table:
    """A table of kernels' settings.

    Raises:
        ArgumentError: it is missing, damaged, of another kind, or of another version of this package.
    """
    table = read_with(path, COMMAND, KEYS, SIZES, VALUES)
    for row in table.rows:
        try:
            settings_of(str(row.values[0]))
        except ValueError as error:
            raise damaged(path, COMMAND, str(error)) from None
    if path.parent != FOLDER:  # whose tables a test holds against their kernels
        fits.check(path, table)
    return table


@dataclass(frozen=True)
class KernelSettings:
    """The settings of every kernel of one group's plans.

    Attributes:
        machine: that runs them.
        config: of the group.
        folder: of tables that go before the package's; None for `folder_of_user`.
    """

    machine: str
    config: Config
    folder: str | os.PathLike[str] | None = None
    _tuned: dict[TritonKernel, TritonKernel] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def tables(self) -> Mapping[Path, Table]:
        """By file, the first that has a row wins.

        Raises:
            ArgumentError: one of them cannot be used; or a folder that the caller names does not exist.
        """
        paths = [folder / f"{name_of(self.machine)}.json" for folder in table_folders(self.folder)]
        return kept.read(paths, checked_table)

    @property
    def compared(self) -> dict[str, str]:
        """What tables set for kernels of the group's sizes, by kernel, variant and dtype: ranks compare it.

        A kernel that keeps its own settings is left out.
        """
        settings_by_keys: dict[tuple[str, ...], str] = {}
        for table in self.tables.values():
            for keys, row in self._rows_of_sizes(table):
                settings_by_keys.setdefault(keys, str(row.values[0]))
        own = text_of({})
        return {
            " ".join(keys): settings for keys, settings in sorted(settings_by_keys.items()) if settings != own
        }

    def _rows_of_sizes(self, table: Table) -> Iterator[tuple[tuple[str, ...], Row]]:
        """A table's rows of H and K, or of none of them: by keys, the ones of the nearest other sizes."""
        c = self.config
        sizes = c.hidden, c.num_topk, c.num_ranks, max(c.num_max_tokens_per_rank, 1)
        fitting = (1, c.hidden), (1, c.num_topk)
        rows = tuple(row for row in table.rows if all(map(tuple.__contains__, fitting, row.sizes)))
        for keys in {row.keys for row in rows}:
            row = replace(table, rows=rows).nearest(keys, sizes)
            assert row is not None
            yield keys, row

    def chosen(self, kernel: TritonKernel) -> Chosen:
        """What the tables say of a kernel.

        The sizes that its code depends on must be those of a row: nothing else has been compiled. Of the rows
        that have them, the one of the nearest number of ranks and tokens counts.
        """
        if kernel.space is None:
            return Chosen({}, "it has nothing to choose")
        sizes = sizes_of(kernel, self.config)
        for path, table in self.tables.items():
            *named, _ = keys = keys_of(kernel)
            row = table.nearest(keys, sizes, (*named, ANY_DTYPE))
            if row is None or row.sizes[:2] != sizes[:2]:
                continue
            return self._taken(kernel, row, said(path, table, row))
        return OWN

    @staticmethod
    def _taken(kernel: TritonKernel, row: Row, source: str) -> Chosen:
        try:
            tuned = kernel.with_settings(settings_of(str(row.values[0])))
        except ArgumentError as error:
            return Chosen({}, f"the kernel's own: {source} does not fit it any more ({error})")
        changed = {name: value for name, value in tuned.settings.items() if kernel.settings[name] != value}
        return Chosen(changed, source)

    def tuned(self, plan: Plan) -> Plan:
        """A plan with the settings of the tables."""
        return plan if not self.tables else replace(plan, launches=tuple(map(self._launch, plan.launches)))

    def _launch(self, launch: Launch) -> Launch:
        kernel = launch.kernel
        if not isinstance(kernel, TritonKernel) or kernel.space is None:
            return launch
        if kernel not in self._tuned:
            self._tuned[kernel] = kernel.with_settings(self.chosen(kernel).settings)
        tuned = self._tuned[kernel]
        return replace(launch, kernel=tuned, blocks=min(launch.blocks, tuned.programs or launch.blocks))
