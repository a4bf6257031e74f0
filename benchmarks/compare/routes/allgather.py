"""All-gather, reduce-scatter: every rank gets every token and sums what its experts have for each of them.

More bytes than all-to-all-v unless K is about W or more, but no sorting and no counts. The sums travel in
fp32, as accurate as in every other route; only the order of the additions differs.
"""

from __future__ import annotations

import torch

from benchmarks.compare.inputs import Inputs
from benchmarks.compare.routes.alltoallv import quantize_rows
from benchmarks.compare.routes.base import Delivered, Route
from benchmarks.compare.routes.exchanges import Exchange
from benchmarks.sizes import EXPERTS, TOPK


class AllGather(Route):
    """Every row to every rank."""

    def __init__(self, inputs: Inputs, exchange: Exchange, quantize: str) -> None:
        self._inputs, self._exchange, self._quantize = inputs, exchange, quantize
        self._tokens = self._counts = self._token_of_row = self._weights = torch.empty(0)
        self._scales: torch.Tensor | None = None

    def dispatch(self) -> None:
        """Gathers the rows of all ranks, and keeps those of this rank's experts."""
        inputs, exchange = self._inputs, self._exchange
        rows = inputs.x
        # Ids, weights and scales together: one small collective instead of three.
        words = [inputs.ids32, inputs.weights.view(torch.int32)]
        if self._quantize:
            rows, scale = quantize_rows(inputs.x)
            words.append(scale.view(torch.int32)[:, None])
        all_words = exchange.all_gather(torch.cat(words, dim=1))
        all_rows = exchange.all_gather(rows)
        local_experts = EXPERTS // inputs.num_ranks
        expert = all_words[:, :TOPK].flatten() - inputs.rank * local_experts
        mine = ((expert >= 0) & (expert < local_experts)).nonzero().squeeze(1)
        expert = expert[mine]
        mine = mine[expert.argsort(stable=True)]
        token = mine // TOPK
        self._tokens, self._token_of_row = all_rows[token], token
        self._counts = torch.bincount(expert, minlength=local_experts)
        self._weights = all_words[:, TOPK : 2 * TOPK].flatten()[mine].view(torch.float32)
        if self._quantize:
            self._scales = all_words[:, 2 * TOPK].view(torch.float32)[token]

    def combine(self) -> None:
        """Sums this rank's answers by weight for every token, and reduce-scatters the sums."""
        y, inputs = self._inputs.answers, self._inputs
        sums = torch.zeros(inputs.num_ranks * inputs.num_tokens, y.shape[1])
        sums.index_add_(0, self._token_of_row, y.float().mul_(self._weights[:, None]))
        out = self._exchange.reduce_scatter(sums).to(y.dtype)
        self.delivered = Delivered(self._tokens, self._scales, self._counts, out, exact=False)
        self._tokens = torch.empty(0)
