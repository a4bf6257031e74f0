"""Operators that are set up and not yet torn down."""

from __future__ import annotations

from moe_triton.core.errors import BufferStateError
from moe_triton.operators.variants import Variant


class InFlight:
    """The pending setups of one communicator, at most one of each operator.

    Attributes:
        variants: by operator, what each was set up for.
    """

    def __init__(self) -> None:
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
