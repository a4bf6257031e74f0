"""The usual route: sort by expert, exchange counts, all-to-all-v of rows, and back.

The local work is the same as ours (quantise, reorder, weighted sum), written as a torch user writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.compare.inputs import Inputs
from benchmarks.compare.routes.base import Delivered, Route
from benchmarks.compare.routes.exchanges import Exchange
from benchmarks.sizes import EXPERTS, TOPK


@dataclass(frozen=True)
class Sent:
    """What the way back needs."""

    order: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]
    to_expert_order: torch.Tensor


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to int8 with a scale each."""
    xf = x.float()
    s = torch.full((x.shape[0], 1), 127.0) / xf.abs().amax(dim=1, keepdim=True)
    return (xf * s).round_().to(torch.int8), 1.0 / s.squeeze(1)


class AllToAllV(Route):
    """Rows to the ranks that they go to."""

    def __init__(self, inputs: Inputs, exchange: Exchange, quantize: str) -> None:
        self._inputs, self._exchange, self._quantize = inputs, exchange, quantize
        self._sent: Sent | None = None
        self._tokens = self._counts = torch.empty(0)
        self._scales: torch.Tensor | None = None

    def dispatch(self) -> None:
        """Sorts rows by expert, exchanges counts, and sends each row to its expert's rank."""
        x, exchange, num_ranks = self._inputs.x, self._exchange, self._inputs.num_ranks
        flat = self._inputs.ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS)
        by_source = torch.empty_like(counts)
        equal = [EXPERTS // num_ranks] * num_ranks
        exchange.all_to_all(by_source.view(-1, 1), counts.view(-1, 1), equal, equal)
        send_splits = counts.view(num_ranks, -1).sum(1).tolist()
        by_source = by_source.view(num_ranks, -1)
        receive_splits = by_source.sum(1).tolist()
        total = sum(receive_splits)
        token = order // TOPK
        scales = None
        if self._quantize:
            q, scale = quantize_rows(x)
            rows, scales = q[token], scale[token]
        else:
            rows = x[token]
        received = rows.new_empty(total, x.shape[1])
        exchange.all_to_all(received, rows, receive_splits, send_splits)
        expert_of_row = torch.arange(by_source.shape[1]).repeat(num_ranks)
        to_expert_order = expert_of_row.repeat_interleave(by_source.flatten()).argsort(stable=True)
        if scales is not None:
            received_scales = scales.new_empty(total, 1)
            exchange.all_to_all(received_scales, scales.view(-1, 1), receive_splits, send_splits)
            self._scales = received_scales.view(-1)[to_expert_order]
        self._tokens, self._counts = received[to_expert_order], by_source.sum(0)
        self._sent = Sent(order, send_splits, receive_splits, to_expert_order)

    def combine(self) -> None:
        """Sends answers back to the ranks of their tokens, and sums them there by weight."""
        sent, y, weights = self._sent, self._inputs.answers, self._inputs.weights
        assert sent is not None
        by_source = torch.empty_like(y)
        by_source[sent.to_expert_order] = y
        returned = y.new_empty(sum(sent.send_splits), y.shape[1])
        self._exchange.all_to_all(returned, by_source, sent.send_splits, sent.receive_splits)
        num_tokens, topk = weights.shape
        rows = torch.empty_like(returned)
        rows[sent.order] = returned
        rows = rows.view(num_tokens, topk, -1)
        out = torch.zeros(num_tokens, y.shape[1])
        for k in range(topk):
            out += rows[:, k].float() * weights[:, k, None]
        self.delivered = Delivered(self._tokens, self._scales, self._counts, out.to(y.dtype))
        self._tokens, self._sent = torch.empty(0), None
