"""A rank whose combine is given ids that its dispatch did not have: no later combine ends by its flags."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from moe_triton.core.ascendc import REPORT_STRAY
from moe_triton.layout import NUM_ZONES

from .case import Case, Routing, check_reports, draw_routing, results_of
from .driver import World
from .library import Library
from .memory import Window
from .parts import CombineInParts
from .ranks import Ranks

MISUSED, ROUNDS = 0, 4
LATE_S = 0.01


@dataclass(frozen=True)
class StrayCase(Case):
    """Rounds of dispatch and combine; rank 0's first combine has ids of -1 where its dispatch had experts.

    Attributes:
        dropped: how many of each token's first ids.
    """

    dropped: int = 1


class StrayWorld(World):
    """Rank 0 is the one; the last rank is late with its results in every round but the first."""

    case: StrayCase

    def misused(self, routing: Routing) -> Routing:
        """What its combine is given."""
        ids = routing.ids.copy()
        ids[:, : self.case.dropped] = -1
        return replace(routing, ids=ids)

    def num_stray(self, routing: Routing) -> int:
        """What comes to rank 0 and its misused combine does not expect, beside results that it does."""
        c, told = self.config, self.misused(routing)
        stray = 0
        for token in range(self.case.tokens[0]):
            here, asked = (
                [r.is_expected(token, k, c) for k in range(c.num_results_per_token)] for r in (routing, told)
            )
            stray += (sum(here) - sum(asked)) * any(asked)
        return stray

    def _result_flags(self, window: Window) -> np.ndarray:
        """Nobody looks at some of them."""
        return np.zeros(1, np.int32)

    def rounds(self, rank: int) -> None:
        """Of one rank."""
        for number in range(ROUNDS):
            zone = number % NUM_ZONES
            received = self.dispatch(rank, number, zone)
            routing = draw_routing(self.case, self.seed, number, rank)
            is_misused = rank == 0 and number == MISUSED
            if is_misused:
                routing = self.misused(routing)
            if rank == len(self.case.tokens) - 1 and number != MISUSED:
                time.sleep(LATE_S)
            report = self.reports_of(rank, number, zone, received, routing)
            # What nobody expects may come later than what is waited for, and then nobody has seen it.
            check_reports(report[report[:, 0] != REPORT_STRAY] if is_misused else report)
            self.check_results(rank, number, zone, routing)

    def reports_of(
        self, rank: int, number: int, zone: int, received: dict[str, np.ndarray], routing: Routing
    ) -> np.ndarray:
        """Of all waits of a combine."""
        rows = results_of(self.case, received["origins"], number)
        kept = self.calls.combining(rank, number)
        if self.case.part_tokens:
            parts = CombineInParts(self, rank, number, zone)
            of_parts = [parts.launch(p, rows, received, routing, **kept) for p in range(parts.num_parts)]
            return np.concatenate(of_parts)
        check_reports(self.send_results(rank, rows, received, zone, **kept))
        return self.wait_for_results(rank, routing, zone)


def check_stray(library: Library, case: StrayCase, seed: int = 0) -> None:
    """Raises unless all combines behind the misused one are right."""
    world = StrayWorld(library, case, seed)
    Ranks(library, seed, len(case.tokens)).run(world.rounds)
    world.check_what_is_left()
