"""The same as `tests.chaos.survivors` with calls in rounds, and with rows that have places.

python -m tests.chaos.long_survivors --trials 100 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moe_triton.processes import RankFailedError, run_ranks
from tests.distributed.cases import Case, small_case
from tests.distributed.long_runs import Options
from tests.distributed.masked_rounds import LongChaos, calls_in_chaos
from tests.patience import seconds

# Twice the time-out and more: who has not run for a while itself begins its deadline anew.
TIMEOUT_S, STOPPED_S, ENDS_S = 2.0, 8.0, 60.0
SCHEMES = "fullmesh_v1", "fullmesh_v2", "fullmesh"
OPTIONS: tuple[Options, ...] = (
    {},
    {"num_max_tokens_per_rank": 16},
    {"num_recv_tokens": "exact"},
    {"layout": "padded", "num_recv_tokens": "exact"},
    {"expert_alignment": 4, "do_zero_padding": True},
    {"do_expand": False, "num_max_tokens_per_rank": 16, "num_recv_tokens": "exact"},
    {"num_recv_tokens": 300},
)


def case_of(scheme: str, num_ranks: int, quantize: str | None = None, num_blocks: int = 1) -> Case:
    """A case whose ranks need different numbers of rounds."""
    case = small_case(num_ranks, scheme, quantize, rounds=7, weights=True, num_blocks=num_blocks)
    tokens = (3, 13, 9, 0)[:num_ranks]
    config = replace(case.config, num_topk=4, num_experts=3 * num_ranks, is_of_buffer=True)
    return replace(case, config=config, tokens=tokens)


def trial(seed: int) -> LongChaos:
    """A trial by its number."""
    draw = random.Random(seed)
    num_ranks, scheme = draw.choice([2, 3, 4]), draw.choice(SCHEMES)
    case = case_of(scheme, num_ranks, draw.choice([None, "int8"]), draw.choice([1, 2]))
    if draw.random() < 0.3:  # one round, which native code runs where it has places
        case = replace(case, tokens=(3, 4, 2, 0)[:num_ranks])
    victim, options = draw.randrange(1, num_ranks), tuple(draw.sample(OPTIONS, 3))
    stopped_s = draw.choice([None, None, STOPPED_S])
    return LongChaos(case, victim, draw.random() * 0.5, stopped_s, seconds(TIMEOUT_S), options)


def complaints(of: LongChaos, results: Sequence[Any]) -> list[str]:
    """Why a trial was not survived; empty if it was."""
    said = []
    for rank, result in enumerate(results):
        if isinstance(result, RankFailedError):
            if rank != of.victim or of.stopped_s is not None:
                said.append(f"rank {rank}: {result}")
            continue
        wrong, masked, raised = result
        if rank == of.victim:
            said += [] if raised else [f"rank {rank} was not told that it is masked"]
            continue
        said += [f"rank {rank}: {text}" for text in wrong]
        if masked != [of.victim] or raised:
            said.append(f"rank {rank} has masked {masked}, and raised {raised!r}")
    return said


def run(of: LongChaos) -> list[str]:
    """Runs a trial."""
    ranks = of.case.config.num_ranks
    results = run_ranks(calls_in_chaos, ranks, (of,), timeout_s=seconds(ENDS_S), allow_failures=True)
    return complaints(of, results)


def main() -> int:
    """Runs trials, and says what went wrong in each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first trial")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.seed, options.seed + options.trials):
        said = run(trial(seed))
        failed += bool(said)
        for text in said:
            print(f"trial {seed}: {text}", flush=True)
    print(f"{options.trials - failed} of {options.trials} trials survived")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
