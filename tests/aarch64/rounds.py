"""A few rounds of every scheme and both APIs, against the reference: ``python -m tests.aarch64.rounds``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from tests.distributed.cases import Case, small_case
from tests.distributed.workers import compare_rounds
from tests.patience import seconds

SCHEMES = ("fullmesh_v1", "fullmesh_v2", "direct", "fullmesh", "hierarchy")
ROUNDS = 4  # of which native code makes the last ones
ANSWER_S = 600.0


def case_of(scheme: str, quantize: str | None) -> Case:
    """On two ranks; on two servers of two where that is what the scheme is for."""
    num_ranks = 4 if scheme == "hierarchy" else 2
    case = small_case(num_ranks, scheme, quantize, rounds=ROUNDS)
    if scheme == "hierarchy":
        case = replace(case, config=replace(case.config, ranks_per_server=2), weights=True)
    return case


def pair_of_functions(rank: int, num_ranks: int) -> bool:
    """Whether torch_npu's functions give each token its sum, where experts give what they get."""
    ops.configure(timeout_s=seconds(60.0))
    group: tuple[Any, ...] = (ops.group_name(), num_ranks, rank, 2 * num_ranks)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 1024, generator=generator).bfloat16()
    ids = torch.rand(4, 2 * num_ranks, generator=generator).topk(2).indices.int()
    weights = torch.full((4, 2), 0.5)
    out = ops.npu_moe_distribute_dispatch_v2(x, ids, *group)
    sums = ops.npu_moe_distribute_combine_v2(out[0], ids, out[2], out[4], weights, *group)
    return torch.equal(sums, x)


def main() -> int:
    """Runs all, and says what differs."""
    wrong: list[str] = []
    for num_ranks, schemes in ((2, SCHEMES[:-1]), (4, SCHEMES[-1:])):
        with RankGroup(num_ranks) as group:
            for scheme in schemes:
                for quantize in (None, "int8"):
                    case = case_of(scheme, quantize)
                    found = group.run(compare_rounds, case, timeout_s=seconds(ANSWER_S))
                    wrong += [f"{scheme} {quantize}: {text}" for of_rank in found for text in of_rank]
                    print(f"{scheme}, {quantize or 'as they are'}: {ROUNDS} rounds", flush=True)
            if num_ranks == 2 and not all(group.run(pair_of_functions, timeout_s=seconds(ANSWER_S))):
                wrong.append("torch_npu's functions")
    print("\n".join(wrong) or "equal to the reference, bit for bit")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
