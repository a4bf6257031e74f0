"""`Communicator`: one group's windows, plans and zones, and the one place that turns the zones.

`moe_triton.buffer` and `moe_triton.torch_npu_ops` check what their users pass and make the outputs; both run
their operators here. An operator runs whole, or as setup (up to its flags) and teardown (from the wait on).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from multiprocessing.util import Finalize
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from moe_triton.backends.base import Bindings, Calls, CallSetting, Executable, RenewedWindow, Window
from moe_triton.backends.waits import Waiting
from moe_triton.core.ascendc import REPORT_MASKED, REPORT_MISMATCH
from moe_triton.core.endings import at_end
from moe_triton.core.errors import (
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    RankLostError,
)
from moe_triton.core.flight_file import Header
from moe_triton.core.handle import DispatchHandle
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import BEGINNING, ENDING
from moe_triton.core.records import CALL_HEADER
from moe_triton.operators.variants import CombineVariant, Variant
from moe_triton.rendezvous.deaths import Watch
from moe_triton.rendezvous.hosts import Probe
from moe_triton.rendezvous.masked_sets import MaskedSets
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.rendezvous.notes import Notes, noted_after_s
from moe_triton.rendezvous.stores import Store, below, read_key
from moe_triton.runtime.buffer_calls import BufferCalls
from moe_triton.runtime.construction import Order, Prepared, prepare
from moe_triton.runtime.diagnosis import Run, failure, note_of, patience_s, tell_of
from moe_triton.runtime.executables import Executables, Phase, PlanCalls, PlanMemory, call_bytes
from moe_triton.runtime.in_flight import InFlight, UnreadRuns
from moe_triton.runtime.local_launches import LocalLaunches
from moe_triton.runtime.masks import Masks, Paths
from moe_triton.runtime.participants import Calling, Participants
from moe_triton.runtime.peer_memory import OutBytes, PeerMemory, Wanted
from moe_triton.runtime.recorder import Recorder, is_wanted
from moe_triton.runtime.renewals import check_lets_go, spare_bytes
from moe_triton.runtime.rounds import Rounds
from moe_triton.runtime.traces import Trace
from moe_triton.runtime.turns import WHOLE, PhaseRun, operator_of, turns_of
from moe_triton.schemes.rank_context import OPERATORS, Operator

# Orders the uses of a process's communicators; it is the same on every rank, since all make the same calls.
_clock = itertools.count(1)

_BELL_MASK = 0x7FFFFFFF
_WORD_BYTES = 4

_LEFT = "="  # before texts in the store, where some words mean that nothing is there


def _queued(communicator: Callable[[], Communicator | None]) -> Mapping[int, int]:
    """By rank, posts that are not delivered; nothing where there are no queues."""
    owner = communicator()
    return owner._windows[0].queued() if owner is not None and owner._windows else {}


def bell_of(count: int) -> int:
    """The word that a call in rounds rings with. It is not 0, as fresh memory is, nor that of another call.

    Args:
        count: which dispatch of the buffer its first round is, from 1 on.
    """
    return count % _BELL_MASK + 1


class Communicator(Calling):
    """Runs dispatch, combine and barriers of one rank. Collective: every rank makes the same calls.

    Args:
        meeting: the group.
        order: what to make.
        exchange: the tensor-parallel group of two, where there is one.

    Raises:
        ArgumentError: an argument breaks a rule.
        ConfigMismatchError: ranks disagree, or another one cannot be constructed.
        WindowError: no memory for a window.
        ToolchainError: something that the back end needs is missing.
        CommunicationTimeoutError: a rank did not come.
    """

    on_long_wait: Callable[[Waiting], None] | None = None
    """Called when a wait lasts, and again each time that it has doubled."""

    _write_at_end: Finalize | None = None

    def __init__(self, meeting: Meeting, order: Order, exchange: Meeting | None = None) -> None:
        meetings = [meeting, exchange] if exchange else [meeting]
        with contextlib.ExitStack() as made:
            try:
                watches = [made.enter_context(contextlib.closing(Watch(one))) for one in meetings]
                probe = made.enter_context(contextlib.closing(Probe())) if order.on_hosts else None
                prepared = prepare(order, meeting, exchange, watches, probe)
                if probe is not None:
                    probe.close()
                self._construct(meetings, prepared, made)
                reached = []
                for one, watch in zip(meetings, watches, strict=True):
                    # Any rank may have failed before this, and then all do.
                    mine = {"reaches_all": watch.reaches_all, "flight": self.recorder and self.recorder.name}
                    said = one.exchange(mine, "construction is done")
                    reached.append(all(each.get("reaches_all") is True for each in said))
                    if self.recorder and one is meeting:
                        self.recorder.meet([each.get("flight") for each in said], one.hosts)
            except BaseException as error:
                for one in meetings:
                    one.refuse(error)
                raise
            made.pop_all()
        if self._trace:
            self._write_at_end = at_end(self, self._trace.close)
        of_waits = self._notes, self._waits, self._timeout_s
        of_sets = partial(meeting.store, order.agreed_at), self.config.num_ranks, self.rank
        sets = MaskedSets(*of_sets) if self._on_lost == "mask" else None
        of_ranks = meeting.store, self._windows[0], self.kernel_settings
        self.participants.is_of_one_host = meeting.num_hosts == 1
        self.participants.group = self.recorder.group if self.recorder else ""
        self.participants.begin(watches, reached, of_waits, self.counts, sets, *of_ranks)
        self._tell_of_waits()
        if self._unread is not None or meeting.num_hosts > 1:
            self._meet()

    def _construct(self, meetings: list[Meeting], prepared: Prepared, made: contextlib.ExitStack) -> None:
        """Makes everything; ``made`` gives it back."""
        self._meetings, self._on_lost, self._timeout_s = meetings, prepared.on_lost, prepared.timeout_s
        self.scheme, self.backend = prepared.scheme, prepared.backend
        self.context, self.kernel_settings = self.scheme.context, prepared.kernel_settings
        self.config, self.rank = prepared.config, self.context.rank
        self.layout, self.capacity = self.scheme.layout, self.config.receive_capacity(self.rank)
        self._rounds = Rounds(self.scheme.rounds)
        self.counts = self._rounds.counts
        of_trace = self.context, self.backend, self.counts, meetings
        self._trace = Trace(prepared.file, *of_trace) if prepared.file else None
        log = self._trace.log if self._trace else None
        self._windows: list[Window] = []
        of_group = dict(zip(("expert", "tensor"), meetings, strict=False))
        private_bytes = call_bytes(self.scheme)
        for spec in self.scheme.windows:
            meeting = of_group[spec.peers.group]
            spare = 0 if self._windows else spare_bytes(self.layout)
            of_window = spec.queues, log, private_bytes, spare
            window = self.backend.make_window(spec.window_bytes, meeting, *of_window)
            made.callback(window.close)
            self._windows.append(window)
        if self._on_lost == "mask" and self.layout.wandering and isinstance(self._windows[0], RenewedWindow):
            check_lets_go(self._windows[0], "on_lost", "mask", "Pass on_lost='raise'")
        self.memory = PlanMemory(self.scheme, self._windows, self.backend.device)
        self._fixed = self.memory.bindings
        relays = self.scheme.relays, not self.backend.is_asynchronous
        self.recorder = None
        if is_wanted():
            queued = partial(_queued, weakref.ref(self))
            of_runs = self.backend.name, self._rounds.record, queued, self.scheme.relays
            self.recorder = Recorder(self.context, *of_runs)
            made.callback(self.recorder.close)
        paths = Paths(self.context.config, self.rank, *relays)
        self.masks = Masks(self._fixed["peers"], paths, self.counts, self.backend.fence)
        if self.recorder:
            self.masks.on_masked.append(self.recorder.note_masked)
        made.callback(self._fixed.clear)
        of_plans = self.scheme, self.kernel_settings, self.backend, self.memory, log, self.recorder
        self._executables = Executables(*of_plans)
        blocks = self.context.num_blocks if self.context.capabilities.owns_cores else 1
        self._local = LocalLaunches(self.backend, blocks)
        self._last: dict[str, Executable] = {}
        self._in_flight = InFlight(self.scheme.rounds.shared)
        self.bells = self._make_bells()
        self._call_words: dict[int, torch.Tensor] = {}
        self._unread = UnreadRuns() if self.backend.is_asynchronous else None
        self.last_use = 0
        of_group_ranks = meetings[0].rank, meetings[0].num_ranks
        self._notes = Notes(meetings[0].store, *of_group_ranks, self.backend.waits.are_seen)
        super().__init__(self.backend.waits)
        of_calls = self._fixed, self._executables, self._in_flight, self.backend
        goes_on = self._on_lost == "mask"
        self.participants = Participants(self, self.scheme, self.masks, *of_calls, goes_on=goes_on)

    def _make_bells(self) -> list[memoryview]:
        """Words that calls in rounds ring: in this rank's window, and where posts are relayed in those of its
        server. None on devices, where the host reads no window: every rank says there what is to come.
        """
        calls = self.layout.calls
        if calls is None or self.backend.is_asynchronous:
            return []
        windows = [self._windows[0].tensor()]
        if self.scheme.relays:
            ranks = self.config.topology.neighbours(self.rank)
            windows += [self._windows[0].view(rank) for rank in ranks if rank != self.rank]
        places = [calls.bell.offset(zone=zone) for zone in range(self.layout.num_zones)]
        words = (window[place : place + _WORD_BYTES] for window in windows for place in places)
        return [word.numpy().data.cast("i") for word in words]

    def check_usable(self) -> None:
        """Checks that a call may begin, which then goes by what is masked.

        Raises:
            BufferStateError: a thread is inside, or it is closed, broken or without a rank that is dead.
        """
        super().check_usable()
        self.participants.learn_told()

    def settle(self) -> None:
        """Waits for what this rank has started, if that runs by itself."""
        if self._unread is not None:
            self._look_back(wait=True)

    def ended_dispatches(self) -> tuple[int, bool]:
        """How many have ended, and whether some rank has rung for more of the last one. From any thread."""
        while True:
            ended = self.counts["dispatch"]
            is_rung = self.is_rung
            if self.counts["dispatch"] == ended:
                return ended, is_rung

    def refuse_calls(self) -> None:
        """A rank is dead: who calls is told of it."""
        self._has_dead = True
        self._executables.stop_calls()

    def accept_calls(self) -> None:
        """No rank is dead that takes part. Python does all calls, as it does where ranks are masked."""
        self._has_dead = False

    def _check_open(self) -> None:
        is_first = self._has_dead and not (self._closed or self._forked or self._broken)
        if is_first and (refusal := self.participants.losses.refusal()) is not None:
            self._give_up_for("calls", refusal)
            raise refusal
        super()._check_open()

    def _meet(self) -> None:
        """Checks that flags reach every peer, and compiles the barrier that a graph may need.

        Of several hosts that are traced the clocks are compared.
        """
        try:
            self.barrier()
            if self._trace and self._meetings[0].num_hosts > 1:
                self._trace.compare_clocks(self._meetings[0], self.barrier)
        except BaseException:
            self.close()
            raise

    def run(self, variant: Variant, bindings: Bindings, phase: Phase = "whole") -> None:
        """Runs an operator, or one half of it.

        Args:
            variant: what it is specialised for.
            bindings: a tensor or an integer for each placeholder of its plan that is not scratch.
            phase: which half.

        Raises:
            BufferStateError: closed, broken, in use by another thread, or halves out of order.
            CommunicationTimeoutError: a rank's data did not come in time; the communicator is then broken.
        """
        self.alone(self._run, variant, bindings, phase)

    def _run(self, variant: Variant, bindings: Bindings, phase: Phase) -> None:
        operator = operator_of(variant)
        self.last_use = next(_clock)
        capturing = self.backend.is_capturing()
        if self._unread is not None:
            self._look_back()
            self._rounds.check_graph(capturing)
        if phase != "whole" or self._in_flight.variants:
            self._in_flight.check(operator, phase == "teardown", capturing)
        if phase != "teardown":
            if operator == "dispatch":
                self._before_dispatch()
            if self._rounds.needs_wait(operator, capturing):
                self._full_wait()
            self._rounds.begin(operator)
        zone = self._rounds.zone(operator)
        tokens = bindings.get("num_tokens", 0)  # combine's setup works on rows
        assert isinstance(tokens, int)
        parts = self.context.parts(operator, tokens)
        if isinstance(variant, CombineVariant):
            variant = self.participants.spread(variant, bindings, zone)
        executable = self._executables.operator(variant, zone, phase, parts)
        number = self.counts[operator]
        try:
            if operator == "combine":
                self.participants.begin_combine(bindings)
            with self.participants.passing_on(variant, zone, phase, number, bindings):
                self._execute(operator, executable, bindings, turn=phase != "setup")
            if phase == "setup":
                self._in_flight.begin(operator, variant, capturing)
            self._last[operator] = executable
        except BaseException as error:
            self._give_up_at(operator, number, error)
            raise

    def _before_dispatch(self) -> None:
        try:
            self.participants.before_dispatch()
        except BaseException as error:
            self._give_up_at("dispatch", self.counts["dispatch"], error)
            raise

    def run_phase(self, run: PhaseRun) -> None:
        """Runs one phase of a dispatch in rounds; or what goes before a combine of one.

        Raises:
            BufferStateError: closed, broken or in use by another thread; or a call is not waited for yet.
            CommunicationTimeoutError: a rank's data did not come in time; the communicator is then broken.
        """
        self.alone(self._run_phase, run)

    def _run_phase(self, run: PhaseRun) -> None:
        variant, bindings, phase, zone = run
        operator = run.operator
        self.last_use = next(_clock)
        capturing = self.backend.is_capturing()
        if self._unread is not None:
            self._look_back()
            self._rounds.check_graph(capturing)
        if self._in_flight.variants:
            self._in_flight.check(operator, False, capturing)
        if phase in BEGINNING:
            if operator == "dispatch":
                self._before_dispatch()
            self._rounds.begin(operator)
        if zone is None:
            zone = self._rounds.zone(operator)
        executable = self._executables.operator(variant, zone, phase, run.parts(self.context))
        number = self.counts[operator]
        try:
            with self.participants.passing_on(variant, zone, phase, number, bindings):
                self._execute(operator, executable, bindings, turn=phase in ENDING)
            self._last.pop(operator, None)  # of an operator in one piece
        except BaseException as error:
            self._give_up_at(operator, number, error)
            raise

    def run_phases(self, phases: Sequence[PhaseRun]) -> None:
        """Runs phases one behind the other, where the back end can without Python in between.

        Raises:
            BufferStateError: closed, broken or in use by another thread; or a call is not waited for yet.
            CommunicationTimeoutError: a rank's data did not come in time; the communicator is then broken.
        """
        self.alone(self._run_phases, phases)

    def _run_phases(self, phases: Sequence[PhaseRun]) -> None:
        # Where relays sum, each combine may hear that ranks are masked, and marks its own tokens.
        hears = self.scheme.relays and (self._on_lost == "mask" or self.masks.is_used)
        is_quick = self._unread is None and not self.masks.masked and not hears
        if is_quick and len(phases) > 1 and self._run_in_turn(phases):
            return
        for number, each in enumerate(phases, start=1):
            word = self.masks.known.word
            if each.phase == WHOLE:
                self._run(each.variant, each.bindings, WHOLE)
            else:
                self._run_phase(each)
            if self.masks.known.word != word:
                self.participants.mark(phases[number:])

    def _run_in_turn(self, phases: Sequence[PhaseRun]) -> bool:
        """Whether the back end has run them itself."""
        self.last_use = next(_clock)
        if self._in_flight.variants:
            self._in_flight.check(phases[0].operator, False, False)
        turns = turns_of(phases, self._rounds, self._executables, self.context)
        operator = phases[0].operator
        first = self.counts[operator]
        try:
            ran = self.backend.run_turns(turns, self._rounds.record)
        except BaseException as error:  # of a signal that came when all was over
            self._give_up_at(operator, max(first, self.counts[operator] - 1), error)
            raise
        if ran is None:
            return False
        last, report = turns[ran[0]], ran[1]
        operator = OPERATORS[last.operator]
        number = self.counts[operator] - last.ends
        try:
            code = report()
            if code == REPORT_MASKED:
                code = self._go_on(operator, number, last.executable, last.bindings)
            if code:
                self._fail(Run(operator, number, last.bindings), last.executable, code)
            if last.ends and operator != "barrier":
                self.participants.behind(last.executable)
            left = phases[sum(OPERATORS[turn.operator] != "barrier" for turn in turns[: ran[0] + 1]) :]
            if left:  # before which ranks were masked
                self.participants.mark(left)
                self._run_phases(left)
                return True
            if phases[-1].phase == WHOLE:
                self._last[operator] = last.executable
            else:
                self._last.pop(operator, None)  # of an operator in one piece
        except BaseException as error:
            self._give_up_at(operator, number, error)
            raise
        return True

    def zone(self, operator: Operator, ahead: int = 0) -> int:
        """The zone of an operator's next run, or of one so many runs behind it."""
        return (self._rounds.zone(operator) + ahead) % self.scheme.rounds.num_zones

    def abandon(self, operator: str, error: BaseException) -> None:
        """Ends a call between two of its phases: peers wait for what does not come any more.

        Args:
            operator: of the call.
            error: why.
        """
        self._give_up_at(operator, self.counts[operator], error)

    @property
    def is_rung(self) -> bool:
        """Whether the dispatch that has just ended was the first round of more, as some rank says."""
        word = bell_of(self._rounds.record.counts[0])  # of dispatches
        for bell in self.bells:  # noqa: SIM110 - a generator would cost twice as much, in every call
            if bell[0] == word:
                return True
        return False

    def call_words(self, zone: int) -> torch.Tensor:
        """(EP, words) int32 in the window: what each rank has said of a call in rounds.

        Args:
            zone: of the call's first round.
        """
        words = self._call_words.get(zone)
        if words is None:
            calls = self.layout.calls
            assert calls is not None
            first, ranks = calls.counts.offset(zone=zone), calls.counts.extent("source")
            memory = self._fixed["window"][first : first + ranks * calls.counts.stride("source")]
            words = memory.view(torch.int32).view(ranks, -1)[:, : calls.counts.extent("entry")]
            self._call_words[zone] = words
        return words

    def quiet_call_words(self, zone: int) -> None:
        """Has masked ranks say what this one says of a call in rounds, without tokens.

        Args:
            zone: of the call's first round.
        """
        for rank in self.masks.known.masked:
            words = self.call_words(zone)
            words[rank] = 0
            words[rank, : CALL_HEADER.num_words] = words[self.rank, : CALL_HEADER.num_words]

    def barrier(self, timeout_us: int | None = None) -> None:
        """Waits for every rank of the group, ``timeout_us`` at most; None for the buffer's timeout.

        Raises:
            BufferStateError: closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank did not come; the communicator is then broken.
        """
        self.alone(self._barrier, timeout_us)

    def _barrier(self, timeout_us: int | None) -> None:
        self.last_use = next(_clock)
        self._full_wait(timeout_us)
        if self._unread is not None and not self.backend.is_capturing():
            self._look_back(wait=True)

    def synchronize(self) -> None:
        """Waits for everything that this rank has started, graphs included, and checks the reports.

        Raises:
            BufferStateError: closed, broken or in use by another thread; or a row had an invalid origin.
            CommunicationTimeoutError: a rank's data did not come in time; the communicator is then broken.
        """
        self.alone(self._synchronize)

    def _synchronize(self) -> None:
        self.last_use = next(_clock)
        self.settle()

    def _look_back(self, wait: bool = False) -> None:
        """Raises what earlier runs have reported in the meantime."""
        assert self._unread is not None
        if self.backend.is_capturing():
            return
        try:
            failures = sorted(
                self._unread.failures(wait=wait), key=lambda failed: failed[2] != REPORT_MISMATCH
            )
            for executable, run, code in failures:  # calls that differ are why others timed out
                self._fail(run, executable, code)
        except BaseException as error:
            self._give_up_for("a wait for the device", error)
            raise

    def digest_ids(self, ids: torch.Tensor, mask: torch.Tensor | None) -> int | None:
        """What stands for ids, whatever masks have made of them; None where the host does not read any."""
        return self.backend.digest_ids(self.masks.whole(ids), mask)

    def peer_memory(self, asked: Wanted, out_bytes: OutBytes | None = None) -> PeerMemory:
        """Memory of each rank that all reach; see `PeerMemory`. Collective.

        Raises:
            BufferStateError: closed, broken or in use by another thread.
        """
        self.check_usable()
        mine = self._meetings[0]
        if mine.group is None and mine.num_ranks > 1:
            raise BufferStateError("the buffer's group is gone, and ranks cannot meet. Keep the group.")
        meeting, counts = Meeting(mine.group, mine.timeout_s, mine.members), self.counts
        meeting.hosts, meeting.network = mine.hosts, mine.network
        servers = self.config.topology.servers
        return PeerMemory(self.backend, meeting, asked, lambda: counts["dispatch"], servers, out_bytes)

    def leave(self, name: str, text: str) -> None:
        """Leaves a text for the other ranks; see `moe_triton.EPBuffer.leave`.

        Raises:
            BufferStateError: closed.
        """
        self._texts(name).set(str(self.rank), _LEFT + text)

    def left(self, name: str) -> list[str]:
        """What each rank has left under a name, without waiting; "" of one that has left nothing.

        Raises:
            BufferStateError: closed.
        """
        texts = self._texts(name)
        return [read_key(texts, str(rank)).removeprefix(_LEFT) for rank in range(self.config.num_ranks)]

    def _texts(self, name: str) -> Store:
        super()._check_open()  # texts need nobody: a rank may be dead
        return below(self._meetings[0].store(), f"texts/{name}")

    def run_local(self, kernel: TritonKernel, arguments: Bindings) -> None:
        """Runs a kernel that no peer takes part in; see `LocalLaunches.run`.

        Raises:
            BufferStateError: closed, broken or in use by another thread.
        """
        self.alone(self._local.run, kernel, arguments)

    def meet(self) -> None:
        """Waits until all ranks that are not masked have come here, in a call too."""
        self._full_wait()

    def _full_wait(self, timeout_us: int | None = None) -> None:
        self._rounds.begin("barrier")
        executable = self._executables.barrier(self._rounds.zone("barrier"), timeout_us)
        number = self.counts["barrier"]
        try:
            self._execute("barrier", executable, {}, turn=True)
        except BaseException as error:
            self._give_up_at("barrier", number, error)
            raise

    def _execute(self, operator: Operator, executable: Executable, bindings: Bindings, *, turn: bool) -> None:
        number, code = self.counts[operator], None
        capturing = self.backend.is_capturing()
        self.participants.before()
        try:
            code = executable.run(bindings)
            if code == REPORT_MASKED:
                code = self._go_on(operator, number, executable, bindings)
        finally:
            if turn:
                self._rounds.end(operator, code == 0, capturing)
        if self._unread is not None:
            self._in_flight.is_captured |= capturing
            self._unread.add(executable, operator, number, bindings)
        elif code:
            self._fail(Run(operator, number, bindings), executable, code)
        elif turn and operator != "barrier":
            if operator == "combine":
                self.participants.end_combine(bindings)
            self.participants.behind(executable)

    def make_calls(self, buffer_id: int) -> BufferCalls | None:
        """The native calls of a buffer, or None if the back end has none.

        Args:
            buffer_id: which buffer it is.
        """
        calls = self.native_calls(buffer_id, DispatchHandle)
        if calls is None or self.scheme.tables_of(
            self.context.config
        ):  # whose weights are compared in Python
            return None
        results = self._executables.results_in_window()
        made = BufferCalls(self.context, calls, buffer_id, self.window_base, results, self.layout.calls)
        self.use_calls(made)
        return made

    def use_calls(self, calls: PlanCalls) -> None:
        """Registers native calls: they get every plan that is compiled from now on."""
        self._executables.calls = calls

    def native_calls(self, owner: int, handle_type: type) -> Calls | None:
        """The back end's native calls, for programs of this communicator; None if it has none.

        Args:
            owner: the buffer whose handles later calls accept.
            handle_type: of those handles.
        """
        me = weakref.ref(self)

        def failed(
            operator: Operator,
            executable: Executable,
            code: Callable[[], int],
            bindings: Bindings,
            addresses: Bindings,
        ) -> bool:
            communicator = me()
            assert communicator is not None  # its lock is held
            return communicator._end(operator, executable, code, bindings, addresses)

        shared = self._rounds.record, self._last, self._lock
        return self.backend.make_calls(CallSetting(owner, *shared, handle_type, self._waits, failed))

    def _end(
        self,
        operator: Operator,
        executable: Executable,
        report: Callable[[], int],
        bindings: Bindings,
        addresses: Bindings,
    ) -> bool:
        """Raises the error of a native call, which has already counted its run and still holds the lock.

        Or brings it to its end, where nothing has gone wrong but that ranks were masked. True then.
        """
        number = self.counts[operator] - 1
        try:
            code = report()
            if code == REPORT_MASKED:
                code = self._go_on(operator, number, executable, addresses)
            if code == 0:
                self.participants.behind(executable)
                return True
            self._fail(Run(operator, number, bindings), executable, code)
        except BaseException as error:
            self._give_up_at(operator, number, error)
            raise
        finally:
            if self._closed:
                self._give_back_once()

    def _go_on(self, operator: Operator, number: int, executable: Executable, bindings: Bindings) -> int:
        """Brings a run to its end in which ranks were masked. What runs for that is of the same number."""
        around = self.recorder.going_on(operator, number) if self.recorder else contextlib.nullcontext()
        with around:
            return self.participants.go_on(operator, number, executable, bindings)

    def _give_up_at(self, operator: str, number: int, error: BaseException) -> None:
        self._give_up_for(f"{operator} number {number}", error)

    @contextlib.contextmanager
    def noting_refusals(self, operator: Operator) -> Iterator[None]:
        """Has a call noted whose arguments are refused: peers wait for it, and its rank is in no call."""
        try:
            yield
        except ArgumentError as error:
            if self.recorder:
                self.recorder.memory.say_refused(operator, self.counts[operator], str(error))
            raise

    def _give_up_for(self, call: str, error: BaseException) -> None:
        why = f"{call} ended in {type(error).__name__}"
        if isinstance(error, RankLostError):
            why = f"{call} cannot go on without rank(s) {list(error.missing_ranks)}"
        self._give_up(why)
        if isinstance(error, CommunicationTimeoutError):
            self._notes.last_word("raised", call)
        else:
            self._notes.last_word("left", why)
        if self.recorder:
            self.recorder.give_up(why, error)

    def _give_up(self, why: str) -> None:
        """Refuses every call from now on; the first reason given is the one reported."""
        self._broken = self._broken or why
        self._executables.stop_calls()

    def _fail(self, run: Run, executable: Executable, code: int) -> NoReturn:
        launch = executable.failed_launch
        assert launch is not None
        report, in_flight = executable.failed_report, self._in_flight.variants
        why, error = failure(
            self.context, run, launch, code, report, self._fixed, in_flight, self._notes.culprits
        )
        self._give_up(why)
        try:
            raise error
        finally:
            # Its traceback references this frame and those of callers, which hold tensors of the window.
            del error

    def window_tensor(self, name: Literal["rows", "results"], dtype: torch.dtype) -> torch.Tensor:
        """The window memory that the next dispatch writes rows to, or the next combine reads results from.

        Args:
            name: "rows" of dispatch, or "results" of combine.
            dtype: of the elements.

        Returns:
            (A, H): memory of this rank's window.
        """
        zone = self._rounds.zone("dispatch" if name == "rows" else "combine")
        view = self._executables.window_view(name, zone, dtype)
        assert view is not None
        return view

    @cached_property
    def has_outputs_in_window(self) -> bool:
        """Whether the scheme places outputs in the window; otherwise they are separate tensors."""
        return self.scheme.place("rows", 1) is not None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, while it exists and this is open; None for a process by itself."""
        return self._meetings[0].group

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's windows."""
        return sum(window.window_bytes for window in self.scheme.windows)

    @property
    def window_base(self) -> int:
        """Address of this rank's window."""
        return self._windows[0].base

    def in_flight(self, operator: str) -> Variant | None:
        """What a pending operator was set up for, or None."""
        return self._in_flight.variants.get(operator)

    @property
    def calls(self) -> PlanCalls | None:
        """The native calls, or None."""
        return self._executables.calls

    def stop(self, why: str) -> None:
        """Ends the wait of a call, which raises a `ConfigMismatchError` that says why. From any thread."""
        self._waits.stop(why)

    def note_use(self) -> None:
        """Counts a native call."""
        self.last_use = next(_clock)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending and no graph has captured addresses of its memory."""
        return self._in_flight.is_none

    def durations_us(self, operator: str) -> dict[str, float]:
        """Microseconds that each step of this rank's last dispatch or combine took.

        Raises:
            BufferStateError: it has not run yet, or the last one was in rounds.
        """
        if operator not in self._last:
            if self.counts[operator]:
                raise BufferStateError(f"the last {operator} was in rounds: a trace has the steps of each")
            raise BufferStateError(f"there was no {operator} yet")
        return self._last[operator].durations_us()

    def write_trace(self) -> None:
        """Appends what has happened since the last write to the trace file.

        Raises:
            BufferStateError: there is none, or another thread is inside.
            OSError: the file cannot be written.
        """
        if self._trace is None or self._closed:
            raise BufferStateError("there is no trace: the buffer was made without one, or is closed")
        self.alone(self._trace.write)

    def scratch_bytes(self) -> int:
        """Private memory that plans have needed so far, in bytes."""
        return self.memory.private_bytes()

    def _give_back(self) -> None:
        self.participants.stop_masking()
        if self._unread is not None:
            self.backend.synchronize()  # running kernels use the memory that is released here
        self.bells.clear()
        self._call_words.clear()
        self._executables.clear()
        self._local.clear()
        self._last.clear()
        self._fixed.clear()
        for window in self._windows:
            window.close()
        self.backend.close()
        self.participants.close()
        for meeting in self._meetings:
            meeting.leave()
        if self._trace:
            self._trace.close()
        if self.recorder:
            self._waits.ask_no_more()
            self.recorder.close()

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        self._executables.stop_calls()
        if self.recorder:
            self.recorder.memory.leave_to_parent()
        if self._write_at_end:
            self._write_at_end.cancel()  # the parent writes what was traced so far

    def _tell_of_waits(self) -> None:
        """Has long waits of this rank noted for its peers, and reported."""
        me = weakref.ref(self)

        def note(waiting: Waiting) -> None:
            communicator = me()
            if communicator is not None:
                communicator.participants.losses.note(waiting)
                note_of(communicator.context, waiting, communicator.counts, communicator._notes)

        def tell(waiting: Waiting) -> None:
            communicator = me()
            if communicator is not None:
                group = communicator.recorder.group if communicator.recorder else ""
                masked = communicator.masks.known.masked
                tell_of(communicator.context, waiting, communicator.counts, group, masked)
                if communicator.on_long_wait:
                    communicator.on_long_wait(waiting)

        def say(waiting: Waiting) -> None:
            communicator = me()
            if communicator is not None and communicator.recorder:
                communicator.recorder.say(waiting)

        def answered() -> None:
            communicator = me()
            if communicator is not None and communicator.recorder:
                communicator.recorder.memory.answered()

        if self.recorder:
            address_of = self.recorder.memory.address_of
            of_words = address_of(Header.asked.offset), address_of(Header.answered.offset)
            self._waits.say_when_asked(*of_words, say, answered)
        timeout_s = self._timeout_s
        self._waits.tell_after(noted_after_s(timeout_s), note, patience_s(timeout_s), tell)
