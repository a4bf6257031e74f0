"""Rounds of row-wise experts while weights move, with ranks that are late: ``python -m tests.balance.soak``.

Every output is compared, to the bit, with what the model's experts give without balance. It takes minutes.
"""

from __future__ import annotations

import argparse
import sys

from moe_triton.processes import RankGroup
from tests.balance.test_mover import HOW, beside_dispatches

LONGEST_S = 0.002  # that a rank is late, in one of ten rounds


def main() -> int:
    """How many settings were wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=20_000)
    options.add_argument("--ranks", type=int, default=3)
    options.add_argument("--timeout-s", type=float, default=3600.0, help="of each setting")
    chosen = options.parse_args()
    num_wrong = 0
    alone = [(side, held, None) for side, held in HOW]
    for side, held, servers in [*alone, *((side, held, (chosen.ranks - 1, 1)) for side, held in HOW[:2])]:
        with RankGroup(chosen.ranks) as group:
            arguments = side, held, chosen.rounds, LONGEST_S, servers
            found = group.run(beside_dispatches, *arguments, timeout_s=chosen.timeout_s)
        wrong = [text for of_rank in found for text in of_rank]
        num_wrong += bool(wrong)
        of = " on two servers" if servers else ""
        print(f"{held}, {side}{of}: {chosen.rounds} rounds, {len(wrong)} wrong {wrong[:5]}", flush=True)
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
