"""What a rank does in a trial of lost ranks: rounds, and what a framework does where they cannot go on.

Results are compared once all is over, so that rounds come one upon the other.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_triton import CommunicationTimeoutError, MoeTritonError, RankMaskedError, reference
from moe_triton.backends.cpu import window
from moe_triton.processes import tell
from moe_triton.rendezvous import meeting
from moe_triton.runtime.masks import Paths
from moe_triton.tools.selftest.cases import difference, expected_dispatch
from tests.chaos.lost_layers import Layer, Members, open_layer
from tests.chaos.lost_trial import (
    CONTINUED_AFTER,
    ROUNDS,
    UNTIL_STRUCK,
    Account,
    Answer,
    Met,
    Operator,
    Span,
    Trial,
)
from tests.chaos.ranks import held
from tests.distributed.cases import Inputs, experts_of, inputs_of
from tests.patience import seconds

STRIKE, CONTINUE, DONE = "strike", "continue", "done"
"""What ranks tell whoever runs them: strike this victim of the trial; continue the first one; all rounds
are over."""
MEET_S, STRUCK_S = seconds(40.0), seconds(20.0)
BESIDE_S = 0.005
"""Between rounds beside one that is continued: what it does late is to meet several of them."""
MOST_TOLD = 5
T = TypeVar("T")


def live_through(rank: int, num_ranks: int, trial: Trial, prefix: str) -> Account:
    """Runs all rounds of a trial, whatever happens; called as ``f(rank, num_ranks, ...)`` on every rank."""
    window.PREFIX = prefix
    logging.getLogger("moe_triton").setLevel(logging.ERROR)  # that ranks wait and mask is what trials are for
    life = Life(rank, trial)
    try:
        # Those whose calls have ended come to a new buffer later than others, and later than a time-out.
        with (
            mock.patch("moe_triton.buffer.seconds_to_meet", return_value=MEET_S),
            mock.patch("moe_triton.torch_npu_ops.registry.seconds_to_meet", return_value=MEET_S),
        ):
            life.run()
    finally:
        tell((DONE, rank))
    gc.collect()  # errors that are raised while another one is handled keep its frames, and what these held
    wrong = tuple(itertools.islice(life.wrong(), MOST_TOLD))
    return Account(life.answer, life.masked, tuple(life.met), wrong, tuple(held(prefix)), tuple(life.spans))


@dataclass
class Round:
    """What a rank brought to a round and got.

    Attributes:
        number: of the round.
        members: its group.
        inputs: of this rank.
        rows: for the experts here.
        sums: of its tokens.
        lost: (T, K) each answer to which entries are missing, once the dispatch had ended and once all had.
        of_call: whether the last answer is of this very call.
        masked: ranks that were masked when it had ended, by their numbers in the group.
    """

    number: int
    members: Members
    inputs: Inputs
    rows: torch.Tensor
    sums: torch.Tensor
    lost: tuple[torch.Tensor, torch.Tensor]
    of_call: bool
    masked: frozenset[int]


@dataclass
class Life:
    """One rank's way through a trial."""

    rank: int
    trial: Trial
    met: list[Met] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    answer: Answer = "raise"
    masked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.members = Members(self.trial.case, tuple(range(self.trial.case.config.num_ranks)))
        self.is_victim = self.rank in self.trial.victims
        self.is_told = self.trial.what.by_hand
        self.calls = 0
        self.lost_at: int | None = None  # the round in which the first victim was lost here
        self.asked: set[str] = set()

    def run(self) -> None:
        """All rounds, in as many buffers as it takes."""
        self._host_store()
        layer, number = self._open(), 0
        self.answer = layer.answer  # that of later ones as well
        try:
            while number < ROUNDS:
                try:
                    self._round(number, layer)
                    number += 1
                except MoeTritonError as error:
                    self._note(error)
                    if self.is_victim and (self.rank == self.trial.victims[0] or len(self.met) > 1):
                        break
                    # Who was not hit, or has nobody to go on with, is told of as it is.
                    if len(self.met) > len(self.trial.victims) or isinstance(error, RankMaskedError):
                        break
                    layer.close()
                    layer, number = self._begin_again(number)
            self._wait_for_who_is_back()
        finally:
            self.masked = tuple(self.members.ranks[number] for number in layer.masked())
            layer.close()

    def _open(self) -> Layer:
        trial = self.trial
        may_mask = not self.is_told and (self.answer == "mask" or not self.met)
        return open_layer(trial.api, self.members, trial.timeout_s, may_mask=may_mask)

    def _host_store(self) -> None:
        """Rank 0 hosts the store of this library, as it does where torch.distributed goes by an address."""
        is_host = self.rank == 0
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if is_host else None
        port = [store.port if store else 0]
        dist.broadcast_object_list(port, src=0)
        world = dist.group.WORLD
        assert world is not None
        meeting._stores[world] = store or dist.TCPStore("localhost", port[0], wait_for_workers=False)

    def _note(self, error: MoeTritonError) -> None:
        named: tuple[int, ...] = ()
        doubted: tuple[int, ...] = ()
        if isinstance(error, CommunicationTimeoutError):
            of = self.members.ranks
            doubted = tuple(of[rank] for rank in error.uncertain_ranks)
            named = tuple(of[rank] for rank in error.missing_ranks if of[rank] not in doubted)
        self.met.append(Met(type(error).__name__, str(error), named, doubted))

    def _begin_again(self, number: int) -> tuple[Layer, int]:
        """What a framework does that has looked who is gone: those who are left make a new buffer."""
        gone = self.trial.victims[: len(self.met)]
        left = tuple(rank for rank in range(self.trial.case.config.num_ranks) if rank not in gone)
        group = dist.new_group(list(left), use_local_synchronization=True)
        self.members = Members(self.trial.case, left, group if self.trial.new_group else None)
        layer = self._open()
        earliest = torch.tensor([number])
        dist.all_reduce(earliest, dist.ReduceOp.MIN, group=group)
        if self.lost_at is None:
            self.lost_at = int(earliest) - 1
        return layer, int(earliest)

    def _round(self, number: int, layer: Layer) -> None:
        case, rank = self.members.case(), self.members.ranks.index(self.rank)
        inputs = inputs_of(case, rank, number)
        self._before("dispatch", number, layer)
        rows, sent = self._timed(lambda: layer.dispatch(inputs))
        before = layer.lost(inputs, sent)
        self._before("combine", number, layer)
        sums = self._timed(lambda: layer.combine(inputs, sent))
        lost, masked = layer.lost(inputs, sent), frozenset(layer.masked())
        self.rounds.append(
            Round(number, self.members, inputs, rows, sums, (before, lost), layer.marks_calls, masked)
        )
        # In a hierarchy relays say what is missing, before this rank hears who it is.
        if (masked or (self.answer == "mask" and bool(lost.any()))) and self.lost_at is None:
            self.lost_at = number

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return call()
        finally:
            self.spans.append(Span(self.calls, began, time.monotonic()))
            self.calls += 1

    def _before(self, operator: Operator, number: int, layer: Layer) -> None:
        """What happens before an operator of a round."""
        trial, what = self.trial, self.trial.what
        is_step = (operator, number) == (trial.operator, trial.number)
        if self.rank == trial.striker and is_step:
            self._ask(0)
        if is_step and self.is_told and not self.is_victim:
            layer.mask(trial.victims)
        since = -1 if self.lost_at is None else number - self.lost_at - 1
        if self.rank in trial.victims[1:] and since >= 1:
            self._ask(1)
        struck_by = trial.number if self.rank in trial.victims[:1] else trial.number + ROUNDS
        if self.rank in trial.victims[1:] and self.lost_at is not None:
            struck_by = self.lost_at + 2
        if self.is_victim and operator == "dispatch" and number == struck_by + UNTIL_STRUCK:
            _wait_to_be_struck()
        if what.is_continued and not self.is_victim and operator == "dispatch" and since >= CONTINUED_AFTER:
            self._tell_once(CONTINUE)
            time.sleep(BESIDE_S)

    def _ask(self, victim: int) -> None:
        """Has a victim of the trial struck, which is this one, or all ranks where there is none."""
        if STRIKE in self.asked:
            return
        if self.is_told and self.is_victim:
            _wait_to_be_struck(lambda: self._tell_once(STRIKE, victim))
            return
        self._tell_once(STRIKE, victim)
        if self.is_victim and self.trial.delay_s is None:
            is_stopped = victim == 0 and self.trial.what.how == "stop"
            os.kill(os.getpid(), signal.SIGSTOP if is_stopped else signal.SIGKILL)

    def _tell_once(self, word: str, *more: object) -> None:
        if word not in self.asked:
            self.asked.add(word)
            tell((word, *more))

    def _wait_for_who_is_back(self) -> None:
        """Nobody leaves before the one that was continued has seen how things are, for it asks the others."""
        if not self.trial.what.is_continued:
            return
        store = distributed_c10d._get_default_store()
        key = "the first victim is back"
        if self.is_victim:
            store.set(key, "")
            return
        store.wait([key], timedelta(seconds=MEET_S))

    def wrong(self) -> Iterator[str]:
        """What of the rounds is not the reference's without what was lost."""
        was_silent: frozenset[int] = frozenset()
        members = None
        for each in self.rounds:
            if each.members is not members:
                members, was_silent = each.members, frozenset()
            checked = Checked(self.trial, self.rank, each)
            silent = checked.silent(was_silent)
            if silent is None:
                yield f"round {each.number}: rows differ from those without {sorted(was_silent)}, or more"
            was_silent = was_silent if silent is None else silent
            yield from (f"round {each.number}: {text}" for text in checked.wrong_sums())
            if each.number == ROUNDS - 1:
                yield from (f"round {each.number}: {text}" for text in checked.wrong_marks())


@dataclass
class Checked:
    """A round of a rank, beside the reference.

    Attributes:
        trial: which.
        rank: this one's first number.
        round: what it was.
    """

    trial: Trial
    rank: int
    round: Round

    def __post_init__(self) -> None:
        members = self.round.members
        self.case, self.own = members.case(), members.ranks.index(self.rank)
        self.size = self.case.config.num_ranks
        self.everyone = [inputs_of(self.case, each, self.round.number) for each in range(self.size)]
        # Who may be missing: not who was gone before this group was made.
        self.victims = [members.ranks.index(each) for each in self.trial.victims if each in members.ranks]
        config = self.case.config
        self.paths = Paths(config, self.own, config.scheme == "hierarchy" and config.topology.num_servers > 1)

    def silent(self, at_least: frozenset[int]) -> frozenset[int] | None:
        """Those of whom no rows have come: victims, maybe with those whom they relay for. None: others.

        Args:
            at_least: of whom none had come in the round before. Victims stay so; who was behind them may have
                another relay by now.
        """
        at_least &= frozenset(self.victims)
        sets = [
            frozenset(s)
            for n in range(len(self.victims) + 1)
            for s in itertools.combinations(self.victims, n)
        ]
        for masked in sets:
            behind = frozenset(
                s for s in range(self.size) if s != self.own and self.paths.is_silent(s, masked)
            )
            for silent in dict.fromkeys((masked, behind)):
                if silent >= at_least and self.own not in silent and self._has_rows_without(silent):
                    return silent
        return None

    def _has_rows_without(self, silent: frozenset[int]) -> bool:
        everyone = [_nothing(each) if rank in silent else each for rank, each in enumerate(self.everyone)]
        rows = expected_dispatch(self.case, everyone)[self.own].tokens
        return difference("rows", self.round.rows, rows) is None

    def sums_without(self, lost: torch.Tensor) -> torch.Tensor:
        """This rank's sums without these entries, by the reference."""
        case, everyone = self.case, list(self.everyone)
        own = everyone[self.own]
        everyone[self.own] = replace(own, topk_idx=torch.where(lost, -1, own.topk_idx))
        received = expected_dispatch(case, everyone)
        y = [experts_of(case, rank, each.tokens) for rank, each in enumerate(received)]
        ids, weights = [i.topk_idx for i in everyone], [i.topk_weights for i in everyone]
        return reference.combine(case.config, y, received, ids, weights)[self.own]

    def wrong_sums(self) -> list[str]:
        """Sums that are not those without the entries that are marked."""
        sums = self.round.sums
        before, after = self.round.lost
        without = self.sums_without(after)
        text = difference("sums", sums, without)
        if text is None:
            return []
        if not self.round.of_call:
            # These masks are as they are now, and a sum that was made before them has everything.
            whole = self.sums_without(before)
            is_right = (_bits(sums) == _bits(without)).all(1) | (_bits(sums) == _bits(whole)).all(1)
            if is_right.all():
                return []
        return [f"{text}; {self._what_sums_are()}"]

    def _what_sums_are(self) -> str:
        """Which entries wrong sums are without, where they are sums at all."""
        lost, said = self.round.lost[1], []
        for token, right in enumerate(self.sums_without(lost)):
            have = self.round.sums[token : token + 1]
            if torch.equal(_bits(have), _bits(right[None])):
                continue
            tried = torch.cartesian_prod(*[torch.tensor([False, True])] * lost.shape[1]).view(
                -1, lost.shape[1]
            )
            without = [
                each.tolist()
                for each in tried
                if torch.equal(_bits(have), _bits(self.sums_without(each.expand_as(lost))[token : token + 1]))
            ]
            ids = self.round.inputs.topk_idx[token].tolist()
            said.append(f"token {token} of experts {ids} is without {without}, not {lost[token].tolist()}")
        return "; ".join(said)

    def wrong_marks(self) -> list[str]:
        """Entries that are marked and need not be, or the other way round, once masks are settled."""
        of_rank = self.round.inputs.topk_idx // self.case.config.num_local_experts
        lost, masked = self.round.lost[1], self.round.masked
        at_least = torch.tensor([rank in masked for rank in range(self.size)])[of_rank]
        at_most = torch.tensor([self.paths.is_lost(rank, masked) for rank in range(self.size)])[of_rank]
        return [] if (at_least <= lost).all() and (lost <= at_most).all() else [f"marks: {lost.tolist()}"]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(len(tensor), -1)


def _nothing(inputs: Inputs) -> Inputs:
    return Inputs(inputs.x[:0], inputs.topk_idx[:0], inputs.topk_weights[:0])


def _wait_to_be_struck(ask: Callable[[], None] = lambda: None) -> None:
    """Until this process has been stopped and goes on; who is to be killed does not come back."""
    # Not an event: a handler that comes while this thread holds its lock would wait for that for ever.
    is_back, end = list[int](), time.monotonic() + STRUCK_S
    before = signal.signal(signal.SIGCONT, lambda number, _: is_back.append(number))
    try:
        ask()
        # Another thread may take the signal, which then does not end this one's wait.
        while not is_back and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        signal.signal(signal.SIGCONT, before)
