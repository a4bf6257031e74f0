"""What the buffers of this process do now, in words: for `buffer.status` and the dump signal."""

from __future__ import annotations

import os
import time

from moe_triton.core.errors import BufferStateError, MoeTritonError
from moe_triton.core.flight_story import status_lines
from moe_triton.runtime.exclusive import alive
from moe_triton.runtime.recorder import Recorder

NO_RECORDER = "there is no flight recorder (MOE_TRITON_FLIGHT is off)"


def recorder_of(recorder: Recorder | None) -> Recorder:
    """The same one.

    Raises:
        BufferStateError: there is none.
    """
    if recorder is None:
        raise BufferStateError(f"{NO_RECORDER}. Unset the variable, and construct the buffer again.")
    return recorder


def status_of(recorders: list[Recorder]) -> str:
    """A line for each buffer. From any thread: waits that go on are asked whom they are for."""
    flights = [recorder.flight() for recorder in recorders]
    return "\n".join(status_lines(flights, time.monotonic_ns()))


def _said_of(recorder: Recorder) -> str:
    try:
        return status_of([recorder])
    except MoeTritonError as error:
        return str(error)


def status_of_process() -> str:
    """The same of all buffers of this process that are open."""
    recorders = [recorder for each in alive() if (recorder := getattr(each, "recorder", None)) is not None]
    text = "\n".join(_said_of(each) for each in recorders if each.memory.is_open)
    return f"process {os.getpid()}, of moe_triton:\n{text or 'no buffer is open, or ' + NO_RECORDER}"
