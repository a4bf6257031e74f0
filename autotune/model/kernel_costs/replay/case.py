"""Replays a kernel on the inputs of its case, for display and for tests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from autotune.model.constants import Machine
from autotune.model.cost import Table
from autotune.model.kernel_costs.replay.kernel_cost import Argument, Replay, Replayed, replay_of
from moe_triton.kernels import Case

_INTEGERS = (torch.bool, torch.int8, torch.int32, torch.int64)


def case_arguments(case: Case) -> dict[str, Argument]:
    """A case's inputs as the model takes them: numbers, and tables of the integers behind pointers."""
    return {
        name: Table(value.numpy() if value.dtype in _INTEGERS else None)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in case.arguments(case.memory).items()
    }


def replay_case(case: Case, soc: str, machine: Machine, blocks: int, with_spans: bool = False) -> Replayed:
    """Replays one call of a case.

    Args:
        case: of the table of the compiler gate, in the sizes of a call.
        soc: name of the chip that it is compiled for.
        machine: its constants.
        blocks: programs.
        with_spans: keep every instruction of the slowest core.

    Raises:
        ToolchainError: the compiler rejects the kernel, or the model does not know something that is in it.
        ReplayError: its control flow depends on data that the case does not have.
    """
    return replay_of(case.kernel, soc, case_arguments(case), blocks, machine, with_spans)


def trace_events(replay: Replay, machine: Machine, name: str) -> list[dict[str, Any]]:
    """A timeline of pipes, for Perfetto: complete events in microseconds, with their cycles and bytes.

    Args:
        replay: with spans.
        name: of the kernel.
    """
    per_us = machine.clock_ghz * 1e3
    rows = {pipe: row for row, pipe in enumerate(replay.busy)}
    named = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": pipe}}
        for pipe, row in rows.items()
    ]
    spans = [
        {
            "name": span.name,
            "ph": "X",
            "pid": 0,
            "tid": rows[span.pipe],
            "ts": span.begin / per_us,
            "dur": (span.end - span.begin) / per_us,
            "args": {"cycles": span.end - span.begin, "bytes": span.num_bytes},
        }
        for span in replay.spans
    ]
    process = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"{name}, slowest core"}}
    return [process, *named, *spans]


def as_json(launch: Replayed, machine: Machine) -> dict[str, Any]:
    """What a replay found, as a JSON object. Times are cycles, but for ``us``."""
    replay = launch.slowest
    shown = {key: value for key, value in asdict(replay).items() if key != "spans"}
    return {
        "machine": machine.name,
        "us": replay.cycles / (machine.clock_ghz * 1e3),
        "bound": replay.bound,
        **shown,
        "bytes_read": launch.read,
        "bytes_written": launch.written,
        "bytes_per_cycle": launch.bytes_per_cycle,
        "active_cores": launch.active,
    }
