"""Two zones and graphs: every order of two ranks' steps, for every short programme of graphs and eager calls.

What a programme's calls become (which barrier comes before which combine) is `Rounds`' own answer. What can
go wrong: a rank writes where a peer has not read yet, or takes what was meant for another round.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from moe_triton.core.config import Config
from moe_triton.core.errors import BufferStateError
from moe_triton.runtime.rounds import Rounds
from moe_triton.schemes.site import Operator, Site

RANKS = (0, 1)
# Whom a rank's combine sends to: both ranks to both, only to itself, or one way.
ALL, OWN, ONE_WAY = {0: (0, 1), 1: (0, 1)}, {0: (0,), 1: (1,)}, {0: (0, 1), 1: (1,)}
NAMES: dict[str, Operator] = {"D": "dispatch", "C": "combine"}
FLOWS = {"all": ALL, "own": OWN, "one way": ONE_WAY}


def rounds(scheme: str = "fullmesh_v1", target: str = "npu") -> Rounds:
    config = Config(2, 8, 64, 2, 4, scheme=scheme, relaxed=True).normalized()
    return Rounds(Site(config, 0, num_blocks=1, timeout_us=1, target=target))


def record(rounds: Rounds, calls: str, capturing: bool) -> list[Operator]:
    """The operators that these calls become: D is a dispatch, C a combine."""
    made: list[Operator] = []

    def run(operator: Operator) -> None:
        if operator != "combine":
            rounds.post()
        rounds.counts[operator] += 1
        if operator != "combine":
            rounds.cover(capturing)
        made.append(operator)

    for call in calls:
        if call == "C" and rounds.needs_wait(capturing):
            run("barrier")
        run("dispatch" if call == "D" else "combine")
    return made


@dataclass(frozen=True)
class Step:
    """What a rank does at a time.

    Attributes:
        kind: "write" to one peer's zone, or "take" what has come into its own, once all of it has.
        operator: whose region, or "both" where dispatch and combine share one.
        zone: which.
        round: the how many-th of that operator.
        peers: written to, or waited for.
    """

    kind: str
    operator: Operator | Literal["both"]
    zone: int
    round: int
    peers: tuple[int, ...]


def steps(
    operators: Sequence[Operator], rank: int, flows: dict[int, tuple[int, ...]], is_shared: bool
) -> list[Step]:
    """A rank's steps. Zones turn as the kernels turn them: with every run."""
    done: dict[str, int] = dict.fromkeys(("dispatch", "combine", "barrier", "both"), 0)
    found = []
    for operator in operators:
        region: Operator | Literal["both"] = "both" if is_shared else operator
        number = done[region]
        zone = number % 2
        done[region] += 1
        to = flows[rank] if operator == "combine" else RANKS
        senders = tuple(r for r in RANKS if rank in flows[r]) if operator == "combine" else RANKS
        found += [Step("write", region, zone, number, (peer,)) for peer in to]
        found.append(Step("take", region, zone, number, senders))
    return found


State = tuple[tuple[int, int], frozenset[tuple[int, int, str, int, int]]]


def trouble(operators: Sequence[Operator], flows: dict[int, tuple[int, ...]], is_shared: bool = False) -> str:
    """What goes wrong in some order of the two ranks' steps; empty if nothing ever does.

    Args:
        operators: of both ranks.
        flows: whom each rank's combine sends to.
        is_shared: dispatch and combine take turns in the same zones.
    """
    programmes = [steps(operators, rank, flows, is_shared) for rank in RANKS]
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
                if any(cell[:4] == place for cell in unread):
                    return f"rank {rank} writes {step.operator} {step.round} over what was not read"
                after = unread | {(*place, step.round)}
            else:
                mine = {c for c in unread if c[0] == rank and c[2:4] == (step.operator, step.zone)}
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


@pytest.mark.parametrize("flows", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_run_any_number_of_times_with_anything_between(
    graph: str, flows: dict[int, tuple[int, ...]]
) -> None:
    for order in orders([graph], 4):
        made = rounds()
        record(made, "DC", capturing=False)  # what every capture has before it
        captured = record(made, graph, capturing=True)
        operators: list[Operator] = []
        for part in order:
            is_eager = part.startswith("eager ")
            operators += record(made, part.removeprefix("eager "), False) if is_eager else captured
        assert trouble(operators, flows) == "", order


@pytest.mark.parametrize("pair", list(itertools.combinations(["DC", "D", "DCC", "CD"], 2)), ids=str)
def test_two_graphs_in_any_order(pair: tuple[str, str]) -> None:
    made = rounds()
    captured = {graph: record(made, graph, capturing=True) for graph in pair}
    for order in itertools.product(pair, repeat=4):
        operators = [operator for graph in order for operator in captured[graph]]
        assert trouble(operators, ONE_WAY) == "", order


@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("DC", repeat=6)])
def test_eager_calls_of_the_cpu_back_end(calls: str) -> None:
    operators = record(rounds(target="cpu"), calls, capturing=False)
    assert trouble(operators, ONE_WAY) == ""
    assert trouble(operators, OWN) == ""


@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_the_usual_layer_needs_no_barrier(target: str) -> None:
    assert record(rounds(target=target), "DC" * 3, capturing=False) == ["dispatch", "combine"] * 3


def test_the_model_finds_what_barriers_are_for() -> None:
    """Three combines with no dispatch between; and a graph of a combine alone."""
    assert "over what was not read" in trouble(["dispatch", *["combine"] * 3], ONE_WAY)
    assert "over what was not read" in trouble(["combine"] * 3, ONE_WAY)
    assert trouble(["combine"] * 2, ONE_WAY) == ""


PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"


def documented_programmes() -> list[list[str]]:
    """Rows of the table in docs/protocol.md, "Which programmes are safe"."""
    section = PAGE.read_text(encoding="utf-8").split("## Which programmes are safe\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [row for row in rows if re.fullmatch("[DC ]+", row[0])]


def verdict(
    operators: Sequence[Operator], flows: Iterable[dict[int, tuple[int, ...]]], is_shared: bool
) -> str:
    return "overwrites" if any(trouble(operators, flow, is_shared) for flow in flows) else "safe"


def test_the_programmes_that_are_documented_as_safe_are() -> None:
    """Columns: regions of their own; one for both; one for both, where combine waits for every rank."""
    rows = documented_programmes()
    assert len(rows) == 5
    for programme, *columns in rows:
        operators: list[Operator] = [NAMES[letter] for letter in programme.split()]
        found = [verdict(operators, FLOWS.values(), is_shared) for is_shared in (False, True)]
        assert columns == [*found, verdict(operators, [ALL], is_shared=True)], programme


def test_host_zones_cannot_be_captured() -> None:
    with pytest.raises(BufferStateError, match="comm_alg='direct' cannot be captured"):
        rounds("direct").check_graph(capturing=True)
    rounds("direct").check_graph(capturing=False)
    rounds("fullmesh_v2").check_graph(capturing=True)
