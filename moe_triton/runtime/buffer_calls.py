"""`EPBuffer`'s usual calls in native code, one native call each (`moe_triton.runtime.programs`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_triton.backends.base import Calls, Executable, PreparedCalls
from moe_triton.core.handle import DispatchHandle, DispatchOutput, PlacedHandle
from moe_triton.layout import CallRegions
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.runtime.executables import Phase, PlanCalls
from moe_triton.runtime.programs import combines, dispatches
from moe_triton.runtime.programs.combines import CombineProgram
from moe_triton.runtime.programs.dispatches import DispatchProgram
from moe_triton.runtime.programs.placed import Asked, Begun, PlacedProgram
from moe_triton.runtime.programs.shared import IDS, Programs, by_kind
from moe_triton.schemes.rank_context import RankContext

_DISPATCHES = (dispatches.PLAIN, dispatches.PER_RANK, dispatches.WITH_OPTIONS, dispatches.BY_KNOWN)
_COMBINES = (combines.PLAIN, combines.WITH_OPTIONS, combines.FROM_PLACES, combines.FROM_PADDED)


class BufferCalls(PlanCalls):
    """The native calls of one buffer.

    Each of its functions returns None where the call is anything but usual: nothing has happened then.

    Args:
        context: where its plans run.
        calls: the back end's.
        buffer_id: which buffer it is.
        window_base: address of this rank's window.
        results: where combine looks for results first, in each zone; none with most schemes.
        regions: where ranks say what a call with places has, or None.

    Attributes:
        dispatch: called with quantize of `EPBuffer.dispatch` and the tensors of
            `moe_triton.runtime.programs.shared.USUAL`: its output.
        dispatch_per_rank: the same with ``do_expand=False``.
        combine: called with y, handle and topk_weights of `EPBuffer.combine`: its result.
    """

    def __init__(
        self,
        context: RankContext,
        calls: Calls,
        buffer_id: int,
        window_base: int,
        results: Sequence[torch.Tensor],
        regions: CallRegions | None,
    ) -> None:
        super().__init__(calls)
        self._bypasses, self._buffer_id = context.local_bypass, buffer_id
        programs = Programs(context, buffer_id, window_base)
        self._dispatches = [DispatchProgram(programs, way) for way in _DISPATCHES]
        self._combines = [CombineProgram(programs, way, results) for way in _COMBINES]
        made = [calls.operator(each.program) for each in self._dispatches]
        self.dispatch: Callable[..., Any]
        self.dispatch_per_rank: Callable[..., Any]
        self.dispatch, self.dispatch_per_rank, self._with_options, self._by_known = made
        of_combines = [calls.operator(each.program) for each in self._combines]
        self.combine: Callable[..., Any]
        self.combine, self._combine_with, self._from_places, self._from_padded = of_combines
        self._placed = PlacedProgram(programs, regions) if regions is not None else None
        self._to_places = calls.operator(self._placed.program) if self._placed else None
        self._phases: dict[tuple[DispatchVariant, int], dict[Phase, Executable]] = defaultdict(dict)

    def dispatch_with(
        self, usual: tuple[Any, ...], mask: Any, performance_info: Any, out: Any, handle: Any
    ) -> DispatchOutput | None:
        """A dispatch with options.

        Args:
            usual: what `dispatch` takes.
            mask: active_mask of `EPBuffer.dispatch`.
            performance_info: of it.
            out: of it.
            handle: of it.
        """
        outputs: tuple[Any, ...] = (out, None, None, None)
        if type(out) is DispatchOutput:
            outputs = out[:-1]
        made: DispatchOutput | None
        if handle is None:
            made = self._with_options(*usual, *by_kind(mask), performance_info, *outputs)
            return made
        if type(handle) is not DispatchHandle or handle.buffer_id != self._buffer_id:
            return None
        counts = handle.__dict__.get("send_counts")  # by which it has dispatched before
        if counts is None or not (mask is usual[IDS] is handle.results_idx is None):
            return None
        usual = (*usual[:IDS], handle.topk_idx, *usual[IDS + 1 :])
        known = handle.expand_idx, counts, handle.digest
        masks = by_kind(handle.active_mask)
        made = self._by_known(*usual, *masks, performance_info, *outputs, *known)
        return made

    def dispatch_to_places(
        self, usual: tuple[Any, ...], mask: Any, performance_info: Any, asked: Asked
    ) -> DispatchOutput | Begun | None:
        """A dispatch whose rows have places.

        Args:
            usual: what `dispatch` takes.
            mask: active_mask of `EPBuffer.dispatch`.
            performance_info: of it.
            asked: what else it is asked for.
        """
        if self._to_places is None:
            return None
        made: DispatchOutput | Begun | None
        made = self._to_places(*usual, *by_kind(mask), performance_info, *asked)
        return made

    def combine_with(
        self, y: Any, handle: Any, topk_weights: Any, options: tuple[Any, ...]
    ) -> torch.Tensor | None:
        """A combine with options, or of a dispatch whose rows had places.

        Args:
            y: of `EPBuffer.combine`.
            handle: of it.
            topk_weights: of it.
            options: comm_quantize, performance_info and out of it.
        """
        run = self._combine_with
        if type(handle) is PlacedHandle:
            is_padded = type(y) is torch.Tensor and y.dim() == 3
            run = self._from_padded if is_padded else self._from_places
        made: torch.Tensor | None = run(y, handle, topk_weights, *options)
        return made

    def add(
        self, variant: Variant, zone: int, parts: int, tokens: torch.Tensor | None, executable: Executable
    ) -> None:
        """Lets native code run calls like this one, where they are usual."""
        if isinstance(variant, DispatchVariant):
            for dispatch in self._dispatches:
                if dispatch.way.takes(variant, bypasses=self._bypasses):
                    for plan in dispatch.plans(variant, zone, parts, tokens):
                        self._calls.add(plan, executable)
        else:
            for combine in self._combines:
                if combine.way.takes(variant, bypasses=self._bypasses):
                    for plan in combine.plans(variant, zone, parts):
                        self._calls.add(plan, executable)

    def swap(self, prepared: PreparedCalls) -> PreparedCalls:
        """Replaces the registered plans, ``{}`` for none, and returns the previous ones."""
        self._phases.clear()
        return super().swap(prepared)

    def add_phase(self, variant: Variant, zone: int, phase: Phase, executable: Executable) -> None:
        """Lets native code run calls whose rows have places, once there are both of their plans."""
        placed = self._placed
        if placed is None or isinstance(variant, CombineVariant) or phase not in ("ask", "place"):
            return
        phases = self._phases[variant, zone]
        phases[phase] = executable
        if len(phases) == 2 and placed.takes(variant, bypasses=self._bypasses):
            for plan in placed.plans(variant, zone):
                self._calls.add(plan, phases["ask"], phases["place"])
