"""Time that one call spends in Python when its plan is cached: all of it but the kernels.

``python -m benchmarks.python_time [--json FILE]``. Rank 0 of two makes real calls first, and is then timed
with plans of no launches; the other rank is gone by then, so that nothing shares its core.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.harness import at_least, parser, print_table, records_of, run_main, write_records
from benchmarks.memory import one_communicator
from benchmarks.operators import Inputs
from benchmarks.sizes import EXPERTS, HIDDEN, SIZES, TOPK
from moe_triton import EPBuffer
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.tools.progress import progress

BUDGET_US = {"dispatch": 10.0, "dispatch and combine": 20.0, "EPBuffer": 60.0}
# Short repeats and many: the machine has slow phases, and the fastest repeat is to lie between them.
CALLS, REPEATS = 20, 2000


def measure(rank: int, num_ranks: int, tokens: int) -> dict[str, float]:
    """Microseconds per call of rank 0: the fastest of many repeats."""
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
    some = torch.ones(tokens, dtype=torch.bool)
    per_rank = EPBuffer(num_max_tokens_per_rank=tokens, **SIZES, comm_alg="fullmesh_v1")
    routes["EPBuffer, one row for each rank, fullmesh_v1"] = _per_rank(per_rank, inputs)
    communicators.append(per_rank._communicator)
    for scheme, mask in (("fullmesh_v1", None), ("direct", None), ("fullmesh_v1", some)):
        buffer = EPBuffer(num_max_tokens_per_rank=tokens, **SIZES, comm_alg=scheme)
        name = "EPBuffer, dispatch and combine" if mask is None else "EPBuffer with a mask"  # not native
        routes[f"{name}, {scheme}"] = _pair(buffer, inputs, mask)
        communicators.append(buffer._communicator)
    for _ in range(4):  # both zones of both
        out = dispatch()
        for call in list(routes.values())[1:]:
            call()
    if rank:
        return {}
    for communicator in (one_communicator(group[0]), *communicators):
        executables = communicator._executables
        keys = executables.keys()
        executables.swap(({}, {}))
        for key in keys:
            executables.put(key, replace(executables.plan(key), launches=()))
    return {
        name: min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS * 1e6
        for name, call in {**routes, f"torch.empty({HIDDEN})": lambda: torch.empty(HIDDEN)}.items()
    }


def _pair(buffer: EPBuffer, inputs: Inputs, mask: torch.Tensor | None = None) -> Callable[[], object]:
    def call() -> torch.Tensor:
        output = buffer.dispatch(inputs.x, inputs.ids, active_mask=mask)
        return buffer.combine(buffer.expert_output(), output.handle, inputs.weights)

    return call


def _per_rank(buffer: EPBuffer, inputs: Inputs) -> Callable[[], object]:
    def call() -> torch.Tensor:
        output = buffer.dispatch(inputs.x, inputs.ids, inputs.weights, do_expand=False)
        return buffer.combine(buffer.expert_output(), output.handle)

    return call


def _judged(name: str, us: float) -> str:
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
            microseconds: dict[str, float] = group.run(measure, tokens)[0]
        for name, value in microseconds.items():
            rows.append([f"{name}, BS {tokens}", f"{value:.1f}", _judged(name, value)])
            records += records_of("python_time", {"call": name, "tokens": tokens}, {"python_us": value})
    print_table("Python per call, plan cached", ["call", "us", "of the budget"], rows)
    write_records(options.json, records)


if __name__ == "__main__":
    run_main(main)
