"""Whether the rows of a table of kernels are settings that kernels have.

A row that does not fit is left out, as a kernel may have lost a setting since the row was written; a user is
told of it when the table is read, whichever sizes the row is of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from moe_triton.core.dtypes import DTYPES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.logs import log_of
from moe_triton.core.space import settings_of
from moe_triton.core.tables import Row, Table

_log = log_of("tables")
_MOST_NAMED = 3
_USUAL = 7168, 1  # H and K where a kernel's code does not depend on them; K of 1 is a size like others
_told: set[Path] = set()


def check(path: Path, table: Table) -> None:
    """Warns of rows that do not fit their kernels, once for each file.

    Args:
        path: of the file.
        table: of kernels.
    """
    if path in _told or not (misfits := list(misfits_of(table))):
        return
    _told.add(path)
    more = f"; and {len(misfits) - _MOST_NAMED} more" if len(misfits) > _MOST_NAMED else ""
    _log.warning(
        "%s: rows that fit no kernel are left out: %s%s. Tune again: %s",
        path,
        "; ".join(misfits[:_MOST_NAMED]),
        more,
        table.command,
    )


def misfits_of(table: Table) -> Iterator[str]:
    """What of a table does not fit, a text for each row."""
    target = "cpu" if table.name.startswith("kernels-cpu-") else "npu"
    for row in table.rows:
        reasons = [_why_not(kernel, row) for kernel in _kernels(row, target)]
        if all(reasons):  # of zoned and other forms of a kernel one is enough
            why = reasons[0] if reasons else "no kernel of that name takes these sizes"
            yield f"{' '.join(row.keys)} {list(row.sizes)} ({why})"


def _why_not(kernel: TritonKernel, row: Row) -> str:
    try:
        kernel.with_settings(settings_of(str(row.values[0])))
    except ArgumentError as error:
        return f"{error.argument} is {error.value}, but {error.rule}"
    return ""


def _kernels(row: Row, target: str) -> Iterator[TritonKernel]:
    """The kernels of a row's name, with what its variant names."""
    from moe_triton.kernels import Shape, families

    name, variant, dtype = row.keys
    family = families().get(name)  # a kernel has its family's name
    if family is None:
        return
    hidden, topk = (size if size > 1 else usual for size, usual in zip(row.sizes, _USUAL, strict=False))
    features = frozenset(variant.split("-")).intersection(family.features)
    for zoned in (False, True):
        shape = Shape(dtype if dtype in DTYPES else "bf16", hidden, topk, 0, features, target, zoned)
        with contextlib.suppress(ArgumentError):
            if (kernel := family.kernel(shape)).space is not None:
                yield kernel
