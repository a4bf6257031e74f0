"""Ranks that make different calls: each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from moe_triton import CommunicationTimeoutError, ConfigMismatchError, EPBuffer, torch_npu_ops
from moe_triton.schemes import product_of
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import Case, experts_of, inputs_of, small_case, smooth_scales_of
from tests.distributed.operator_cases import OperatorCase
from tests.distributed.operator_runs import FUNCTIONS
from tests.distributed.workers import expected_round, make_buffer
from tests.patience import seconds

# What a call is made of where ranks agree, by name; the odd rank changes one of them.
USUAL: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "int8": False,
    "weights": False,
    "comm_quant_mode": 0,
    "elastic": False,
    "do_expand": True,
}
LONG_S, SHORT_S = 300.0, seconds(3.0)
Said = tuple[str, str, float]


class BufferCalls:
    """The calls of an `EPBuffer`."""

    def __init__(self, rank: int, num_ranks: int, scheme: str, timeout_s: float) -> None:
        self._inputs = inputs_of(small_case(num_ranks), rank, 0)
        self.buffer = make_buffer(small_case(num_ranks, scheme), timeout_s=timeout_s)
        self._output: Any = None

    def dispatch(self, how: dict[str, Any]) -> None:
        """One, as `USUAL` with changes says."""
        inputs, quantize = self._inputs, "int8" if how["int8"] else None
        weights = inputs.topk_weights if how["weights"] else None
        x = inputs.x.to(how["dtype"])
        given = {"quantize": quantize, "do_expand": how["do_expand"]}
        self._output = self.buffer.dispatch(x, inputs.topk_idx, weights, **given)

    def combine(self, how: dict[str, Any]) -> None:
        """Of the latest dispatch."""
        handle = self._output.handle
        self.buffer.combine(self._output.tokens.to(handle.dtype), handle)

    def barrier(self) -> None:
        """Of the buffer's own."""
        self.buffer._communicator.barrier()

    def close(self) -> None:
        """Gives everything back."""
        self.buffer.close()


class OperatorCalls:
    """The calls of torch_npu's functions."""

    def __init__(self, rank: int, num_ranks: int, scheme: str, timeout_s: float) -> None:
        self._version = 1 if scheme == "version 1" else 2
        self._inputs = inputs_of(small_case(num_ranks), rank, 0)
        torch_npu_ops.configure(relaxed=True, timeout_s=timeout_s, product=product_of(scheme))
        self._group = torch_npu_ops.group_name()
        self._place = self._group, num_ranks, rank, small_case(num_ranks).config.num_experts
        self._attributes: dict[str, Any] = {} if self._version == 1 else {"comm_alg": scheme}
        words = OperatorCase(ranks=num_ranks, elastic="unscaled").deployment().elastic_info
        self._elastic = torch.tensor(words, dtype=torch.int32)
        self._size = num_ranks
        self._received: tuple[torch.Tensor, ...] = ()

    def _attributes_of(self, how: dict[str, Any]) -> dict[str, Any]:
        return {**self._attributes, **({"elastic_info": self._elastic} if how["elastic"] else {})}

    def dispatch(self, how: dict[str, Any]) -> None:
        """One, as `USUAL` with changes says."""
        inputs = self._inputs
        self._received = FUNCTIONS[self._version][0](
            inputs.x.to(how["dtype"]),
            inputs.topk_idx,
            *self._place,
            quant_mode=2 if how["int8"] else 0,
            expert_scales=inputs.topk_weights if how["weights"] else None,
            **self._attributes_of(how),
        )

    def combine(self, how: dict[str, Any]) -> None:
        """Of the latest dispatch."""
        rows, _, index, _, counts = self._received[:5]
        FUNCTIONS[self._version][1](
            rows.to(how["dtype"]),
            self._inputs.topk_idx,
            index,
            counts,
            self._inputs.topk_weights,
            *self._place,
            comm_quant_mode=how["comm_quant_mode"],
            **self._attributes_of(how),
        )

    def barrier(self) -> None:
        """Of the group, in the buffer that its latest call used."""
        torch_npu_ops._npu_distribute_barrier(torch.zeros(1), self._group, self._size)

    def close(self) -> None:
        """Gives everything back."""
        torch_npu_ops.release(self._group)


Calls = BufferCalls | OperatorCalls


def calls_of(rank: int, num_ranks: int, api: str, scheme: str, timeout_s: float) -> Calls:
    """A way to make calls: "buffer" or "operators"."""
    return (BufferCalls if api == "buffer" else OperatorCalls)(rank, num_ranks, scheme, timeout_s)


def _failure(body: Callable[[], None]) -> Said:
    """Kind, text and seconds of what is raised; kind is empty if nothing is."""
    start = time.monotonic()
    try:
        body()
    except (ConfigMismatchError, CommunicationTimeoutError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def differ(
    rank: int,
    num_ranks: int,
    api: str,
    scheme: str,
    operator: str,
    field: str,
    value: object,
    before: int,
    others: dict[str, Any],
) -> tuple[Said, str]:
    """After some rounds the last rank makes a dispatch, or a combine, with another value of a field.

    Args:
        rank: this one.
        num_ranks: of the group.
        api: see `calls_of`.
        scheme: how tokens travel.
        operator: "dispatch" or "combine".
        field: of `USUAL`.
        value: of the last rank's.
        before: rounds in which all agree.
        others: what all ranks change.

    Returns:
        What the dispatch, or the combine and the dispatch after it, ended in; and what the next call says.
    """
    calls = calls_of(rank, num_ranks, api, scheme, LONG_S)
    usual = {**USUAL, **others}
    how = {**usual, field: value} if rank == num_ranks - 1 else usual
    try:
        for _ in range(before):
            calls.dispatch(usual)
            calls.combine(usual)

        def body() -> None:
            if operator == "dispatch":
                calls.dispatch(how)
            else:
                calls.dispatch(usual)
                calls.combine(how)
                calls.dispatch(usual)

        said = _failure(body)
        try:
            calls.dispatch(usual)
        except Exception as error:
            return said, f"{type(error).__name__}: {error}"
        return said, ""
    finally:
        calls.close()


def meet(rank: int, num_ranks: int, api: str, scheme: str, mine: str, others: str, before: int) -> Said:
    """After a dispatch, the last rank makes one call and the others another.

    Args:
        rank: this one.
        num_ranks: of the group.
        api: see `calls_of`.
        scheme: how tokens travel.
        mine: what the last rank calls: "dispatch", "combine" or "barrier".
        others: what the others call.
        before: rounds in which all agree.
    """
    calls = calls_of(rank, num_ranks, api, scheme, SHORT_S)

    def make(operator: str) -> None:
        if operator == "barrier":
            calls.barrier()
        else:
            getattr(calls, operator)(USUAL)

    try:
        for _ in range(before):
            calls.dispatch(USUAL)
            calls.combine(USUAL)
        calls.dispatch(USUAL)
        return _failure(lambda: make(mine if rank == num_ranks - 1 else others))
    finally:
        calls.close()


def smooth_on_one_rank(rank: int, num_ranks: int, scheme: str) -> list[str]:
    """What differs from the reference in any bit where one rank has smooth scales and the others none."""
    case = small_case(num_ranks, scheme, quantize="int8", rounds=4)
    ones = smooth_scales_of(replace(case, smooth=True))
    assert ones is not None
    ones = torch.ones_like(ones)
    wrong = []
    with make_buffer(case) as buffer:
        for number in range(case.rounds):
            wrong += _one_smooth_round(buffer, case, rank, number, ones if rank == 0 else None)
    return wrong


def _one_smooth_round(
    buffer: EPBuffer, case: Case, rank: int, number: int, scales: torch.Tensor | None
) -> list[str]:
    inputs = inputs_of(case, rank, number)
    weights = inputs.topk_weights if case.weights else None
    output = buffer.dispatch(inputs.x, inputs.topk_idx, weights, quantize="int8", smooth_scales=scales)
    received, sums = expected_round(case, number)
    wrong = wrong_received(output, received[rank])
    combined = buffer.combine(experts_of(case, rank, output.tokens), output.handle, weights)
    return wrong if torch.equal(combined, sums[rank]) else [*wrong, "combined"]


def mask_on_one_rank(rank: int, num_ranks: int, scheme: str) -> bool:
    """Whether a mask of all tokens on one rank, and none on the others, gives what no mask gives."""
    torch_npu_ops.configure(relaxed=True, timeout_s=LONG_S, product=product_of(scheme))
    group = torch_npu_ops.group_name()
    inputs = inputs_of(small_case(num_ranks), rank, 0)
    place = group, num_ranks, rank, small_case(num_ranks).config.num_experts
    dispatch, combine = FUNCTIONS[2]
    everything = torch.ones(len(inputs.x), dtype=torch.bool)
    results = []
    try:
        for mask in (None, everything if rank == 0 else None):
            given = {"comm_alg": scheme, "x_active_mask": mask}
            received = dispatch(inputs.x, inputs.topk_idx, *place, quant_mode=0, **given)
            rows, _, index, _, counts = received[:5]
            back = rows, inputs.topk_idx, index, counts, inputs.topk_weights
            results.append(combine(*back, *place, **given))
    finally:
        torch_npu_ops.release(group)
    return torch.equal(*results)
