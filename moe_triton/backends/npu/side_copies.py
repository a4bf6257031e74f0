"""Copies of the NPU back end: on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_triton.backends.npu.runtime import Event, Runtime, Stream


class NpuSideCopies:
    """See `moe_triton.core.side_copies.SideCopies`. Peers' memory is mapped, so a copy reaches it.

    Args:
        runtime: of the device.
    """

    is_asynchronous = True

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._stream = runtime, runtime.make_stream()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the side stream, asynchronously."""
        self._runtime.copy(to, source, self._stream)

    def copy_in_turn(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the current stream, asynchronously."""
        self._runtime.copy(to, source)

    def follow(self) -> None:
        """The side stream waits for the current one."""
        self._stream.wait_event(self._recorded(self._runtime.current_stream()))

    def mark(self) -> Callable[[], bool]:
        """An event of the side stream."""
        return self._is_done(self._stream)

    def mark_in_turn(self) -> Callable[[], bool]:
        """An event of the current stream."""
        return self._is_done(self._runtime.current_stream())

    def is_capturing(self) -> bool:
        """As the run time says."""
        return self._runtime.is_capturing()

    def _recorded(self, stream: Stream) -> Event:
        event = self._runtime.make_event()
        event.record(stream)
        return event

    def _is_done(self, stream: Stream) -> Callable[[], bool]:
        done: Callable[[], bool] = self._recorded(stream).query
        return done
