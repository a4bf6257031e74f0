"""Operators that are set up and not yet torn down."""

from __future__ import annotations

from collections.abc import Collection

from moe_triton.core.errors import BufferStateError
from moe_triton.operators.variants import Variant


class InFlight:
    """The pending setups of one communicator, at most one of each operator.

    Args:
        shared: operators that take turns in the same zones: one that is set up has to end before another.

    Attributes:
        variants: by operator, what each was set up for.
    """

    def __init__(self, shared: Collection[str] = ()) -> None:
        self._shared = shared
        self.variants: dict[str, Variant] = {}
        self._in_graph: dict[str, bool] = {}

    def begin(self, operator: str, variant: Variant, capturing: bool) -> None:
        """A setup has run, or has been captured."""
        self.variants[operator] = variant
        self._in_graph[operator] = capturing

    def check(self, operator: str, is_teardown: bool, capturing: bool) -> None:
        """Checks that an operator, whole or one half of it, may run now; a teardown ends its setup.

        Raises:
            BufferStateError: it may not, or only one of setup and teardown is inside a graph.
        """
        pending = self.variants.get(operator)
        if not is_teardown:
            pending_others = (name for name in self.variants if name != operator)
            other = next((name for name in pending_others if {name, operator} <= set(self._shared)), None)
            if other is not None:
                raise BufferStateError(
                    f"a {other} is set up and not yet torn down, and with this scheme a {operator} would "
                    f"use the same memory. Wait for it first, or call {other}_teardown."
                )
            if pending is not None:
                raise BufferStateError(
                    f"a {operator} is set up and not yet torn down, and only one may be. "
                    f"Wait for it first, or call {operator}_teardown."
                )
        elif pending is None:
            raise BufferStateError(f"no {operator} is set up. Call {operator}_setup first.")
        elif self._in_graph[operator] is not capturing:
            where = "outside of the graph" if capturing else "inside a graph"
            raise BufferStateError(
                f"the {operator} in flight was set up {where}. "
                f"Put both halves into the same graph, or neither."
            )
        else:
            del self.variants[operator]
