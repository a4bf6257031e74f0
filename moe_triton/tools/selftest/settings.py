"""What a selftest is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (
    "environment",
    "windows",
    "kernels",
    "operators",
    "stragglers",
    "torch_npu",
    "graphs",
    "timing",
    "constants",
)
"""In the order in which they run: what later ones stand on comes first."""


@dataclass(frozen=True)
class Settings:
    """Of one run.

    Attributes:
        backend: "cpu" or "npu".
        ranks: one per device; None for all devices of the machine.
        quick: fewer sizes, cases and repetitions.
        only: stages to run beside the environment; none for all.
        timeout_s: seconds that one check may take, the start of its processes included.
        seed: of all data.
    """

    backend: str = "cpu"
    ranks: int | None = None
    quick: bool = False
    only: tuple[str, ...] = ()
    timeout_s: float = 120.0
    seed: int = 20260101

    @property
    def wait_s(self) -> float:
        """Deadline of one wait inside an operator: a check sees it pass, and says who was missing."""
        return self.timeout_s / 4

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """H of the kernels' cases."""
        return (512,) if self.quick else (512, 4096, 7168)

    def runs(self, stage: str) -> bool:
        """Whether a stage is part of this run."""
        return stage == STAGES[0] or not self.only or stage in self.only
