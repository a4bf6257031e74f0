"""What a trial is, which faults there are, and when a trial was survived."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_triton.processes import RankFailedError

Operator = Literal["dispatch", "combine"]

ROUNDS = 7
# Faults strike before these, so that every rank still has a dispatch to make, which waits for all ranks.
LAST_STRIKE = ROUNDS - 3
SCHEMES = ("fullmesh_v1", "fullmesh_v2", "direct", "fullmesh", "hierarchy")
BETWEEN_SERVERS: Mapping[str, tuple[int | None, ...]] = {
    "fullmesh_v1": (None, 1),
    "fullmesh": (None, 1),
    "hierarchy": (1,),
}
"""How many ranks a server may have, by scheme; all of them with the others."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one rank, the victim.

    Attributes:
        name: of the fault.
        victim: what the victim's first error is; None where it has none.
        others: what the first error of every other rank is; None where they have none.
        names: what the others' first error must say, with the victim's rank for ``{victim}``.
        is_deadly: the victim is gone for good, and the others go on without it.
        holds_others: the others come late, so that the victim waits when it is struck.
        operators: before which it can strike.
        schemes: with which it can.
        needs_own_group: the group is not used again.
        all_are_struck: it befalls every rank at once.
        has_host: the victim hosts the store that ranks leave notes in.
    """

    name: str
    victim: str | None
    others: str | None
    names: str = "{victim}"
    is_deadly: bool = False
    holds_others: bool = False
    operators: tuple[Operator, ...] = ("dispatch", "combine")
    schemes: tuple[str, ...] = SCHEMES
    needs_own_group: bool = False
    all_are_struck: bool = False
    has_host: bool = False


TIME_OUT, LOST, STATE = "CommunicationTimeoutError", "RankLostError", "BufferStateError"
ARGUMENT, MISMATCH = "ArgumentError", "ConfigMismatchError"

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("kill", None, LOST, is_deadly=True),
        Fault("terminate", None, LOST, is_deadly=True),
        # What it finds when it goes on depends on what the others have left.
        Fault("stop", TIME_OUT, TIME_OUT),
        Fault("late", TIME_OUT, TIME_OUT),
        Fault("wait and die", None, LOST, is_deadly=True, operators=("combine",)),
        Fault("host of the store", None, LOST, is_deadly=True, has_host=True),
        Fault("paused machine", None, None, all_are_struck=True),
        Fault("never comes", None, TIME_OUT, operators=("dispatch",)),
        Fault("straggle", None, None),
        Fault("bad call", ARGUMENT, None),
        Fault("bad construction", ARGUMENT, MISMATCH, "rank {victim}", operators=("dispatch",)),
        Fault("close", STATE, TIME_OUT, holds_others=True),
        Fault("Ctrl-C", "KeyboardInterrupt", TIME_OUT, holds_others=True),
        Fault(
            "full disk",
            "WindowError",
            "WindowError",
            "rank {victim}",
            operators=("dispatch",),
            schemes=("fullmesh_v1", "fullmesh_v2"),  # their windows take more than the limit
            needs_own_group=True,
        ),
        Fault("other rows", MISMATCH, MISMATCH, "rank(s) [{victim}]", operators=("dispatch",)),
        Fault(
            "other results",
            MISMATCH,
            MISMATCH,
            "rank(s) [{victim}]",
            operators=("combine",),
            schemes=("hierarchy",),  # elsewhere the next dispatch raises it, when this round was summed
        ),
        Fault(
            "other weights",
            MISMATCH,
            MISMATCH,
            "rank(s) [{victim}]",
            operators=("dispatch",),
            schemes=SCHEMES[:-1],  # hierarchy takes no dispatch without weights
        ),
    )
}


TIMED = "stop", "late"
"""Faults that others must wait for from the beginning: not in rounds, whose plans are compiled meanwhile."""


@dataclass(frozen=True)
class Trial:
    """One fault, once: who is struck, when, and in what group.

    Attributes:
        fault: its name in `FAULTS`.
        scheme: how tokens travel.
        num_ranks: of the group.
        victim: the rank that is struck.
        number: the round in which it is struck.
        operator: before which.
        seed: of the inputs.
        ranks_per_server: None for one server.
        in_rounds: ranks have more tokens than a round takes.
    """

    fault: str
    scheme: str
    num_ranks: int
    victim: int
    number: int
    operator: Operator
    seed: int
    ranks_per_server: int | None = None
    in_rounds: bool = False

    @staticmethod
    def draw(fault: str, source: random.Random) -> Trial:
        """A trial of a fault, at random."""
        num_ranks = source.choice((2, 3, 4))
        scheme = source.choice(FAULTS[fault].schemes)
        return Trial(
            fault,
            scheme,
            # Who is left after a death is still a group.
            max(num_ranks, 3) if FAULTS[fault].is_deadly else num_ranks,
            source.randrange(num_ranks),
            source.randrange(LAST_STRIKE),
            source.choice(FAULTS[fault].operators),
            source.randrange(1000),
            source.choice(BETWEEN_SERVERS.get(scheme, (None,))),
            scheme != "direct" and fault not in TIMED and source.random() < 1 / 3,
        )


@dataclass(frozen=True)
class Seen:
    """An error that a rank met.

    Attributes:
        kind: name of its type.
        text: its message.
        seconds: from the beginning of the round that raised it, or from the fault, where it struck here.
        missing: ranks that a time-out names.
        uncertain: those of them that it names with a doubt.
    """

    kind: str
    text: str
    seconds: float
    missing: tuple[int, ...] = ()
    uncertain: tuple[int, ...] = ()


@dataclass(frozen=True)
class Account:
    """How a rank fared.

    Attributes:
        errors: that it met, in order.
        wrong: what was not bit-equal to the reference.
        left_behind: what it still held of all that it had opened.
    """

    errors: tuple[Seen, ...] = ()
    wrong: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()


def complaints(trial: Trial, accounts: Sequence[Account | RankFailedError]) -> list[str]:
    """Why a trial was not survived; nothing where it was."""
    fault, said = FAULTS[trial.fault], []
    for rank, account in enumerate(accounts):
        is_victim = rank == trial.victim
        if isinstance(account, RankFailedError):
            if not (is_victim and fault.is_deadly):
                said.append(str(account))
            continue
        said += [f"rank {rank}: {wrong}" for wrong in (*account.wrong, *account.left_behind)]
        expected = fault.victim if is_victim else fault.others
        first = account.errors[0] if account.errors else None
        # Whoever was stopped may find all flags there, and what comes next is whatever the others do by then.
        if trial.fault in ("stop", "late") and is_victim and first is None:
            continue
        if (first.kind if first else None) != expected:
            said.append(f"rank {rank}: met {first}, not {expected}")
        elif first and not is_victim and fault.names.format(victim=trial.victim) not in first.text:
            said.append(f"rank {rank}: {first.text!r} does not name rank {trial.victim}")
        elif first and not is_victim and not {*first.missing} - {*first.uncertain} <= {trial.victim}:
            said.append(f"rank {rank}: {first.text!r} names an innocent rank")
    return said


def doubts(trial: Trial, accounts: Sequence[Account | RankFailedError]) -> int:
    """How many ranks named others with a doubt in their first error."""
    return sum(
        bool(account.errors and account.errors[0].uncertain)
        for rank, account in enumerate(accounts)
        if isinstance(account, Account) and rank != trial.victim
    )


def worst_seconds(accounts: Sequence[Account | RankFailedError]) -> float:
    """The longest that a call took to end in an error."""
    seen = [error for account in accounts if isinstance(account, Account) for error in account.errors]
    return max((error.seconds for error in seen), default=0.0)
