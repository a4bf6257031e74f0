"""What each rank does to compare candidates with the default: in the same processes, in turn, with one input.

A candidate is timed from the first rank in to the last rank out of a dispatch and a combine, first of rows as
they are and then of int8 rows: what the slowest rank takes. In every iteration all candidates run, each as
often in each place, and a ratio is that of a candidate's time to the default's in the same iteration.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from autotune.intervals import LOOKING, NORMAL_95, Interval
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.search.task import WrongBitsError
from moe_triton import EPBuffer
from moe_triton.core.errors import ArgumentError, MoeTritonError, WindowError
from moe_triton.core.handle import DispatchOutput
from moe_triton.starting_line import StartingLine

FORMATS = (None, "int8")
FILLED_ROUNDS = 2
"""Rounds of each format before any is timed: both zones are filled then, and all plans are compiled."""
LOOK_EVERY = 4


Spans = dict[int, list[tuple[float, float]]]
"""When a rank went in and came out, of each format, by candidate."""


@dataclass(frozen=True)
class Race:
    """What is compared.

    Attributes:
        sizes: the group.
        candidates: the default first.
        most: iterations at most.
        precision: of ratios; see `Interval.decides`.
        seconds: after which it ends, whatever is known.
        seed: of inputs and of the order.
    """

    sizes: Sizes
    candidates: tuple[Candidate, ...]
    most: int = 400
    precision: float = 0.02
    seconds: float = 30.0
    seed: int = 0


class Result(NamedTuple):
    """What one candidate came to.

    Attributes:
        candidate: it.
        ns: median of its times; 0 where it could not be made.
        ratio: to the default.
        refused: why it could not be made, if so.
    """

    candidate: Candidate
    ns: int
    ratio: Interval
    refused: str = ""


class _Inputs(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor


class _Lane:
    """One candidate on this rank."""

    def __init__(self, candidate: Candidate, sizes: Sizes, stack: contextlib.ExitStack) -> None:
        self.candidate = candidate
        self._is_in_place = sizes.lies_in_window(candidate.scheme, "results")
        self.buffer = stack.enter_context(
            EPBuffer(
                num_max_tokens_per_rank=sizes.tokens,
                hidden=sizes.hidden,
                num_topk=sizes.topk,
                num_experts=sizes.experts,
                product=sizes.product,
                relaxed=True,
                comm_alg=candidate.scheme,
                num_blocks=candidate.num_blocks,
                tuning=candidate.tuning,
            )
        )

    def run(self, inputs: _Inputs, quantize: str | None, fill: bool) -> tuple[DispatchOutput, torch.Tensor]:
        """A round; with ``fill`` the experts' answers are written where combine looks for them first."""
        received = self.buffer.dispatch(inputs.x, inputs.ids, quantize=quantize)
        answers = self.buffer.expert_output() if self._is_in_place else inputs.answers
        if fill and answers is not inputs.answers:
            answers[: len(inputs.answers)] = inputs.answers
        return received, self.buffer.combine(answers, received.handle, inputs.weights)

    def bits(self, inputs: _Inputs, quantize: str | None) -> list[torch.Tensor]:
        """Everything that a round gives, with nothing undefined in it."""
        received, out = self.run(inputs, quantize, fill=True)
        count = int(received.tokens_per_expert.sum())
        tensors = [received.tokens_per_expert.clone(), received.tokens[:count].clone(), out.clone()]
        return tensors if received.scales is None else [*tensors, received.scales[:count].clone()]


def compare(rank: int, num_ranks: int, race: Race) -> list[Result]:
    """Compares candidates; collective. The results are on rank 0, nothing on the others.

    Raises:
        WrongBitsError: a candidate gives other bits; on every rank.
    """
    inputs = _inputs(rank, race)
    with contextlib.ExitStack() as stack:
        lanes: dict[int, _Lane] = {}
        refused: dict[int, str] = {}
        # A window that is made later may lie better: the next seed makes them the other way round.
        for number in range(len(race.candidates))[:: -1 if race.seed % 2 else 1]:
            try:
                lanes[number] = _Lane(race.candidates[number], race.sizes, stack)
            except (ArgumentError, WindowError) as error:  # on every rank
                refused[number] = str(error)
        if 0 in refused:
            raise MoeTritonError(f"the default, {race.candidates[0]}, cannot be made: {refused[0]}")
        for quantize in FORMATS:
            _check_bits(lanes, inputs, quantize)
        times = _measure(lanes, inputs, race)
        for quantize in FORMATS:
            _check_bits(lanes, inputs, quantize)
    if rank:
        return []
    return [_result(c, times.get(n, []), times[0], refused.get(n, "")) for n, c in enumerate(race.candidates)]


def _inputs(rank: int, race: Race) -> _Inputs:
    """Normally distributed tokens and answers, experts by the largest of random logits."""
    s, make = race.sizes, torch.Generator()
    routing = []
    for other in range(s.ranks):
        make.manual_seed(race.seed * 1009 + other)
        logits = torch.randn(s.tokens, s.experts, generator=make)
        routing.append(logits.softmax(1).topk(s.topk, dim=1))
    weights, ids = routing[rank]
    received = sum(int((each.indices // (s.experts // s.ranks) == rank).sum()) for each in routing)
    make.manual_seed(race.seed * 1009 + s.ranks + rank)
    x = torch.randn(s.tokens, s.hidden, generator=make).bfloat16()
    answers = torch.randn(received, s.hidden, generator=make).bfloat16()
    return _Inputs(x, ids.int(), weights, answers)


def _check_bits(lanes: dict[int, _Lane], inputs: _Inputs, quantize: str | None) -> None:
    """Compares what every candidate gives with what the default gives, on every rank."""
    wrong = []
    for _ in range(FILLED_ROUNDS):
        want = lanes[0].bits(inputs, quantize)
        for lane in lanes.values():
            have = lane.bits(inputs, quantize)
            if not all(torch.equal(a, b) for a, b in zip(have, want, strict=True)):
                wrong.append(str(lane.candidate))
    said: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(said, wrong)
    for rank, names in enumerate(said):
        if names:
            rows = quantize or "as they are"
            raise WrongBitsError(f"{names[0]} gives other bits than the default on rank {rank}, rows {rows}")


def _measure(lanes: dict[int, _Lane], inputs: _Inputs, race: Race) -> dict[int, list[float]]:
    """Seconds of every iteration by candidate, on rank 0; candidates leave when it is known what they are."""
    line, shuffle = StartingLine(), random.Random(race.seed)
    running, times = list(lanes), {number: list[float]() for number in lanes}
    deadline = time.monotonic() + race.seconds
    for _ in range(0, race.most, LOOK_EVERY):
        spans: list[Spans] = []
        order = shuffle.sample(running, len(running))
        _timed(lanes[order[0]], inputs, line)  # what comes after gloo's messages pays for them
        for _ in range(LOOK_EVERY):
            order = [*order[1:], order[0]]  # each is in each place equally often
            spans.append({number: _timed(lanes[number], inputs, line) for number in order})
        gathered: list[list[Spans]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, spans)
        for same in zip(*gathered, strict=True):
            for number in running:
                times[number].append(_slowest([of_rank[number] for of_rank in same]))
        over: list[bool] = [time.monotonic() > deadline]
        dist.broadcast_object_list(over, src=0)
        looked = {n: _ratio(times[n], times[0], LOOKING) for n in running if n}
        running = [0, *(n for n, ratio in looked.items() if not ratio.decides(race.precision))]
        if over[0] or running == [0]:
            break
    return times


def _timed(lane: _Lane, inputs: _Inputs, line: StartingLine) -> list[tuple[float, float]]:
    """When this rank went in and came out, of each format."""
    spans = []
    for quantize in FORMATS:
        line.wait()
        begin = time.perf_counter()
        kept = lane.run(inputs, quantize, fill=False)
        spans.append((begin, time.perf_counter()))
        del kept
    return spans


def _slowest(spans: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Last rank out minus first rank in, of all formats together."""
    each = (max(end for _, end in of) - min(begin for begin, _ in of) for of in zip(*spans, strict=True))
    return float(sum(each))


def _ratio(times: Sequence[float], default: Sequence[float], deviations: float = NORMAL_95) -> Interval:
    return Interval.of([a / b for a, b in zip(times, default, strict=False)], deviations)


def _result(candidate: Candidate, times: Sequence[float], default: Sequence[float], why: str) -> Result:
    ns = round(1e9 * sorted(times)[len(times) // 2]) if times else 0
    return Result(candidate, ns, _ratio(times, default), why)
