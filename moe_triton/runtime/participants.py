"""Which ranks take part in a communicator's calls: who is masked, who has gone, and what calls do then."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from moe_triton.backends.base import Backend, Bindings, Executable, RenewedWindow, StandsIn, Window
from moe_triton.backends.waits import Waits
from moe_triton.core.ascendc import REPORT_MASKED
from moe_triton.core.errors import (
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    RankMaskedError,
)
from moe_triton.core.health import RankHealth
from moe_triton.core.reach import address_of
from moe_triton.core.threads import Deadline
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.rendezvous.deaths import Gone, Watch
from moe_triton.rendezvous.masked_sets import MaskedSets
from moe_triton.rendezvous.notes import Notes, noted_after_s
from moe_triton.rendezvous.starts import Start
from moe_triton.rendezvous.stores import Store
from moe_triton.runtime.exclusive import Exclusive
from moe_triton.runtime.executables import Executables, Phase
from moe_triton.runtime.in_flight import InFlight
from moe_triton.runtime.losses import Losses
from moe_triton.runtime.lost_relay import LostRelay
from moe_triton.runtime.masked_run import IDS, MaskedRun
from moe_triton.runtime.masks import Masks
from moe_triton.runtime.on_lost import OnLostRanks
from moe_triton.runtime.outcomes import Outcomes
from moe_triton.runtime.renewals import Renewals, check_lets_go
from moe_triton.runtime.repeated_dispatch import RepeatedDispatch, Together
from moe_triton.runtime.settled_calls import SettledCalls, Verdict
from moe_triton.runtime.stand_ins import Owner, StandIns
from moe_triton.runtime.turns import PhaseRun, operator_of
from moe_triton.schemes.scheme import Scheme
from moe_triton.tables import KernelSettings

HEARD_S = 0.001
"""Between looks at whom others mask."""


class Calling(Exclusive):
    """What runs the calls of some ranks, as far as these need it."""

    @abstractmethod
    def settle(self) -> None:
        """Waits for the outcome of what has been started, where that is not known yet."""

    @abstractmethod
    def meet(self) -> None:
        """Waits until all ranks that are not masked have come here, in a call too."""

    @abstractmethod
    def refuse_calls(self) -> None:
        """A rank is dead: calls are refused from now on. From any thread."""

    @abstractmethod
    def accept_calls(self) -> None:
        """No rank is dead that takes part: calls are not refused any more. From any thread."""

    @abstractmethod
    def ended_dispatches(self) -> tuple[int, bool]:
        """How many have ended, and whether some rank has rung for more of the last one. From any thread."""


class Participants:
    """The ranks of one communicator.

    Args:
        calling: the communicator, which holds this.
        scheme: of it.
        masks: of its ranks.
        fixed: what placeholders hold in every run.
        executables: of its plans.
        in_flight: its pending calls.
        backend: of its calls.
        goes_on: whether calls go on by themselves without ranks that are lost.

    Attributes:
        losses: who is lost, once calls may begin.
        renewals: of places in the window that wander; None where there are none, or windows cannot have other
            memory.
        is_of_one_host: whether all ranks are.
        group: its short name, in lines of the log.
        owns_ids: whether the ids that combine is given are the library's own copies, in which masks may leave
            marks.
    """

    losses: Losses
    _settled: SettledCalls | None = None
    renewals: Renewals | None = None
    is_of_one_host = True
    group = ""
    owns_ids = False
    _on_lost: OnLostRanks | None = None
    _stand_ins: StandIns | None = None
    _has_told = False
    """Whether ranks have been masked by hand since the last call."""
    _gaps: tuple[int, torch.Tensor] | None = None
    """Of which dispatch, and where the results of its rows belong: not one behind the other."""

    def __init__(
        self,
        calling: Calling,
        scheme: Scheme,
        masks: Masks,
        fixed: Bindings,
        executables: Executables,
        in_flight: InFlight,
        backend: Backend,
        *,
        goes_on: bool = False,
    ) -> None:
        self._calling = weakref.ref(calling)
        self._scheme, self._context, self._masks = scheme, scheme.context, masks
        self._fixed, self._executables, self._in_flight = fixed, executables, in_flight
        self._backend, self._goes_on = backend, goes_on

    def begin(
        self,
        watches: Sequence[Watch],
        reached: Sequence[bool],
        of_waits: tuple[Notes, Waits, float],
        counts: Mapping[str, int],
        sets: MaskedSets | None,
        open_store: Callable[[], Store],
        window: Window,
        kernel_settings: KernelSettings,
    ) -> None:
        """Hears of deaths from now on: calls are refused and waits ended that need a rank which is lost.

        Args:
            watches: of the communicator's groups.
            reached: whether each of them reaches all of its ranks.
            of_waits: notes of this rank's and its peers', its own, and seconds after which a rank is missed.
            counts: runs of each operator that have ended.
            sets: of masked ranks, where calls go on without those that do not come.
            open_store: returns the store of these ranks and this buffer.
            window: of the scheme's own.
            kernel_settings: of its plans.
        """
        notes, waits, timeout_s = of_waits
        self._counts = counts
        layout, of_ranks = self._scheme.layout, (self._context.rank, self._context.config.num_ranks)
        if layout.wandering and isinstance(window, RenewedWindow):
            of_zones = layout.wandering, layout.num_zones
            self.renewals = Renewals(window, *of_zones, *of_ranks, watches[0].is_quiet)
            self._masks.on_change = window.say_masked
        self._of_waits = of_waits
        self.losses = Losses(self._context, watches, waits, counts, notes, self._masks)
        calling = self._calling
        if sets is not None:
            self._on_lost = OnLostRanks(self._context, self._masks, sets, *of_waits, counts, group=self.group)
            waits.give_up_after(timeout_s, self._on_lost.missing)
            if self.may_stand_in:
                is_quiet = watches[0].is_quiet
                self._begin_stand_ins(window, sets, open_store, is_quiet, kernel_settings)

        def ended() -> tuple[int, bool]:
            owner = calling()
            return (0, True) if owner is None else owner.ended_dispatches()

        if layout.calls is not None:
            self._settled = SettledCalls(open_store, *of_ranks, self._masks, timeout_s, ended)
            self._masks.on_masked.append(self._settled.note)
        me = weakref.ref(self)

        def hear(gone: Gone) -> None:
            if (participants := me()) is not None:
                participants._hear(gone)

        for watch, reach_all in zip(watches, reached, strict=True):
            watch.listen(hear)
            watch.begin(reach_all)

    @property
    def may_stand_in(self) -> bool:
        """Whether a rank may come to pass on what another one of its server did, which is lost.

        On several hosts none may: the others' connections are to the process that has ended.
        """
        relays = self._scheme.relays and self.is_of_one_host and self._context.config.topology.num_servers > 1
        return relays and self._goes_on and isinstance(self._backend, StandsIn)

    def _begin_stand_ins(
        self,
        window: Window,
        sets: MaskedSets,
        open_store: Callable[[], Store],
        is_quiet: Callable[[int], bool],
        settings: KernelSettings,
    ) -> None:
        calling, counts, (notes, waits, timeout_s) = self._calling, self._counts, self._of_waits
        me = weakref.ref(self)  # what follows others must not keep the window

        def meet() -> None:
            if (owner := calling()) is not None:
                owner.meet()

        def learn() -> None:
            if (participants := me()) is not None:
                participants._learn_masks()

        def give_up(start: Start) -> None:
            if (participants := me()) is not None:
                participants._give_up_starting(start)

        def make_relay(rank: int, since: int) -> LostRelay:
            participants = me()
            assert participants is not None  # it is in a call
            return participants._make_relay(rank, since, settings, window)

        def follow() -> None:
            if (participants := me()) is not None and participants._stand_ins is not None:
                participants._stand_ins.look()

        owner = Owner(lambda: counts["dispatch"], meet, learn, notes.leave, give_up, make_relay)
        of_ranks = self._masks, sets, open_store, is_quiet, waits, timeout_s
        self._stand_ins = StandIns(self._scheme, window, *of_ranks, owner, group=self.group)
        assert self._on_lost is not None
        self._on_lost.on_followed = follow

    def _make_relay(self, rank: int, since: int, settings: KernelSettings, window: Window) -> LostRelay:
        assert self._on_lost is not None
        tensors = {name: each for name, each in self._fixed.items() if isinstance(each, torch.Tensor)}
        of_plans = since, settings, self._backend, window, tensors
        of_waits = self._of_waits[2], self._on_lost.missing_at
        return LostRelay(self._scheme, rank, *of_plans, self._masks, *of_waits)

    def _give_up_starting(self, start: Start) -> None:
        assert self._on_lost is not None
        self._on_lost.ask(start.give_up, start.awaited(), "dispatch", 0)

    def _hear(self, gone: Gone) -> None:
        """A rank has gone. Called on the thread that has noticed it."""
        if self._on_lost is not None:
            if gone.is_lost:
                self._on_lost.lost(gone.rank, gone.sign)
            return
        self.losses.hear(gone)
        is_needed = gone.state == "dead" and gone.rank not in self._masks.masked
        if is_needed and (calling := self._calling()) is not None:
            # A call that is under way goes on, for it may need nothing of that rank.
            calling.refuse_calls()

    def health(self) -> tuple[RankHealth, ...]:
        """What this rank knows of each one; see `moe_triton.EPBuffer.health`.

        Raises:
            BufferStateError: closed, or of the process that this one was forked from.
        """
        calling = self._owner()
        calling.check_here()
        found = list(self.losses.health(calling.is_busy_elsewhere))
        for rank, (why, since_s) in sorted(self._masks.reasons.items()):
            sign = f"{why}; {found[rank].sign}" if found[rank].state in ("dead", "left") else why
            if (other := self._masks.stand_ins.get(rank)) is not None:
                sign += f"; rank {other.rank} passes on what it did"
            found[rank] = RankHealth(rank, "masked", since_s, sign)
        return tuple(found)

    def update_mask(self, rank: int, masked: bool) -> None:
        """Masks a rank, or un-masks it; see `moe_triton.EPBuffer.update_mask`.

        Raises:
            ArgumentError: there is no such rank, it is this one, or masks are not for this buffer.
            BufferStateError: closed or broken; the rank has missed rounds; or it is to be un-masked while
                another thread is in a call.
        """
        if self._context.exchange_rank is not None:
            rule = "of tensor-parallel ranks one cannot go on without the other"
            raise ArgumentError("rank", rank, rule, "Construct the buffer without tp_group.")
        if self.renewals is not None:
            check_lets_go(self.renewals.window, "rank", rank, "Construct a buffer without it")
        calling = self._owner()
        if masked and not self._backend.is_asynchronous:
            self._mask_beside_calls(calling, rank)
        elif calling.is_busy and not masked:
            raise BufferStateError(
                "a call is under way, and who was masked has missed it. Un-mask between calls."
            )
        else:  # whoever is dead can be masked: calls are refused until then
            calling.alone(self._update_mask, rank, masked, beside_dead=masked)

    def _update_mask(self, rank: int, masked: bool) -> None:
        self._prepare_to_mask()
        self._masks.update(rank, masked)
        self._learn_masks()
        self._accept_without_dead()

    def _mask_beside_calls(self, calling: Calling, rank: int) -> None:
        """Masks a rank and keeps no call out, as another thread may begin one or be in it.

        Such a call sees it where it runs; the next one begins with it (`learn_told`).
        """
        calling.check_whole()
        is_between_calls = not calling.is_busy
        if is_between_calls:
            self._check_quiet()
        self._masks.update(rank, True)
        if is_between_calls:
            self._has_told = True
            self._executables.suspend_calls(True)
        self._accept_without_dead()

    def learn_told(self) -> None:
        """Has the call that begins go by what has been masked by hand since the last one.

        Raises:
            BufferStateError: closed, broken or in use by another thread.
        """
        if self._has_told and not self._in_flight.variants:
            self._owner().alone(self._learn_masks)

    def _accept_without_dead(self) -> None:
        """Calls need nobody who is dead and masked."""
        calling = self._owner()
        calling.accept_calls()
        if self._on_lost is None and self.losses.dead():  # also one that has died since
            calling.refuse_calls()

    def clean_mask(self) -> None:
        """Un-masks all ranks; see `moe_triton.EPBuffer.clean_mask`.

        Raises:
            BufferStateError: closed, broken or in use by another thread; or a rank has missed rounds.
        """
        self._owner().alone(self._clean_mask)

    def _clean_mask(self) -> None:
        self._prepare_to_mask()
        self._masks.clean()
        self._learn_masks()
        self._accept_without_dead()

    def _prepare_to_mask(self) -> None:
        self._check_quiet()
        self._owner().settle()

    def _check_quiet(self) -> None:
        recapture = "Construct a buffer without the rank, and capture with it."
        self.check_quiet("this buffer", lambda _: "Wait for it first.", recapture)

    def check_quiet(self, of: str, end: Callable[[str], str], recapture: str) -> None:
        """Checks that nothing has begun, or is to run again, that would find other masks than it began with.

        Args:
            of: whose calls these are.
            end: says how an operator is ended that is set up.
            recapture: what to do about graphs.

        Raises:
            BufferStateError: something has.
        """
        for operator in sorted(self._in_flight.variants):
            raise BufferStateError(f"a {operator} of {of} is set up and not yet torn down. {end(operator)}")
        if self._in_flight.is_captured:
            raise BufferStateError(
                f"graphs have captured calls of {of}, which read the ids of their capture. {recapture}"
            )

    def _learn_masks(self) -> None:
        """From now on calls go by what is masked."""
        self._has_told = False
        masked = self._masks.learn().masked
        self._executables.suspend_calls(bool(masked))
        if self.renewals is not None:
            self.renewals.learn(masked)
            self._follow_renewals()

    def _follow_renewals(self) -> None:
        if self.renewals is not None and (masked := self._masks.known.masked):
            self.renewals.before(set(range(self._context.config.num_ranks)) - masked - {self._context.rank})

    def before(self) -> None:
        """A run begins: it finds places where peers have them now, and all others hear whom it goes without.

        Raises:
            WindowError: they cannot be mapped.
        """
        self._follow_renewals()
        if self._on_lost is not None:
            self._on_lost.name(self._masks.known.masked)

    def behind(self, executable: Executable) -> None:
        """A run of a dispatch or a combine has ended well.

        Raises:
            BufferStateError: the window's places share pages with others.
            WindowError: there is no other memory for them.
        """
        if self.renewals is not None and self._masks.known.masked:
            variant, zone, _, _ = self._executables.key_of(executable)
            assert isinstance(variant, (DispatchVariant, CombineVariant))
            operator = operator_of(variant)
            self.renewals.let_go(operator, zone)
            self._wait_until_heard(self.renewals, operator, zone)
            self.renewals.behind(operator, zone)

    def _wait_until_heard(self, renewals: Renewals, operator: str, zone: int) -> None:
        """Until all who go on mask whom this rank does: from then on they see where its zones are."""
        notes, waits, timeout_s = self._of_waits
        deadline, pending, noted = Deadline(timeout_s), [True], Deadline(noted_after_s(timeout_s))
        is_noted = False
        try:
            while unheard := renewals.unheard(operator, zone, self._masks.masked):
                if waits.is_stopped:
                    waits.raise_stopped(operator)
                if not is_noted and noted.left() <= 0:
                    is_noted = True
                    notes.leave(f"what follows a {operator}", unheard, lambda: pending[0])
                if deadline.left() <= 0:
                    self._give_up_on(unheard, operator, zone)
                    deadline = Deadline(timeout_s)
                time.sleep(HEARD_S)
        finally:
            pending[0] = False

    def _give_up_on(self, unheard: Sequence[int], operator: str, zone: int) -> None:
        """Ranks have not masked whom they were to mask."""
        if self._on_lost is not None:
            self._on_lost.missing_ranks(unheard, operator, zone)
            return
        masked = sorted(self._masks.known.masked)
        raise CommunicationTimeoutError(
            operator,
            0,
            zone,
            list(unheard),
            f"rank(s) {masked} are masked here, and not all of them there. Mask the same ranks on every rank "
            f"that goes on, before the same call.",
        )

    def before_dispatch(self) -> None:
        """A dispatch begins, from which on ranks may stand in for lost ones.

        Raises:
            CommunicationTimeoutError: a rank does not come to where all meet before that.
        """
        if self._stand_ins is not None:
            self._stand_ins.before_dispatch()

    def passing_on(
        self, variant: Variant, zone: int, phase: Phase, number: int, bindings: Bindings
    ) -> AbstractContextManager[None]:
        """While a call runs, runs what the rank did in it that this one stands in for, if there is one."""
        if self._stand_ins is None:
            return nullcontext()
        return self._stand_ins.passing_on(variant, zone, phase, number, bindings)

    def begin_combine(self, bindings: Bindings) -> None:
        """Takes out of what a scheme keeps for a combine the results that will not come."""
        if self._masks.is_used and (tables := self._scheme.tables_of(self._context.config)):
            self._masks.mark_tables(tables, {**self._fixed, **bindings})

    def end_combine(self, bindings: Bindings) -> None:
        """Marks the ids whose results others have not had when they summed for this rank.

        They mask those ranks, which this one would hear of many quick rounds later.
        """
        if self.owns_ids and (ranks := self._scheme.left_out(self._fixed)):
            ids = bindings[IDS]
            assert isinstance(ids, torch.Tensor)
            self._masks.mark_left_out(ids, ranks)
            if self._on_lost is not None:
                self._on_lost.hear(ranks)

    def go_on(self, operator: str, number: int, executable: Executable, bindings: Bindings) -> int:
        """Brings a run to its end in which ranks were masked; returns what `Executable.run` does.

        Args:
            operator: which one.
            number: which run of it.
            executable: what has stopped.
            bindings: that it ran with.

        Raises:
            RankMaskedError: it has read in windows of peers that mask this rank.
        """
        if self.renewals is not None and executable.plan.reads_peers:
            self.renewals.refuse_masked(range(self._context.config.num_ranks))
        of_run = self._scheme, self._masks, self._fixed, bindings, self._executables.key_of(executable)[0]
        if operator == "dispatch" and self._scheme.sends_by_all_counts:
            repeated = RepeatedDispatch(*of_run, owns_ids=self.owns_ids)
            code = repeated.go_on(number, executable, self._executables, self._together())
            self._gaps = None if repeated.places is None else (number, repeated.places)
            return code
        run = MaskedRun(*of_run, owns_ids=self.owns_ids)
        while True:
            self._learn_masks()
            variant, zone, phase, _ = self._executables.key_of(executable)
            mending = run.mending(operator, executable, phase)
            if mending is not None:
                assert isinstance(variant, DispatchVariant)
                mended = self._executables.operator(variant, zone, mending, 1)
                code = mended.run(run.bindings)
                if mending == "mend":
                    executable = mended
                    if code != REPORT_MASKED:
                        break
                    continue
                while code == REPORT_MASKED:  # of those masked since then all had come
                    self._learn_masks()
                    code = mended.resume(run.bindings)
                if code == 0:
                    code = executable.resume(run.bindings)
            else:
                code = executable.resume(run.bindings)
            if code != REPORT_MASKED:
                break
        if code == 0:
            run.end(operator)
            if operator == "dispatch" and self._settled is not None:
                self._settled.note()  # others may ask what this rank goes by in it
        return code

    def mark(self, phases: Sequence[PhaseRun]) -> None:
        """Has rounds of a combine that are still to run go by what is masked now."""
        for each in phases:
            if each.operator == "combine":
                of_run = self._scheme, self._masks, self._fixed, each.bindings, each.variant
                MaskedRun(*of_run, owns_ids=self.owns_ids).mark_results()

    def settle(self, number: int, find: Callable[[], Verdict]) -> Verdict:
        """What becomes of a call in rounds, the same on every rank.

        Args:
            number: of its first round.
            find: finds it from what ranks have said that are not masked.

        Raises:
            RankMaskedError: the others go on without this rank.
            CommunicationTimeoutError: ranks cannot agree.
        """

        def found() -> Verdict:
            self._learn_masks()
            return find()

        assert self._settled is not None  # there are calls in rounds
        settled = self._settled.settle(number, found, self._on_lost)
        if self._context.rank in settled.masked:
            raise RankMaskedError(
                f"rank {self._context.rank} is masked, and all others go on without it. Construct a new "
                f"buffer on every rank to take part again."
            )
        for rank in set(settled.masked) - self._masks.masked:
            self._masks.update(rank, True, "as another rank has said")
        self._learn_masks()
        return settled

    def _together(self) -> Together:
        backend, peers = self._backend, self._fixed["peers"]
        assert isinstance(peers, torch.Tensor)
        outcomes = self._scheme.layout.region("outcomes")
        agreed = Outcomes(outcomes, address_of(int(peers[0])), backend.exchange_word)
        meet = self._owner().meet
        return Together(self._learn_masks, meet, self.behind, backend.fence, agreed, self._of_waits[2])

    def spread(self, variant: CombineVariant, bindings: Bindings, zone: int) -> CombineVariant:
        """Has results lie where peers look for them, where rows were taken out from between theirs.

        Args:
            variant: of the combine that is to run.
            bindings: of it.
            zone: of it.

        Returns:
            The one that takes them from there.
        """
        if self._gaps is None or self._gaps[0] != self._counts["dispatch"] - 1:
            return variant
        places, window = self._gaps[1], self._executables.window_view("results", zone, variant.dtype)
        rows = window if variant.in_place else bindings["y"]
        assert isinstance(window, torch.Tensor)
        assert isinstance(rows, torch.Tensor)
        window[places] = rows[: len(places)].clone()
        return replace(variant, in_place=True)

    def stop_masking(self) -> None:
        """Nobody is masked any more for what others say."""
        if self._on_lost is not None:
            self._on_lost.on_followed = None
            self._on_lost.close()
        if self._stand_ins is not None:
            self._stand_ins.close()

    def close(self) -> None:
        """Nobody is watched any more."""
        self.losses.close()

    def _owner(self) -> Calling:
        calling = self._calling()
        assert calling is not None  # it holds this
        return calling
