"""Time that one call spends in Python when its plan is cached: all of it but the kernels.

``python -m benchmarks.python_time [--json FILE]``. Rank 0 of two makes real calls first, and is then timed
with plans of no launches; the other rank is gone by then, so that nothing shares its core.
"""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import (
    at_least,
    interval_text,
    parser,
    print_table,
    records_of,
    run_main,
    with_interval,
    write_records,
)
from benchmarks.memory import one_communicator
from benchmarks.operators import Inputs
from benchmarks.sizes import EXPERTS, HIDDEN, SIZES, TOPK
from moe_triton import EPBuffer
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.runtime import recorder
from moe_triton.tools.progress import progress

BUDGET_US = {"dispatch": 10.0, "dispatch and combine": 20.0, "EPBuffer": 60.0}
BUDGET_OF_OPTION_US = 10.0
"""Of what an option adds to a plain pair."""
PLAIN, WITH = "EPBuffer, dispatch and combine, fullmesh_v1", "EPBuffer with "
UNRECORDED = "EPBuffer, dispatch and combine, fullmesh_v1, no flight recorder"
EARLIER: Any = object()
"""Stands for what an earlier dispatch of the same buffer gave."""
# Short repeats and many: the machine has slow phases, and the fastest repeat is to lie between them.
CALLS, REPEATS = 20, 2000
REPEATS_OF_OPTION = 100  # which takes many times as long


def measure(rank: int, num_ranks: int, tokens: int) -> tuple[dict[str, float], list[float]]:
    """Of rank 0: microseconds per call, the fastest of many repeats; ratios of `PLAIN` to `UNRECORDED`."""
    ops.configure()
    inputs, group = Inputs.random(rank, tokens, TOPK, EXPERTS), (ops.group_name(), num_ranks, rank, EXPERTS)

    def dispatch() -> tuple[torch.Tensor, ...]:
        return ops.npu_moe_distribute_dispatch_v2(inputs.x, inputs.ids, *group)

    out = dispatch()
    answers = torch.zeros_like(out[0])

    def both() -> torch.Tensor:  # combines alone would wait for every rank now and then
        dispatch()
        return ops.npu_moe_distribute_combine_v2(answers, inputs.ids, out[2], out[4], inputs.weights, *group)

    routes: dict[str, Callable[[], object]] = {"dispatch": dispatch, "dispatch and combine": both}
    communicators = []
    per_rank = EPBuffer(num_max_tokens_per_rank=tokens, **SIZES, comm_alg="fullmesh_v1")
    routes["EPBuffer, one row for each rank, fullmesh_v1"] = _per_rank(per_rank, inputs)
    communicators.append(per_rank._communicator)
    for scheme in ("fullmesh_v1", "direct"):
        buffer = EPBuffer(num_max_tokens_per_rank=tokens, **SIZES, comm_alg=scheme)
        routes[f"EPBuffer, dispatch and combine, {scheme}"] = _pair(buffer, inputs)
        communicators.append(buffer._communicator)
    os.environ[recorder.VARIABLE] = "off"
    buffer = EPBuffer(num_max_tokens_per_rank=tokens, **SIZES, comm_alg="fullmesh_v1")
    del os.environ[recorder.VARIABLE]
    routes[UNRECORDED] = _pair(buffer, inputs)
    communicators.append(buffer._communicator)
    for name, (options, of_combine) in with_options(inputs, num_ranks).items():
        buffer = EPBuffer(num_max_tokens_per_rank=tokens, **SIZES, comm_alg="fullmesh_v1")
        routes[f"{WITH}{name}"] = _pair(buffer, inputs, options, of_combine)
        communicators.append(buffer._communicator)
    for _ in range(4):  # both zones of both
        out = dispatch()
        for call in list(routes.values())[1:]:
            call()
    if rank:
        return {}, []
    for communicator in (one_communicator(group[0]), *communicators):
        executables = communicator._executables
        keys = executables.keys()
        executables.swap(({}, {}))
        for key in keys:
            executables.put(key, replace(executables.plan(key), launches=()))
    fastest = {
        name: min(timeit.repeat(call, number=CALLS, repeat=_repeats(name))) / CALLS * 1e6
        for name, call in {**routes, f"torch.empty({HIDDEN})": lambda: torch.empty(HIDDEN)}.items()
    }
    with_and_without = routes[PLAIN], routes[UNRECORDED]
    times = [[timeit.timeit(call, number=CALLS) for call in with_and_without] for _ in range(REPEATS)]
    return fastest, [one / other for one, other in times]


def _repeats(name: str) -> int:
    return REPEATS_OF_OPTION if name.startswith(WITH) else REPEATS


Options = dict[str, Any]


def with_options(inputs: Inputs, num_ranks: int) -> dict[str, tuple[Options, Options]]:
    """What dispatches and combines of pairs are given besides, one thing each, by what it is called."""
    tokens, topk = inputs.ids.shape
    waited = {"performance_info": torch.zeros(num_ranks, dtype=torch.int64)}
    sums = {"out": torch.empty_like(inputs.x)}
    return {
        "a mask": ({"active_mask": torch.ones(tokens, dtype=torch.bool)}, {}),
        "a mask of entries": ({"active_mask": torch.ones(tokens, topk, dtype=torch.bool)}, {}),
        "out=": ({"out": EARLIER}, {}),
        "out= of both": ({"out": EARLIER}, sums),
        "performance_info": (waited, {}),
        "performance_info of both": (waited, waited),
        "comm_quantize='int8'": ({}, {"comm_quantize": "int8"}),
        "num_recv_tokens='exact'": ({"num_recv_tokens": "exact"}, {}),
        "expert_alignment": ({"expert_alignment": 16}, {}),
        "layout='padded'": ({"layout": "padded", "num_recv_tokens": "exact"}, {}),
        "handle=": ({"handle": EARLIER}, {}),
    }


def _pair(
    buffer: EPBuffer, inputs: Inputs, options: Options | None = None, of_combine: Options | None = None
) -> Callable[[], object]:
    first: Any = None
    options, of_combine = options or {}, of_combine or {}
    if EARLIER in options.values():
        first = buffer.dispatch(inputs.x, inputs.ids)
        buffer.combine(buffer.expert_output(), first.handle, inputs.weights)
    of_earlier = {"out": first, "handle": first and first.handle}
    options = {name: of_earlier[name] if value is EARLIER else value for name, value in options.items()}
    ids = None if "handle" in options else inputs.ids
    has_places = options.keys() & {"num_recv_tokens", "expert_alignment", "layout"}

    def call() -> object:
        output: Any = buffer.dispatch(inputs.x, ids, **options)
        y = output.tokens if has_places else buffer.expert_output()  # as many as there are places
        return buffer.combine(y, output.handle, inputs.weights, **of_combine)

    return call


def _per_rank(buffer: EPBuffer, inputs: Inputs) -> Callable[[], object]:
    def call() -> torch.Tensor:
        output = buffer.dispatch(inputs.x, inputs.ids, inputs.weights, do_expand=False)
        return buffer.combine(buffer.expert_output(), output.handle)

    return call


def _judged(name: str, us: float, plain_us: float) -> str:
    if name == UNRECORDED:
        return f"{us - plain_us:+.2f} us"
    if name.startswith(WITH):
        return f"{us - plain_us:+.1f} of {BUDGET_OF_OPTION_US:g} us"
    budget = BUDGET_US.get(name.split(",")[0])
    return "" if budget is None else f"{us / budget:.2f} of {budget:g} us"


def main() -> None:
    """Measure and print the table."""
    arguments = parser("Python per call with a cached plan.")
    arguments.add_argument("--tokens", type=at_least(1), nargs="+", default=[1, 16])
    options = arguments.parse_args()
    rows, records = [], []
    for tokens in options.tokens:
        with progress(f"BS {tokens}"), RankGroup(2) as group:
            microseconds, recorded = group.run(measure, tokens)[0]
        for name, value in microseconds.items():
            rows.append([f"{name}, BS {tokens}", f"{value:.1f}", _judged(name, value, microseconds[PLAIN])])
            records += records_of("python_time", {"call": name, "tokens": tokens}, {"python_us": value})
        ratios = with_interval("recorded_vs_not", recorded)
        name = f"{PLAIN}: with the flight recorder against without, in turn"
        rows.append(
            [
                f"{name}, BS {tokens}",
                "",
                f"{ratios['recorded_vs_not']:.3f} ({interval_text(ratios, 'recorded_vs_not', 3)})",
            ]
        )
        records += records_of("python_time", {"call": name, "tokens": tokens}, ratios)
    print_table("Python per call, plan cached", ["call", "us", "of the budget"], rows)
    write_records(options.json, records)


if __name__ == "__main__":
    run_main(main)
