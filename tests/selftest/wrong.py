"""The checks' own functions on a library that is wrong by a bit somewhere: they have to see it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from moe_triton import torch_npu_ops
from moe_triton.tools.selftest import cases
from moe_triton.tools.selftest.cases import Case
from moe_triton.tools.selftest.check import Finding, Place
from moe_triton.tools.selftest.checks import operators, stragglers, windows
from moe_triton.tools.selftest.wires import Wires


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """The same, but for the lowest bit of its last element."""
    changed = tensor.clone()
    changed.view(-1)[-1:].view(torch.uint8)[0] ^= 1
    return changed


def wrong_combine(place: Place, case: Case) -> Finding:
    """Rank 1 gets one bit of the second round's result wrong."""
    calls = 0

    def one_round(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        output, combined = real(*arguments)
        return output, flipped(combined) if place.rank == 1 and calls == 2 else combined

    real = cases.one_round
    with mock.patch.object(cases, "one_round", one_round):
        return operators.compare_rounds(place, case)


def wrong_dispatch(place: Place, case: Case) -> Finding:
    """Every rank gets one bit of the scales wrong."""

    def one_round(*arguments: Any) -> Any:
        output, combined = real(*arguments)
        rows = output.handle.num_received()
        return output._replace(scales=flipped(output.scales[:rows])), combined

    real = cases.one_round
    with mock.patch.object(cases, "one_round", one_round):
        return operators.compare_rounds(place, case)


def wrong_late_combine(place: Place, delay_ms: int) -> Finding:
    """Who waits for a late rank gets a wrong bit."""
    real = cases.wrong_parts

    def wrong_parts(output: Any, combined: torch.Tensor, *expected: Any) -> list[str]:
        return real(output, flipped(combined) if place.rank == 0 else combined, *expected)

    with mock.patch.object(cases, "wrong_parts", wrong_parts):
        return stragglers.come_late(place, delay_ms)


def early_rows(place: Place, delay_ms: int) -> Finding:
    """A dispatch that does not wait for the late rank: its end is taken too early."""
    finding = stragglers.come_late(place, delay_ms)
    begins = finding.samples["begin_ms"]
    return Finding(samples={"begin_ms": begins, "end_ms": [begin + 1 for begin in begins]})


def wrong_names(place: Place, quant_mode: int) -> Finding:
    """torch_npu's combine is off by a bit on rank 0."""
    real = torch_npu_ops.npu_moe_distribute_combine_v2

    def combine(*arguments: Any) -> torch.Tensor:
        out = real(*arguments)
        return flipped(out) if place.rank == 0 else out

    with mock.patch.object(torch_npu_ops, "npu_moe_distribute_combine_v2", combine):
        return operators.compare_torch_npu(place, quant_mode)


def wrong_rows(place: Place) -> Finding:
    """Rank 0's rows arrive with a wrong bit, but those to itself."""
    real = Wires.send

    def send(self: Wires, peer: int, rows: torch.Tensor, *more: Any, **options: Any) -> None:
        is_wrong = place.rank == 0 and peer != 0
        real(self, peer, flipped(rows) if is_wrong else rows, *more, **options)

    with mock.patch.object(Wires, "send", send):
        return windows.exchange_rows(place)


def wrong_numbers(place: Place) -> Finding:
    """Rank 1's third flag has another number."""
    real = Wires.barrier
    calls = 0

    def barrier(self: Wires, number: int = 0) -> list[int]:
        nonlocal calls
        calls += 1
        return real(self, number + (place.rank == 1 and calls == 3))

    with mock.patch.object(Wires, "barrier", barrier):
        return windows.exchange_flags(place)


def everybody_comes(place: Place) -> Finding:
    """The rank that should be missed dispatches as well, once the others are about to."""
    real_round, real_barrier = cases.one_round, stragglers.dist.barrier
    rounds: list[Any] = []

    def one_round(*arguments: Any) -> Any:
        rounds.append(arguments)
        return real_round(*arguments)

    def barrier() -> None:
        real_barrier()
        if place.rank == place.num_ranks - 1 and len(rounds) == 1:
            one_round(*rounds[0])

    patch = mock.patch.object
    with patch(cases, "one_round", one_round), patch(stragglers.dist, "barrier", barrier):
        return stragglers.never_come(place)


def without_posts(place: Place, case: Case) -> Finding:
    """Kernels that post to each other, on a machine where they cannot."""
    with mock.patch.object(type(place.backend), "why_no_posts", return_value="there is no network"):
        return operators.compare_posted(place, case)
