"""Our routes: `EPBuffer` with slots, with rows written to where they stay (direct), and without waiting.

Without waiting they are the very same calls and plans, without the launches that wait for flags. The rows
that such a run reads may be those of an earlier run: the same bytes, since every run sends the same tokens
along the same routes. So it delivers the same bits, and what it takes less is the price of waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.compare.routes.base import Delivered, Inputs, Route, Steps
from moe_triton import EPBuffer
from moe_triton.backends.base import Executable
from moe_triton.core.handle import DispatchOutput
from moe_triton.core.plan import Launch, device_launches
from moe_triton.core.records import STATUS_ENTRY
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.executables import Executables, Key
from moe_triton.schemes.rank_context import Operator


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

    def steps_us(self) -> Steps | None:
        """Returns the microseconds of each step of the last dispatch and combine, as the buffer has them."""
        if self.inputs.num_tokens > self.buffer.config.num_max_tokens_per_rank:
            return None  # of a call in rounds it has none
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


def apart(launches: Sequence[Launch]) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """The waits of a plan, and everything else. What was to run beside a launch that is gone, runs alone."""
    split: dict[bool, list[Launch]] = {True: [], False: []}
    was_wait = None
    for phases in device_launches(launches):
        began: set[bool] = set()  # whether a launch of waits, or of others, has its first phase
        for launch in phases:
            is_wait = launch.step == "wait"
            alongside = launch.alongside and is_wait == was_wait
            split[is_wait].append(replace(launch, alongside=alongside, joined=is_wait in began))
            began.add(is_wait)
            was_wait = is_wait
    return tuple(split[True]), tuple(split[False])


class NoWait(Slots):
    """Runs on the buffer of a `Slots` route, whose plans must have been run in both zones before."""

    def __init__(self, slots: Slots) -> None:
        super().__init__(slots.inputs, slots.buffer, slots.quantize)
        self._communicator: Communicator = slots.buffer._communicator
        self._waits: dict[tuple[str, int], Executable] = {}
        self._zones: dict[str, int] = {}
        self._executables: Executables = self._communicator._executables
        keys = self._executables.keys()
        usual = self._executables.swap(({}, {}))
        for key in keys:
            self._split(key)
        self._waitless = self._executables.swap(usual)

    def _split(self, key: Key) -> None:
        """Compiles a plan without its waits, and its waits alone."""
        variant, zone, *_ = key
        if not isinstance(variant, DispatchVariant | CombineVariant):
            return
        plan = self._executables.plan(key)
        waits, others = apart(plan.launches)
        assert waits
        self._executables.put(key, replace(plan, launches=others))
        self._waits[plan.operator, zone] = self._executables.compile(replace(plan, launches=waits))

    def dispatch(self) -> None:
        """Dispatches without the launches that wait for flags."""
        with self._without_waits("dispatch"):
            super().dispatch()

    def combine(self) -> None:
        """Combines without the launches that wait for flags."""
        with self._without_waits("combine"):
            super().combine()

    @contextlib.contextmanager
    def _without_waits(self, operator: Operator) -> Iterator[None]:
        """Other executables for one call. It goes through the same checks, outputs and turns of the zones."""
        self._zones[operator] = self._communicator._rounds.zone(operator)
        usual = self._executables.swap(self._waitless)
        try:
            yield
        finally:
            self._executables.swap(usual)

    def settle(self) -> None:
        """Takes the flags out of the windows that no wait has taken: real calls use these zones again."""
        super().settle()
        dist.barrier()
        inputs = self.inputs
        for operator, zone in self._zones.items():
            if operator == "dispatch":
                self._clear_entries(zone)
                continue
            code = self._waits[operator, zone].run(
                {"topk_idx": inputs.ids32, "num_tokens": inputs.num_tokens}
            )
            if code:
                raise RuntimeError(f"{operator}: a flag of a run without waiting is missing (code {code})")
        self._zones.clear()

    def _clear_entries(self, zone: int) -> None:
        """Its last launch has cleared those that were there by then; the others came too late for it."""
        context = self._communicator.context
        first = context.layout.region("dispatch_status").offset(zone=zone)
        last = first + context.num_entries * STATUS_ENTRY.num_bytes
        self._communicator._windows[0].tensor()[first:last] = 0
