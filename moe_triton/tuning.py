"""Settings of one rank that change speed and never results."""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.checks import check_positive
from moe_triton.errors import ArgumentError


@dataclass(frozen=True)
class Tuning:
    """How an operator is cut into parts, how rows are copied and how flags are waited for.

    Attributes:
        dispatch_tokens: tokens of a part that is quantised while the part before it is sent.
        combine_tokens: tokens of a part that is summed while the results of the next one come in.
        communication_blocks: of a rank's blocks, those that communicate while the others compute; 0 lets
            all of them do both in turn.
        cached_bytes: CPU: rows that one launch writes by way of the caches; it streams what comes after
            them. None: all of them, which is fastest where the machine could be measured.
        spins: CPU: looks at missing flags with only a pause in between. None: what suits the machine.
        yields: CPU: looks after those that let other threads run in between; then the waiter sleeps. None:
            many where ranks have cores of their own, few where they share them.
    """

    dispatch_tokens: int = 64
    combine_tokens: int = 64
    communication_blocks: int = 0
    cached_bytes: int | None = None
    spins: int | None = None
    yields: int | None = None

    def check(self, num_blocks: int) -> None:
        """Checks the settings against a rank's blocks.

        Raises:
            ArgumentError: a size that is not positive or a number below 0, or no block is left to compute.
        """
        check_positive("tuning.dispatch_tokens", self.dispatch_tokens)
        check_positive("tuning.combine_tokens", self.combine_tokens)
        for name in ("cached_bytes", "spins", "yields"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ArgumentError(f"tuning.{name}", value, "it must be 0 or more, or None", "Pass None.")
        if not 0 <= self.communication_blocks < num_blocks:
            raise ArgumentError(
                "tuning.communication_blocks",
                self.communication_blocks,
                f"it must be 0, or less than the rank's {num_blocks} blocks",
                "Pass 0, or more num_blocks.",
            )
