"""Trials in which ranks are lost and the others go on: what strikes, when, and when it was survived."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moe_triton.processes import RankFailedError
from tests.distributed.cases import Case, small_case
from tests.patience import seconds

Api = Literal["EPBuffer", "torch_npu"]
Operator = Literal["dispatch", "combine"]
Answer = Literal["mask", "raise"]

SCHEMES: Mapping[Api, tuple[str, ...]] = {
    "EPBuffer": ("fullmesh_v1", "fullmesh_v2", "direct", "fullmesh", "hierarchy"),
    "torch_npu": ("fullmesh_v1", "fullmesh_v2", "fullmesh", "hierarchy"),
}
SERVERS: Mapping[str, tuple[int | None, ...]] = {
    "fullmesh_v1": (None, None, 1, 2),
    "fullmesh": (None, None, 1, 2),
    "hierarchy": (1, 2),
}
"""How many ranks a server may have, by scheme; all of them with the others."""
TAKES_ELASTIC_INFO = "fullmesh_v1"
QUANTIZED = "fullmesh_v1", "fullmesh_v2", "fullmesh"

FIRST_ROUNDS = 5
"""In one of these the first victim is struck: in calls through Python, and in native ones, too"""
UNTIL_STRUCK = 3
"""Rounds that a victim goes on for at most when it is to be struck."""
CONTINUED_AFTER = 3
"""Rounds without it after which a stopped one is continued."""
LAST_ROUNDS = 8
ROUNDS = FIRST_ROUNDS + UNTIL_STRUCK + CONTINUED_AFTER + LAST_ROUNDS
LATE_S = 0.5
"""What a call may take beyond the time-out."""
SAME_SERVER_S, OTHER_SERVER_S = 0.5, 1.5
"""What a call may take once a rank has died, whatever the time-out."""
TIMED_S, PATIENT_S = seconds(1.0), seconds(20.0)
"""What a wait may take: where a time-out is to come, and where nobody may need it."""


@dataclass(frozen=True)
class Strike:
    """What befalls a group.

    Attributes:
        how: the first victim is hit: "kill" and "stop"; "freeze" stops all ranks, and continues them.
        victims: how many ranks are lost. The second one is killed one round after the first is lost.
        is_continued: the first goes on once the others have done so for some rounds.
        hits_host: the first victim hosts the group's store.
        by_hand: the others know at once, and mask it themselves before their next call.
    """

    how: Literal["kill", "stop", "freeze"]
    victims: int = 1
    is_continued: bool = False
    hits_host: bool = False
    by_hand: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether somebody waits until a time-out is over."""
        return self.how != "kill"


STRIKES: Mapping[str, Strike] = {
    "killed": Strike("kill"),
    "killed, and another one a round later": Strike("kill", 2),
    "killed, host of the store": Strike("kill", hits_host=True),
    "killed, masked by hand": Strike("kill", by_hand=True),
    "stopped": Strike("stop"),
    "stopped, and another one killed a round later": Strike("stop", 2),
    "stopped, continued three rounds later": Strike("stop", is_continued=True),
    "stopped, host of the store": Strike("stop", hits_host=True),
    "stopped, masked by hand, continued": Strike("stop", is_continued=True, by_hand=True),
    "all frozen, all continued": Strike("freeze", 0),
}
CALLS = [(api, scheme) for api, schemes in SCHEMES.items() for scheme in schemes]
KINDS = [(strike, *calls) for strike in STRIKES for calls in CALLS]


@dataclass(frozen=True)
class Trial:
    """One strike, once.

    Attributes:
        strike: its name in `STRIKES`.
        api: through which ranks call.
        case: a group and its rounds.
        victims: ranks that are lost, in this order.
        number: the round in which the first one is struck.
        operator: before which, or in which.
        delay_s: for how long it goes on until it is struck; None for not at all.
        new_group: those who cannot go on in their buffer make one in a group without the lost ranks, and not
            in the same one.
        timeout_s: of every wait.
    """

    strike: str
    api: Api
    case: Case
    victims: tuple[int, ...]
    number: int
    operator: Operator
    delay_s: float | None
    new_group: bool
    timeout_s: float

    @property
    def what(self) -> Strike:
        """The strike."""
        return STRIKES[self.strike]

    @property
    def frozen_s(self) -> float:
        """For how long all ranks are stopped: longer than any of them would wait."""
        return self.timeout_s + seconds(0.6)

    @property
    def striker(self) -> int:
        """Who asks for the first strike: the victim, where there is one."""
        return self.victims[0] if self.victims else 0

    @property
    def survivors(self) -> list[int]:
        """Ranks that go on."""
        return [rank for rank in range(self.case.config.num_ranks) if rank not in self.victims]


def draw(seed: int) -> Trial:
    """The trial of a number: each kind in turn, and the rest at random."""
    strike, api, scheme = KINDS[seed % len(KINDS)]
    what, source = STRIKES[strike], random.Random(seed)
    num_ranks = source.choice((3, 4, 4) if what.victims < 2 else (4,))
    per_server = source.choice(SERVERS.get(scheme, (None,)))
    if per_server == 2 and num_ranks == 3:  # servers of a hierarchy are of one size
        per_server = 1
    is_quantized = api == "EPBuffer" and scheme in QUANTIZED and source.random() < 1 / 3
    usual = small_case(num_ranks, scheme, "int8" if is_quantized else None, seed=source.randrange(1000))
    case = replace(usual, config=replace(usual.config, ranks_per_server=per_server).normalized())
    others = source.sample(range(1, num_ranks), num_ranks - 1)
    delay_s = source.choice((None, source.random() * 0.001, source.random() * 0.005))
    return Trial(
        strike,
        api,
        case,
        tuple(([0] if what.hits_host else others)[: what.victims]),
        source.randrange(1, FIRST_ROUNDS),
        source.choice(("dispatch", "combine")),
        None if what.by_hand else delay_s,
        what.hits_host or (api == "torch_npu" and scheme != TAKES_ELASTIC_INFO) or source.random() < 0.5,
        TIMED_S if what.is_timed else PATIENT_S,
    )


@dataclass(frozen=True)
class Met:
    """An error that a rank met.

    Attributes:
        kind: name of its type.
        text: its message.
        named: ranks that it names without a doubt, by their first numbers.
        doubted: those that it names with one.
    """

    kind: str
    text: str
    named: tuple[int, ...] = ()
    doubted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """A call, in seconds of the machine's clock.

    Attributes:
        index: how many calls this rank had made before.
        began: when.
        ended: when.
    """

    index: int
    began: float
    ended: float


@dataclass(frozen=True)
class Account:
    """How a rank fared.

    Attributes:
        answer: what its buffer does about lost ranks, which the library says.
        masked: by their first numbers, in the end.
        met: errors, in order.
        wrong: what differs from the reference.
        left_behind: what it still held of all that it had opened.
        spans: of its calls.
    """

    answer: Answer
    masked: tuple[int, ...] = ()
    met: tuple[Met, ...] = ()
    wrong: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()


TIME_OUT = "CommunicationTimeoutError"
ERRORS: Mapping[str, str] = {"kill": "RankLostError", "stop": TIME_OUT}
"""What those raise that cannot go on without a rank that has been hit."""


def complaints(trial: Trial, accounts: Sequence[Account | RankFailedError]) -> list[str]:
    """Why a trial was not survived; nothing where it was."""
    said = []
    for rank, account in enumerate(accounts):
        is_victim = rank in trial.victims
        is_back = rank in trial.victims[:1] and trial.what.is_continued
        if isinstance(account, RankFailedError):
            if not is_victim or is_back:
                said.append(str(account))
            continue
        said += [f"rank {rank}: {text}" for text in (*account.wrong, *account.left_behind)]
        if is_back:
            said += [f"rank {rank}: {text}" for text in _not_told(trial, account)]
        elif is_victim:
            said.append(f"rank {rank} is a victim, and was not struck")
        else:
            said += [f"rank {rank}: {text}" for text in _of_survivor(trial, account)]
    return said


def _not_told(trial: Trial, account: Account) -> list[str]:
    """What is wrong with how a victim fared that went on when the others had masked it, or had left."""
    kinds = [met.kind for met in account.met]
    if trial.what.by_hand or account.answer == "raise":
        return [] if len(kinds) == 1 else [f"met {kinds}, not one error"]
    said = [] if kinds == ["RankMaskedError"] else [f"was not told that it is masked: met {account.met}"]
    return said + ([f"has masked {account.masked}"] if account.masked else [])


def _of_survivor(trial: Trial, account: Account) -> list[str]:
    what, said = trial.what, []
    # Who is stopped, and nobody can agree on that: the store's host is the one.
    goes_on = what.by_hand or (account.answer == "mask" and not (what.hits_host and what.how == "stop"))
    masked = trial.victims if goes_on else ()
    if tuple(sorted(account.masked)) != tuple(sorted(masked)):
        said.append(f"has masked {account.masked}, not {masked}")
    expected = [] if goes_on or what.how == "freeze" else [what.how, "kill"][: what.victims]
    if len(account.met) != len(expected):
        return [*said, f"met {account.met}, not {len(expected)} errors"]
    for number, (met, how) in enumerate(zip(account.met, expected, strict=True)):
        lost = trial.victims[: number + 1]
        if what.hits_host and met.kind == TIME_OUT and met.doubted and {*met.named} <= {*lost}:
            continue  # without the host nobody learns who is stuck behind whom, or has given up
        if met.kind != ERRORS[how]:
            said.append(f"met {met}, not {ERRORS[how]}")
        elif lost[-1] not in (*met.named, *met.doubted):
            said.append(f"met {met}, which does not name rank {lost[-1]}")
        elif not {*met.named} <= {*lost}:
            said.append(f"met {met}, which names an innocent rank")
    return said


@dataclass(frozen=True)
class Longest:
    """The longest that a survivor's call lasted once a rank was struck.

    Attributes:
        took_s: that call.
        over_s: beyond what it may take; negative where it came in time.
    """

    took_s: float
    over_s: float


def longest(
    trial: Trial, accounts: Sequence[Account | RankFailedError], struck: Sequence[float]
) -> Longest | None:
    """The call that was latest, by what it may take; None where nobody was in one.

    Args:
        trial: which.
        accounts: of its ranks.
        struck: when its victims were.
    """
    topology = trial.case.config.topology
    spans = {r: a.spans for r, a in enumerate(accounts) if isinstance(a, Account) and r not in trial.victims}
    found = []
    for at, victim in zip(struck, trial.victims, strict=False):
        is_killed = trial.what.how == "kill" or victim != trial.victims[0]
        for rank, own in spans.items():
            most = trial.timeout_s + LATE_S
            if is_killed:
                most = SAME_SERVER_S if victim in topology.neighbours(rank) else OTHER_SERVER_S
            for span in own:
                if span.ended > at and span.began < at + most:
                    is_behind = not is_killed and any(
                        _holds_up(other, span, trial.timeout_s / 2)
                        for r, each in spans.items()
                        if r != rank
                        for other in each
                    )
                    took = span.ended - max(at, span.began)
                    found.append(Longest(took, took - most - is_behind * trial.timeout_s))
    return max(found, key=lambda each: each.over_s, default=None)


def _holds_up(other: Span, span: Span, for_s: float) -> bool:
    """Whether another rank's call, an earlier one, went on for so long while one waited."""
    return other.index < span.index and other.ended > span.began + for_s
