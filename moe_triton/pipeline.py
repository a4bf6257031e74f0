"""How an operator is cut into parts, so that one part's computing hides another's communication."""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.checks import check_positive
from moe_triton.errors import ArgumentError


@dataclass(frozen=True)
class Pipeline:
    """Settings of one rank; they change speed and never results.

    Attributes:
        dispatch_tokens: tokens of a part that is quantised while the part before it is sent.
        combine_tokens: tokens of a part that is summed while the results of the next one come in.
        communication_blocks: of a rank's blocks, those that communicate while the others compute; 0 lets
            all of them do both in turn.
    """

    dispatch_tokens: int = 64
    combine_tokens: int = 64
    communication_blocks: int = 0

    def check(self, num_blocks: int) -> None:
        """Checks the settings against a rank's blocks.

        Raises:
            ArgumentError: a size that is not positive, or no block is left to compute.
        """
        check_positive("pipeline.dispatch_tokens", self.dispatch_tokens)
        check_positive("pipeline.combine_tokens", self.combine_tokens)
        if not 0 <= self.communication_blocks < num_blocks:
            raise ArgumentError(
                "pipeline.communication_blocks",
                self.communication_blocks,
                f"it must be 0, or less than the rank's {num_blocks} blocks",
                "Pass 0, or more num_blocks.",
            )
