"""What a lost rank costs the others: ``python -m benchmarks.lost_ranks [--json FILE]``.

Ranks make rounds of dispatch and combine, one upon the other, until one of them is killed or stopped from
outside at a random moment of a call. What counts is the time from then to the end of the next whole round of
all others: one that began later, on each of them. In turns they go on in their buffer (``on_lost="mask"``),
or close it when the call raises, and construct one without the lost rank; so both see the same state of the
machine. Each trial has processes of its own.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from benchmarks import harness
from moe_triton import CommunicationTimeoutError, EPBuffer
from moe_triton.processes import RankFailedError, RankGroup, tell
from moe_triton.tools.progress import progress

ROUNDS_BEFORE, ROUNDS_AFTER = 8, 40
"""Until the strike is asked for, when all plans are there; and in the buffer that is the last."""
HELD_AT = ROUNDS_AFTER // 2
"""Rounds behind the asking in which a lost rank takes part at most."""
LONGEST_DELAY_S = 0.003
STOPPED_TIMEOUT_S, KILLED_TIMEOUT_S = 1.0, 60.0
"""No death waits for a time-out."""
ENDS_S = 120.0
MOST_TRIES = 10
EXPERTS_OF_A_RANK = 4
DONE, STRIKE = "done", "strike"

Way = Literal["mask", "anew"]
WAYS: tuple[Way, ...] = ("mask", "anew")


@dataclass(frozen=True)
class Setting:
    """What is lost, and among whom.

    Attributes:
        name: of tables.
        goal_s: what the next whole round may take where the others go on in their buffer.
        how: the last rank is struck.
        per_server: ranks of a server; None for all of them.
        ranks, tokens, hidden, topk, experts: W, T, H, K, E.
        scheme: how tokens travel.
    """

    name: str
    goal_s: float
    how: signal.Signals
    per_server: int | None = None
    ranks: int = 4
    tokens: int = 16
    hidden: int = 1024
    topk: int = 4
    experts: int = 16
    scheme: str = "fullmesh_v1"

    @property
    def timeout_s(self) -> float:
        """Of every wait."""
        return KILLED_TIMEOUT_S if self.how == signal.SIGKILL else STOPPED_TIMEOUT_S


SETTINGS = (
    Setting("killed, same server", 0.5, signal.SIGKILL),
    Setting("killed, on another server", 1.5, signal.SIGKILL, 1),
    Setting("stopped", STOPPED_TIMEOUT_S + 0.5, signal.SIGSTOP),
)


@dataclass(frozen=True)
class Rounds:
    """Of one rank: when each began and ended, by the machine's clock; and who was masked in the end."""

    spans: list[tuple[float, float]]
    masked: list[int]


def _construct(setting: Setting, way: Way, lost: Sequence[int] = ()) -> EPBuffer:
    return EPBuffer(
        num_max_tokens_per_rank=setting.tokens,
        hidden=setting.hidden,
        num_topk=setting.topk,
        num_experts=setting.experts,
        lost_ranks=lost,
        comm_alg=setting.scheme,
        ranks_per_server=setting.per_server,
        relaxed=True,
        timeout_s=setting.timeout_s,
        on_lost="mask" if way == "mask" else "raise",
    )


def _construct_anew(setting: Setting, lost: int) -> EPBuffer:
    """Ranks come to it whenever their own call has raised, and whoever is first may give up meanwhile."""
    for _ in range(MOST_TRIES):
        try:
            return _construct(setting, "anew", [lost])
        except CommunicationTimeoutError as error:
            last = error
    raise last


def rounds(rank: int, num_ranks: int, setting: Setting, way: Way) -> Rounds:
    """A rank's rounds; called as ``f(rank, num_ranks, ...)`` on every rank."""
    logging.getLogger("moe_triton").setLevel(logging.ERROR)  # that ranks wait and mask is what is measured
    victim = num_ranks - 1
    spans: list[tuple[float, float]] = []
    x = torch.randn(setting.tokens, setting.hidden).bfloat16()
    weights = torch.rand(setting.tokens, setting.topk)

    def one(buffer: EPBuffer, number: int) -> None:
        generator = torch.Generator().manual_seed(number * num_ranks + rank)
        chances = torch.rand(setting.tokens, buffer.config.num_experts, generator=generator)
        ids = chances.topk(setting.topk).indices.int()
        began = time.monotonic()
        received = buffer.dispatch(x, ids, weights)
        buffer.combine(received.tokens, received.handle, weights)
        spans.append((began, time.monotonic()))

    buffer = _construct(setting, way)
    last = ROUNDS_BEFORE + ROUNDS_AFTER
    number = 0
    while number < last:
        if rank == victim and number == ROUNDS_BEFORE:
            tell(STRIKE)
        if rank == victim and number == ROUNDS_BEFORE + HELD_AT:
            time.sleep(ENDS_S)  # until it is struck
        try:
            one(buffer, number)
        except CommunicationTimeoutError:
            if way == "mask":
                raise
            buffer.close()
            buffer = _construct_anew(setting, victim)
            number = ROUNDS_BEFORE + HELD_AT  # the same on every rank
        number += 1
    masked = buffer.query_mask().nonzero().flatten().tolist()
    tell(DONE)
    buffer.close()
    return Rounds(spans, masked)


def next_whole_round(struck: float, per_rank: Sequence[Rounds]) -> float:
    """Seconds from a strike to the end of the next whole round of all these ranks.

    Args:
        struck: when.
        per_rank: rounds of those that go on.
    """
    ends = [next(end for began, end in each.spans if began > struck) for each in per_rank]
    return max(ends) - struck


def trial(setting: Setting, way: Way, delay_s: float) -> float:
    """Seconds to the next whole round, of one strike."""
    struck: list[float] = []
    done: set[int] = set()
    with RankGroup(setting.ranks) as group:
        victim = group.processes[-1]

        def hear(rank: int, said: object) -> None:
            if said == STRIKE:
                time.sleep(delay_s)
                os.kill(victim.pid or 0, setting.how)
                struck.append(time.monotonic())
            elif said == DONE:
                done.add(rank)
                if len(done) == setting.ranks - 1:
                    victim.kill()

        found = group.run(rounds, setting, way, timeout_s=ENDS_S, allow_failures=True, hear=hear)
    failed = [each for each in found[:-1] if isinstance(each, RankFailedError)]
    if failed:
        raise failed[0]
    masked = [setting.ranks - 1] if way == "mask" else []
    assert all(each.masked == masked for each in found[:-1])
    return next_whole_round(struck[0], found[:-1])


def measure(setting: Setting, trials: int, draw: random.Random) -> dict[Way, list[float]]:
    """Seconds of each way's trials, which take turns in random order."""
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    with progress(setting.name, trials) as work:
        for _ in range(trials):
            delay_s = draw.random() * LONGEST_DELAY_S
            for way in draw.sample(WAYS, len(WAYS)):
                seconds[way].append(trial(setting, way, delay_s))
            work.advance()
    return seconds


def main() -> None:
    """Measures all settings and prints a table."""
    options = harness.parser(__doc__ or "")
    options.add_argument("--trials", type=harness.at_least(1), default=12, help="of each setting and way")
    options.add_argument("--ranks", type=harness.at_least(2, harness.MAX_RANKS), default=4)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    draw = random.Random(chosen.seed)
    rows, records = [], []
    load, count = os.getloadavg()[0], chosen.trials
    for each in SETTINGS:
        setting = replace(each, ranks=chosen.ranks, experts=EXPERTS_OF_A_RANK * chosen.ranks)
        seconds = measure(setting, count, draw)
        figures = {metric: value for way in WAYS for metric, value in _figures(way, seconds[way]).items()}
        case = {"lost": setting.name, "ranks": setting.ranks, "timeout_s": setting.timeout_s}
        records += harness.records_of("lost_ranks", case, figures, "s")
        rows.append([setting.name, f"{setting.goal_s:g}", *(f"{value:.2f}" for value in figures.values())])
    heads = "lost rank", "goal", "masked: median", "worst", "built anew: median", "worst"
    harness.print_table("Seconds from the strike to the end of the others' next whole round", heads, rows)
    print(f"Of {count} trials each; the machine's load was {load:.1f} before, on {harness.cores()} cores.")
    harness.write_records(chosen.json, records)


def _figures(way: Way, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{way}_median": statistics.median(seconds), f"{way}_worst": max(seconds)}


if __name__ == "__main__":
    harness.run_main(main)
