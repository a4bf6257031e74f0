"""How many rows each expert has got in the last steps, on all ranks of a buffer.

Each rank has its counts written by dispatch, and puts their sums over the last steps into the buffer's store
at an interval. Whoever asks puts together what all ranks have there. Nobody waits for anybody.

Shapes: L layers, P physical experts, E logical ones, W ranks with routed experts.
"""

from __future__ import annotations

import base64
import binascii
import concurrent.futures as futures
import json
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_triton.balance.arguments import (
    MOST_ELEMENTS,
    Ints,
    check_at_least,
    check_at_most,
    check_even,
    check_layer,
)
from moe_triton.balance.placement import Placement, check_placement
from moe_triton.buffer import EPBuffer
from moe_triton.core.checks import check_seconds, check_text, shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError, BufferStateError, ConfigMismatchError
from moe_triton.core.logs import log_of
from moe_triton.core.threads import in_thread

SETTINGS = "num_layers", "window", "interval"
GRACE_S = 5.0  # that a store may take
KEPT = 2  # published sums of a rank: its newest one, and the one before, which slower ranks have as well


@dataclass(frozen=True)
class ExpertLoad:
    """What the experts of all ranks have got.

    Attributes:
        step: the last one that counts, from 1.
        steps: how many count, up to that one.
        physical: (L, P) int64, rows of each physical expert.
    """

    step: int
    steps: int
    physical: torch.Tensor

    def logical(self, placement: Placement) -> torch.Tensor:
        """Rows of each logical expert, (L, E) int64: of all its replicas.

        Args:
            placement: by which the tables of these steps were made.

        Raises:
            ArgumentError: it is of other layers or of another number of physical experts.
        """
        placement = check_placement(placement)
        mine, its = tuple(self.physical.shape), (placement.num_layers, placement.num_replicas)
        if mine != its:
            rule = f"it places {its[1]} experts in {its[0]} layers, and {mine[1]} in {mine[0]} were counted"
            raise ArgumentError("placement", "of other sizes", rule, "Pass the placement in use.")
        rows = torch.zeros(placement.num_layers, placement.num_experts, dtype=torch.int64)
        return rows.scatter_add_(1, placement.phy2log, self.physical)


class ExpertCounts:
    """Counts of one rank, and the sums of all ranks'. Every rank makes one, alike, and ends the same steps.

    Args:
        buffer: whose rows are counted.
        num_layers: L.
        window: steps that a sum is over, up to its own; a multiple of interval. There are fewer at first.
        interval: steps from one sum to the next.
        name: which tells several of one buffer apart: two of one name write over each other's sums.

    Raises:
        ArgumentError: a bad argument.
        BufferStateError: the buffer is closed.

    Examples:
        >>> counts = ExpertCounts(buffer, num_layers=2, window=2, interval=1)
        >>> received = buffer.dispatch(x, topk_idx, cumulative_local_expert_recv_stats=counts.of_layer(0))
        >>> counts.end_step()
    """

    def __init__(
        self,
        buffer: EPBuffer,
        num_layers: int,
        *,
        window: int = 1000,
        interval: int = 100,
        name: str = "counts",
    ) -> None:
        if not isinstance(buffer, EPBuffer):
            rule = "it counts what an EPBuffer receives"
            raise ArgumentError("buffer", shown(buffer), rule, "Pass one.", code=INVALID_ARGUMENT)
        check_even(buffer.config)
        self._interval = check_at_least("interval", interval, 1)
        self._window = check_at_least("window", window, self._interval)
        if self._window % self._interval:
            rule = f"it is a multiple of interval, {self._interval}"
            raise ArgumentError("window", self._window, rule, "Pass one.")
        self._num_layers = check_at_least("num_layers", num_layers, 1)
        config, self._rank = buffer.config, buffer.rank
        self._first, self._ranks = config.num_shared_ranks, config.num_ranks
        self._experts = config.num_local_experts
        self._buffer, self._name = buffer, f"expert counts/{check_text('name', name)}"
        num_local = buffer.num_local_experts  # one on a rank of shared experts, whose rows nobody places
        check_at_most("num_layers", self._num_layers, MOST_ELEMENTS // num_local, "layers")
        most = self._interval * (MOST_ELEMENTS // (num_local * self._num_layers))
        check_at_most("window", self._window, most, f"steps at interval {self._interval}")
        self._rows = torch.zeros(self._num_layers, num_local, dtype=torch.int32, device=buffer.device)
        self._layers = list(self._rows.unbind())
        zeros: Ints = np.zeros((self._num_layers, num_local), dtype=np.int64)
        # What the rows were at the ends of intervals, back to the beginning of the window.
        self._before: deque[Ints] = deque([zeros], maxlen=self._window // self._interval)
        self._published: deque[str] = deque(maxlen=KEPT)
        self._publishing: futures.Future[None] | None = None
        self._reading: futures.Future[ExpertLoad | None] | None = None
        self._newest: ExpertLoad | None = None
        self._has_warned = False
        self._log = log_of("stores", rank=self._rank, num_ranks=self._ranks)
        self.step = 0

    def of_layer(self, layer: int) -> torch.Tensor:
        """Where dispatch adds a layer's counts: (local experts,) int32, on the buffer's device.

        It is ``cumulative_local_expert_recv_stats`` of every dispatch that counts, in graphs too. What counts
        is how it grows, so nobody need clear it, and it may overflow.

        Raises:
            ArgumentError: there is no such layer.
        """
        return self._layers[check_layer(layer, self._num_layers)]

    def end_step(self) -> None:
        """Ends a step. At each interval this rank's sums go to the others, from a thread.

        On an NPU it waits for the device then.
        """
        self.step += 1
        if self.step % self._interval:
            return
        rows: Ints = self._rows.to("cpu", copy=True).numpy().astype(np.int64)
        grown = (rows - self._before[0]) & 0xFFFFFFFF  # in 32 bits, as they are counted
        steps = min(len(self._before) * self._interval, self.step)
        self._before.append(rows)
        if self._publishing is not None:
            if not self._publishing.done():
                return  # the store is slow: the next sums have these rows, too
            if (error := self._publishing.exception()) is not None and not self._has_warned:
                self._has_warned = True
                self._log.warning("sums of rows per expert were not published: %s", error)
        self._published.append(_written(self.step, steps, self._settings, grown))
        text = "\n".join(self._published)
        self._publishing = in_thread(lambda: self._buffer.leave(self._name, text), "counts")

    @property
    def _settings(self) -> list[int]:
        return [self._num_layers, self._window, self._interval]

    def latest(self, timeout_s: float = 5.0) -> ExpertLoad | None:
        """The newest sums that all ranks have published, or those that were found before if they are newer.

        It asks the process that hosts the group's store, about 0.1 ms a rank: call it where a decision is
        due, on one rank if need be. Ranks that ask at different moments may find sums of different steps. A
        question that is not answered in time is waited for again by the next call, which asks no other.

        Args:
            timeout_s: how long the store may take.

        Returns:
            The sums, or None while some rank has published none.

        Raises:
            BufferStateError: the store does not answer: the buffer is closed, or the process is gone.
            ConfigMismatchError: ranks count other layers, or at other intervals.
        """
        try:
            timeout_s = check_seconds("timeout_s", timeout_s)
            if self._reading is None or self._reading.done():  # or a thread of each call would stay
                self._reading = in_thread(self._read, "counts")
            found = self._reading.result(timeout_s)
        except (ConfigMismatchError, BufferStateError):
            raise
        except (futures.TimeoutError, RuntimeError) as error:
            why = str(error).partition("\n")[0] or f"nothing in {timeout_s} s"
            raise BufferStateError(f"the group's store does not answer: {why}") from None
        if found is not None and (self._newest is None or found.step > self._newest.step):
            self._newest = found
        return self._newest

    def _read(self) -> ExpertLoad | None:
        by_step: dict[int, dict[int, tuple[int, Ints]]] = {}
        others: dict[int, list[int]] = {}
        ranks = range(self._first, self._ranks)
        left = self._buffer.left(self._name)
        for rank in ranks:
            for line in left[rank].split("\n")[:KEPT]:
                read = _read(line, self._experts)
                if read is None:
                    continue
                step, steps, settings, rows = read
                if settings != self._settings:
                    others[rank] = settings
                else:
                    by_step.setdefault(step, {})[rank] = steps, rows
        if others:
            mine = dict(zip(SETTINGS, self._settings, strict=True))
            said = [f"rank {rank}: {dict(zip(SETTINGS, each, strict=True))}" for rank, each in others.items()]
            text = "; ".join([f"rank {self._rank}: {mine}", *said])
            raise ConfigMismatchError(f"ranks count differently: {text}. Pass the same on every rank.")
        whole = [step for step, of_rank in by_step.items() if len(of_rank) == len(ranks)]
        if not whole:
            return None
        found = by_step[max(whole)]
        rows = np.concatenate([found[rank][1] for rank in ranks], axis=1)
        return ExpertLoad(max(whole), found[self._first][0], torch.from_numpy(rows))

    def close(self) -> None:
        """Takes this rank's sums back, which stay as long as the group otherwise.

        Raises:
            BufferStateError: the buffer is closed.
        """
        if self._publishing is not None:  # or they would be there again
            futures.wait([self._publishing], GRACE_S)
        self._buffer.leave(self._name, "")


def _written(step: int, steps: int, settings: list[int], rows: Ints) -> str:
    return f"{json.dumps([step, steps, settings])} {base64.b64encode(rows.astype('<i8').tobytes()).decode()}"


def _read(text: str, experts: int) -> tuple[int, int, list[int], Ints] | None:
    """What a rank has published, or None: nothing from a peer is trusted."""
    head, _, body = text.rpartition(" ")
    try:
        said: Any = json.loads(head)
        step, steps, settings = int(said[0]), int(said[1]), [int(each) for each in said[2]]
        rows = np.frombuffer(base64.b64decode(body, validate=True), dtype="<i8").astype(np.int64)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, binascii.Error):
        return None
    is_sound = (
        len(settings) == len(SETTINGS) and 0 < steps <= step and ((rows >= 0) & (rows <= 0xFFFFFFFF)).all()
    )
    if not is_sound or rows.size != settings[0] * experts:
        return None
    return step, steps, settings, rows.reshape(settings[0], experts)
