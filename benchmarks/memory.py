"""Memory of dispatch and combine: the window against its formula, private bytes against the outputs'.

``python -m benchmarks.memory [--json FILE]``. Every row runs in processes of its own, which hold all outputs.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import MAX_RANKS, at_least, parser, print_table, records_of, run_main, write_records
from benchmarks.operators import BUFFER_MEGABYTES, Inputs
from benchmarks.sizes import EXPERTS, HIDDEN, TOPK
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.runtime.communicator import Communicator
from moe_triton.schemes.buffer_size import needed_buffer_bytes
from moe_triton.tools.progress import progress
from moe_triton.torch_npu_ops import registry

CALLS = 4  # every zone twice
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "quant_mode 2": ({"quant_mode": 2}, {}),
    "comm_quant_mode 2": ({}, {"comm_quant_mode": 2}),
    "fullmesh_v2": ({"comm_alg": "fullmesh_v2"}, {"comm_alg": "fullmesh_v2"}),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    formula: int
    window: int
    outputs: int
    scratch: int
    private: int


def private_bytes() -> int:
    """Resident memory of this process that no other shares and no file backs."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert match
    return int(match[1]) * 1024


def one_communicator(group: str) -> Communicator:
    """The communicator that a group's calls of one kind have made."""
    (communicator,) = registry._communicators[group].values()
    return communicator


def measure(rank: int, num_ranks: int, tokens: int, feature: str) -> Memory:
    """Bytes after some calls whose outputs are held once."""
    os.environ["HCCL_BUFFSIZE"] = str(BUFFER_MEGABYTES)
    ops.configure()
    to, back = FEATURES[feature]
    inputs, group = Inputs.random(rank, tokens, TOPK, EXPERTS), (ops.group_name(), num_ranks, rank, EXPERTS)
    rows = tokens * num_ranks * min(EXPERTS // num_ranks, TOPK)
    answers = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16).fill_(1.0)
    # Kernels are compiled and libraries loaded by a call of another shape.
    warm = Inputs.random(rank, 1, TOPK, EXPERTS)
    out = ops.npu_moe_distribute_dispatch_v2(warm.x, warm.ids, *group, **to)
    ops.npu_moe_distribute_combine_v2(answers, warm.ids, out[2], out[4], warm.weights, *group, **back)
    ops.release(group[0])
    before = private_bytes()
    for _ in range(CALLS):
        out = ops.npu_moe_distribute_dispatch_v2(inputs.x, inputs.ids, *group, **to)
        combined = ops.npu_moe_distribute_combine_v2(
            answers, inputs.ids, out[2], out[4], inputs.weights, *group, **back
        )
    grown = private_bytes() - before
    communicator = one_communicator(group[0])
    outputs = sum(t.numel() * t.element_size() for t in (*out, combined))
    used = communicator.layout.data_bytes
    return Memory(
        needed_buffer_bytes(communicator.config), used, outputs, communicator.scratch_bytes(), grown
    )


def main() -> None:
    """Measure every row and print the table."""
    arguments = parser("Memory of dispatch and combine.")
    arguments.add_argument("--ranks", type=at_least(1, MAX_RANKS), default=4)
    arguments.add_argument("--tokens", type=at_least(1), default=64, help="per rank")
    options = arguments.parse_args()
    rows, records = [], []
    memory_by_feature: dict[str, list[Memory]] = {}
    with progress("features", len(FEATURES)) as work:
        for feature in FEATURES:
            work.begin(feature)
            with RankGroup(options.ranks) as group:
                memory_by_feature[feature] = group.run(measure, options.tokens, feature, timeout_s=300)
            work.advance()
    for feature, per_rank in memory_by_feature.items():
        most = max(per_rank, key=lambda m: m.private)
        megabytes = [f"{n / 1e6:.1f}" for n in (most.formula, most.window, most.outputs, most.scratch)]
        ratios = {
            "window_vs_formula": most.window / most.formula,
            "private_vs_outputs": most.private / most.outputs,
        }
        figures = [f"{ratio:.2f}" for ratio in ratios.values()]
        rows.append([feature, *megabytes, f"{most.private / 1e6:.1f}", *figures])
        case = {"feature": feature, "ranks": options.ranks, "tokens": options.tokens}
        records += records_of("memory", case, ratios)
    columns = ["feature", "formula MB", "window", "outputs", "scratch", "private", "window / formula"]
    title = f"EP {options.ranks}, BS {options.tokens}, H {HIDDEN}, K {TOPK}, {EXPERTS} experts; worst rank"
    print_table(title, [*columns, "private / outputs"], rows)
    write_records(options.json, records)


if __name__ == "__main__":
    run_main(main)
