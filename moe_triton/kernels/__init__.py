"""Triton kernels, one operator per file: device code, argument table, model in torch, and cases."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import replace

from moe_triton.core import triton_package

triton_package.hide_remains()  # before the first kernel's file imports Triton

from moe_triton.kernels.cases import Case, Draw, Family, Shape, Sizes, blank  # noqa: E402

__all__ = ["Case", "Draw", "Family", "Shape", "Sizes", "blank", "families", "kernel_cases"]


@functools.cache
def families() -> Mapping[str, Family]:
    """Every kernel by its family's name: what the modules of this package list as ``FAMILIES``."""
    modules = (
        importlib.import_module(f"{__name__}.{module_info.name}")
        for module_info in pkgutil.iter_modules(__path__)
    )
    listed = [family for module in modules for family in getattr(module, "FAMILIES", ())]
    return {family.name: family for family in sorted(listed, key=lambda family: family.name)}


def kernel_cases(sizes: Sizes, hidden: int, target: str) -> list[Case]:
    """What a selftest and the benchmarks run: every kernel, in every variant that the docs show.

    Inputs have what correctness hangs on: entries without an expert, masked tokens, ranges that begin
    late, counts that nobody can have sent.

    Args:
        sizes: of each call.
        hidden: H, a multiple of 256; 0 for the cases that have none.
        target: what kernels are specialised for: the back end's name.
    """
    base = Shape(hidden=hidden, target=target, zoned=target == "npu")
    chosen = [family for family in families().values() if ("hidden" in family.axes) == bool(hidden)]
    cases = [Case(family, shape, sizes) for family in chosen for shape in _shapes(family, base)]
    return list({id(case.kernel): case for case in cases}.values())


def _shapes(family: Family, base: Shape) -> Iterator[Shape]:
    """Every variant as plans have it, and the main one with what else there is; some are the same kernel."""
    main = replace(base, features=frozenset(family.main))
    yield from (replace(base, features=frozenset(features)) for features in ((), *family.shown))
    yield from (replace(main, dtype="fp16"), replace(main, shared=2), replace(main, zoned=not main.zoned))
