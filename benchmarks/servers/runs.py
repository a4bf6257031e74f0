"""Ranks that run the routes of a benchmark in turn, each on a buffer of its own."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

from benchmarks.harness import Record, elapsed, median_with_interval, records_of
from benchmarks.sizes import HIDDEN
from benchmarks.spans import Span
from moe_triton import EPBuffer, Tuning
from moe_triton.backends.cpu.nic import NicSettings, emulated_nic
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.core.config import Product
from moe_triton.core.tuning import Posts
from moe_triton.processes import RankGroup
from moe_triton.starting_line import StartingLine

OPERATORS = ("dispatch", "combine")
WARM_UP = 3
UNPACED = 10_000.0  # GB/s
Case = dict[str, object]


@dataclass(frozen=True)
class Wire:
    """The queues between servers.

    Attributes:
        gigabytes_per_s: of each rank's link.
        latency_us: until what was sent has arrived.
        post_us: of a post.
    """

    gigabytes_per_s: float = UNPACED
    latency_us: float = 0.0
    post_us: float = 0.0

    def us(self, posts: float, num_bytes: float) -> float:
        """What posts and bytes of one rank take by the formula, and no call can be faster than.

        A message's bytes travel while the next one is posted, and none before the first post has ended.
        """
        link_us = num_bytes / self.gigabytes_per_s / 1e3
        return max(posts * self.post_us, min(posts, 1) * self.post_us + link_us) + self.latency_us


@dataclass(frozen=True)
class Route:
    """How tokens travel.

    Attributes:
        name: of the route.
        product, comm_alg: see `EPBuffer`.
        ranks_per_server: see `EPBuffer`.
        quantize: of rows in dispatch.
        wire: between servers; None for the setting's.
        posts, post_parts, tables: see `Tuning`.
    """

    name: str
    product: Product
    comm_alg: str
    ranks_per_server: int
    quantize: Literal["int8"] | None = None
    wire: Wire | None = None
    posts: Posts | None = None
    post_parts: int | None = None
    tables: Path | None = None

    @property
    def tuning(self) -> Tuning | None:
        """None where nothing is set."""
        settings = {"posts": self.posts, "post_parts": self.post_parts, "tables": self.tables}
        given = {name: value for name, value in settings.items() if value is not None}
        return Tuning(**given) if given else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        routes: run in turn.
        tokens: of each rank.
        topk: K.
        experts: M.
        wire: between servers, of routes that have none of their own.
        iterations: of each route.
        limit: into how many servers experts are cut, by their ids, and in how many of them those of a token
            lie; None for any experts.
        traces: the folder that each route's trace is written to, by its name; None for no traces.
    """

    routes: Sequence[Route]
    tokens: int
    topk: int
    experts: int
    wire: Wire = field(default_factory=Wire)
    iterations: int = 20
    limit: tuple[int, int] | None = None
    traces: Path | None = None

    def trace_of(self, route: Route) -> Path | None:
        """Its file."""
        return self.traces / f"{route.name}.json" if self.traces else None


class Sent(NamedTuple):
    """What a call sends.

    Attributes:
        posts: to other ranks.
        between: bytes to ranks of other servers.
        payload: those of rows among them.
    """

    posts: int = 0
    between: int = 0
    payload: int = 0


@dataclass(frozen=True)
class Figures:
    """One rank's.

    Attributes:
        spans: begin and end of each call, in seconds, by operator and route.
        sent: of a call, by operator and route.
        steps: microseconds of each step of a call, the median of all, by operator and route.
        idle_share: of a core, what the NICs took while nothing was posted.
    """

    spans: dict[str, dict[str, list[Span]]]
    sent: dict[str, dict[str, Sent]]
    steps: dict[str, dict[str, dict[str, float]]]
    idle_share: float = 0.0


@dataclass(frozen=True)
class Measured:
    """What a run came to.

    Attributes:
        per_rank: the figures of every rank.
    """

    per_rank: Sequence[Figures]

    def seconds(self, operator: str, route: str) -> list[float]:
        """Last rank out minus first rank in, of each iteration."""
        return elapsed(figures.spans[operator][route] for figures in self.per_rank)

    def most(self, operator: str, route: str) -> Sent:
        """What a call sends, each number of the rank with most of it."""
        return Sent(*map(max, zip(*(f.sent[operator][route] for f in self.per_rank), strict=True)))

    def most_us(self, operator: str, route: str, wire: Wire) -> float:
        """What the rank with the most to post takes by the formula."""
        sent = (figures.sent[operator][route] for figures in self.per_rank)
        return max(wire.us(each.posts, each.between) for each in sent)

    def step_us(self, operator: str, route: str, step: str) -> float:
        """Microseconds of a step on the slowest rank, its waits among them."""
        return max(figures.steps[operator][route][step] for figures in self.per_rank)


class Pair:
    """Dispatch and combine of one route, with the inputs that all routes have."""

    def __init__(self, rank: int, setting: Setting, route: Route) -> None:
        generator = torch.Generator().manual_seed(rank)
        sizes = setting.tokens, setting.topk
        self._x = torch.randn(setting.tokens, HIDDEN, generator=generator).bfloat16()
        scores = torch.rand(setting.tokens, setting.experts, generator=generator)
        if setting.limit:
            servers, most = setting.limit
            best = torch.rand(setting.tokens, servers, generator=generator).topk(most, dim=1).indices
            allowed = torch.zeros(setting.tokens, servers).scatter(1, best, 1.0)
            scores *= allowed.repeat_interleave(setting.experts // servers, dim=1)
        self._weights, ids = scores.topk(setting.topk, dim=1)
        self._ids = ids.int()
        assert ids.shape == sizes
        self._quantize = route.quantize
        self._received: Any = None
        self._results: torch.Tensor | None = None
        self.buffer = EPBuffer(
            num_max_tokens_per_rank=setting.tokens,
            hidden=HIDDEN,
            num_topk=setting.topk,
            num_experts=setting.experts,
            product=route.product,
            comm_alg=route.comm_alg,
            ranks_per_server=route.ranks_per_server,
            relaxed=True,
            tuning=route.tuning,
            trace=setting.trace_of(route),
        )

    def run(self, operator: str) -> None:
        """One call. A combine needs the dispatch before it."""
        if operator == "dispatch":
            self._received = self.buffer.dispatch(self._x, self._ids, self._weights, quantize=self._quantize)
            return
        rows = self._received.tokens
        if self._results is None:
            self._results = torch.randn(rows.shape).bfloat16()
        self.buffer.combine(self._results, self._received.handle, self._weights)

    def sent(self, operator: str) -> Sent:
        """By the last call."""
        traffic = self.buffer.traffic(cast("Any", operator))
        if traffic is None:
            return Sent()
        payload = traffic.payload_bytes.between
        return Sent(sum(traffic.posts), payload + traffic.framing_bytes.between, payload)


def nic_seconds() -> float:
    """What all NICs of this process have taken of their cores."""
    tasks = Path("/proc/self/task").iterdir()
    nics = [task for task in tasks if (task / "comm").read_text().strip() == "moe-nic"]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in nics) / 1e9


def measure(rank: int, num_ranks: int, setting: Setting, idle_s: float) -> Figures:
    """Every route on this rank."""
    line, shuffle = StartingLine(), random.Random(0)  # the same on every rank
    names = [route.name for route in setting.routes]
    spans: dict[str, dict[str, list[Span]]] = {o: {name: [] for name in names} for o in OPERATORS}
    steps: dict[str, dict[str, list[dict[str, float]]]] = {o: {name: [] for name in names} for o in OPERATORS}
    with ExitStack() as stack:
        pairs = {route.name: _made(rank, setting, route) for route in setting.routes}
        for pair in pairs.values():
            stack.enter_context(pair.buffer)
        for iteration in range(WARM_UP + setting.iterations):
            for name in shuffle.sample(names, len(names)):
                for operator in OPERATORS:
                    line.wait()
                    begin = time.perf_counter()
                    pairs[name].run(operator)
                    if iteration >= WARM_UP:
                        spans[operator][name].append((begin, time.perf_counter()))
                        steps[operator][name].append(pairs[name].buffer.durations_us(cast("Any", operator)))
        idle = _idle_share(line, idle_s)
        sent = {o: {name: pair.sent(o) for name, pair in pairs.items()} for o in OPERATORS}
    medians = {
        o: {name: _medians(durations) for name, durations in each.items()} for o, each in steps.items()
    }
    return Figures(spans, sent, medians, idle)


def _medians(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {step: statistics.median(call[step] for call in calls) for step in calls[0]} if calls else {}


def _made(rank: int, setting: Setting, route: Route) -> Pair:
    """On a link and a NIC of its own, which its buffer keeps."""
    wire = route.wire or setting.wire
    with ExitStack() as stack:
        if wire.gigabytes_per_s != UNPACED or wire.latency_us:
            stack.enter_context(paced(PacedLink(wire.gigabytes_per_s, wire.latency_us)))
        stack.enter_context(emulated_nic(NicSettings(post_us=wire.post_us)))
        return Pair(rank, setting, route)


def _idle_share(line: StartingLine, seconds: float) -> float:
    if not seconds:
        return 0.0
    line.wait()
    before = nic_seconds()
    time.sleep(seconds)
    return (nic_seconds() - before) / seconds


def run(num_ranks: int, setting: Setting, idle_s: float = 0.0) -> Measured:
    """Measures, in a group of processes."""
    with RankGroup(num_ranks) as group:
        return Measured(group.run(measure, setting, idle_s, timeout_s=1200))


@contextmanager
def traced(num_ranks: int, setting: Setting, kept: Path | None) -> Iterator[tuple[Measured, Path]]:
    """What was measured, and the folder that each route's trace is in.

    Args:
        num_ranks, setting: of the run.
        kept: that folder; None for one that is gone behind the block.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield run(num_ranks, replace(setting, traces=folder)), folder


def ratios(times: Sequence[float], others: Sequence[float] | float) -> tuple[float, float, float]:
    """The median of a ratio and its 95% interval, round by round or against one number."""
    against = [others] * len(times) if isinstance(others, float) else others
    return median_with_interval([a / b for a, b in zip(times, against, strict=True)])


def shown(ratio: tuple[float, float, float]) -> str:
    """A ratio with its interval."""
    return f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"


def records(case: Mapping[str, object], metric: str, ratio: tuple[float, float, float]) -> list[Record]:
    """A ratio and the ends of its interval."""
    ends = (metric, f"{metric}_low", f"{metric}_high")
    return records_of("servers", case, dict(zip(ends, ratio, strict=True)))
