"""Combines of dispatches whose rows had places: round by round, as those were sent."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.errors import ArgumentError
from moe_triton.core.handle import PlacedHandle, Round
from moe_triton.operators.buffer import COMBINE_OF_BUFFER, DISPATCHED, OF_HANDLE
from moe_triton.operators.variants import CombineVariant
from moe_triton.runtime import given_outputs
from moe_triton.runtime.arguments import other_ids_error
from moe_triton.runtime.buffer_plans import BufferPlans, CombineOfBuffer
from moe_triton.runtime.prepared_call import Bindings, Named
from moe_triton.runtime.turns import PhaseRun

# What a call binds for each of its tokens.
_BY_TOKEN = "topk_idx", "topk_weights", "mask", "shared_x", "ori_x", "out"


class PlacedCombine:
    """One of them.

    Args:
        plans: of the buffer.
        tensors: every one that it takes besides those of the handle.
        handle: a checked one.
        comm_quantize: of `EPBuffer.combine`.
        out: where sums are to go, or None.

    Raises:
        ArgumentError: a bad argument. Nothing was sent.
    """

    def __init__(
        self, plans: BufferPlans, tensors: Named, handle: PlacedHandle, comm_quantize: str | None, out: Any
    ) -> None:
        self.communicator, self.plans, self.handle = plans.communicator, plans, handle
        self.backend, self.host, self.fitting = self.communicator.backend, plans.host, self.plans.fitting
        self.out, results = out, _flat(tensors["y"], handle)
        first = handle.rounds[0]
        y = results
        if self.fitting is not None and self.fitting.has_room(y):
            y = self.fitting.stand_in(y)
        kept = {name: getattr(first, name, None) for name in OF_HANDLE}
        kept |= {name: getattr(handle, name) for name in ("topk_idx", "expand_idx", "active_mask")}
        if handle.results_idx is not None:  # ranks that a mask leaves out are not among these
            kept |= {"topk_idx": handle.results_idx, "active_mask": None}
        tensors = tensors | kept | {"y": y}
        is_quantized = comm_quantize is not None
        self.takes_places = self.communicator.scheme.sums_placed and not is_quantized
        modes = {
            "comm_quant_mode": 2 * is_quantized,
            "local_bypass": not is_quantized and self.plans.bypasses(tensors),
            "in_place": False,
            "is_placed": self.takes_places,
            "is_long": True,
        }
        if not modes["local_bypass"]:
            tensors["expand_idx"] = None
        shape = "n", self.communicator.config.hidden
        check_tensor("y", y, shape=shape, dtypes=(handle.dtype,), device=self.host.device)
        self.plan = self.plans.find(COMBINE_OF_BUFFER, CombineOfBuffer, tensors, modes)
        self._check_rows(y)
        fitted = self.plans.fitted(self.plan, tensors)
        if self.fitting is not None:
            fitted["y"] = self.fitting.results(results, handle.num_rows, quantized=is_quantized)
        self._check_tables(fitted)
        self.given: Bindings = {**self.plan.bind(fitted), DISPATCHED: handle.dispatched}
        if handle.digest != self.communicator.digest_ids(handle.topk_idx, handle.active_mask):
            name, remedy = "handle.topk_idx", "Pass output.handle as dispatch made it."
            raise other_ids_error(name, f"dispatch {handle.number}", remedy)
        self.communicator.masks.mark_handle(handle)
        if out is not None:
            self.out = given_outputs.sized("out", out, self.plan.specs["out"], self.host.device)
            read = {self.plan.symbols.operator.called(name): tensor for name, tensor in tensors.items()}
            given_outputs.check_apart({"out": self.out}, read | {"y": results})
        is_given = self.out is not None and self.fitting is None
        self.made = self.plan.make({"out": self.out} if is_given else {})
        self.gathered: torch.Tensor | None = None

    def _check_rows(self, y: torch.Tensor) -> None:
        """Checks that there is a result for each row that dispatch gave."""
        handle = self.handle
        if len(y) >= handle.num_rows:
            return
        has_gaps = handle.stride or handle.alignment > 1
        needed = handle.num_rows if has_gaps or self.host.is_asynchronous else handle.num_received()
        if len(y) < needed:
            rule = f"{needed} rows{' with the gaps' if has_gaps else ''} have to go back"
            remedy = "Pass one output row per row of dispatch's tokens, in the same order."
            raise ArgumentError("y", f"of {len(y)} rows", rule, remedy)

    def _check_tables(self, fitted: Named) -> None:
        """Where a dispatch keeps tables, each round is held to its own."""
        tables = self.plans.tables
        if tables is None or self.host.is_asynchronous:
            return
        weights = fitted["topk_weights"]
        for each in self.handle.rounds:
            last = each.first_token + len(each.topk_idx)
            of_round = None if weights is None else weights[each.first_token : last].float().contiguous()
            bindings = {**each._asdict(), "origins": each.assist_info, "topk_weights": of_round}
            bindings |= {"num_tokens": len(each.topk_idx), "mask": each.active_mask}
            tables.check(bindings, self.plan.called)

    def run(self) -> torch.Tensor:
        """All rounds. If it ends between two of them, as by Ctrl-C, no peer is left in the dark."""
        whole = self.given | self.plan.bound(self.made)
        rounds = (self._phases(whole, each) for each in self.handle.rounds)
        try:
            if self.host.is_asynchronous:  # whose allocator gives a round what the one before it had
                for phases in rounds:
                    self.communicator.run_phases(phases)
            else:
                self.communicator.run_phases(list(chain.from_iterable(rounds)))
        except BaseException as error:
            if self.communicator.is_usable:
                self.communicator.abandon("combine", error)
            raise
        out = self.made["out"]
        if self.fitting is None:
            return out
        return self.fitting.copied(self.fitting.all_seen(self.plan.specs, self.made)["out"], self.out)

    def _phases(self, whole: Bindings, each: Round) -> list[PhaseRun]:
        """What runs a round, whose results may have to be gathered first."""
        variant, bindings = cast(CombineVariant, self.plan.variant), self._of_round(whole, each)
        if self.communicator.memory.posts and each is not self.handle.rounds[0]:
            variant = replace(variant, adds_traffic=True)
        if self.takes_places:
            return [PhaseRun(variant, bindings)]
        gathered, rows = self._memory_for_results(each)
        gathers = bindings | {"gathered": gathered, "room_of_gathered": rows}
        return [
            PhaseRun(variant, gathers, "gather"),
            PhaseRun(variant, bindings | {"y": gathered, "num_rows": rows}),
        ]

    def _of_round(self, whole: Bindings, each: Round) -> Bindings:
        """What a round binds of what the call does."""
        bindings, first = dict(whole), each.first_token
        last = first + len(each.topk_idx)
        for name in _BY_TOKEN:
            tensor = bindings.get(name)
            if isinstance(tensor, torch.Tensor):
                # Of a shared expert's results, tokens may stand in two dimensions.
                rows = tensor.view(-1, tensor.shape[-1]) if name == "shared_x" else tensor
                bindings[name] = rows[first:last]
        names = "topk_idx", "expand_idx", "recv_offsets", "places", "tables"
        bindings |= {name: getattr(each, name) for name in names}
        bindings |= {"mask": each.active_mask, "origins": each.assist_info}
        return bindings | {"num_tokens": last - first, "num_ids": each.topk_idx.numel()}

    def _memory_for_results(self, each: Round) -> tuple[torch.Tensor, int]:
        """Where a round's results go one after the other, and how many there may be."""
        rows, columns = self.communicator.context.capacity, self.given["y"].shape[1]
        if self.host.is_asynchronous:
            return self.backend.empty((rows, columns), self.given["y"].dtype), rows
        if self.gathered is None:
            most = max(int(each.recv_offsets[-1]) for each in self.handle.rounds)
            self.gathered = self.backend.empty((min(rows, most), columns), self.given["y"].dtype)
        return self.gathered, min(rows, int(each.recv_offsets[-1]))


def _flat(y: Any, handle: PlacedHandle) -> Any:
    """Results as rows, also where there is a block of them for each expert."""
    if not (handle.stride and isinstance(y, torch.Tensor) and y.dim() == 3):
        return y
    shape = (handle.num_rows // handle.stride, handle.stride)
    if y.shape[:2] != shape:
        rule = f"dispatch's tokens are of {shape[0]} experts with {shape[1]} rows each"
        raise ArgumentError("y", f"of shape {tuple(y.shape)}", rule, "Pass as many rows of each expert.")
    is_block = y.stride(0) == y.shape[1] * y.stride(1)
    return y.flatten(0, 1) if is_block or y.is_contiguous() else y
