"""Zones and graphs: every order of two ranks' steps, for every short programme of graphs and eager calls.

What a programme's calls become (which barrier comes before which combine, and in which zone each runs) is the
answer of `Rounds`, and of the same rule in native code. What can go wrong: a rank writes where a peer has not
read yet, or takes what was meant for another round.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends import CAPABILITIES
from moe_triton.backends.cpu.extension import extension
from moe_triton.core.config import Config
from moe_triton.core.errors import BufferStateError
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.runtime.executables import Executables
from moe_triton.runtime.rounds import Rounds
from moe_triton.runtime.turns import PhaseRun, turns_of
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import OPERATORS, Operator, RankContext, RoundFacts
from tests.headers import needs_headers

RANKS = (0, 1)
# The ranks that a rank's combine sends to: both ranks to both, only to itself, or one way.
ALL, OWN, ONE_WAY = {0: (0, 1), 1: (0, 1)}, {0: (0,), 1: (1,)}, {0: (0, 1), 1: (1,)}
NAMES: dict[str, Operator] = {"D": "dispatch", "C": "combine"}
FLOWS = {"all": ALL, "own": OWN, "one way": ONE_WAY}


def facts(scheme: str = "fullmesh_v1", target: str = "npu", num_zones: int = 2) -> RoundFacts:
    config = Config(2, 8, 64, 2, 4, scheme=scheme, relaxed=True).normalized()
    return replace(
        make_scheme(RankContext(config, 0, 1, 1, CAPABILITIES[target])).rounds, num_zones=num_zones
    )


@functools.cache
def native_rule() -> ctypes.CDLL:
    module = extension()
    assert module is not None
    library = ctypes.CDLL(module.__file__)
    library.moe_rounds_zone.restype = ctypes.c_uint64
    library.moe_rounds_needs_wait.restype = ctypes.c_bool
    return library


class NativeRounds(Rounds):
    """The rule as native calls follow it, on the same record."""

    def _call(self, name: str, operator: Operator, *flags: bool) -> int:
        function = getattr(native_rule(), f"moe_rounds_{name}")
        number = ctypes.c_uint32(OPERATORS.index(operator))
        result: int = function(ctypes.byref(self.record), number, *map(ctypes.c_bool, flags))
        return result

    def zone(self, operator: Operator) -> int:
        return self._call("zone", operator)

    def needs_wait(self, operator: Operator, capturing: bool) -> bool:
        return bool(self._call("needs_wait", operator, capturing))

    def begin(self, operator: Operator) -> None:
        self._call("begin", operator)

    def end(self, operator: Operator, succeeded: bool, capturing: bool) -> None:
        self._call("end", operator, succeeded, capturing)


RULES = [Rounds, pytest.param(NativeRounds, marks=needs_headers)]
Rule = Callable[[RoundFacts], Rounds]


@dataclass(frozen=True)
class Run:
    """An operator, and the zone that the host chose for it; None where kernels look it up."""

    operator: Operator
    zone: int | None = None


def record(rounds: Rounds, calls: str, capturing: bool) -> list[Run]:
    """The operators that these calls become: D is a dispatch, C a combine."""
    made: list[Run] = []

    def run(operator: Operator) -> None:
        rounds.begin(operator)
        made.append(Run(operator, None if rounds.record.on_device else rounds.zone(operator)))
        rounds.end(operator, succeeded=True, capturing=capturing)

    for call in calls:
        if rounds.needs_wait(NAMES[call], capturing):
            run("barrier")
        run(NAMES[call])
    return made


@dataclass(frozen=True)
class Step:
    """What a rank does at a time.

    Attributes:
        kind: "write" to one peer's zone, or "take" what has come into its own, once all of it has.
        operator: whose region, or "both" where dispatch and combine share one.
        zone: which.
        round: index of the run among those of that operator.
        peers: written to, or waited for.
        is_misused: the caller does not know of all that come: it waits for some.
    """

    kind: str
    operator: Operator | Literal["both"]
    zone: int
    round: int
    peers: tuple[int, ...]
    is_misused: bool = False


@dataclass(frozen=True)
class Misuse:
    """A combine whose caller leaves out what comes from a peer.

    Attributes:
        rank: whose.
        round: which of its combines.
        peer: that it does not wait for.
        numbered: whether flags of combines are numbers of rounds; otherwise it is another protocol.
    """

    rank: int
    round: int
    peer: int
    numbered: bool = True


def steps(
    runs: Sequence[Run],
    rank: int,
    flows: dict[int, tuple[int, ...]],
    is_shared: bool,
    num_zones: int,
    misuse: Misuse | None = None,
) -> list[Step]:
    """A rank's steps. Zones that the host does not choose turn as the kernels turn them: with every run."""
    done: dict[str, int] = dict.fromkeys(("dispatch", "combine", "barrier", "both"), 0)
    found = []
    for run in runs:
        operator = run.operator
        region: Operator | Literal["both"] = "both" if is_shared else operator
        number = done[region]
        zone = number % num_zones if run.zone is None else run.zone
        done[region] += 1
        to = flows[rank] if operator == "combine" else RANKS
        senders = tuple(r for r in RANKS if rank in flows[r]) if operator == "combine" else RANKS
        found += [Step("write", region, zone, number, (peer,)) for peer in to]
        is_misused = operator == "combine" and misuse is not None and misuse.rank == rank
        if misuse is not None and is_misused and misuse.round == number:
            left = tuple(sender for sender in senders if sender != misuse.peer)
            found.append(Step("take", region, zone, number, left, is_misused=True))
        else:
            found.append(Step("take", region, zone, number, senders))
    return found


State = tuple[tuple[int, int], frozenset[tuple[int, int, str, int, int]]]


def trouble(
    runs: Sequence[Run],
    flows: dict[int, tuple[int, ...]],
    is_shared: bool = False,
    num_zones: int = 2,
    misuse: Misuse | None = None,
) -> str:
    """What goes wrong in some order of the two ranks' steps; empty if nothing ever does.

    Args:
        runs: of both ranks.
        flows: whom each rank's combine sends to.
        is_shared: dispatch and combine take turns in the same zones.
        num_zones: of each operator.
        misuse: a combine that is wrong.
    """
    programmes = [steps(runs, rank, flows, is_shared, num_zones, misuse) for rank in RANKS]
    numbered = {"combine"} if misuse is None or misuse.numbered else set()
    # What lies unread: (reader, writer, operator, zone, round).
    start: State = ((0, 0), frozenset())
    seen, waiting = {start}, [start]
    while waiting:
        positions, unread = waiting.pop()
        moved = False
        for rank in RANKS:
            if positions[rank] == len(programmes[rank]):
                continue
            step = programmes[rank][positions[rank]]
            if step.kind == "write":
                (peer,) = step.peers
                place = (peer, rank, step.operator, step.zone)
                over = {cell for cell in unread if cell[:4] == place}
                taken = {
                    (s.operator, s.round) for s in programmes[peer][: positions[peer]] if s.kind == "take"
                }
                # Who has got past a round looks for its number no more.
                if any(c[2] not in numbered or (c[2], c[4]) not in taken for c in over):
                    return f"rank {rank} writes {step.operator} {step.round} over what was not read"
                after = (unread - over) | {(*place, step.round)}
            else:
                mine = {c for c in unread if c[0] == rank and c[2:4] == (step.operator, step.zone)}
                if step.operator in numbered:
                    mine = {c for c in mine if c[4] == step.round}
                if step.is_misused:
                    mine = {c for c in mine if c[1] in step.peers}
                if {c[1] for c in mine} != set(step.peers):
                    if {c[1] for c in mine} - set(step.peers):
                        return f"rank {rank} finds what it does not expect in {step.operator} {step.round}"
                    continue  # not all has come yet
                if any(c[4] != step.round for c in mine):
                    return f"rank {rank} takes another round's for {step.operator} {step.round}"
                after = unread - mine
            moved = True
            advanced = (positions[0] + (rank == 0), positions[1] + (rank == 1))
            state: State = (advanced, frozenset(after))
            if state not in seen:
                seen.add(state)
                waiting.append(state)
        if not moved and any(positions[r] < len(programmes[r]) for r in RANKS):
            return f"all wait for ever at {positions}"
    return ""


GRAPHS = ("DC", "D", "C", "CD", "DCC", "DCDC", "CC")


def orders(graphs: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    """Programmes of runs of graphs and eager calls."""
    return itertools.product([*graphs, "eager DC", "eager C", "eager D"], repeat=length)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("flows", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_run_any_number_of_times_with_anything_between(
    graph: str, flows: dict[int, tuple[int, ...]], rule: Rule
) -> None:
    for order in orders([graph], 4):
        made = rule(facts())
        record(made, "DC", capturing=False)  # what every capture has before it
        captured = record(made, graph, capturing=True)
        runs: list[Run] = []
        for part in order:
            is_eager = part.startswith("eager ")
            runs += record(made, part.removeprefix("eager "), False) if is_eager else captured
        assert trouble(runs, flows) == "", order


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", list(itertools.combinations(["DC", "D", "DCC", "CD"], 2)), ids=str)
def test_two_graphs_in_any_order(pair: tuple[str, str], rule: Rule) -> None:
    made = rule(facts())
    captured = {graph: record(made, graph, capturing=True) for graph in pair}
    for order in itertools.product(pair, repeat=4):
        runs = [run for graph in order for run in captured[graph]]
        assert trouble(runs, ONE_WAY) == "", order


@pytest.mark.parametrize("num_zones", [2, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("DC", repeat=6)])
def test_eager_calls_of_the_cpu_back_end(calls: str, rule: Rule, num_zones: int) -> None:
    runs = record(rule(facts(target="cpu", num_zones=num_zones)), calls, capturing=False)
    assert trouble(runs, ONE_WAY, num_zones=num_zones) == ""
    assert trouble(runs, OWN, num_zones=num_zones) == ""


@pytest.mark.parametrize("num_zones", [2, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("DC", repeat=5)])
def test_operators_that_share_zones_and_all_wait_for_every_rank(
    calls: str, rule: Rule, num_zones: int
) -> None:
    version_1 = RoundFacts(num_zones, frozenset(OPERATORS), shared=frozenset({"dispatch", "combine"}))
    runs = record(rule(version_1), calls, capturing=False)
    assert [run.operator for run in runs] == [NAMES[call] for call in calls]
    assert trouble(runs, ALL, is_shared=True, num_zones=num_zones) == ""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_the_usual_layer_needs_no_barrier(target: str, rule: Rule) -> None:
    runs = record(rule(facts(target=target)), "DC" * 3, capturing=False)
    assert [run.operator for run in runs] == ["dispatch", "combine"] * 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_zones", [1, 2, 3])
def test_each_zone_takes_one_combine_before_a_barrier(num_zones: int, rule: Rule) -> None:
    runs = record(rule(facts(target="cpu", num_zones=num_zones)), "C" * 7, capturing=False)
    combines = "".join(run.operator[0] for run in runs).split("b")
    assert {len(found) for found in combines[:-1]} == {num_zones}


@pytest.mark.parametrize("rule", RULES)
def test_a_full_wait_that_failed_covers_nothing(rule: Rule) -> None:
    made = rule(facts(target="cpu"))
    record(made, "CC", capturing=False)
    made.begin("barrier")
    made.end("barrier", succeeded=False, capturing=False)
    assert made.needs_wait("combine", capturing=False)
    assert dict(made.counts) == {"dispatch": 0, "combine": 2, "barrier": 1}


def runs_of(letters: str) -> list[Run]:
    return [Run(NAMES[letter]) for letter in letters]


@pytest.mark.parametrize("num_zones", [2, 3])
def test_the_model_finds_what_barriers_are_for(num_zones: int) -> None:
    """A combine more than there are zones, with no dispatch between; and a graph of a combine alone."""
    combines = "C" * (num_zones + 1)
    for calls in (f"D{combines}", combines):
        assert "over what was not read" in trouble(runs_of(calls), ONE_WAY, num_zones=num_zones)
    assert trouble(runs_of("C" * num_zones), ONE_WAY, num_zones=num_zones) == ""


PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"


def documented_programmes() -> list[list[str]]:
    """Rows of the table in docs/protocol.md, "Which programmes are safe"."""
    section = PAGE.read_text(encoding="utf-8").split("## Which programmes are safe\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [row for row in rows if re.fullmatch("[DC ]+", row[0])]


def verdict(runs: Sequence[Run], flows: Iterable[dict[int, tuple[int, ...]]], is_shared: bool) -> str:
    return "overwrites" if any(trouble(runs, flow, is_shared) for flow in flows) else "safe"


def test_the_programmes_that_are_documented_as_safe_are() -> None:
    """Columns: regions of their own; one for both; one for both, where combine waits for every rank."""
    rows = documented_programmes()
    assert len(rows) == 5
    for programme, *columns in rows:
        runs = runs_of(programme.replace(" ", ""))
        found = [verdict(runs, FLOWS.values(), is_shared) for is_shared in (False, True)]
        assert columns == [*found, verdict(runs, [ALL], is_shared=True)], programme


def test_host_zones_cannot_be_captured() -> None:
    with pytest.raises(BufferStateError, match="comm_alg='direct' cannot be captured"):
        Rounds(facts("direct")).check_graph(capturing=True)
    Rounds(facts("direct")).check_graph(capturing=False)
    Rounds(facts("fullmesh_v2")).check_graph(capturing=True)


def misuses(calls: str) -> Iterator[Misuse]:
    """Of any combine of either rank, by what comes from either."""
    for number, rank, peer in itertools.product(range(calls.count("C")), RANKS, RANKS):
        yield Misuse(rank, number, peer)


@pytest.mark.parametrize("num_zones", [2, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("DC", repeat=5)])
def test_no_round_ends_by_what_a_misused_one_left(calls: str, rule: Rule, num_zones: int) -> None:
    runs = record(rule(facts(target="cpu", num_zones=num_zones)), calls, capturing=False)
    for misuse in misuses(calls):
        assert trouble(runs, ALL, num_zones=num_zones, misuse=misuse) == "", misuse


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("between", ["", "DC", "C", "D"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_no_replay_ends_by_what_a_misused_one_left(graph: str, between: str, rule: Rule) -> None:
    made = rule(facts())
    record(made, "DC", capturing=False)
    captured = record(made, graph, capturing=True)
    runs = [*captured, *record(made, between, capturing=False), *captured]
    runs += record(made, "C", capturing=False)
    for misuse in misuses("C" * sum(run.operator == "combine" for run in runs)):
        assert trouble(runs, ALL, misuse=misuse) == "", misuse


def test_a_flag_that_is_left_ends_a_later_round() -> None:
    """What the rounds above would do if flags had no numbers."""
    runs = record(Rounds(facts(target="cpu")), "DC" * 3, capturing=False)
    assert trouble(runs, ALL, misuse=Misuse(1, 0, 0, numbered=False)) != ""
    assert trouble(runs, ALL, misuse=Misuse(1, 0, 0)) == ""


class AskedFor:
    """Executables that only say what they were asked for."""

    def operator(self, variant: Variant, zone: int, phase: str, parts: int) -> Any:
        return type(variant).__name__, zone, phase, parts

    def barrier(self, zone: int, timeout_us: int | None) -> Any:
        return "barrier", zone


class InFourths:
    """A rank's context that cuts every operator into so many parts as it has tokens, four at most."""

    def parts(self, operator: Operator, tokens: int) -> int:
        return min(tokens, 4)


DISPATCHES, COMBINES = DispatchVariant(torch.bfloat16), CombineVariant(torch.bfloat16)
RUNS = {
    "D": [PhaseRun(DISPATCHES, {"num_tokens": 3}, "round")],
    "A": [PhaseRun(DISPATCHES, {}, "ask"), PhaseRun(DISPATCHES, {}, "place")],
    "C": [PhaseRun(COMBINES, {}, "gather"), PhaseRun(COMBINES, {"num_tokens": 5})],
}


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct"])
@given(before=st.text("DC", max_size=4), calls=st.text("DAC", min_size=1, max_size=9))
def test_turns_are_in_the_zones_and_have_the_waits_of_calls_one_by_one(
    scheme: str, before: str, calls: str
) -> None:
    rounds = Rounds(facts(scheme, target="cpu"))
    record(rounds, before, capturing=False)
    as_it_was = bytes(rounds.record)
    executables, context = cast(Executables, AskedFor()), cast(RankContext, InFourths())
    turns = turns_of([run for call in calls for run in RUNS[call]], rounds, executables, context)
    assert bytes(rounds.record) == as_it_was, "only those who run them count"

    wanted: list[tuple[Any, bool, bool]] = []
    for call in calls:
        operator: Operator = "combine" if call == "C" else "dispatch"
        if call == "C":
            wanted.append((("CombineVariant", rounds.zone(operator), "gather", 1), False, False))
        for run in record(rounds, call.replace("A", "D"), capturing=False):
            if run.operator == "barrier":
                wanted.append((("barrier", run.zone), True, True))
            elif call == "A":
                wanted.append((("DispatchVariant", run.zone, "ask", 1), True, False))
                wanted.append((("DispatchVariant", run.zone, "place", 1), False, True))
            elif call == "D":
                wanted.append((("DispatchVariant", run.zone, "round", 3), True, True))
            else:
                wanted.append((("CombineVariant", run.zone, "whole", 4), True, True))
    assert [(turn.executable, turn.begins, turn.ends) for turn in turns] == wanted
