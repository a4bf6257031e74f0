"""MPI's all-to-all-v with our Triton kernels for the local work: all that differs from us is the transport.

As good as we can make it: buffers are made once, a row and its scale travel together, and the sum reads the
returned rows where they are, without a reordering before it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.compare.routes.base import Delivered, Inputs, Route
from benchmarks.compare.routes.gather import gather_kernel
from benchmarks.sizes import EXPERTS, TOPK
from moe_triton.backends.cpu.triton import prepare
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.route import route_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout

ANSWER_ITEMSIZE = 2
Call = Callable[[], None]


class MpiNative(Route):
    """All-to-all-v between our own kernels.

    Rows in the send buffer stand by expert, and within an expert by token: ``place`` is where an entry's row
    is. In the receive buffer they stand by source rank first; ``order`` is where those in expert order are.

    Args:
        comm: an ``mpi4py.MPI.Comm``.
    """

    def __init__(self, inputs: Inputs, comm: Any, quantize: str) -> None:
        self._inputs, self._comm, self._quantize = inputs, comm, quantize
        mpi: Any = importlib.import_module("mpi4py.MPI")
        self._byte, self._int = mpi.BYTE, mpi.INT
        ranks, sent, received = inputs.num_ranks, inputs.num_sent, inputs.num_received
        self._shape = (ranks, EXPERTS // ranks)
        hidden, answer_bytes = inputs.hidden, ANSWER_ITEMSIZE * inputs.hidden
        self._slot = SlotLayout(hidden, 1)
        self._row_bytes = self._slot.packed_bytes if quantize else answer_bytes
        i32, i8 = torch.int32, torch.int8
        self._entry_index = torch.empty(sent, dtype=i32)
        self._expert_counts = torch.empty(EXPERTS, dtype=i32)
        self._received_counts = np.empty(self._shape, np.int32)
        self._place, self._token_of_place = torch.empty(sent, dtype=i32), torch.empty(sent, dtype=i32)
        self._token = np.repeat(np.arange(inputs.num_tokens, dtype=np.int32), TOPK)
        self._ids = inputs.ids32.view(-1).numpy()
        self._packed = torch.zeros(inputs.num_tokens, self._slot.packed_bytes, dtype=i8)
        # What is sent by dispatch is gone by the time that combine uses the memory the other way.
        own, peers = (torch.zeros(rows * answer_bytes, dtype=i8) for rows in (sent, received))
        self._send = own[: sent * self._row_bytes].view(sent, self._row_bytes)
        self._receive = peers[: received * self._row_bytes].view(received, self._row_bytes)
        self._order, self._place_of_row = torch.empty(received, dtype=i32), torch.empty(received, dtype=i32)
        self._rows = torch.arange(received, dtype=i32).numpy()
        self._tokens = torch.empty(received, hidden, dtype=i8 if quantize else torch.bfloat16)
        self._scales = torch.empty(received if quantize else 0)
        self._answers = peers.view(received, answer_bytes)
        self._returned = own.view(sent, answer_bytes)
        self._out = torch.empty(inputs.num_tokens, hidden, dtype=torch.bfloat16)
        self._prepare()

    def _prepare(self) -> None:
        """Checks arguments and lays them out once; a call then only runs the kernels."""
        inputs, slot = self._inputs, self._slot
        sizes = [self._ids.size, EXPERTS]
        self._route = prepare(route_kernel(), [inputs.ids32, self._entry_index, self._expert_counts, *sizes])
        x = inputs.x.view(torch.int8)
        if self._quantize:
            scales = self._packed.view(-1).view(torch.float32)[slot.scale_offset // WORD_BYTES :]
            stride = slot.packed_bytes
            numbers = [0, inputs.num_tokens, stride, stride // WORD_BYTES]
            self._pack = prepare(
                pack_kernel(torch.bfloat16, inputs.hidden), [inputs.x, self._packed, scales, *numbers]
            )
            x = self._packed
        self._fill_send = _gather(x, self._token_of_place, self._send)
        self._arrange = _gather(
            self._receive,
            self._order,
            self._tokens,
            self._scales if self._quantize else None,
            slot.scale_offset // WORD_BYTES,
        )
        self._fill_answers = _gather(inputs.answers, self._place_of_row, self._answers)
        kernel = weighted_sum_kernel(
            torch.bfloat16, inputs.hidden, TOPK, features=SumFeatures(by_expert=True)
        )
        # By expert, with all experts in one place: a result is found by its place alone.
        values: dict[str, torch.Tensor | int] = {
            "slots": self._returned.view(torch.bfloat16),
            "topk_idx": inputs.ids32,
            "topk_weights": inputs.weights,
            "expand_idx": self._place,
            "out": self._out,
            "expert_stride": 0,
            "index_stride": inputs.hidden,
            "first_token": 0,
            "num_tokens": inputs.num_tokens,
            "num_experts": EXPERTS,
            "max_index": inputs.num_sent,
        }
        self._sum = prepare(kernel, [values[arg.name] for arg in kernel.args])

    def dispatch(self) -> None:
        """Sends rows to their experts' ranks by MPI, with our own kernels for the work at both ends."""
        self._route()
        counts = self._expert_counts.numpy()
        starts = np.cumsum(counts) - counts
        place, token_of_place = self._place.numpy(), self._token_of_place.numpy()
        np.add(starts[self._ids], self._entry_index.numpy(), out=place, casting="unsafe")
        token_of_place[place] = self._token
        self._comm.Alltoall([counts, self._int], [self._received_counts, self._int])
        self._send_rows = counts.reshape(self._shape).sum(1)
        self._receive_rows = self._received_counts.sum(1)
        if self._quantize:
            self._pack()
        self._fill_send()
        self._exchange(self._send, self._send_rows, self._receive, self._receive_rows)
        self._find_order()
        self._arrange()

    def _find_order(self) -> None:
        """Blocks of rows from source-major to expert-major."""
        counts = self._received_counts
        starts = (np.cumsum(counts) - counts.ravel()).reshape(self._shape)
        by_expert = counts.T.ravel()
        shift = starts.T.ravel() - (np.cumsum(by_expert) - by_expert)
        order, place_of_row = self._order.numpy(), self._place_of_row.numpy()
        np.add(np.repeat(shift, by_expert), self._rows, out=order, casting="unsafe")
        place_of_row[order] = self._rows

    def combine(self) -> None:
        """Sends answers back by MPI, and sums them by weight with our own kernel where they arrive."""
        self._fill_answers()
        self._exchange(self._answers, self._receive_rows, self._returned, self._send_rows)
        self._sum()
        counts = torch.from_numpy(self._received_counts.sum(0, dtype=np.int64))
        self.delivered = Delivered(self._tokens, self._scales if self._quantize else None, counts, self._out)

    def _exchange(self, rows: torch.Tensor, sent: Any, out: torch.Tensor, received: Any) -> None:
        size = rows.shape[1]
        self._comm.Alltoallv(
            [rows.numpy(), sent * size, self._byte], [out.numpy(), received * size, self._byte]
        )


def _gather(
    rows: torch.Tensor,
    order: torch.Tensor,
    out: torch.Tensor,
    out_scales: torch.Tensor | None = None,
    scale_word: int = 0,
) -> Call:
    """A call that puts rows (of any type) where ``order`` says, as wide as they are in ``out``."""
    words, out_words = rows.view(torch.int32), out.view(torch.int32)
    kernel = gather_kernel(out_words.shape[1], scale_word, out_scales is not None)
    scales = torch.empty(0) if out_scales is None else out_scales
    return prepare(
        kernel, [words, words.view(torch.float32), order, out_words, scales, order.numel(), words.shape[1]]
    )
