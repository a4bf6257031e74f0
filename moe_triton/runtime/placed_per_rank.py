"""Dispatches whose rows have places, and that send a token once to each rank (``do_expand=False``).

Places are found as if each row were for its rank's first expert (`moe_triton.kernels.one_per_rank`), so that
rows of all rounds are in the order of source rank and token. Local ids and weights go to the places of their
rows; rows are counted for each expert by these ids, once all rounds are there.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.core.handle import DispatchOutput, Round
from moe_triton.runtime.placed_dispatch import Heard, PlacedDispatch
from moe_triton.runtime.placed_outputs import LOCAL, Outputs
from moe_triton.runtime.prepared_call import Bindings
from moe_triton.runtime.turns import PhaseRun


class PlacedPerRank(PlacedDispatch):
    """One of them; see `PlacedDispatch`."""

    def _results_idx(self, num_tokens: int) -> torch.Tensor | None:
        if self._known is not None:
            return self._known.results_idx
        return self._backend.empty((num_tokens, self._of_kernels.num_topk), torch.int32)

    def _counting_experts(self, heard: Heard, places: Bindings) -> list[PhaseRun]:
        stats = self._given.get("recv_stats")
        if self._known is not None and stats is None:  # whose counts these are, too
            return []
        if self._joined is not None and stats is not None:  # the round that is over has counted its own
            counts = self._joined.tokens_per_expert  # kernels may have more experts
            stats[: len(counts)].sub_(counts)
        counted = {"call_offsets": heard.offsets, "call_tokens_per_expert": heard.per_expert}
        return [self._phase("local_counts", self._given | places | counted, zone=0)]

    def _round_that_is_over(self) -> Bindings:
        assert self._joined is not None
        return super()._round_that_is_over() | {"results_idx": self._joined.handle.results_idx}

    def _late_rows(self, first: DispatchOutput) -> Bindings:
        kept = {f"round_{name}": getattr(first.handle, name) for name in LOCAL}
        return super()._late_rows(first) | kept

    def _kept_round(self, bindings: Bindings) -> Round:
        """What combine goes by in place of ids: it has no entry that a mask leaves out."""
        kept = super()._kept_round(bindings)
        return kept._replace(topk_idx=bindings["results_idx"], active_mask=None)

    def _kept(self, outputs: Outputs, heard: Heard) -> dict[str, Any]:
        first, local = self._joined, {name: outputs.written.get(name) for name in LOCAL}
        results_idx = self._given["results_idx"] if first is None else first.handle.results_idx
        return super()._kept(outputs, heard) | {"results_idx": results_idx, **local}
