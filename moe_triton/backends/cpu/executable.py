"""Plans compiled for the CPU: run natively in one call, or step by step with torch in place of Triton."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, cast

import torch

from moe_triton.backends.base import Bindings, Recording, Turn
from moe_triton.backends.cpu import native, row_copies
from moe_triton.backends.cpu.flight import FlownPlan
from moe_triton.backends.cpu.nic import Nic
from moe_triton.backends.cpu.paced_link import PacedLink
from moe_triton.backends.cpu.spare import mask_place
from moe_triton.backends.cpu.trace_log import NativeTraceLog
from moe_triton.backends.cpu.triton import load
from moe_triton.backends.cpu.waits import NativeWaits
from moe_triton.backends.phases import (
    PhaseTimes,
    first_code,
    is_profiled,
    name_of,
    names_of,
    recorded,
    step_names,
)
from moe_triton.core import abi
from moe_triton.core.ascendc import REPORT_MASKED
from moe_triton.core.checks import CPU
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import Arg, AscendCKernel, TritonKernel
from moe_triton.core.plan import Launch, Part, Phases, Placeholder, Plan, num_blocks
from moe_triton.core.reach import PEER_BYTES, address_of, is_queued, num_ranks_in
from moe_triton.core.tuning import Tuning, usual_on_cpu

KIND_TRITON, KIND_ASCEND_C = 0, 1
MASKS_CHANGED = 1 << 32
"""``moe::calls::MASKS_CHANGED``."""


class CpuSettings(NamedTuple):
    """The settings of `Tuning` that only this back end has, all decided.

    Attributes:
        copy_row: number of the way rows are copied through the caches (`row_copies`).
        link: paced, or None.
        nic: of a rank that posts, or None.
    """

    cached_bytes: int
    spins: int
    yields: int
    copy_row: int
    link: PacedLink | None = None
    nic: Nic | None = None


def settings_of(
    tuning: Tuning, num_ranks: int, link: PacedLink | None = None, nic: Nic | None = None
) -> CpuSettings:
    """A rank's settings, when ``num_ranks`` ranks share the machine: what changes speed and never results."""
    usual = usual_on_cpu(num_ranks, len(os.sched_getaffinity(0)))
    given = {name: getattr(tuning, name) for name in ("cached_bytes", "spins", "yields")}
    chosen = {name: usual[name] if value is None else value for name, value in given.items()}
    copies = row_copies.chosen()
    if tuning.cached_bytes is None:
        chosen["cached_bytes"] = copies.cached_bytes(num_ranks)
    return CpuSettings(**chosen, copy_row=copies.number, link=link, nic=nic)


class _Executable:
    """What both kinds have: a plan, the native settings of its launches, and how long its steps took.

    Attributes:
        placeholders: names of those that calls fill, in the order of their values.
    """

    def __init__(
        self,
        plan: Plan,
        report: torch.Tensor,
        fixed: Bindings,
        settings: CpuSettings,
        waits: NativeWaits,
        log: NativeTraceLog | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.plan = plan
        self.placeholders = tuple(name for name in plan.placeholders if name not in fixed)
        self.failed_launch: Launch | None = None
        self._stopped_at = 0
        self._report, self.failed_report = report, report[0]
        self._waits, self._emulated = waits, settings  # the native settings hold addresses of theirs
        self._settings = settings_struct(settings, fixed, waits)
        self._fixed = fixed  # the words hold addresses of its memory
        self._log, self._trace = log, log.add_plan(plan, self.placeholders, fixed) if log else None
        self._durations = (ctypes.c_double * len(plan.launches))()
        self._times = PhaseTimes(plan)
        of_runs = self.placeholders, self._durations, self._times
        self._flown = FlownPlan(recording, *of_runs) if recording else None
        # Of each phase; where Python runs the launches, up to the one that runs.
        self._words: list[ctypes.Array[ctypes.c_uint64]] = []
        self._step_names = step_names(plan)
        # One at least, for native code.
        self._c_names = (ctypes.c_char_p * max(len(plan.launches), 1))(*map(str.encode, self._step_names))
        waits.add(self._prepare(), self)

    def _prepare(self) -> int:
        """Makes what runs need, and returns the number that native code knows the plan by."""
        return id(self)

    def _lay_out(self, words: Sequence[int], firsts: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
        """A launch's words in memory, of which each phase's begin with its own first one."""
        array = (ctypes.c_uint64 * len(words))(*words)
        self._words += [
            (ctypes.c_uint64 * (len(words) - first)).from_buffer(array, 8 * first) for first in firsts
        ]
        return array

    def words_of(self, launch: int) -> ctypes.Array[ctypes.c_uint64]:
        """Returns the current argument words of one of the launches."""
        return self._words[launch]

    def values(self, bindings: Bindings) -> list[ctypes.c_uint64 | int]:
        """What placeholders stand for in a call."""
        return [
            bound if isinstance(bound, int) else bound.data_ptr()
            for bound in map(bindings.__getitem__, self.placeholders)
        ]

    @property
    def ran(self) -> Sequence[Phases]:
        """Launches that have run, where ranks were masked meanwhile."""
        return self._times.launches[: self._stopped_at]

    def outcome(self, wait: bool) -> int | None:
        """Returns 0: a run returns its report code itself, once it has ended."""
        return 0

    def durations_us(self) -> dict[str, float]:
        """Returns the microseconds that each step of the last run took."""
        return self.plan.by_step(self._times.durations_us(list(self._durations)))


class NativeExecutable(_Executable):
    """A plan as arrays of C structs. A call fills the placeholders and enters native code once.

    Attributes:
        address: of the ``MoePlan``.
    """

    def _prepare(self) -> int:
        plan, report = self.plan, self._report
        self._values = (ctypes.c_uint64 * max(len(self.placeholders), 1))()
        self._values_address = ctypes.addressof(self._values)
        self._launches = (native.LaunchStruct * len(self._times.launches))()
        patches: list[native.PatchStruct] = []
        for struct, phases in zip(self._launches, self._times.launches, strict=True):
            times = {abi.TIMES: self._times.of(len(self._words))}
            patches += self._pack(struct, phases, {**self._fixed, **times})
        self._patches = (native.PatchStruct * max(len(patches), 1))(*patches)
        self._struct = native.PlanStruct(
            ctypes.addressof(self._launches),
            len(self._launches),
            ctypes.addressof(self._patches),
            len(patches),
            report.data_ptr(),
            report.numel(),
            report[0].numel(),
            ctypes.addressof(self._durations),
            ctypes.addressof(self._settings),
            plan.overlap,
            ctypes.addressof(self._trace) if self._trace else None,
            name_of(plan).encode(),
            ctypes.addressof(self._c_names),
            plan.reads_peers,
            self._flown.address if self._flown else None,
        )
        self.address = ctypes.addressof(self._struct)
        self._run = native.library().moe_run_plan
        self._resume = native.library().moe_resume_plan
        return self.address

    def _pack(self, struct: native.LaunchStruct, phases: Phases, fixed: Bindings) -> list[native.PatchStruct]:
        """Fills in a launch, and returns what calls change in it."""
        kernel, firsts = phases[0].kernel, [0]
        if isinstance(kernel, AscendCKernel):
            launched, words, placeholders, firsts = abi.phase_words(phases, _report_bytes(self._report))
            struct.entry, struct.kind = native.address_of(native.launcher(launched)), KIND_ASCEND_C
        else:
            # Compiled on the promise that no output overlaps an input: outputs are always our own fresh
            # tensors.
            streams = 0 < kernel.streamed_bytes >= self._emulated.cached_bytes
            struct.entry, struct.kind = load(kernel, streams=streams).entry, KIND_TRITON
            words, placeholders = abi.words(phases[0])
        for position, placeholder in placeholders:
            if placeholder.name in fixed:
                words[position] = abi.word_of(fixed[placeholder.name]) + placeholder.offset
        struct.blocks, struct.alongside = num_blocks(phases), phases[0].alongside
        struct.first = len(self._words)
        array = self._lay_out(words, firsts)
        struct.words = ctypes.addressof(array)
        return [
            patch_struct(
                ctypes.addressof(array) + 8 * position, self.placeholders.index(placeholder.name), placeholder
            )
            for position, placeholder in placeholders
            if placeholder.name not in fixed
        ]

    def run(self, bindings: Bindings) -> int:
        """Fills the placeholders, runs every launch in one native call, and returns 0 or a report code."""
        self._values[: len(self.placeholders)] = self.values(bindings)
        return self.finish(self._run(self.address, self._values_address))

    def resume(self, bindings: Bindings) -> int:
        """The same of the launches that have not run."""
        self._values[: len(self.placeholders)] = self.values(bindings)
        return self.finish(self._resume(self.address, self._values_address, self._stopped_at))

    def finish(self, result: int) -> int:
        """Turns a result of ``moe_run_plan`` into what `run` returns or raises."""
        if result >= MASKS_CHANGED:
            self._stopped_at, self.failed_launch = result - MASKS_CHANGED, None
            return REPORT_MASKED
        if result > 0:
            self._waits.raise_stopped(self.plan.operator)
        if result < 0:
            phases = self._times.phases_with(-1 - result)
            raise ToolchainError(f"{self.plan.operator}: {names_of(phases)} failed: {native.last_error()}")
        if result == 0:
            return 0
        code, phase = first_code(self._report)
        self.failed_launch = self._times.phases_with(result - 1)[phase]
        self.failed_report = self._report[phase]
        return code


def run_turns(turns: Sequence[Turn], rounds: ctypes.Structure) -> tuple[int, Callable[[], int]] | None:
    """See `moe_triton.backends.base.Backend.run_turns`."""
    executables: list[NativeExecutable] = []
    values: list[ctypes.c_uint64 | int] = []
    firsts: list[int] = []
    for turn in turns:
        if not isinstance(turn.executable, NativeExecutable):
            return None
        executables.append(turn.executable)
        firsts.append(len(values))
        values += turn.executable.values(turn.bindings)
    words = (ctypes.c_uint64 * len(values))()
    words[:] = values
    structs = (native.TurnStruct * len(turns))()
    for struct, executable, first, turn in zip(structs, executables, firsts, turns, strict=True):
        struct.plan, struct.operator = executable.address, turn.operator
        struct.begins, struct.ends = turn.begins, turn.ends
        struct.placeholders = ctypes.addressof(words) + first * ctypes.sizeof(ctypes.c_uint64)
    last = ctypes.c_uint64(0)
    run = native.library().moe_run_turns
    result = run(structs, len(turns), ctypes.byref(rounds), ctypes.byref(last))
    return last.value, partial(executables[last.value].finish, result)


class TorchExecutable(_Executable):
    """A plan that runs each Triton kernel's torch fallback: slow, for machines without the toolchain."""

    _is_profiled = False

    def run(self, bindings: Bindings) -> int:
        """Runs the launches one after the other from Python, and returns 0 or a report code."""
        bindings = {**self._fixed, **bindings}
        self._is_profiled = is_profiled()
        with self._range(name_of(self.plan)), torch.device(CPU):  # fallbacks go by torch's default device
            return self._run_traced(bindings)

    def _range(self, name: str) -> AbstractContextManager[object]:
        return recorded(name) if self._is_profiled else nullcontext()

    def _run_traced(self, bindings: Bindings) -> int:
        if self._log is None or self._trace is None:
            return self._run(bindings)
        self._log.begin_call()
        begin, code, self.failed_launch = time.monotonic_ns(), 0, None
        try:
            code = self._run(bindings)
        finally:
            failed = self.plan.launches.index(self.failed_launch) + 1 if self.failed_launch else 0
            self._log.end_call(self._trace, begin, bindings, failed)
        return code

    def resume(self, bindings: Bindings) -> int:
        """The same of the launches that have not run."""
        with torch.device(CPU):
            return self._run({**self._fixed, **bindings}, self._stopped_at)

    def _are_masks_changed(self) -> bool:
        changes = self._settings.changes
        if not changes:
            return False
        now, known = (ctypes.c_uint64.from_address(changes + PEER_BYTES * word).value for word in range(2))
        return now != known

    def _is_masked_by_peers(self) -> bool:
        return bool(native.library().moe_is_masked_by_peers(ctypes.byref(self._settings)))

    def _run(self, bindings: Bindings, first: int = 0) -> int:
        if self._flown is None:
            return self._walk(bindings, first)
        # What native code does for the flight recorder where it runs the whole plan.
        library, result = native.library(), 1
        values = (ctypes.c_uint64 * max(len(self.placeholders), 1))(*self.values(bindings))
        library.moe_flight_begin(self._flown.address, values)
        try:
            with self._waits.recorded(self._flown.address):
                code = self._walk(bindings, first)
            failed = self.plan.launches.index(self.failed_launch) if self.failed_launch else 0
            result = {0: 0, REPORT_MASKED: MASKS_CHANGED}.get(code, 1 + failed)
            return code
        finally:
            library.moe_flight_end(self._flown.address, values, result)

    def _walk(self, bindings: Bindings, first: int) -> int:
        self._report.zero_()
        self._words.clear()
        for place, phases in enumerate(self._times.launches):
            if place < first:
                self._words += [(ctypes.c_uint64 * 1)() for _ in phases]
                continue
            if self._are_masks_changed():
                self._stopped_at, self.failed_launch = place, None
                return REPORT_MASKED
            number, start = len(self._words), time.perf_counter()
            if isinstance(phases[0].kernel, TritonKernel):
                self._run_triton(phases[0], bindings)
            else:
                self._launch_ascend_c(phases, {**bindings, abi.TIMES: self._times.of(number)})
                self._waits.raise_stopped(self.plan.operator)
                code, phase = first_code(self._report)
                if code:
                    self.failed_launch, self.failed_report = phases[phase], self._report[phase]
                    return code
            self._durations[number] = (time.perf_counter() - start) * 1e6
        if self._are_masks_changed() or (self.plan.reads_peers and self._is_masked_by_peers()):
            self._stopped_at, self.failed_launch = len(self._times.launches), None
            return REPORT_MASKED
        return 0

    def _run_triton(self, launch: Launch, bindings: Bindings) -> None:
        assert isinstance(launch.kernel, TritonKernel)
        number, begin = len(self._words), time.monotonic_ns()
        self._lay_out([], [0])
        arguments = {
            arg.name: _argument(arg, value, bindings)
            for arg, value in zip(launch.kernel.args, launch.values, strict=True)
        }
        with self._range(self._step_names[number]):
            launch.kernel.fallback(launch.blocks, **arguments, **launch.kernel.constants)
        if self._log:
            self._log.add_launch(number, begin)

    def _launch_ascend_c(self, phases: Phases, bindings: Bindings) -> None:
        number = len(self._words)
        packed = abi.phase_words(phases, _report_bytes(self._report))
        for position, placeholder in packed.placeholders:
            packed.words[position] = _filled(placeholder, bindings)
        array = self._lay_out(packed.words, packed.firsts)
        library = native.library()
        function = native.launcher(packed.kernel)
        steps = ctypes.addressof(self._c_names) if self._is_profiled else None
        traced = native.TracedLaunchStruct(self._log.address if self._log else None, number, 0, steps)
        stream = ctypes.byref(traced) if self._log or self._is_profiled else None
        self._waits.begin(id(self), number)
        try:
            library.moe_use_settings(ctypes.addressof(self._settings))
            failed: int = function(ctypes.c_uint32(num_blocks(phases)), stream, ctypes.byref(array))
        finally:
            library.moe_use_settings(None)
        if failed:
            raise ToolchainError(f"{self.plan.operator}: {names_of(phases)} failed: {native.last_error()}")


def settings_struct(settings: CpuSettings, fixed: Bindings, waits: NativeWaits) -> native.SettingsStruct:
    """Settings of native launches: how to copy, send and wait, and where each group's windows are."""
    groups = []
    for name, peers in fixed.items():
        if not name.endswith("peers"):
            continue
        window = fixed[f"{name.removesuffix('peers')}window"]
        assert isinstance(peers, torch.Tensor)
        assert isinstance(window, torch.Tensor)
        places = peers.data_ptr(), num_ranks_in(peers), window.numel(), window.data_ptr()
        groups.append(native.WindowGroupStruct(*places))
    return native.SettingsStruct(
        native.library().moe_row_copy(settings.copy_row),
        settings.cached_bytes,
        settings.spins,
        settings.yields,
        len(groups),
        (native.WindowGroupStruct * len(groups))(*groups),
        waits.address,
        settings.link.address if settings.link else None,
        settings.nic.address if settings.nic else None,
        changes_of(fixed),
        *masked_by(fixed),
    )


def masked_by(fixed: Bindings) -> tuple[ctypes.Array[ctypes.c_uint64], int, int]:
    """Addresses of the bytes in which peers say that they mask this rank, how many, and its bit there."""
    peers, window = fixed.get("peers"), fixed.get("window")
    if not isinstance(peers, torch.Tensor) or not isinstance(window, torch.Tensor):
        return (ctypes.c_uint64 * 0)(), 0, 0
    words, own = peers[: num_ranks_in(peers)].tolist(), window.data_ptr()
    byte, bit = mask_place([address_of(word) for word in words].index(own))
    places = [address_of(word) + window.numel() + byte for word in words if not is_queued(word)]
    return (ctypes.c_uint64 * len(places))(*places), len(places), 1 << bit


def changes_of(fixed: Bindings) -> int | None:
    """Where it stands how masks of the group have changed; None where there are no peers."""
    peers = fixed.get("peers")
    if not isinstance(peers, torch.Tensor):
        return None
    return peers.data_ptr() + PEER_BYTES * num_ranks_in(peers)


def _filled(placeholder: Placeholder, bindings: Bindings) -> int:
    """The argument word of a placeholder, in a call."""
    bound = bindings[placeholder.name]
    if isinstance(placeholder, Part):
        assert isinstance(bound, int)
        return placeholder.of(bound)
    return abi.word_of(bound) + placeholder.offset


def patch_struct(word: int, number: int, placeholder: Placeholder) -> native.PatchStruct:
    """A placeholder as native code fills it."""
    if isinstance(placeholder, Part):
        return native.PatchStruct(word, number, 0, placeholder.index, placeholder.parts, placeholder.is_count)
    return native.PatchStruct(word, number, placeholder.offset, 0, 0, 0)


def _report_bytes(report: torch.Tensor) -> int:
    """From one phase's report to the next one's."""
    return report[0].numel() * report.element_size()


def _argument(arg: Arg, value: object, bindings: Bindings) -> torch.Tensor | int:
    """A fallback's argument: an integer, or a flat tensor that starts at the address."""
    if not isinstance(value, Placeholder):
        return cast(int, value)
    bound = bindings[value.name]
    if isinstance(bound, int):
        return _filled(value, bindings)
    return bound.view(-1).view(torch.uint8)[value.offset :].view(arg.dtype)
