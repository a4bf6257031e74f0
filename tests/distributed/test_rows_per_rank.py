"""Dispatches with one row for each token and rank (``do_expand=False``), and their combines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_triton import DispatchOutput, EPBuffer, Tuning, reference
from moe_triton.processes import RankGroup
from moe_triton.reference import ReceivedPerRank
from tests.distributed.cases import Case, Inputs, experts_of, inputs_of, small_case
from tests.distributed.workers import by_turns, make_buffer

Groups = Callable[[int], RankGroup]
Expected = tuple[list[ReceivedPerRank], list[torch.Tensor]]


def masked(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return ids
    return ids.where(mask if mask.dim() == 2 else mask[:, None], -1)


def mask_of(case: Case, rank: int, number: int, dims: int) -> torch.Tensor | None:
    tokens = len(inputs_of(case, rank, number).x)
    if dims == 1:
        return torch.arange(tokens) < tokens - 1
    generator = torch.Generator().manual_seed(number * 100 + rank)
    return torch.rand(tokens, case.config.num_topk, generator=generator) < 0.7 if dims else None


def expected_round(case: Case, number: int, dims: int = 0, comm_quant_mode: int = 0) -> Expected:
    everyone = [inputs_of(case, rank, number) for rank in range(case.config.num_ranks)]
    ids = [masked(own.topk_idx, mask_of(case, rank, number, dims)) for rank, own in enumerate(everyone)]
    weights = [own.topk_weights for own in everyone] if case.weights else None
    x = [own.x for own in everyone]
    received = reference.dispatch_per_rank(case.config, x, ids, weights, quantize=case.quantize)
    y = [experts_of(case, rank, own.tokens) for rank, own in enumerate(received)]
    sizes = list(map(len, x))
    mode = {"comm_quant_mode": comm_quant_mode}
    return received, reference.combine_per_rank(case.config, y, received, sizes, **mode)


def wrong_parts(output: DispatchOutput, received: ReceivedPerRank) -> list[str]:
    n, handle = len(received.tokens), output.handle
    pairs = {
        "tokens": (output.tokens, received.tokens),
        "scales": (output.scales, received.scales),
        "sources": (handle.origins[:, :2], received.sources),
        "local_topk_idx": (handle.local_topk_idx, received.local_topk_idx),
        "local_topk_weights": (handle.local_topk_weights, received.local_topk_weights),
    }
    wrong = [
        name
        for name, (have, want) in pairs.items()
        if (have is None) != (want is None) or (have is not None and not torch.equal(have[:n], want))
    ]
    if not torch.equal(output.tokens_per_expert, received.tokens_per_expert):
        wrong.append("tokens_per_expert")
    if handle.num_received() != n or output.weights is not None:
        wrong.append("number of rows, or weights")
    return wrong


def dispatched(buffer: EPBuffer, case: Case, own: Inputs, **options: Any) -> DispatchOutput:
    weights = own.topk_weights if case.weights else None
    given = {"quantize": case.quantize, "do_expand": False, **options}
    made: Any = buffer.dispatch(own.x, own.topk_idx, weights, **given)
    return made if isinstance(made, DispatchOutput) else made.wait()


def compared(
    rank: int, num_ranks: int, case: Case, options: dict[str, Any], dims: int, comm: str | None
) -> list[str]:
    """Names what is not the reference's. Every second round is plain: zones and turns are the same."""
    wrong = []
    expected = by_turns(lambda number: expected_round(case, number, dims, 2 * bool(comm)), case.rounds)
    with make_buffer(case, **options) as buffer:
        stats = torch.zeros(buffer.num_local_experts, dtype=torch.int32)
        counted = stats.clone()
        for number in range(case.rounds):
            own, halves = inputs_of(case, rank, number), number % 4 > 1
            received, sums = expected[number]
            mask = mask_of(case, rank, number, dims)
            given = {"active_mask": mask, "cumulative_local_expert_recv_stats": stats, "wait": not halves}
            output = dispatched(buffer, case, own, **given)
            counted += received[rank].tokens_per_expert
            wrong += [f"round {number}: {name}" for name in wrong_parts(output, received[rank])]
            y = buffer.expert_output()
            y.copy_(experts_of(case, rank, torch.zeros(y.shape)))
            n = len(received[rank].tokens)
            y[:n] = experts_of(case, rank, output.tokens[:n])
            combined: Any = buffer.combine(y, output.handle, comm_quantize=comm, wait=not halves)  # type: ignore[arg-type]
            if not torch.equal(combined.wait() if halves else combined, sums[rank]):
                wrong.append(f"round {number}: combined")
            if not torch.equal(stats, counted):
                wrong.append(f"round {number}: stats")
            if number % 2:
                plain = buffer.dispatch(own.x, own.topk_idx)
                buffer.combine(plain.tokens, plain.handle)
                if plain.handle.results_idx is not None or plain.handle.local_topk_idx is not None:
                    wrong.append("a plain handle")
    return wrong


def case_of(num_ranks: int, scheme: str, config: dict[str, Any] | None = None, **changes: Any) -> Case:
    case = small_case(num_ranks, scheme, rounds=6, tokens=(4, 3, 0, 2)[:num_ranks], **changes)
    sizes = {"num_topk": 4, "num_experts": 3 * num_ranks, **(config or {})}
    return replace(case, config=replace(case.config, **sizes))


NO_OPTIONS: dict[str, Any] = {}
SERVERS = {"ranks_per_server": 2}
FORMATS = None, "int8", "int8_128"
CASES: dict[str, tuple[Case, dict[str, Any], int, str | None]] = {
    f"{scheme} {quantize}": (case_of(2, scheme, quantize=quantize), NO_OPTIONS, 0, None)
    for scheme in ("fullmesh_v1", "fullmesh_v2", "fullmesh")
    for quantize in FORMATS
}
CASES |= {
    "four ranks": (case_of(4, "fullmesh_v1"), NO_OPTIONS, 0, None),
    "four ranks in band, fp16": (case_of(4, "fullmesh_v2", dtype=torch.float16), NO_OPTIONS, 0, None),
    "four ranks in blocks": (case_of(4, "fullmesh"), NO_OPTIONS, 0, None),
    "no weights": (case_of(2, "fullmesh_v1", weights=False), NO_OPTIONS, 0, None),
    "nothing": (case_of(2, "fullmesh_v1", routing="none"), NO_OPTIONS, 0, None),
    "all experts": (case_of(2, "fullmesh_v1", {"num_topk": 6}), NO_OPTIONS, 0, None),
    "mask of tokens": (case_of(2, "fullmesh_v1"), NO_OPTIONS, 1, None),
    "mask of entries": (case_of(2, "fullmesh_v2"), NO_OPTIONS, 2, None),
    "mask in blocks": (case_of(2, "fullmesh"), NO_OPTIONS, 2, None),
    "results as int8": (case_of(2, "fullmesh_v1"), NO_OPTIONS, 0, "int8"),
    "padded": (case_of(2, "fullmesh_v1", {"hidden": 65}), NO_OPTIONS, 0, None),
    "own numbers": (case_of(2, "fullmesh_v2", {"experts_per_rank": (4, 2)}), NO_OPTIONS, 0, None),
    "a rank without experts": (case_of(2, "fullmesh_v1", {"experts_per_rank": (0, 6)}), NO_OPTIONS, 0, None),
    "servers": (case_of(4, "fullmesh_v1", SERVERS), NO_OPTIONS, 0, None),
    "servers in blocks": (case_of(4, "fullmesh", SERVERS, quantize="int8"), NO_OPTIONS, 0, None),
    "parts": (
        case_of(2, "fullmesh_v1", num_blocks=2),
        {"tuning": Tuning(dispatch_tokens=2, combine_tokens=2, communication_blocks=1)},
        0,
        None,
    ),
    "received while sent": (
        case_of(2, "fullmesh_v2", num_blocks=2),
        {"tuning": Tuning(receiving_blocks=1)},
        0,
        None,
    ),
    "in torch": (case_of(2, "fullmesh_v1", quantize="int8", kernels="torch"), NO_OPTIONS, 2, None),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_and_sums_are_the_references(ranks: Groups, name: str) -> None:
    case, options, dims, comm = CASES[name]
    num_ranks = case.config.num_ranks
    assert ranks(num_ranks).run(compared, case, options, dims, comm) == [[]] * num_ranks
