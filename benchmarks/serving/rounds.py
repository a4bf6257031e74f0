"""One call in rounds against the same rounds by hand, without a link and over links of some speeds.

By hand, every round is a dispatch of its own, and then every handle is combined: what a user writes whose
buffer takes no more than a round at once. Nobody puts the rows of those dispatches together, which experts
would need, and which one call has done. Experts answer at once, with rows that are there. Both ways give the
same bits, which is looked at before anything is timed.

A link is paced as in `benchmarks.overlap`: its rate has the sender of an operator sleep so many times as long
as the operator's other work takes by hand without a link. That is arranging, of a dispatch. Its bucket is one
as there, a small share of a call's bytes, or holds two rounds, so that a sender is through with a round
before the link is.

Both ways run on a buffer as it comes, one launch after the other, and on one that sends and computes beside
each other: there parts of a round overlap by hand, and one round with the next in one call. Routes run in
random order in each iteration, and each operator begins with all ranks. A time is the last rank out minus the
first rank in; beside it is what all ranks took of their cores, which other work on the machine hardly
changes.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks import harness
from benchmarks.overlap import BUCKET_SHARE, FAST, Load, keep_others_out, median_of_ranks
from benchmarks.serving.sizes import HIDDEN, ROUND_TOKENS, TOKENS, sizes
from benchmarks.sizes import EXPERTS, TOPK
from benchmarks.spans import Span
from moe_triton import EPBuffer, Tuning
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.processes import RankGroup
from moe_triton.starting_line import StartingLine

Operator = Literal["dispatch", "combine"]
OPERATORS: tuple[Operator, ...] = ("dispatch", "combine")
ONE_CALL, BY_HAND = "one call", "by hand"
OVERLAPPING = "overlapping "
"""Before the names of routes on a buffer that communicates beside computing."""
ROUTES = (ONE_CALL, BY_HAND, OVERLAPPING + ONE_CALL, OVERLAPPING + BY_HAND)
BESIDE: dict[str, Any] = {"num_blocks": 2, "tuning": Tuning(communication_blocks=1)}
RATIOS = {
    "by_hand_vs_one_call": (BY_HAND, ONE_CALL),
    "overlapping_vs_overlapping": (OVERLAPPING + BY_HAND, OVERLAPPING + ONE_CALL),
    "by_hand_vs_overlapping": (BY_HAND, OVERLAPPING + ONE_CALL),
}
"""Over which routes' times others are held, by metric."""
WARM_UP = 3
M_MMAP_MAX = -4  # of glibc's malloc.h


@dataclass(frozen=True)
class Link:
    """What lies between the ranks.

    Attributes:
        wire: how long senders sleep, of an operator's other work by hand; 0 for no link.
        rounds_ahead: of rows, that a sender may be ahead of the link; 0 for a small share of a call's.
    """

    wire: float = 0.0
    rounds_ahead: int = 0

    def __str__(self) -> str:
        if not self.wire:
            return "none"
        return f"{self.wire:g}, {self.rounds_ahead} rounds ahead" if self.rounds_ahead else f"{self.wire:g}"


LINKS = (Link(), Link(0.5), Link(1.0), Link(2.0), Link(1.0, 2))


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        ranks, tokens, round_tokens, hidden: W, T, B, H.
        rows: how they are dispatched: "" or "int8".
        links: one after the other.
        iterations: of each.
        real_time: before other processes on the same cores.
    """

    ranks: int
    rows: str
    iterations: int
    tokens: int = TOKENS
    round_tokens: int = ROUND_TOKENS
    hidden: int = HIDDEN
    links: tuple[Link, ...] = LINKS
    real_time: bool = False

    @property
    def rounds(self) -> int:
        """Of a call."""
        return -(-self.tokens // self.round_tokens)

    @staticmethod
    def from_json(loaded: dict[str, Any]) -> Setting:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        return Setting(**{**loaded, "links": tuple(Link(**each) for each in loaded["links"])})


@dataclass(frozen=True)
class Inputs:
    """What a rank sends, and what its experts answer in either way.

    Attributes:
        x, ids, weights: (T, H) bf16, (T, K) int32 and (T, K) fp32.
        answers: (N, H) of the whole call.
        of_round: by round, of its rows.
        is_of_round: by round, (N,) which of the call's rows are its own.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor
    of_round: list[torch.Tensor] = field(default_factory=list)
    is_of_round: list[torch.Tensor] = field(default_factory=list)

    @staticmethod
    def random(rank: int, setting: Setting) -> Inputs:
        """Normally distributed tokens, experts by the largest of random logits."""
        routing = [_routing(other, setting.tokens) for other in range(setting.ranks)]
        weights, ids = routing[rank]
        local = EXPERTS // setting.ranks
        rounds = []  # of each row in its order: expert, source, token
        for expert in range(rank * local, (rank + 1) * local):
            for _, of_source in routing:
                rounds.append((of_source == expert).any(1).nonzero()[:, 0] // setting.round_tokens)
        round_of_row = torch.cat(rounds)
        generator = torch.Generator().manual_seed(1009 * rank + 1)
        x = torch.randn(setting.tokens, setting.hidden, generator=generator).bfloat16()
        answers = torch.randn(len(round_of_row), setting.hidden, generator=generator).bfloat16()
        masks = [round_of_row == number for number in range(setting.rounds)]
        return Inputs(x, ids.int(), weights, answers, [answers[mask] for mask in masks], masks)


def _routing(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(1009 * rank))
    weights, ids = logits.softmax(1).topk(TOPK, dim=1)
    return weights, ids


class OneCall:
    """All tokens in one call of each operator."""

    def __init__(self, buffer: EPBuffer, inputs: Inputs, quantize: Any) -> None:
        self._buffer, self._inputs, self._quantize = buffer, inputs, quantize
        self._received: Any = None

    def dispatch(self) -> None:
        """Sends all tokens."""
        self._received = self._buffer.dispatch(self._inputs.x, self._inputs.ids, quantize=self._quantize)

    def combine(self) -> list[torch.Tensor]:
        """Combines what the experts answered, and lets go of what they had."""
        handle, self._received = self._received.handle, None
        return [self._buffer.combine(self._inputs.answers, handle, self._inputs.weights)]

    def rows(self, inputs: Inputs) -> list[torch.Tensor]:
        """What the last dispatch brought, by round."""
        return [self._received.tokens[mask] for mask in inputs.is_of_round]


class ByHand:
    """A call for each round: all dispatches, then all combines."""

    def __init__(self, buffer: EPBuffer, inputs: Inputs, quantize: Any, size: int) -> None:
        self._buffer, self._inputs, self._quantize = buffer, inputs, quantize
        self._parts = [slice(first, first + size) for first in range(0, len(inputs.x), size)]
        self._received: list[Any] = []

    def dispatch(self) -> None:
        """Sends round after round."""
        x, ids, dispatch = self._inputs.x, self._inputs.ids, self._buffer.dispatch
        self._received = [dispatch(x[part], ids[part], quantize=self._quantize) for part in self._parts]

    def combine(self) -> list[torch.Tensor]:
        """Combines round after round, and lets go of what experts had."""
        received, self._received = self._received, []
        inputs, combine = self._inputs, self._buffer.combine
        rounds = zip(inputs.of_round, received, self._parts, strict=True)
        return [combine(y, each.handle, inputs.weights[part]) for y, each, part in rounds]

    def rows(self, inputs: Inputs) -> list[torch.Tensor]:
        """What the last dispatches brought, by round."""
        return [each.tokens[: len(y)] for each, y in zip(self._received, inputs.of_round, strict=True)]


def check(routes: Mapping[str, OneCall | ByHand], inputs: Inputs) -> None:
    """Runs all.

    Raises:
        AssertionError: one gives other bits than by hand.
    """
    reference = routes[BY_HAND]
    for name, route in routes.items():
        reference.dispatch()
        route.dispatch()
        pairs = zip(route.rows(inputs), reference.rows(inputs), strict=True)
        if not all(torch.equal(mine, theirs) for mine, theirs in pairs):
            raise AssertionError(f"{name} brings other rows: nothing to compare")
        wanted = torch.cat(reference.combine())
        if route is not reference and not torch.equal(torch.cat(route.combine()), wanted):
            raise AssertionError(f"{name} has other sums: nothing to compare")


@dataclass(frozen=True)
class Times:
    """One rank's: by link's place among those of the setting, route and operator, in each iteration.

    Attributes:
        spans: when it began and ended.
        core_s: what it took of its core.
        waited_s: what it waited for a core that others had.
    """

    spans: dict[tuple[int, str, Operator], list[Span]]
    core_s: dict[tuple[int, str, Operator], list[float]]
    waited_s: dict[tuple[int, str, Operator], list[float]]


def measure(rank: int, num_ranks: int, setting: Setting) -> Times:
    """Every link and route on this rank."""
    torch.set_num_threads(1)
    harness.keep_freed_memory()
    # Nor is anything mapped by itself: outputs of a call are larger than what malloc keeps.
    ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    usual = os.sched_getscheduler(0), os.sched_getparam(0)
    inputs = Inputs.random(rank, setting)
    quantize, size = setting.rows or None, setting.round_tokens
    line, shuffle = StartingLine(), random.Random(0)  # the same on every rank
    times = Times({}, {}, {})
    with ExitStack() as stack:
        link = stack.enter_context(paced(PacedLink(FAST)))
        routes: dict[str, OneCall | ByHand] = {}
        usual_buffer, beside = (
            stack.enter_context(EPBuffer(**sizes(size, setting.hidden), comm_alg="fullmesh_v1", **how))
            for how in ({}, BESIDE)
        )
        for before, buffer in (("", usual_buffer), (OVERLAPPING, beside)):
            routes[before + ONE_CALL] = OneCall(buffer, inputs, quantize)
            routes[before + BY_HAND] = ByHand(buffer, inputs, quantize, size)
        for _ in range(WARM_UP):  # makes all plans: one for each zone
            check(routes, inputs)
        if setting.real_time:
            keep_others_out()
        loads = _calibrated(usual_buffer, routes[BY_HAND], link, line)
        for number, each in enumerate(setting.links):
            for iteration in range(1 + setting.iterations):
                for name in shuffle.sample(ROUTES, len(ROUTES)):
                    for operator in OPERATORS:
                        _pace(link, each, loads[operator], setting.rounds)
                        call = getattr(routes[name], operator)
                        line.wait()
                        _time(times, (number, name, operator), call, is_kept=iteration > 0)
        os.sched_setscheduler(0, *usual)
        link.set(FAST)
        check(routes, inputs)
    os.sched_setaffinity(0, cores)
    return times


def _time(times: Times, key: tuple[int, str, Operator], call: Any, *, is_kept: bool) -> None:
    waited, core = harness.waited_s(), time.process_time()
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    if is_kept:
        times.spans.setdefault(key, []).append((begin, end))
        times.core_s.setdefault(key, []).append(time.process_time() - core)
        times.waited_s.setdefault(key, []).append(harness.waited_s() - waited)


def _pace(link: PacedLink, asked: Link, load: Load, rounds: int) -> None:
    """Sets the link for an operator."""
    if not asked.wire:
        link.set(FAST)
        return
    share = asked.rounds_ahead / rounds if asked.rounds_ahead else BUCKET_SHARE
    link.set(load.gigabytes_per_s(asked.wire), 5.0, int(share * load.sent))


CALIBRATION = 5


def _calibrated(
    buffer: EPBuffer, hand: OneCall | ByHand, link: PacedLink, line: StartingLine
) -> dict[Operator, Load]:
    """What the operators by hand are without a link, all rounds together. Collective."""
    samples: dict[Operator, list[tuple[float, float, float]]] = {operator: [] for operator in OPERATORS}
    for _ in range(CALIBRATION):
        for operator in OPERATORS:
            line.wait()
            core, before = time.process_time(), link.taken_bytes
            getattr(hand, operator)()
            core_us = 1e6 * (time.process_time() - core)
            steps = buffer.durations_us(operator)  # of the last round, which stands for all
            working = {step: us for step, us in steps.items() if step not in ("wait", "rows")}
            sending = working["send"] / sum(working.values())
            samples[operator].append((sending * core_us, (1 - sending) * core_us, link.taken_bytes - before))
    return {
        operator: Load(*map(median_of_ranks, zip(*rows, strict=True))) for operator, rows in samples.items()
    }


@dataclass(frozen=True)
class Measured:
    """Of a setting, in plain types: a figure's values in each iteration.

    Attributes:
        setting: which.
        seconds: by link's place, route and operator.
        core_s: the same, of all ranks together.
        is_shared: by link's place, whether cores were shared in most iterations.
    """

    setting: Setting
    seconds: list[dict[str, dict[Operator, list[float]]]]
    core_s: list[dict[str, dict[Operator, list[float]]]]
    is_shared: list[bool]

    @staticmethod
    def from_json(loaded: dict[str, Any]) -> Measured:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        return Measured(**{**loaded, "setting": Setting.from_json(loaded["setting"])})

    def ratios(
        self, link: int, metric: str, operators: Sequence[Operator] = OPERATORS, of: str = "seconds"
    ) -> list[float]:
        """One of `RATIOS` in each iteration; of several operators, of their sum."""
        by_route = getattr(self, of)[link]
        over, under = (_sums([by_route[name][each] for each in operators]) for name in RATIOS[metric])
        return [a / b for a, b in zip(over, under, strict=True)]

    def figures(self, link: int) -> dict[str, float]:
        """Medians with their intervals: of both operators, of each, and of core time."""
        figures: dict[str, float] = {}
        for metric in RATIOS:
            figures |= harness.with_interval(metric, self.ratios(link, metric))
            for operator in OPERATORS:
                of_one = self.ratios(link, metric, [operator])
                figures |= harness.with_interval(f"{operator}_{metric}", of_one)
            of_cores = self.ratios(link, metric, of="core_s")
            figures |= harness.with_interval(f"core_{metric}", of_cores)
        return figures


def _sums(values: Sequence[Sequence[float]]) -> list[float]:
    return [sum(each) for each in zip(*values, strict=True)]


def run(setting: Setting) -> Measured:
    """Starts the ranks and measures."""
    with RankGroup(setting.ranks) as group:
        per_rank: list[Times] = group.run(measure, setting, timeout_s=600)
    seconds, core_s, is_shared = [], [], []
    for link in range(len(setting.links)):
        keys = {name: {o: (link, name, o) for o in OPERATORS} for name in ROUTES}
        seconds.append(
            {
                name: {o: harness.elapsed([times.spans[key] for times in per_rank]) for o, key in of.items()}
                for name, of in keys.items()
            }
        )
        core_s.append(
            {
                name: {o: _sums([t.core_s[key] for t in per_rank]) for o, key in of.items()}
                for name, of in keys.items()
            }
        )
        shares = [
            waited / (end - begin)
            for times in per_rank
            for of in keys.values()
            for key in of.values()
            for waited, (begin, end) in zip(times.waited_s[key], times.spans[key], strict=True)
        ]
        is_shared.append(statistics.median(shares) > harness.SHARED_FROM)
    return Measured(setting, seconds, core_s, is_shared)
