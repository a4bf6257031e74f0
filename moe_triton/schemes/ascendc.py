"""All Ascend C kernels: those that schemes share, and each folder's own; what a library is built of.

Nothing that runs needs the list: a plan brings its kernels. It works where torch is not installed.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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


def tables(others: Sequence[Path] = ()) -> Tables:
    """Those of this package's schemes, each kernel once.

    Args:
        others: ``ascendc.py`` of further schemes.
    """
    classes = (path for of_product in SCHEMES.values() for path in of_product.values())
    folders = dict.fromkeys(path.partition(":")[0].rpartition(".")[0] for path in classes)
    modules = [f"{folder}.ascendc" for folder in ("moe_triton.schemes.common", *folders)]
    namespaces = [vars(importlib.import_module(name)) for name in modules]
    namespaces += [runpy.run_path(str(path)) for path in others]
    of_each = (
        dict.fromkeys(kernel for each in namespaces for kernel in each[name]) for name in ("KERNELS", "FUSED")
    )
    return Tables(*map(tuple, of_each))


KERNELS, FUSED = tables()
LAUNCHED: tuple[AscendCKernel | FusedKernel, ...] = (*KERNELS, *FUSED)
"""All that have a launcher."""
