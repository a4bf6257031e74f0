"""Windows and flags: every rank writes to every peer, and posts a flag."""

from __future__ import annotations

from contextlib import closing

import torch

from moe_triton.tools.selftest.check import HIDDEN, Check, Finding, Place
from moe_triton.tools.selftest.checks.environment import BACKEND, DEVICES
from moe_triton.tools.selftest.wires import Wires

STAGE = "windows"
FLAGS, WRITES = "flags between all ranks", "rows between all ranks"
ROW_BYTES, ROWS, FLAG_ROUNDS = 2 * HIDDEN, 64, 20


def window_checks(ranks: int) -> list[Check]:
    """Flags first, since rows are announced by them."""
    return [
        Check(FLAGS, STAGE, exchange_flags, ranks=ranks, needs=(BACKEND, DEVICES)),
        Check(WRITES, STAGE, exchange_rows, ranks=ranks, needs=(FLAGS,)),
    ]


def exchange_flags(place: Place) -> Finding:
    """Whether the number that every rank sends with its flag arrives, in each of several rounds."""
    with closing(Wires(place.backend, 32, 1, place.settings.wait_s)) as wires:
        for number in range(FLAG_ROUNDS):
            numbers = wires.barrier(1000 * number + place.rank)
            if numbers != [1000 * number + rank for rank in range(place.num_ranks)]:
                return Finding(wrong=(f"round {number}: the ranks' numbers came as {numbers}",), left=True)
    return Finding(figures={"rounds": FLAG_ROUNDS})


def exchange_rows(place: Place) -> Finding:
    """Whether rows written to any window, a rank's own included, are complete once the flag has arrived."""
    wrong = []
    with closing(Wires(place.backend, ROW_BYTES, ROWS, place.settings.wait_s)) as wires:
        for shift in range(place.num_ranks):
            peer, source = (place.rank + shift) % place.num_ranks, (place.rank - shift) % place.num_ranks
            wires.send(peer, _pattern(place.rank, peer).to(place.backend.device), zone=shift % 2)
            wires.barrier()
            different = (wires.slots(shift % 2) != _pattern(source, place.rank)).any(dim=1).nonzero()
            if len(different):
                first = int(different[0])
                wrong.append(f"{len(different)} of {ROWS} rows from rank {source} differ, first row {first}")
            wires.barrier()  # no rank writes to a zone that another one still reads
    return Finding(wrong=tuple(wrong), figures={"bytes_per_pair": ROWS * ROW_BYTES})


def _pattern(source: int, target: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(source * 1009 + target)
    return torch.randint(0, 256, (ROWS, ROW_BYTES), generator=generator, dtype=torch.uint8)
