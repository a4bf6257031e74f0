"""Kernels and shapes by their names in the table, as the command line takes them.

Run-time arguments (tokens, ranks, strides) decide nothing about a kernel's code on the NPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from moe_triton.core.errors import ArgumentError
from moe_triton.kernels import Family, Shape, families


def family_named(name: str) -> Family:
    """A family by its name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in families():
        rule = f"must be one of {', '.join(families())}"
        raise ArgumentError("kernel", repr(name), rule, "Choose one of them.")
    return families()[name]


_SIZES = {"h": "hidden", "k": "topk", "s": "shared"}


def parse_case(name: str) -> tuple[Family, Shape]:
    """A family and a shape from what `Family.case_name` writes; what is left out is as in `Shape`.

    Raises:
        ArgumentError: the name says something that the family does not know.
    """
    head, _, tail = name.partition("/")
    family = family_named(head)
    sizes: dict[str, Any] = {}
    features = []
    for part in tail.split("-") if tail else ():
        if size := re.fullmatch(r"([hks])(\d+)", part):
            sizes[_SIZES[size[1]]] = int(size[2])
        elif part in ("bf16", "fp16"):
            sizes["dtype"] = part
        else:
            features.append(part)
    return family, with_sizes(family, Shape(), sizes, features)


def with_sizes(family: Family, shape: Shape, sizes: Mapping[str, Any], features: Iterable[str] = ()) -> Shape:
    """A shape with other sizes and further features.

    Args:
        sizes: by the names of `AXES`.

    Raises:
        ArgumentError: a size or a feature that decides nothing about this kernel, or that no kernel takes.
    """
    for axis, value in sizes.items():
        if axis not in family.axes:
            rule = f"{family.name} does not depend on it; it depends on {', '.join(family.axes) or 'no size'}"
            raise ArgumentError(axis, value, rule, "Leave it out.")
    changed = replace(shape, **sizes, features=shape.features.union(features))
    family.check(changed)
    return changed
