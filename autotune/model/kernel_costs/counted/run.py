"""`PlanRun`: what the Ascend C kernels of a plan do on some ranks of a group, from a run of these kernels.

One rank after the other runs a launch, all before the next launch. Of the other ranks only what they send is
run, with nothing but what goes to the ranks that count, or comes from them. So whatever a launch waits for is
there, as their own kernels left it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.model.cost import UnknownWorkError
from autotune.model.kernel_costs.counted.library import (
    FIRST_SEGMENT,
    Contents,
    CountedError,
    Launching,
    Mode,
    Ranks,
    Writers,
    counting_library,
    segment_at,
)
from autotune.model.kernel_costs.counted.steps import Steps
from autotune.model.traffic import Traffic, traffic_with
from moe_triton.backends import CAPABILITIES
from moe_triton.core.abi import word_offsets, words
from moe_triton.core.ascendc import REPORT_WORDS
from moe_triton.core.config import Config
from moe_triton.core.kernel import Arg, AscendCKernel
from moe_triton.core.plan import Launch, Part, Placeholder, Plan, Value, device_launches, num_blocks
from moe_triton.core.reach import NUM_CHANGES_WORDS, token_of
from moe_triton.core.region import ROTATED_DIMS, fields_of, region_in
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.scheme import Scheme

WINDOW, PEERS, REPORT, CALL_WORDS = "window", "peers", "report", "call_words"
"""Holes that every buffer fills, beside those of a call."""
NOBODY = np.zeros(0, np.uint64)
MOST_WORDS = 1 << 20
"""The most words that are read of a table that kernels make for others."""
_FLOATS = "*fp32", "*bf16", "*fp16"
_INTEGERS = ("*i32",)


@dataclass(frozen=True, eq=False)
class Ran:
    """A launch on one rank.

    Attributes:
        steps: what its blocks did.
        look: what they did up to the end of a first look that found nothing; None where it waits for nobody.
        awaits: who stored what it waits for in its window.
        written, posted: bytes that the same launch on other ranks has written to this one, and posted to it.
        messages: in how many these were posted.
    """

    steps: Steps
    look: Steps | None
    awaits: Writers
    written: int
    posted: int
    messages: int


@dataclass(frozen=True, eq=False)
class Awaited:
    """What a launch on one rank waits for: (N,) arrays.

    Attributes:
        launch: of the plan, that sends it.
        rank: that sends it.
        share: of that launch, which is done with the last thing that is waited for.
        posted: whether it comes by a queue.
    """

    launch: np.ndarray
    rank: np.ndarray
    share: np.ndarray
    posted: np.ndarray


@dataclass(frozen=True)
class Group:
    """What is run.

    Attributes:
        traffics: what each of the ranks that count sends and receives.
        plan: of the first of them.
        plan_of: a rank's plan; None where only its number differs, as where none passes on what others send.
        scheme_of: a rank's scheme: what it keeps, and where its queues lead.
        known: traffics of ranks, which runs of the same ranks share.
    """

    traffics: Sequence[Traffic]
    plan: Plan
    plan_of: Callable[[int], Plan] | None
    scheme_of: Callable[[int], Scheme]
    known: dict[int, Traffic]


@dataclass(frozen=True)
class _Words:
    """The words of a launch's arguments.

    Attributes:
        fixed: with 0 where a placeholder is.
        ranks: places of the rank's own number.
        placeholders: place, placeholder and argument of each.
    """

    fixed: np.ndarray
    ranks: list[int]
    placeholders: list[tuple[int, Placeholder, Arg]]

    @staticmethod
    def of(launch: Launch, is_any_rank: bool) -> _Words:
        """Those of a launch, of one rank or of any."""
        packed, placeholders = words(launch)
        places = [(arg, place) for arg, place in word_offsets(launch.kernel.args)]
        args = {place: arg for arg, place in places}
        own = [
            place + word
            for (arg, place), value in zip(places, launch.values, strict=True)
            if is_any_rank and (word := _own_rank_in(arg, value)) is not None
        ]
        return _Words(
            np.array(packed, np.uint64),
            own,
            [(place, placeholder, args[place]) for place, placeholder in placeholders],
        )


def _own_rank_in(arg: Arg, value: Value) -> int | None:
    """Which word of an argument is the number of the rank that launches, if one is."""
    if isinstance(value, tuple):
        is_rotated = arg.type in ROTATED_DIMS and region_in(arg.type, value).rotation
        return fields_of(arg.type).index("receiver") if is_rotated else None
    is_own = arg.name == "rank" or (arg.name == "kept_rank" and isinstance(value, int) and value >= 0)
    return 0 if is_own else None


class PlanRun:
    """The launches of a plan on some ranks of a group, which are run as they are asked for.

    Args:
        group: the ranks.

    Attributes:
        plan: of the first of them.
        traffics: of ranks, those that count and others.
        rings: whether a processor of its own posts blocks (AICPU), for which cores ring.

    Raises:
        UnknownWorkError: nobody knows what the other ranks send.
    """

    def __init__(self, group: Group) -> None:
        first = group.traffics[0]
        if first.ids is None:
            raise UnknownWorkError("the model does not know what the other ranks of the group send")
        self._group, self._config, self._ids = group, first.config, first.ids
        self._counting = [traffic.rank for traffic in group.traffics]
        self.plan = group.plan
        scheme = group.scheme_of(self._counting[0])
        self.rings = (
            scheme.context.posts == "aicpu" if "posts" in scheme.settings else "post_parts" in scheme.settings
        )
        self._scratch = scratch = scheme.scratch()
        self._zeroed = {CALL_WORDS, REPORT, *(name for name, kept in scratch.items() if kept.is_zeroed)}
        # Where ranks pass on what others have sent, all of them are run.
        self._relays = scheme.tables_of(self._config) is not None
        self._ranks = Ranks(self._config.num_ranks)
        for rank in range(self._config.num_ranks) if self._relays else self._counting:
            self._ranks.take(rank)
        self._numbers = np.full(self._config.num_ranks, -1)
        self._numbers[self._counting] = np.arange(len(self._counting))
        self.traffics = group.known
        self._words: dict[tuple[int, int], _Words] = {}
        self._segments: dict[str, int] = {}
        self._given: set[tuple[int, str]] = set()
        self._written: set[str] = set()
        self._ran: list[list[Ran]] = []
        self._made: list[Sequence[Mapping[str, np.ndarray]]] = []
        self._awaited: dict[tuple[int, int], Awaited] = {}

    def ran(self, index: int) -> list[Ran]:
        """A launch of an Ascend C kernel, on each of the ranks that count.

        Raises:
            CountedError: see `Ranks.run`; or it has something to report.
            UnknownWorkError: a number of the call is not known.
        """
        self._run_to(index)
        return self._ran[index]

    def made(self, index: int, number: int) -> Mapping[str, np.ndarray]:
        """What a launch of a Triton kernel finds of what Ascend C kernels before it have made.

        Args:
            index: of the launch.
            number: of the rank, among those that count.
        """
        self._run_to(index)
        made = self._made[index]
        return made[number] if made else {}

    def awaited(self, index: int, number: int) -> Awaited:
        """What a launch waits for that the launches before it send.

        Args:
            index: of the launch.
            number: of the rank, among those that count.
        """
        if (index, number) not in self._awaited:
            self._awaited[index, number] = self._awaited_by(index, number)
        return self._awaited[index, number]

    def _awaited_by(self, index: int, number: int) -> Awaited:
        self._run_to(index)
        told = self._ran[index][number].awaits if self._ran[index] else Writers.of(NOBODY)
        shares = np.ones(len(told.launch))
        for launch in set(told.launch.tolist()) - {index}:
            here = np.flatnonzero((told.launch == launch) & ~told.posted)
            shares[here] = self._shares(launch, told.at(here))
        keys = np.stack([told.launch, told.rank, told.posted])
        keys, place = np.unique(keys, axis=1, return_inverse=True)
        most = np.zeros(keys.shape[1])
        np.maximum.at(most, place.reshape(-1), shares)
        before = keys[0] != index
        return Awaited(keys[0][before], keys[1][before], most[before], keys[2][before] > 0)

    def _shares(self, launch: int, told: Writers) -> np.ndarray:
        """(N,) the part of a launch that is done with what was stored."""
        numbers = self._numbers[told.rank]
        # The others do as those that count do.
        last = {
            kind: max(ran.steps.share_of_step(kind) for ran in self._ran[launch])
            for kind in set(told.step.tolist())
        }
        shares = np.array([last[kind] for kind in told.step.tolist()])
        for number in set(numbers.tolist()) - {-1}:
            here, steps = np.flatnonzero(numbers == number), self._ran[launch][number].steps
            shares[here] = steps.share[steps.begins[told.block[here]] + told.record[here]]
        return shares

    @functools.cached_property
    def _cores(self) -> list[int]:
        return [num_blocks(phases) for phases in device_launches(self.plan.launches) for _ in phases]

    def cores(self, index: int) -> int:
        """The number of cores of the launch on the device that a launch is a phase of."""
        return self._cores[index]

    def _run_to(self, index: int) -> None:
        while len(self._ran) <= index:
            number = len(self._ran)
            launch = self.plan.launches[number]
            is_ours = isinstance(launch.kernel, AscendCKernel)
            made = [] if is_ours else [self._made_for(launch, rank) for rank in self._counting]
            self._ran.append(self._run(number) if is_ours else [])
            self._made.append(made)

    def _run(self, index: int) -> list[Ran]:
        launch = self.plan.launches[index]
        assert isinstance(launch.kernel, AscendCKernel)
        names = {arg.name for arg in launch.kernel.args}
        counted = []
        for rank in self._counting:
            look, waits = None, False
            if "timeout_us" in names:
                look = self._count(index, rank, Mode.BLIND)
                waits = self._ranks.waits()
            steps = self._count(index, rank, Mode.LOGGED)
            awaits = self._ranks.awaited() if waits else Writers.of(NOBODY)
            counted.append((steps, look if waits else None, awaits))
        if self._relays or (PEERS in names and not launch.kernel.only_waits):
            blocks = launch.blocks if self._relays else 1
            for rank in range(self._config.num_ranks):
                if rank not in self._counting:
                    self._start(index, rank, blocks, Mode.SILENT)
        self._written |= {
            value.name
            for arg, value in zip(launch.kernel.args, launch.values, strict=True)
            if isinstance(value, Placeholder) and arg.direction in ("out", "inout")
        }
        arrived = [self._ranks.arrived(rank) for rank in self._counting]
        return [Ran(*each, *came) for each, came in zip(counted, arrived, strict=True)]

    def _count(self, index: int, rank: int, mode: Mode) -> Steps:
        blocks = self.plan.launches[index].blocks
        self._start(index, rank, blocks, mode)
        return Steps(*self._ranks.log(blocks), rank, self._config.num_ranks)

    def _start(self, index: int, rank: int, blocks: int, mode: Mode) -> None:
        kernel = self.plan.launches[index].kernel
        assert isinstance(kernel, AscendCKernel)
        words_of = self._words_of(index, rank)
        filled = words_of.fixed.copy()
        filled[words_of.ranks] = rank
        for place, placeholder, arg in words_of.placeholders:
            filled[place] = self._word(rank, placeholder, arg) % (1 << 64)
        self._ranks.run(rank, Launching(kernel, blocks, index), filled, mode)
        if mode is Mode.LOGGED:
            self._check_report(self.plan.launches[index], rank)

    def _words_of(self, index: int, rank: int) -> _Words:
        """The words of a launch's arguments; on one server the same for all ranks but for their numbers."""
        key = index, rank if self._group.plan_of else self._counting[0]
        if key not in self._words:
            plan = self._group.plan_of(rank) if self._group.plan_of else self.plan
            self._words[key] = _Words.of(plan.launches[index], not self._group.plan_of)
        return self._words[key]

    def _word(self, rank: int, placeholder: Placeholder, arg: Arg) -> int:
        """A number, or the address of what an argument points to."""
        number = self._traffic(rank).numbers.get(placeholder.name)
        if number is not None:
            return placeholder.of(number) if isinstance(placeholder, Part) else number
        if not arg.is_pointer:
            raise UnknownWorkError(
                f"the model does not know {placeholder.name}, which is {arg.name} of a kernel"
            )
        if placeholder.name == WINDOW:
            return token_of(rank) + placeholder.offset
        segment = self._segments.setdefault(placeholder.name, FIRST_SEGMENT + len(self._segments))
        if (rank, placeholder.name) not in self._given:
            self._given.add((rank, placeholder.name))
            self._ranks.give(rank, segment, *self._contents(rank, placeholder.name, arg))
        return segment_at(segment, placeholder.offset)

    def _traffic(self, rank: int) -> Traffic:
        if rank not in self.traffics:
            ranks = range(self._config.num_ranks) if self._relays else self._counting
            self.traffics[rank] = traffic_with(self._config, rank, self._ids, ranks)
        return self.traffics[rank]

    def _contents(self, rank: int, name: str, arg: Arg) -> tuple[Contents, np.ndarray | None]:
        """What an argument points to before any kernel has run."""
        if name == PEERS:
            return Contents.VALUES, self._peers(rank)
        values = self._traffic(rank).tables.get(name)
        if values is not None:
            return Contents.VALUES, values
        # Weights, scales and what a caller sums up in decide nothing.
        is_summed = arg.direction == "inout" and name not in self._scratch
        is_zero = name in self._zeroed or arg.type in _FLOATS or is_summed
        return Contents.ZEROS if is_zero else Contents.UNKNOWN, None

    def _peers(self, rank: int) -> np.ndarray:
        several, ranks = self._config.topology.num_servers > 1, range(self._config.num_ranks)
        queues = self._group.scheme_of(rank).queues if several else None
        if queues is None:
            return self._windows
        return self._table_of([queues.word(rank, peer, token_of(peer)) for peer in ranks])

    @functools.cached_property
    def _windows(self) -> np.ndarray:
        return self._table_of([token_of(rank) for rank in range(self._config.num_ranks)])

    @staticmethod
    def _table_of(words: list[int]) -> np.ndarray:
        """Words of ranks of which none is masked, and those behind them."""
        return np.array([*words, *[0] * NUM_CHANGES_WORDS], np.int64)

    def _made_for(self, launch: Launch, rank: int) -> dict[str, np.ndarray]:
        known = self._traffic(rank).tables
        names = {
            value.name
            for arg, value in zip(launch.kernel.args, launch.values, strict=True)
            if isinstance(value, Placeholder) and arg.type in _INTEGERS and value.name not in known
        }
        return {
            name: self._ranks.read(rank, segment_at(self._segments[name]), MOST_WORDS)
            for name in (names & self._written & self._segments.keys()) - self._zeroed
        }

    def _check_report(self, launch: Launch, rank: int) -> None:
        """Raises unless a launch had nothing to report."""
        placeholder = next(
            value for arg, value in zip(launch.kernel.args, launch.values, strict=True) if arg.name == REPORT
        )
        assert isinstance(placeholder, Placeholder)
        address = segment_at(self._segments[placeholder.name], placeholder.offset)
        report = self._ranks.read(rank, address, launch.blocks * REPORT_WORDS)
        if report.any():
            raise CountedError(f"{launch.kernel.name} on rank {rank} reports {report[report != 0].tolist()}")


def standing_for(
    plan: Plan,
    traffics: Sequence[Traffic],
    plan_of: Callable[[int], Plan] | None = None,
    scheme_of: Callable[[int], Scheme] | None = None,
) -> PlanRun:
    """A run of a plan on some ranks; the same one again for the same ranks.

    Args:
        plan: of the first of them.
        traffics: of these ranks.
        plan_of: a rank's, where more than its number differs: where ranks pass on what others send.
        scheme_of: a rank's; one without settings if not given.
    """
    ranks = tuple(map(id, traffics))
    key = counting_library(), plan.launches, ranks
    if key not in _RUNS:
        known = next((run.traffics for (_, _, others), run in _RUNS.items() if others == ranks), None)
        while len(_RUNS) >= KEPT:
            del _RUNS[next(iter(_RUNS))]
        by_rank = functools.cache(plan_of) if plan_of else None
        schemes = functools.cache(scheme_of or functools.partial(_scheme, traffics[0].config))
        known = known or {traffic.rank: traffic for traffic in traffics}
        _RUNS[key] = PlanRun(Group(tuple(traffics), plan, by_rank, schemes, known))
    return _RUNS[key]


KEPT = 64
_RUNS: dict[tuple[object, ...], PlanRun] = {}


def _scheme(config: Config, rank: int) -> Scheme:
    return make_scheme(RankContext(config, rank, 1, 0, CAPABILITIES["npu"]))
