"""Whether a table was made with the versions that are installed."""

from __future__ import annotations

import functools
import itertools
from importlib import metadata

from moe_triton.core.tables import Table

NAMED = "moe_triton", "triton-ascend", "ascendnpu-ir"
"""Distributions whose versions a table's source may name, each followed by its version."""


def source_said(table: Table) -> str:
    """A table's source, and which versions are installed if it names others.

    A measured table of other versions is used all the same: no setting changes a result, and most keep their
    order.
    """
    words = table.source.replace(",", " ").split()
    named = {name: version for name, version in itertools.pairwise(words) if name in NAMED}
    others = [f"{name} {version_of(name)}" for name, version in named.items() if version != version_of(name)]
    return f"{table.source}; installed here: {', '.join(others)}" if others else table.source


@functools.cache
def version_of(name: str) -> str:
    """The version of a distribution that is installed; "none" if it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
