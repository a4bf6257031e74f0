"""What a candidate takes on an NPU, by stop-watch: where there is one."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from autotune.kernels.subjects import Subject
from autotune.search.task import Outcome, Task
from moe_triton.core.errors import ToolchainError
from moe_triton.core.space import Settings


def why_none() -> str:
    """Why nothing can be measured on an NPU here."""
    if importlib.util.find_spec("torch_npu") is None:
        return "no NPU: torch_npu is not installed"
    return "no NPU was there to try this on: the selftest measures kernels, their settings are modelled"


@dataclass(frozen=True)
class MeasuredOnNpuTask(Task):
    """A kernel's settings, measured on an NPU.

    Attributes:
        subject: the kernel and its launches.
    """

    subject: Subject = field(kw_only=True)

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        """See `Task`.

        Raises:
            ToolchainError: always, with the reason.
        """
        remedy = "Model it: leave out --measure."
        raise ToolchainError(f"{self.subject.label} cannot be measured: {why_none()}. {remedy}")
