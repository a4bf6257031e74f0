"""The usual routes, by gloo or by Open MPI, written as a torch user writes them.

All-to-all-v: sort by expert, exchange counts, all-to-all-v of rows, and back. The local work is the same as
ours (quantise, reorder, weighted sum).

All-gather, reduce-scatter: every rank gets every token and sums what its experts have for each of them. More
bytes than all-to-all-v unless K is about W or more, but no sorting and no counts. The sums travel in fp32, as
accurate as in every other route; only the order of the additions differs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.compare.routes.base import Delivered, Inputs, Route
from benchmarks.sizes import EXPERTS, TOPK


class Exchange(Protocol):
    """The collectives that the usual routes need. Every rank has the same number of tokens."""

    def all_to_all(
        self, out: torch.Tensor, rows: torch.Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> None:
        """Sends the same number of rows to every rank, and receives them from every rank."""
        ...

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, by rank."""
        ...

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of this rank's share of the fp32 rows."""
        ...


class Gloo:
    """By torch.distributed."""

    def __init__(self) -> None:
        self._num_ranks = dist.get_world_size()

    def all_to_all(
        self, out: torch.Tensor, rows: torch.Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> None:
        """Sends every rank its share of the rows by gloo, and receives what every rank has for this one."""
        dist.all_to_all_single(out.view(torch.int8), rows.view(torch.int8), receive_splits, send_splits)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, by rank, as gloo gathers them."""
        out = rows.new_empty(self._num_ranks * rows.shape[0], *rows.shape[1:])
        dist.all_gather(list(out.view(torch.int8).chunk(self._num_ranks)), rows.view(torch.int8))
        return out

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns gloo's sum over ranks of this rank's share of the fp32 rows."""
        out = rows.new_empty(rows.shape[0] // self._num_ranks, *rows.shape[1:])
        dist.reduce_scatter(out, list(rows.chunk(self._num_ranks)))
        return out


class Mpi:
    """By mpi4py, from and to the tensors' memory.

    Args:
        comm: an ``mpi4py.MPI.Comm``.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        mpi: Any = importlib.import_module("mpi4py.MPI")
        self._byte, self._float = mpi.BYTE, mpi.FLOAT

    def all_to_all(
        self, out: torch.Tensor, rows: torch.Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> None:
        """Sends every rank its share of the rows by MPI, and receives what every rank has for this one."""
        size = rows[:1].nbytes if rows.numel() else out[:1].nbytes
        sent = [n * size for n in send_splits]
        received = [n * size for n in receive_splits]
        self._comm.Alltoallv([_bytes(rows), sent, self._byte], [_bytes(out), received, self._byte])

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, by rank, as MPI gathers them."""
        out = rows.new_empty(self._comm.size * rows.shape[0], *rows.shape[1:])
        self._comm.Allgather([_bytes(rows), self._byte], [_bytes(out), self._byte])
        return out

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns MPI's sum over ranks of this rank's share of the fp32 rows."""
        out = rows.new_empty(rows.shape[0] // self._comm.size, *rows.shape[1:])
        self._comm.Reduce_scatter_block([rows.numpy(), self._float], [out.numpy(), self._float])
        return out


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


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
