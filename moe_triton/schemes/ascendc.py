"""All Ascend C kernels: those that schemes share, and each folder's own; what a library is built of.

Nothing that runs needs the list: a plan brings its kernels. It works where torch is not installed.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from moe_triton.core.kernel import AscendCKernel, FusedKernel
from moe_triton.schemes import SCHEMES


class Tables(NamedTuple):
    """Kernels by what is compiled of them.

    Attributes:
        kernels: of the folders.
        fused: those that run several of them in one launch.
    """

    kernels: tuple[AscendCKernel, ...]
    fused: tuple[FusedKernel, ...]


def tables_of(found: Iterable[Any]) -> Tables:
    """The tables of modules that have ``KERNELS`` and ``FUSED``, each kernel once."""
    found = list(found)
    kernels = dict.fromkeys(kernel for module in found for kernel in module.KERNELS)
    return Tables(tuple(kernels), tuple(dict.fromkeys(kernel for module in found for kernel in module.FUSED)))


def tables(others: Sequence[Path] = ()) -> Tables:
    """Those of this package's schemes.

    Args:
        others: ``ascendc.py`` of further schemes.
    """
    classes = (path for of_product in SCHEMES.values() for path in of_product.values())
    folders = dict.fromkeys(path.partition(":")[0].rpartition(".")[0] for path in classes)
    modules = [f"{folder}.ascendc" for folder in ("moe_triton.schemes.common", *folders)]
    return tables_of([*map(importlib.import_module, modules), *map(_module_at, others)])


def _module_at(path: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(path)))


KERNELS, FUSED = tables()
LAUNCHED: tuple[AscendCKernel | FusedKernel, ...] = (*KERNELS, *FUSED)
"""All that have a launcher."""
