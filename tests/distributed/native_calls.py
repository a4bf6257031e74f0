"""What tests of native calls look at: what Python runs beside them, and whether outputs are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.turns import PhaseRun


@contextmanager
def pythons_runs() -> Iterator[list[object]]:
    """The operators and phases of them that Python runs meanwhile."""
    whole, phase, phases = Communicator.run, Communicator.run_phase, Communicator.run_phases
    seen = list[object]()

    def note(self: Communicator, variant: Any, *rest: Any) -> None:
        seen.append(variant)
        whole(self, variant, *rest)

    def note_phase(self: Communicator, run: PhaseRun) -> None:
        seen.append((run.variant, run.phase))
        phase(self, run)

    def note_phases(self: Communicator, runs: Sequence[PhaseRun]) -> None:
        seen.extend((run.variant, run.phase) for run in runs)
        phases(self, runs)

    with (
        mock.patch.object(Communicator, "run", note),
        mock.patch.object(Communicator, "run_phase", note_phase),
        mock.patch.object(Communicator, "run_phases", note_phases),
    ):
        yield seen


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other
