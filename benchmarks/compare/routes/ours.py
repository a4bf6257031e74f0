"""Our routes: `EPBuffer` with slots, and with rows written to where they stay (direct)."""

from __future__ import annotations

import torch

from benchmarks.compare.inputs import Inputs
from benchmarks.compare.routes.base import Delivered, Route, Steps
from moe_triton import EPBuffer
from moe_triton.core.handle import DispatchOutput


class Slots(Route):
    """Dispatch and combine through slots in the windows."""

    def __init__(self, inputs: Inputs, buffer: EPBuffer, quantize: str) -> None:
        self.inputs, self.buffer, self.quantize = inputs, buffer, quantize
        self._received: DispatchOutput | None = None

    def dispatch(self) -> None:
        """Sends tokens to their experts' ranks by the buffer's dispatch."""
        x, ids = self.inputs.x, self.inputs.ids32
        self._received = self.buffer.dispatch(x, ids, quantize=self.quantize or None)

    def combine(self) -> None:
        """Sends answers back by the buffer's combine, which sums them by weight."""
        self.combine_rows(self.inputs.answers)

    def combine_rows(self, rows: torch.Tensor) -> None:
        """Combines what the experts answered."""
        received = self._received
        assert received is not None
        out = self.buffer.combine(rows, received.handle, self.inputs.weights)
        self.delivered = Delivered(received.tokens, received.scales, received.tokens_per_expert, out)
        self._received = None

    def steps_us(self) -> Steps:
        """Returns the microseconds of each step of the last dispatch and combine, as the buffer has them."""
        return {
            "dispatch": self.buffer.durations_us("dispatch"),
            "combine": self.buffer.durations_us("combine"),
        }


class Direct(Slots):
    """Rows written to their final places, and answers read out of the windows that the experts wrote them to.

    The buffer hands out two tensors in turn for the answers. Filling them is the experts' work: it is done in
    the first runs, which are not timed, and then they keep what they hold.
    """

    FILLED_RUNS = 2

    def __init__(self, inputs: Inputs, buffer: EPBuffer, quantize: str) -> None:
        super().__init__(inputs, buffer, quantize)
        self._runs = 0

    def combine(self) -> None:
        """Combines answers that lie in the window, where the first runs have put them."""
        rows = self.buffer.expert_output()
        if self._runs < self.FILLED_RUNS:
            self._runs += 1
            rows[: self.inputs.num_received] = self.inputs.answers
        self.combine_rows(rows)
