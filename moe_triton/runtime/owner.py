"""What every owner of a communicator can ask of it: times, traces, an end."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from moe_triton.core.checks import check_choice, check_flag
from moe_triton.core.flight_file import Flight
from moe_triton.core.metrics import Metrics, metrics_of
from moe_triton.core.traffic import Traffic
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.recorder import Recorder
from moe_triton.runtime.status import recorder_of, status_of

if TYPE_CHECKING:  # in typing since Python 3.11
    from typing_extensions import Self

OPERATORS = ("dispatch", "combine")


class Durations(dict[str, float]):
    """Microseconds by step of a call.

    Attributes:
        traffic: what the call has posted to queues; None where they lead to no peer.
    """

    traffic: Traffic | None = None


class Owner:
    """Holds a communicator, and closes it."""

    _communicator: Communicator
    _closed = True  # until construction has succeeded
    _explicitly_destroy = False

    def durations_us(self, operator: Literal["dispatch", "combine"]) -> Durations:
        """Microseconds that each step of this rank's last dispatch or combine took, and what it posted.

        Raises:
            BufferStateError: it has not run yet.
            ArgumentError: there is no such operator.

        Examples:
            >>> received = buffer.dispatch(x, topk_idx)
            >>> buffer.durations_us("dispatch")["send"] > 0
            True
        """
        check_choice("operator", operator, OPERATORS)
        durations = Durations(self._communicator.durations_us(operator))
        durations.traffic = self.traffic(operator)
        return durations

    def traffic(self, operator: Literal["dispatch", "combine"]) -> Traffic | None:
        """What this rank's last dispatch or combine has posted to queues; None where they lead to no peer.

        On an NPU it waits until that has run.

        Raises:
            BufferStateError: there was no call yet, or the buffer is closed.
            ArgumentError: there is no such operator.

        Examples:
            >>> received = buffer.dispatch(x, topk_idx)
            >>> buffer.traffic("dispatch") is None
            True
        """
        check_choice("operator", operator, OPERATORS)
        memory, backend = self._communicator.memory, self._communicator.backend
        if backend.is_asynchronous and memory.posts:
            backend.synchronize()
        return memory.traffic(operator)

    def measure(self, on: bool = True) -> None:
        """Whether calls from now on note how long each step takes, for `durations_us`.

        The CPU back end always does; on an NPU it costs two events per step.

        Examples:
            >>> buffer.measure()
            >>> received = buffer.dispatch(x, topk_idx)
            >>> steps = buffer.durations_us("dispatch")
        """
        self._communicator.backend.measure(check_flag("on", on))

    def synchronize(self) -> None:
        """Waits for every call of this rank to end, those in graphs too, and raises what went wrong in one.

        The CPU back end's calls have ended when they return, and raise by themselves.

        Raises:
            BufferStateError: the buffer is closed, broken or in use by another thread.
            CommunicationTimeoutError: a rank's data did not come in time. The buffer is then broken.

        Examples:
            >>> received = buffer.dispatch(x, topk_idx)
            >>> buffer.synchronize()
        """
        self._communicator.synchronize()

    def write_trace(self) -> None:
        """Adds what this rank has done since the last time to the trace. `close` does so too.

        Raises:
            BufferStateError: the buffer has no trace, is closed, or is in use by another thread.
            OSError: the file cannot be written.

        Examples:
            >>> sizes = dict(num_max_tokens_per_rank=64, hidden=7168, num_topk=8, num_experts=32)
            >>> traced = EPBuffer(**sizes, trace="trace.json")
            >>> received = traced.dispatch(x, topk_idx)
            >>> traced.write_trace()
        """
        self._communicator.write_trace()

    def flight(self) -> Flight:
        """What the flight recorder has: the last 64 operators, and what a wait that goes on is for.

        From any thread, also while another one hangs in a call. ``as_json`` makes it a file's contents, which
        ``moe-triton flight`` reads (docs/when-it-hangs.md).

        Raises:
            BufferStateError: there is none, for MOE_TRITON_FLIGHT is off.

        Examples:
            >>> received = buffer.dispatch(x, topk_idx)
            >>> run = buffer.flight().runs[-1]
            >>> run.operator, run.tokens, run.ended
            ('dispatch', 16, 'well')
        """
        return self._recorder().flight()

    def status(self) -> str:
        """What this rank does now, in words: in which call, since when, and for whom it waits.

        From any thread, also while another one hangs in a call. ``moe-triton status --group`` says it of all
        ranks of a machine.

        Raises:
            BufferStateError: there is no flight recorder, for MOE_TRITON_FLIGHT is off.

        Examples:
            >>> "in no call for" in buffer.status()
            True
        """
        return status_of([self._recorder()])

    def metrics(self) -> Metrics:
        """Plain numbers of this buffer: rounds, tokens, bytes and waits by peer, time-outs, masks.

        From any thread, as often as wanted: it copies some hundred kilobytes at most, and asks no rank.
        ``moe_triton.metrics.prometheus`` makes text of it (docs/metrics.md).

        Raises:
            BufferStateError: there is no flight recorder, for MOE_TRITON_FLIGHT is off.

        Examples:
            >>> received = buffer.dispatch(x, topk_idx)
            >>> buffer.metrics().rounds["dispatch"] > 0
            True
        """
        return metrics_of(self._recorder().now())

    def _recorder(self) -> Recorder:
        return recorder_of(self._communicator.recorder)

    def close(self) -> None:
        """Gives all memory back. Other calls raise afterwards; closing again does nothing.

        A call that another thread is inside of ends at once in a `BufferStateError`, and `close` waits for
        it. Tensors of the window, as dispatch returns them with "direct", hold what they held, and keep the
        window's memory: it goes with the last of them.

        Examples:
            >>> buffer.close()
            >>> buffer.dispatch(x, topk_idx)
            Traceback (most recent call last):
                ...
            moe_triton.core.errors.BufferStateError: the buffer is closed. Construct a new one.
        """
        self._closed = True
        self._communicator.close()
        self._forget()

    def _forget(self) -> None:
        """Lets go of what calls have left, once the communicator is closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and self._explicitly_destroy:
            warnings.warn(f"{type(self).__name__} was dropped without close()", ResourceWarning, stacklevel=2)
