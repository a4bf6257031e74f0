"""What each argument of dispatch and combine costs, against a plain pair in the same run, interleaved.

``python -m benchmarks.operators [--json FILE]``. A time is the last rank out minus the first rank in. Beside
each ratio stands that of the bytes which the feature moves: what it may cost without doing anything but move
them. Only ratios inside one run mean anything.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.sizes import EXPERTS, HIDDEN, TOPK
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.starting_line import StartingLine
from moe_triton.tools.progress import progress

ROW = 2 * HIDDEN  # bytes of a bf16 row
# A tensor-parallel pair holds one expert a rank, so that its two EP groups have two experts and K = 2.
TP_TOPK = 2
BUFFER_MEGABYTES = 2048
ALLOWED = 1.2
Call = Callable[[], torch.Tensor]
Options = dict[str, Any]


def traffic(
    topk: float, *, sent: int = 4 * ROW, returned: int = 3 * ROW, once: int = ROW, shared: float = 0
) -> float:
    """Bytes that a token moves: per result in dispatch and in combine, and once.

    Plain: a row is read and written by the send, and again by the arranging; a result is read and written by
    the send and read by the sum, which writes one row.
    """
    return (topk + shared) * (sent + returned) + once


QUANTIZED_RESULT = ROW + 4 * (HIDDEN + HIDDEN // 4)  # quantise, send, sum: an 8th of the row in bf16 scales


@dataclass(frozen=True)
class Feature:
    """One row of the table: options of both calls, or of one, and the bytes that a token then moves."""

    name: str
    bytes_per_token: float
    both: Options = field(default_factory=dict)
    dispatch: Options = field(default_factory=dict)
    combine: Options = field(default_factory=dict)
    version: int = 2
    tolerance: float | None = None  # None: the bits of the plain pair
    baseline: str = "plain"


def features(num_ranks: int, inputs: Inputs) -> list[Feature]:
    """Every row, with tensors of one rank."""
    plain, tokens = traffic(TOPK), inputs.x.shape[0]
    everyone = list(range(num_ranks))
    elastic = torch.tensor([1, num_ranks, 0, EXPERTS, *everyone, *everyone], dtype=torch.int32)
    entries = torch.zeros(tokens, TOPK, dtype=torch.bool)
    entries[:, ::2] = True
    waited = torch.zeros(num_ranks, dtype=torch.int64)
    special = {"zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 1}
    const = {
        "ori_x": inputs.x,
        "const_expert_alpha_1": torch.full((1,), 0.5).bfloat16(),
        "const_expert_alpha_2": torch.full((1,), 0.5).bfloat16(),
        "const_expert_v": inputs.x[:1].clone(),
    }
    smooth = torch.ones(EXPERTS, HIDDEN)
    packed = traffic(TOPK, sent=4 * HIDDEN, once=2 * ROW + HIDDEN)
    return [
        Feature("plain", plain),
        Feature("first version", plain, version=1),
        Feature("expert_scales", plain, dispatch={"expert_scales": inputs.weights}),
        Feature("mask of tokens, all active", plain, {"x_active_mask": torch.ones(tokens).bool()}),
        Feature("mask of entries, half active", traffic(TOPK / 2), {"x_active_mask": entries}, tolerance=9.0),
        Feature("performance_info", plain, {"performance_info": waited}),
        Feature("elastic_info", plain, {"elastic_info": elastic}),
        Feature("zero, copy and constant experts", plain, special, combine=const),
        Feature("quant_mode 2", packed, dispatch={"quant_mode": 2}, tolerance=0.3),
        Feature(
            "quant_mode 2, smooth scales",
            traffic(TOPK, sent=ROW + 5 * HIDDEN),
            dispatch={"quant_mode": 2, "scales": smooth},
            tolerance=0.3,
        ),
        Feature(
            "comm_quant_mode 2",
            traffic(TOPK, returned=QUANTIZED_RESULT),
            combine={"comm_quant_mode": 2},
            tolerance=0.3,
        ),
        Feature("shared_expert_x", plain + ROW, combine={"shared_expert_x": inputs.x}, tolerance=9.0),
        Feature(
            "shared expert on 2 of the ranks",
            traffic(TOPK, shared=1),
            {"shared_expert_num": 1, "shared_expert_rank_num": num_ranks // 2},
            tolerance=9.0,
        ),
        Feature("fullmesh_v2", plain, {"comm_alg": "fullmesh_v2"}),
        Feature(
            "fullmesh_v2, mask of entries, half active",
            traffic(TOPK / 2),
            {"comm_alg": "fullmesh_v2", "x_active_mask": entries},
            tolerance=9.0,
        ),
    ]


@dataclass(frozen=True)
class Inputs:
    """Tokens of one rank."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def random(cls, rank: int, tokens: int, topk: int, experts: int) -> Inputs:
        """Made from the rank's number."""
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        weights, ids = torch.randn(tokens, experts, generator=generator).softmax(1).topk(topk, dim=1)
        return cls(x, ids.int(), weights)


def pair(inputs: Inputs, group: tuple[Any, ...], feature: Feature) -> Call:
    """Dispatch, experts that answer with what they got, combine."""
    dispatch, combine = ops.npu_moe_distribute_dispatch_v2, ops.npu_moe_distribute_combine_v2
    if feature.version == 1:
        dispatch, combine = ops.npu_moe_distribute_dispatch, ops.npu_moe_distribute_combine  # type: ignore[assignment]
    to, back = {**feature.both, **feature.dispatch}, {**feature.both, **feature.combine}
    quantized = to.get("quant_mode") == 2
    answers: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        out = dispatch(inputs.x, inputs.ids, *group, **to)
        # Quantised rows are turned back once, by the first call: experts are not what is measured.
        if quantized and not answers:
            answers.append((out[0].float() * out[1][:, None]).bfloat16())
        z = answers[0] if quantized else out[0]
        given = {"tp_send_counts": out[5], **back} if back.get("tp_world_size") == 2 else back
        return combine(z, inputs.ids, out[2], out[4], inputs.weights, *group, **given)

    return run


def add_rms_norm(inputs: Inputs, group: tuple[Any, ...]) -> Call:
    """The plain pair, with a norm at its end."""
    residual, gamma = inputs.x[:, None], torch.ones(HIDDEN).bfloat16()

    def run() -> torch.Tensor:
        out = ops.npu_moe_distribute_dispatch_v2(inputs.x, inputs.ids, *group)
        return ops.npu_moe_distribute_combine_add_rms_norm(
            out[0], inputs.ids, out[2], out[4], inputs.weights, residual, gamma, *group
        )[2]

    return run


def tensor_parallel(rank: int, num_ranks: int, tokens: int) -> dict[str, tuple[Feature, Call]]:
    """Pairs of ranks that share each token, and the same groups without sharing."""
    ep_size = num_ranks // 2
    ep_groups = [dist.new_group(list(range(tp, num_ranks, 2))) for tp in range(2)]
    tp_groups = [dist.new_group([2 * ep, 2 * ep + 1]) for ep in range(ep_size)]
    ep, tp = divmod(rank, 2)
    inputs = Inputs.random(rank, tokens, TP_TOPK, ep_size)
    group = (ops.group_name(ep_groups[tp]), ep_size, ep, ep_size)
    both = {"group_tp": ops.group_name(tp_groups[ep]), "tp_world_size": 2, "tp_rank_id": tp}
    plain = Feature("plain, EP 2, K 2", traffic(TP_TOPK), baseline="plain, EP 2, K 2")
    # Gathered: sent and appended. Reduced: the peer's half sent back, and two rows read for one written.
    bytes_per_token = traffic(TP_TOPK, sent=8 * ROW, returned=8 * ROW)
    shared = Feature("TP 2", bytes_per_token, both, tolerance=9.0, baseline=plain.name)
    return {f.name: (f, pair(inputs, group, f)) for f in (plain, shared)}


def calls(rank: int, num_ranks: int, tokens: int) -> dict[str, tuple[Feature, Call]]:
    """Every row of the table and what it times."""
    inputs = Inputs.random(rank, tokens, TOPK, EXPERTS)
    group = (ops.group_name(), num_ranks, rank, EXPERTS)
    made = {f.name: (f, pair(inputs, group, f)) for f in features(num_ranks, inputs)}
    # fp32 sums go through memory once more, and the residual comes in
    norm = Feature("add_rms_norm", traffic(TOPK, once=7 * ROW), tolerance=9.0)
    made[norm.name] = (norm, add_rms_norm(inputs, group))
    return {**made, **tensor_parallel(rank, num_ranks, tokens)}


def check(made: dict[str, tuple[Feature, Call]]) -> None:
    """Every row gives what it has to, before any is timed."""
    for name, (feature, call) in made.items():
        have, want = call(), made[feature.baseline][1]()
        if feature.tolerance is None:
            good = torch.equal(have, want)
        else:
            good = bool(((have.view_as(want).float() - want.float()).abs() <= feature.tolerance).all())
        if not good:
            raise AssertionError(f"{name} gives other numbers than the plain pair")


Spans = list[tuple[float, float]]


def measure(rank: int, num_ranks: int, tokens: int, iterations: int) -> dict[str, tuple[float, str, Spans]]:
    """Bytes per token, baseline, and start and end of every iteration of each row on this rank."""
    os.environ["HCCL_BUFFSIZE"] = str(BUFFER_MEGABYTES)
    ops.configure(relaxed=True)
    made = calls(rank, num_ranks, tokens)
    check(made)
    spans: dict[str, Spans] = {name: [] for name in made}
    shuffle = random.Random(0)  # the same on every rank
    line = StartingLine()
    for _ in range(iterations):
        for name in shuffle.sample(list(made), len(made)):
            line.wait()
            start = time.perf_counter()
            made[name][1]()
            spans[name].append((start, time.perf_counter()))
    return {name: (f.bytes_per_token, f.baseline, spans[name]) for name, (f, _) in made.items()}


def seconds(per_rank: list[dict[str, tuple[float, str, Spans]]], name: str) -> list[float]:
    """Last rank out minus first rank in, per iteration."""
    return harness.elapsed(result[name][2] for result in per_rank)


def _pairs(text: str) -> int:
    """The type of a number of ranks that are tensor parallel by two: as many groups as experts of a token."""
    ranks = harness.at_least(2 * TP_TOPK, harness.MAX_RANKS)(text)
    if ranks % 2:
        raise argparse.ArgumentTypeError(f"{ranks}: an even number")
    return ranks


def main() -> None:
    """Measure every feature and print the table."""
    arguments = harness.parser("What each argument costs, against a plain pair of calls.")
    arguments.add_argument("--iterations", type=harness.at_least(1), default=40)
    arguments.add_argument("--ranks", type=_pairs, default=4, help="an even number")
    arguments.add_argument("--tokens", type=harness.at_least(1), default=64, help="per rank")
    options = arguments.parse_args()
    with progress("features"), RankGroup(options.ranks) as group:
        per_rank = group.run(measure, options.tokens, options.iterations, timeout_s=1200)
    rows, records = [], []
    for name, (bytes_per_token, baseline, _) in per_rank[0].items():
        ratios = sorted(
            have / want
            for have, want in zip(seconds(per_rank, name), seconds(per_rank, baseline), strict=True)
        )
        p10, p50, p90 = (ratios[int(q * (len(ratios) - 1))] for q in (0.1, 0.5, 0.9))
        moved = bytes_per_token / per_rank[0][baseline][0]
        verdict = "" if p50 <= ALLOWED * moved else "over"
        rows.append([name, f"{p10:.2f}", f"{p50:.2f}", f"{p90:.2f}", f"{moved:.2f}", verdict])
        case = {"feature": name, "ranks": options.ranks, "tokens": options.tokens, "against": baseline}
        us = statistics.median(seconds(per_rank, name)) * 1e6
        records += harness.records_of(
            "operators", case, {"cost_vs_plain": p50, "bytes_vs_plain": moved, "us": us}
        )
    title = f"dispatch + combine, EP {options.ranks}, BS {options.tokens}, H {HIDDEN}, K {TOPK}, bf16"
    columns = ["feature", "time p10", "p50", "p90", "bytes", f"over {ALLOWED:g} * bytes"]
    harness.print_table(f"{title}: time against plain", columns, rows)
    harness.write_records(options.json, records)


if __name__ == "__main__":
    harness.run_main(main)
