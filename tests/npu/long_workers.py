"""What ranks run of calls in rounds on the stand-in. Each is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.tools.selftest.cases import Inputs, difference
from tests.distributed.cases import Case, inputs_of
from tests.distributed.long_runs import Options, dispatched, results_of, wrong_of
from tests.distributed.workers import expected_round
from tests.npu.workers import start


def compared(rank: int, num_ranks: int, case: Case, policy: str, options: Sequence[Options]) -> list[str]:
    """Runs calls with these options by turns, each of them again by its routing, and names what is wrong."""
    wrong = []
    _, buffer = start(case, policy, rank)
    with buffer:
        for number, given in enumerate(options):
            inputs = inputs_of(case, rank, number)
            received, sums = expected_round(case, number)
            output = dispatched(buffer, case, inputs, **given)
            buffer.synchronize()
            wrong += [f"call {number}: {text}" for text in wrong_of(output, received[rank])]
            y = results_of(case, rank, output)
            out = buffer.combine(y, output.handle, inputs.topk_weights)
            again = buffer.dispatch(
                inputs.x, None, inputs.topk_weights, handle=output.handle, quantize=case.quantize
            )
            buffer.synchronize()
            wrong += [f"call {number}: {text}" for text in [difference("sums", out, sums[rank])] if text]
            wrong += [f"call {number} again: {text}" for text in wrong_of(again, received[rank])]
            out = buffer.combine(results_of(case, rank, again), again.handle, inputs.topk_weights)
            buffer.synchronize()
            wrong += [
                f"call {number} again: {text}" for text in [difference("sums", out, sums[rank])] if text
            ]
    return wrong


def replayed(rank: int, num_ranks: int, case: Case, options: Options) -> list[str]:
    """Captures a call in rounds, and replays it on other tokens and other ids."""
    wrong = []
    _, buffer = start(case, "random", rank)
    with buffer:
        mine = inputs_of(case, rank, 0)

        def layer() -> torch.Tensor:
            output = dispatched(buffer, case, mine, **options)
            kept.append(output)
            tokens = output.tokens.flatten(0, -2)
            return buffer.combine(tokens, output.handle, mine.topk_weights)

        kept: list[object] = []
        layer()
        buffer.synchronize()
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        with torch.npu.graph(graph):  # type: ignore[attr-defined]
            out = layer()
        for number in range(4):
            other = inputs_of(case, rank, number * num_ranks)  # of as many tokens
            for tensor, written in zip(_tensors(mine), _tensors(other), strict=True):
                tensor.copy_(written)
            graph.replay()
            buffer.synchronize()
            sums = expected_sums(case, number * num_ranks)
            wrong += [f"replay {number}: {text}" for text in [difference("sums", out, sums[rank])] if text]
    return wrong


def _tensors(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.x, inputs.topk_idx, inputs.topk_weights


def expected_sums(case: Case, number: int) -> list[torch.Tensor]:
    """What combine gives where experts return what they get."""
    from tests.npu.graph_workers import expected_sums as of_round

    return of_round(case, number)


def refused(rank: int, num_ranks: int, case: Case, options: Options, captured: bool) -> str:
    """What a call says that the host would have to read for, in a graph or not."""
    _, buffer = start(case, "random", rank)
    with buffer:
        inputs = inputs_of(case, rank, 0)
        try:
            if captured:
                graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
                with torch.npu.graph(graph):  # type: ignore[attr-defined]
                    dispatched(buffer, case, inputs, **options)
            else:
                dispatched(buffer, case, inputs, **options)
        except (ArgumentError, BufferStateError) as error:
            return str(error)
    return ""
