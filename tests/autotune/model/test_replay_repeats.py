"""Turns that repeat are multiplied: every number is as if they were run one by one."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from autotune.gate.families import parse_case
from autotune.gate.table import shown_cases
from autotune.model.bodies.replay.case import case_arguments
from autotune.model.bodies.replay.folding import Piece, Repeat, folded
from autotune.model.bodies.replay.instructions import Stream
from autotune.model.bodies.replay.pipes import Core
from autotune.model.bodies.replay.program import streams_of
from autotune.model.bodies.replay.result import timed
from autotune.model.constants import Machine, machine_named
from autotune.npu_compiler.socs import SOC_OF_PRODUCT
from moe_triton.kernels import Case, Sizes
from tests.autotune.model.replay_ir import (
    BYTES_PER_CYCLE,
    MACHINE,
    add,
    barrier,
    constant,
    element,
    flag,
    load,
    loop,
    pass_on,
    store,
    streams,
    tile,
)

A3 = machine_named("A3")
UNEVEN = MACHINE.replaced({"issue_cycles": 1.7, "load_latency_cycles": 99.9, "queue_entries": 3})
KERNELS = ("route", "append", "arrange", "stamps", "pack", "weighted_sum", "rms_norm")
# Their loops have few turns, or no state that comes again within these turns.
UNLIKE = ("route", "stamps")


def ran(kernel: Sequence[Stream], machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checks that a replay with and without skipping is the same.

    Returns:
        How many periods were skipped, each time.
    """
    skipped: list[int] = []
    skip = Core._skip

    def noted(core: Core, before, after, totals, times: int) -> None:  # type: ignore[no-untyped-def]
        skipped.append(times)
        skip(core, before, after, totals, times)

    with monkeypatch.context() as patch:
        patch.setattr(Core, "_skip", noted)
        found = timed(kernel, machine, BYTES_PER_CYCLE)
        count = len(skipped)
        assert timed(kernel, machine, BYTES_PER_CYCLE, skips=False) == found
        assert len(skipped) == count
    return skipped


def buffered(buffers: int) -> list[str]:
    """Loads, adds and stores `a` rows in buffers taken in turn."""
    return [
        tile("x"),
        constant("buffers", buffers, "i64"),
        *[flag("set", "MTE3", "MTE2", event) for event in range(buffers)],
        *loop(
            "none",
            "a",
            '%wide = "arith.extsi"(%i) : (i32) -> i64',
            '%event = "arith.remsi"(%wide, %buffers) : (i64, i64) -> i64',
            flag("wait", "MTE3", "MTE2", "event"),
            load(),
            *pass_on("MTE2", "V"),
            add(),
            *pass_on("V", "MTE3"),
            store(),
            flag("set", "MTE3", "MTE2", "event"),
        ),
        *[flag("wait", "MTE3", "MTE2", event) for event in range(buffers)],
    ]


HAND_MADE = {
    "nothing but scalars": loop("none", "a", *element("e", "b", "none")),
    "copies that fill a queue": [tile("x"), *loop("none", "a", load(), load())],
    "a chain": [tile("x"), *loop("none", "a", load(), *pass_on("MTE2", "V"), add(), barrier("V"))],
    "a barrier of all": [tile("x"), *loop("none", "a", load(), barrier("ALL"), store())],
    "vector work that is still to do": [
        tile("x"),
        *[add()] * 20,
        *loop("none", "a", *element("e", "b", "none")),
        barrier("ALL"),
        store(),
    ],
    "a flag set long before": [
        tile("x"),
        load(),
        flag("set", "MTE2", "V", 3),
        *loop("none", "a", store()),
        flag("wait", "MTE2", "V", 3),
        add(),
    ],
    "one buffer": buffered(1),
    "two buffers": buffered(2),
    "three buffers": buffered(3),
    "loops in a loop": [
        tile("x"),
        *loop("none", "a", load(), *loop("none", "a", store(), index="j"), *pass_on("MTE3", "MTE2")),
    ],
}


@pytest.mark.parametrize("name", HAND_MADE)
@pytest.mark.parametrize("machine", [MACHINE, UNEVEN, A3], ids=["even", "uneven", "A3"])
def test_hand_made_loops(name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for turns in (0, 1, 7, 8, 9, 64, 257):
        kernel = streams(*HAND_MADE[name], arguments={"a": turns, "b": [0]})
        skipped = ran(kernel, machine, monkeypatch)
        assert bool(skipped) or turns < 257


def test_turns_that_differ_are_run() -> None:
    """A branch that follows no period: only what repeats within a turn is multiplied."""
    choice = [
        *element("e", "b", "i"),
        '%is = "arith.cmpi"(%e, %none) <{predicate = 1 : i64}> : (i32, i32) -> i1',
        '"scf.if"(%is) ({',
        load(),
        '"scf.yield"() : () -> ()',
        "}, {",
        '"scf.yield"() : () -> ()',
        "}) : (i1) -> ()",
    ]
    data = [random.Random(0).randrange(2) for _ in range(64)]
    kernel = streams(tile("x"), *loop("none", "a", *choice), arguments={"a": 64, "b": data})
    assert timed(kernel, MACHINE, BYTES_PER_CYCLE) == timed(kernel, MACHINE, BYTES_PER_CYCLE, skips=False)


def test_spans_are_all_there() -> None:
    kernel = streams(*HAND_MADE["two buffers"], arguments={"a": 257, "b": [0]})
    found, whole = (
        timed(kernel, MACHINE, BYTES_PER_CYCLE, with_spans=True),
        timed(kernel, MACHINE, BYTES_PER_CYCLE),
    )
    assert len(found.spans) == 3 * 257
    assert (found.cycles, found.parts, found.stalls) == (whole.cycles, whole.parts, whole.stalls)


def unfolded(pieces: Sequence[Piece]) -> list[int]:
    found: list[int] = []
    for piece in pieces:
        found += unfolded(piece.body) * piece.count if isinstance(piece, Repeat) else list(piece)
    return found


def test_folded_codes_are_the_codes() -> None:
    random_ = random.Random(1)
    for _ in range(200):
        inner = [[8, *random_.choices(range(3), k=2)] * random_.randrange(12) for _ in range(3)]
        turns = [[9, *random_.choice(inner), 7] for _ in range(random_.randrange(4))]
        codes = array("L", [code for turn in [*turns, *turns[:2] * random_.randrange(12)] for code in turn])
        assert unfolded(folded(codes, [9, 8])) == list(codes)


def test_what_repeats_is_written_once() -> None:
    codes = array("L", [1, *[9, *[8, 2] * 10, *[8, 3, 8, 4] * 20] * 100, 5])
    pieces = folded(codes, [9, 8])
    assert [piece.count for piece in pieces if isinstance(piece, Repeat)] == [
        99,
        10,
        19,
    ]  # the last by itself

    def size(pieces: Sequence[Piece]) -> int:
        return sum(size(piece.body) if isinstance(piece, Repeat) else len(piece) for piece in pieces)

    assert size(pieces) < 200


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ranks", [4, 64])
def test_real_kernels(kernel: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(tokens=64, num_experts=64, num_ranks=ranks, unrouted=0.0, first_token=0)
    names = [case.name for case in shown_cases() if case.name.split("/")[0] == kernel]
    assert names
    skipped: list[int] = []
    for name in names[-2:]:  # one of them may have a branch that depends on the data of each turn
        case = Case(*parse_case(name), sizes)
        found = streams_of(case.kernel, SOC_OF_PRODUCT["A3"], case_arguments(case), 2)
        skipped += ran(found, A3, monkeypatch)
    assert bool(skipped) == (kernel not in UNLIKE)
