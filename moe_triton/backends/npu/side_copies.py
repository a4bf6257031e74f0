"""Copies of the NPU back end: on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_triton.backends.npu.runtime import Event, Runtime, Stream


class NpuSideCopies:
    """See `moe_triton.core.side_copies.SideCopies`. Peers' memory is mapped, so a copy reaches it.

    Args:
        runtime: of the device.
    """

    is_asynchronous = True
    fence: Callable[[], None] | None

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._stream = runtime, runtime.make_stream()
        # Hosts read no words in peers' memory: they leave texts.
        self.fence = None

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return data

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the side stream, asynchronously."""
        self._runtime.copy(to, source, self._stream)

    def copy_in_turn(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the current stream, asynchronously."""
        self._runtime.copy(to, source)

    def copy_elements(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the current stream, asynchronously."""
        self._runtime.copy(to, source)

    def follow(self, stream: Any = None) -> None:
        """The side stream waits for the current one, and for another one."""
        self._stream.wait_event(self._recorded(self._runtime.current_stream()))
        if stream is not None:
            self._stream.wait_event(self._recorded(stream))

    def wait(self) -> None:
        """Waits for an event of the side stream: the others go on."""
        self._recorded(self._stream).synchronize()

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
