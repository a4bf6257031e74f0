"""Assumptions of a back end that are documented but not confirmed on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """One thing that a back end relies on.

    Attributes:
        name: what is assumed, in a few words; unique.
        page: the documentation that says so: a title, or an address.
        check: returns None if it holds, else what was found instead. It runs in its own process, with the
            first device selected.
    """

    name: str
    page: str
    check: Callable[[], str | None]
