"""Kernels and shapes by their names in the table, as the command line takes them.

A kernel's code on the NPU does not depend on run-time arguments (tokens, ranks, strides).
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
    """Parses a name of `Family.case_name`; parts that are left out are those of `Shape`.

    Raises:
        ArgumentError: the family does not know a part of the name.
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
        ArgumentError: a size or a feature that this kernel does not depend on, or that is invalid.
    """
    for axis, value in sizes.items():
        if axis not in family.axes:
            rule = f"{family.name} does not depend on it; it depends on {', '.join(family.axes) or 'no size'}"
            raise ArgumentError(axis, value, rule, "Leave it out.")
    changed = replace(shape, **sizes, features=shape.features.union(features))
    family.check(changed)
    return changed
