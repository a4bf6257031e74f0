"""Waits in native code that handle Python's signals, and that another thread can end (`wait_control.h`)."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_triton.backends.cpu.native import I64, POINTER, U64, alike, fields
from moe_triton.backends.waits import Waiting, Waits
from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.logs import log_of
from moe_triton.core.plan import Plan
from moe_triton.core.threads import SHORTEST_STOP_S

_NS = 1_000_000_000
# A block polls every few milliseconds: one that has not for this long is no longer waiting.
_STILL_WAITING_NS = _NS
_log = log_of("waits")
_restore = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyErr_Restore", ctypes.pythonapi)
)


# By the field that gets its address, in the order of the fields.
_PYTHON_CALLS = {
    "ensure_gil": "PyGILState_Ensure",
    "release_gil": "PyGILState_Release",
    "check_signals": "PyErr_CheckSignals",
    "call": "PyObject_CallNoArgs",
    "drop": "Py_DecRef",
    "fetch_error": "PyErr_Fetch",
}


@dataclass
class Stage:
    """What is done about a wait that lasts.

    Attributes:
        after_ns: when it is done first.
        call: does it.
        doubles: whether it is done again each time that the wait has doubled.
        every_ns: after which it is done again; 0 for once.
        due_ns: when next, of the wait that goes on.
    """

    after_ns: int
    call: Callable[[Waiting], None]
    doubles: bool = False
    every_ns: int = 0
    due_ns: int = 0

    def come(self, waited_ns: int) -> None:
        """It is done now."""
        again = 2 * waited_ns if self.doubles else waited_ns + self.every_ns
        self.due_ns = again if self.doubles or self.every_ns else 1 << 62


class BlockWaitStruct(ctypes.Structure):
    """``moe::BlockWait``."""

    _fields_ = fields(looked_ns=U64, launch=U64, first=I64, count=I64)


class WaitControlStruct(ctypes.Structure):
    """``moe::WaitControl``."""

    _fields_ = (
        *alike(U64, "stop", "alarm", "holder", "plan", "first", "launch", "began_ns", "look_ns"),
        *alike(U64, "tell_ns", "patience_ns", "pause_ns", "looked_ns", "was_paused"),
        ("main_thread", U64),
        *alike(POINTER, *_PYTHON_CALLS, "tell", "answer", "say", "flown", "asked", "answered"),
        ("error", POINTER * 3),
        ("blocks", BlockWaitStruct * MAX_BLOCKS),
    )


class Runner(Protocol):
    """What runs a plan."""

    @property
    def plan(self) -> Plan:
        """What it runs."""

    def words_of(self, launch: int) -> ctypes.Array[ctypes.c_uint64]:
        """The current argument words of one of its launches."""


class NativeWaits(Waits):
    """Controls the waits of one communicator in native code, which the host can both end and see.

    Attributes:
        address: of the ``moe::WaitControl``.
    """

    are_seen = True

    def __init__(self) -> None:
        self._struct = WaitControlStruct(main_thread=threading.main_thread().ident)
        super().__init__()
        for field, function in _PYTHON_CALLS.items():
            setattr(self._struct, field, ctypes.cast(getattr(ctypes.pythonapi, function), ctypes.c_void_p))
        self.address = ctypes.addressof(self._struct)
        self.holder = ctypes.c_uint64.from_buffer(self._struct, WaitControlStruct.holder.offset)
        self._runners: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()
        self._stages: list[Stage] = []
        self._wait_of_stages = 0
        self._answer: Callable[[Waiting], None] | None = None
        self._say: tuple[Callable[[Waiting], None], Callable[[], None]] | None = None
        me = weakref.ref(self)

        # Native code keeps it, and must not keep this object alive.
        def tell() -> None:
            waits = me()
            if waits is not None:
                waits._tell_now()

        def answer() -> None:
            waits = me()
            if waits is not None:
                waits._report_to([waits._answer] if waits._answer else [])

        def say() -> None:
            waits = me()
            if waits is not None and waits._say is not None:
                answer_of, answered = waits._say
                try:
                    waits._report_to([answer_of])
                finally:
                    answered()  # it is not asked again at once where it cannot be said

        self._native_calls = tell, answer, say
        self._struct.tell, self._struct.answer, self._struct.say = id(tell), id(answer), id(say)

    @property
    def is_stopped(self) -> bool:  # type: ignore[override]
        """Tells whether all waits end at once, as if at their deadline."""
        return bool(self._struct.stop)

    @is_stopped.setter
    def is_stopped(self, value: bool) -> None:
        self._struct.stop = value

    def raise_stopped(self, operator: str) -> None:
        """Raises what a signal handler raised during a wait, or else why waits were stopped, if they were."""
        kind, value, trace = self._struct.error
        if kind:
            self._struct.error[:] = (None, None, None)
            _restore(kind, value, trace)  # raises it
        super().raise_stopped(operator)

    def tell_after(
        self, note_s: float, note: Callable[[Waiting], None], tell_s: float, tell: Callable[[Waiting], None]
    ) -> None:
        """Has long waits noted for peers, and later reported: again each time that the wait has doubled."""
        self._stages += [Stage(int(note_s * _NS), note), Stage(int(tell_s * _NS), tell, doubles=True)]
        self._struct.patience_ns = min(stage.after_ns for stage in self._stages)

    def give_up_after(self, seconds: float, missing: Callable[[Waiting], None]) -> None:
        """Has somebody decide what becomes of waits that have lasted so long, and again and again."""
        self._stages.append(Stage(int(seconds * _NS), missing, every_ns=_NS // 4))
        self._struct.patience_ns = min(stage.after_ns for stage in self._stages)
        self._struct.pause_ns = max(int(SHORTEST_STOP_S * _NS), int(seconds * _NS) // 4)

    def answer_alarms(self, answer: Callable[[Waiting], None]) -> None:
        """Has a wait reported while there is an alarm: again every few hundredths of a second."""
        self._answer = answer

    def alarm(self, on: bool = True) -> None:
        """Raises an alarm, or ends it. Callable from any thread."""
        self._struct.alarm = on

    def say_when_asked(
        self, asked: int, answered: int, say: Callable[[Waiting], None], done: Callable[[], None]
    ) -> None:
        """Has a wait reported when somebody asks, in any process; within a few hundredths of a second."""
        self._say = say, done
        self._struct.asked, self._struct.answered = asked, answered

    def ask_no_more(self) -> None:
        """The words of `say_when_asked` are gone."""
        self._say, self._struct.asked, self._struct.answered = None, None, None

    @contextlib.contextmanager
    def recorded(self, flown: int) -> Iterator[None]:
        """Launches that Python makes meanwhile note whom they wait for.

        Args:
            flown: address of the plan's ``moe::FlownPlan``.
        """
        self._struct.flown = flown
        try:
            yield
        finally:
            self._struct.flown = None

    def add(self, number: int, runner: Runner) -> None:
        """Registers the runner of the plan that native code knows by this number."""
        self._runners[number] = runner

    def begin(self, number: int, launch: int) -> None:
        """A launch begins that Python makes."""
        struct = self._struct
        struct.plan, struct.first, struct.launch, struct.began_ns = number, launch, launch, 0

    def _tell_now(self) -> None:
        """Called on the waiting thread. An exception of a signal handler in here ends the wait."""
        began_ns = self._struct.began_ns
        waited_ns = time.monotonic_ns() - began_ns
        if self._wait_of_stages != began_ns:
            self._wait_of_stages = began_ns
            for stage in self._stages:
                stage.due_ns = stage.after_ns
        due = [stage for stage in self._stages if waited_ns >= stage.due_ns]
        for stage in due:
            stage.come(waited_ns)
        self._struct.tell_ns = began_ns + min(stage.due_ns for stage in self._stages)
        self._report_to([stage.call for stage in due])

    def _report_to(self, told: Sequence[Callable[[Waiting], None]]) -> None:
        """Reports the wait. On the waiting thread."""
        runner, now = self._runners.get(self._struct.plan), time.monotonic_ns()
        number, began_ns = self._struct.launch, self._struct.began_ns
        if runner is None or not told:
            return
        since_ns = max(began_ns, now - _STILL_WAITING_NS)
        awaited: dict[int, dict[int, tuple[int, int]]] = {number: {}}
        for block, wait in enumerate(self._struct.blocks):
            if wait.looked_ns >= since_ns:
                awaited.setdefault(wait.launch, {})[block] = wait.first, wait.count
        struct = self._struct

        def pending() -> bool:
            return bool(struct.began_ns == began_ns and struct.holder and not struct.stop)

        plan, seconds = runner.plan, (now - began_ns) / _NS
        phases = {each: (plan.launches[each], tuple(runner.words_of(each))) for each in awaited}
        beside = tuple((*phases[each], awaited[each]) for each in awaited if each != number)
        waiting = Waiting(plan, *phases[number], awaited[number], seconds, pending, beside)
        for call in told:
            try:
                call(waiting)
            except Exception:
                _log.exception("a long wait cannot be reported")
