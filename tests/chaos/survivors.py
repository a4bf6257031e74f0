"""Ranks that are killed or stopped at random moments, and others that go on without (``on_lost="mask"``).

    python -m tests.chaos.survivors --trials 500 --seed 1

A trial is survived if every other rank has masked the victim and nobody else, with all bits of all rounds
right; and if a victim that was stopped hears that it is masked. What it finds is said of each trial that was
not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moe_triton.processes import RankFailedError, run_ranks
from tests.distributed.cases import small_case
from tests.distributed.masked import Chaos, rounds_in_chaos
from tests.patience import seconds

SCHEMES = "fullmesh_v1", "fullmesh_v2", "fullmesh", "hierarchy"
SERVERS = {4: (2, 4), 6: (2, 3)}
"""Ranks of a server, by those of the group, where the scheme knows servers."""
STOPPED_S = 3.0
ENDS_S = 60.0


def trial(seed: int) -> Chaos:
    """A trial by its number."""
    draw = random.Random(seed)
    scheme = draw.choice(SCHEMES)
    num_ranks = draw.choice([4, 6] if scheme == "hierarchy" else [2, 3, 4])
    case = small_case(
        num_ranks,
        scheme,
        draw.choice([None, "int8"]),
        rounds=6,
        weights=True,
        num_blocks=draw.choice([1, 2]),
    )
    if scheme == "hierarchy":
        servers = draw.choice(SERVERS[num_ranks])
        # On an A2 a hierarchy of one server would be another scheme.
        product = draw.choice(["A2", "A3"]) if servers < num_ranks else "A3"
        config = replace(case.config, ranks_per_server=servers, product=product)
        case = replace(case, config=config.normalized())
    # Rank 0 hosts the store, without which nobody can agree.
    victim = draw.randrange(1, num_ranks)
    return Chaos(case, victim, draw.random() * 0.5, draw.choice([None, None, STOPPED_S]), seconds(1.0))


def complaints(of: Chaos, results: Sequence[Any]) -> list[str]:
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


def run(of: Chaos) -> list[str]:
    """Runs a trial."""
    ranks = of.case.config.num_ranks
    return complaints(
        of, run_ranks(rounds_in_chaos, ranks, (of,), timeout_s=seconds(ENDS_S), allow_failures=True)
    )


def main() -> int:
    """Runs trials, and says what went wrong in each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first trial; the next one has the next number"
    )
    options = parser.parse_args()
    failed, began = 0, time.monotonic()
    for seed in range(options.seed, options.seed + options.trials):
        said = run(trial(seed))
        failed += bool(said)
        for text in said:
            print(f"trial {seed}: {text}", flush=True)
    took = time.monotonic() - began
    print(f"{options.trials - failed} of {options.trials} trials survived, in {took:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
