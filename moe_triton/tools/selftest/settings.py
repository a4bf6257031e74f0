"""Settings of a selftest."""

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
"""In the order in which they run: later ones depend on earlier ones."""

HIDDEN, QUICK_HIDDEN = 7168, 512
"""H of whole runs and of quick ones."""


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Attributes:
        backend: "cpu" or "npu".
        ranks: one per device; None for all devices of the machine.
        quick: fewer sizes, cases and repetitions.
        only: stages to run in addition to the environment; empty for all.
        timeout_s: seconds that one check may take, including the start of its processes.
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
        """Timeout of one wait in an operator, shorter than a check's, which reports the missing ranks."""
        return self.timeout_s / 4

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """H of the kernels' cases."""
        return (QUICK_HIDDEN,) if self.quick else (QUICK_HIDDEN, 4096, HIDDEN)

    def runs(self, stage: str) -> bool:
        """Whether a stage is part of this run."""
        return stage == STAGES[0] or not self.only or stage in self.only
