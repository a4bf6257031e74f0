"""Dispatch and combine captured into a graph once and replayed with other inputs."""

from __future__ import annotations

import importlib

from moe_triton.tools.selftest.cases import expected_round, finish, inputs_of, make_buffer, one_round
from moe_triton.tools.selftest.check import Check, Finding, Place
from moe_triton.tools.selftest.checks.operators import FIRST, plain_case
from moe_triton.tools.selftest.comparison import wrong_parts

STAGE = "graphs"
REPLAYS = 4


def graph_checks(ranks: int) -> list[Check]:
    """One check, for back ends that can capture graphs."""
    # torch_npu documentation, "torch_npu.npu.NPUGraph" and "torch_npu.npu.graph" (as in torch.cuda)
    page = "torch_npu: torch_npu.npu.NPUGraph, torch_npu.npu.graph"
    return [Check("capture and replay", STAGE, replay, ranks=ranks, needs=(FIRST,), page=page)]


def replay(place: Place) -> Finding:
    """Captures three rounds, so that every other replay begins in the other zone, and changes the inputs."""
    backend = place.backend
    if not backend.capabilities.captures_graphs:
        return Finding(skipped=f"the {backend.name} back end captures no graphs")
    npu = importlib.import_module("torch_npu").npu
    case = plain_case(place.settings, place.num_ranks)
    own = inputs_of(case, place.rank, 0).to(backend.device)
    wrong: list[str] = []
    with make_buffer(case, backend=place.settings.backend, timeout_s=place.settings.wait_s) as buffer:
        for _ in range(2):  # compiles everything before the capture
            one_round(buffer, case, own, None)
        finish(buffer, backend)
        graph = npu.NPUGraph()
        with npu.graph(graph):
            captured = [one_round(buffer, case, own, None) for _ in range(3)]
        for number in range(REPLAYS):
            fresh = inputs_of(case, place.rank, number)
            own.x.copy_(fresh.x)
            own.topk_idx.copy_(fresh.topk_idx)
            own.topk_weights.copy_(fresh.topk_weights)
            graph.replay()
            finish(buffer, backend)
            received, sums = expected_round(case, number)
            for output, combined in captured:
                found = wrong_parts(output, combined, received[place.rank], sums[place.rank])
                wrong += [f"replay {number}: {text}" for text in found]
    return Finding(wrong=tuple(wrong), figures={"replays": REPLAYS})
