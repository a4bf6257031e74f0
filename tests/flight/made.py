"""Recorders as a rank leaves them, made by hand: the bytes that native code and Python would write."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_triton.core.flight_file import (
    MAGIC,
    NUM_RUNS,
    OPERATORS,
    PREFIX,
    STATES,
    TEXT_BYTES,
    VERSION,
    Flight,
    Header,
    Places,
    RunStruct,
    read,
    write_text,
)

MS, S = 10**6, 10**9
OPENED_NS = 1000 * S
STEPS = "pack", "send", "wait", "arrange"
MASKED, REPORTED, FAILED = 1 << 32, 2, -1
"""Results of runs."""


@dataclass(frozen=True)
class MadeRun:
    """A run of a plan.

    Attributes:
        operator, number: which one.
        begin_s, end_s: seconds from when the buffer was opened; None as an end: it runs.
        awaited: whom it waited for longest, and seconds.
        result: of the run.
        phase: of an operator in halves.
        zone: of the windows.
        step: number of the last one.
    """

    operator: str
    number: int
    begin_s: float
    end_s: float | None
    awaited: tuple[int, float] | None = None
    result: int = 0
    phase: str = ""
    zone: int = 0
    step: int = 2

    @property
    def plan(self) -> tuple[str, int, str]:
        return self.operator, self.zone, self.phase


def calls(until: int, *, awaited: tuple[int, float] | None = None) -> list[MadeRun]:
    """Dispatches and combines with numbers below this one, which ended well: each takes 5 ms of 10."""
    names = [(operator, number) for number in range(until) for operator in ("dispatch", "combine")]
    return [
        MadeRun(*name, at / 100, at / 100 + 0.005, awaited, zone=name[1] % 2) for at, name in enumerate(names)
    ]


@dataclass(frozen=True)
class Made:
    """A rank's recorder.

    Attributes:
        rank, num_ranks, group, pid, uid, host: whose it is.
        runs: of plans, oldest first.
        waits_for: ranks that the running run has said it waits for; None if it has said nothing.
        said: more of that.
        state, why: of the buffer.
        about: of the buffer, in addition.
        unix_minus_monotonic_ns: of its machine.
    """

    rank: int
    num_ranks: int = 4
    runs: Sequence[MadeRun] = ()
    waits_for: Sequence[int] | None = None
    said: Mapping[str, object] = field(default_factory=dict)
    state: str = "open"
    why: str = ""
    group: str = "a1b2c3"
    pid: int = 0
    uid: int = field(default_factory=os.geteuid)
    host: str = field(default_factory=platform.node)
    opened_ns: int = OPENED_NS
    about: Mapping[str, object] = field(default_factory=dict)
    unix_minus_monotonic_ns: int = 1_700_000_000 * S

    def bytes(self) -> bytearray:
        """Of the recorder's memory."""
        places = Places.of(self.num_ranks)
        data = bytearray(places.total_bytes)
        header = Header.from_buffer(data)
        header.magic, header.version = MAGIC, VERSION
        header.header_bytes, header.total_bytes = ctypes.sizeof(Header), places.total_bytes
        header.pid, header.uid = self.pid or 1_000_000 + self.rank, self.uid
        header.rank, header.num_ranks = self.rank, self.num_ranks
        header.opened_ns, header.state = self.opened_ns, STATES.index(self.state)
        header.unix_minus_monotonic_ns = self.unix_minus_monotonic_ns
        header.num_runs = len(self.runs)
        plans = list(dict.fromkeys(run.plan for run in self.runs))
        for index, run in enumerate(self.runs, start=1):
            at = places.runs + index % NUM_RUNS * ctypes.sizeof(RunStruct)
            self._write_run(RunStruct.from_buffer(data, at), index, run, plans.index(run.plan))
            if run.end_s is not None and run.result == 0:
                header.runs[OPERATORS.index(run.operator)] += 1
        about = {"group": self.group, "host": self.host, "version": "0.1.0", "protocol": 1, **self.about}
        keys = "operator", "zone", "phase"
        texts = {
            "about": json.dumps(about),
            "plans": "\n".join(
                json.dumps({**dict(zip(keys, plan, strict=True)), "steps": STEPS}) for plan in plans
            ),
            "why": self.why,
            "said": json.dumps(self._said()) if self.waits_for is not None else "",
        }
        for name, text in texts.items():
            assert len(text) <= TEXT_BYTES[name]
            write_text(memoryview(data), header, places, name, text)
        return data

    def flight(self) -> Flight:
        """As it is read."""
        data = bytes(self.bytes())
        return read(lambda: data, f"rank {self.rank}")

    def write(self, folder: Path) -> Path:
        """A file of it, named as a rank names it."""
        path = folder / f"{PREFIX}{self.uid}-{self.group}-{self.rank}"
        path.write_bytes(self.bytes())
        return path

    def write_json(self, folder: Path) -> Path:
        """What an error writes down of it."""
        path = folder / f"rank{self.rank}.json"
        path.write_text(json.dumps(self.flight().as_json()))
        return path

    def ns(self, seconds: float) -> int:
        """A time of the clock of recorders."""
        return self.opened_ns + round(seconds * S)

    def _said(self) -> dict[str, object]:
        last = self.runs[-1] if self.runs else None
        since_ns = self.ns(last.begin_s + 0.01) if last else 0
        return {
            "index": len(self.runs),
            "step": "wait",
            "since_ns": since_ns,
            "said_ns": since_ns,
            "ranks": self.waits_for,
            **self.said,
        }

    def _write_run(self, struct: RunStruct, index: int, run: MadeRun, plan: int) -> None:
        struct.number, struct.count, struct.plan = index, run.number, plan
        struct.begin_ns = self.ns(run.begin_s)
        struct.end_ns = 0 if run.end_s is None else self.ns(run.end_s)
        struct.result, struct.step = run.result, run.step
        struct.tokens, struct.rows, struct.awaited_rank = 16, 128, -1
        if run.awaited is not None:
            rank, waited_s = run.awaited
            struct.awaited_rank, struct.awaited_us = rank, round(waited_s * 1e6)
        for step in range(len(STEPS)):
            struct.steps_us[step] = 1000.0
