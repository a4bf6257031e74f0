"""What ranks run on the stand-in with ``do_expand=False``. Each is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moe_triton.core.handle import DispatchOutput
from moe_triton.core.tuning import Tuning
from tests.distributed.cases import Case, experts_of, inputs_of
from tests.distributed.long_runs import Options
from tests.distributed.test_rows_per_rank import dispatched, expected_round, mask_of, wrong_parts
from tests.npu.workers import start


def compared(
    rank: int, num_ranks: int, case: Case, policy: str, tuning: Tuning | None, dims: int, dtype: torch.dtype
) -> list[str]:
    """Names what is not the reference's, with plain calls between these."""
    wrong = []
    _, buffer = start(case, policy, rank, tuning=tuning)
    with buffer:
        stats = torch.zeros(buffer.num_local_experts, dtype=torch.int32)
        counted = stats.clone()
        for number in range(case.rounds):
            own = inputs_of(case, rank, number)
            received, sums = expected_round(case, number, dims)
            given = type(own)(own.x, own.topk_idx.clone().to(dtype), own.topk_weights)
            options = {
                "active_mask": mask_of(case, rank, number, dims),
                "cumulative_local_expert_recv_stats": stats,
                "wait": number % 2 == 0,
            }
            output = dispatched(buffer, case, given, **options)
            buffer.synchronize()
            given.topk_idx.fill_(1)  # combine reads a copy
            y = buffer.expert_output()
            y.fill_(0)
            n = len(received[rank].tokens)
            y[:n] = experts_of(case, rank, output.tokens[:n])
            combined = buffer.combine(y, output.handle)
            buffer.synchronize()
            counted += received[rank].tokens_per_expert
            wrong += [f"round {number}: {name}" for name in wrong_parts(output, received[rank])]
            if not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined")
            if not torch.equal(stats, counted):
                wrong.append(f"round {number}: stats")
            plain = buffer.dispatch(own.x, own.topk_idx, quantize=case.quantize)
            if case.quantize is None:
                buffer.combine(plain.tokens, plain.handle)
            buffer.synchronize()
    return wrong


def replayed(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Names what is not the reference's in runs of a graph, and in calls between them."""
    wrong = []
    _, buffer = start(case, "random", rank)
    own = inputs_of(case, rank, 0)
    with buffer:

        def a_round() -> tuple[object, torch.Tensor]:
            output = dispatched(buffer, case, own)
            return output, buffer.combine(output.tokens, output.handle)

        for _ in range(2):
            a_round()
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        with torch.npu.graph(graph):  # type: ignore[attr-defined]
            output, combined = a_round()
        expected = expected_sums(case)
        for number in range(4):
            graph.replay()
            buffer.synchronize()
            received = expected_round(case, 0)[0][rank]
            wrong += [f"run {number}: {name}" for name in wrong_parts(output, received)]  # type: ignore[arg-type]
            if not torch.equal(combined, expected[rank]):
                wrong.append(f"run {number}: combined")
            if number % 2:
                a_round()
                buffer.synchronize()
    return wrong


def compared_in_rounds(
    rank: int, num_ranks: int, case: Case, policy: str, dims: int, options: Sequence[Options]
) -> list[str]:
    """Runs calls with these options by turns, each of them again by its routing, and names what is wrong."""
    wrong = []
    _, buffer = start(case, policy, rank)
    with buffer:
        stats = torch.zeros(buffer.num_local_experts, dtype=torch.int32)
        counted = stats.clone()
        for number, given in enumerate(options):
            own = inputs_of(case, rank, number)
            received, sums = expected_round(case, number, dims)
            handle, more = None, {"active_mask": mask_of(case, rank, number, dims), **given}
            for name in (f"call {number}", f"call {number} again"):
                call = own if handle is None else replace(own, topk_idx=None)
                output = dispatched(
                    buffer, case, call, cumulative_local_expert_recv_stats=stats, handle=handle, **more
                )
                buffer.synchronize()
                y = experts_of(case, rank, output.tokens)
                combined = buffer.combine(y, output.handle)
                buffer.synchronize()
                counted += received[rank].tokens_per_expert
                wrong += [f"{name}: {part}" for part in wrong_parts(output, received[rank])]
                wrong += [] if torch.equal(combined, sums[rank]) else [f"{name}: combined"]
                wrong += [] if torch.equal(stats, counted) else [f"{name}: stats"]
                handle, more = output.handle, {}
    return wrong


def replayed_in_rounds(rank: int, num_ranks: int, case: Case, options: Options) -> list[str]:
    """Captures a call in rounds, and replays it on other tokens and other ids."""
    wrong = []
    _, buffer = start(case, "random", rank)
    own = inputs_of(case, rank, 0)
    with buffer:

        def layer() -> tuple[DispatchOutput, torch.Tensor]:
            output = dispatched(buffer, case, own, **options)
            return output, buffer.combine(output.tokens, output.handle)

        layer()
        buffer.synchronize()
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        with torch.npu.graph(graph):  # type: ignore[attr-defined]
            output, combined = layer()
        for number in range(0, 4 * num_ranks, num_ranks):  # of as many tokens
            other = inputs_of(case, rank, number)
            for name in ("x", "topk_idx", "topk_weights"):
                getattr(own, name).copy_(getattr(other, name))
            graph.replay()
            buffer.synchronize()
            received = expected_round(case, number)[0][rank]
            wrong += [f"replay {number}: {name}" for name in wrong_parts(output, received)]
            if not torch.equal(combined, expected_sums(case, number)[rank]):
                wrong.append(f"replay {number}: combined")
    return wrong


def expected_sums(case: Case, number: int = 0) -> list[torch.Tensor]:
    """What combine gives each rank if experts return what they get."""
    from moe_triton import reference

    received = expected_round(case, number)[0]
    tokens = [len(inputs_of(case, rank, number).x) for rank in range(case.config.num_ranks)]
    return reference.combine_per_rank(case.config, [own.tokens for own in received], received, tokens)
