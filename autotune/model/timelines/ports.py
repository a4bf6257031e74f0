"""`Ports`: what is posted on its way through the network port of the sender, and that of the receiver.

A port sends one message after the other, in the order in which they are posted, and takes those that come in
the order in which they begin. A message passes both at once: it takes as long as through one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.model.constants import Machine
from autotune.model.cost import Messages

_GB_PER_S = 1e3  # bytes in a microsecond


class Ports:
    """Those of the ranks of a walk.

    Args:
        machine: that each of them is, with a network where anything is posted.
        ranks: how many.
    """

    def __init__(self, machine: Machine, ranks: int) -> None:
        self._machine = machine
        self._sent, self._taken = np.zeros(ranks), np.zeros(ranks)  # when each direction is free again

    def deliver(self, messages: Sequence[Messages], ends: np.ndarray) -> np.ndarray:
        """(R,) us at which the last message is there on each rank of a group; -inf where none comes.

        Args:
            messages: of each rank's launch.
            ends: (R,) of the launches' own work.
        """
        begins = np.concatenate(self._begins(messages, ends))
        peers = np.concatenate([each.peers for each in messages])
        took = np.concatenate([self._us(each.num_bytes) for each in messages])
        arrived = np.full(ends.size, -np.inf)
        for rank in np.unique(peers).tolist():
            coming = np.flatnonzero(peers == rank)
            coming = coming[np.argsort(begins[coming], kind="stable")]
            ended = _in_turn(begins[coming], took[coming], self._taken[rank]) + took[coming]
            self._taken[rank] = ended[-1]
            arrived[rank] = ended[-1] + self._machine.rdma_latency_us
        return arrived

    def deliver_alike(self, messages: Sequence[Messages], ends: np.ndarray, coming: np.ndarray) -> np.ndarray:
        """The same on ranks that stand for others, each sent to as the slowest of them sends.

        Args:
            messages, ends: as in `deliver`.
            coming: (R,) bytes that reach each of them.
        """
        all_begins = self._begins(messages, ends)
        if not any(each.size for each in all_begins):
            return np.full(ends.size, -np.inf)
        last = max(self._sent[rank] for rank, each in enumerate(all_begins) if each.size)
        first = min(float(each.min()) for each in all_begins if each.size)
        self._taken = np.maximum(first, self._taken) + self._us(coming)
        return np.asarray(np.maximum(last, self._taken) + self._machine.rdma_latency_us)

    def _begins(self, messages: Sequence[Messages], ends: np.ndarray) -> list[np.ndarray]:
        """When each message begins to leave its rank, whose port is busy until the last one has left."""
        found = []
        for rank, each in enumerate(messages):
            took = self._us(each.num_bytes)
            begins = _in_turn(ends[rank] + each.posted_us, took, self._sent[rank])
            if begins.size:
                self._sent[rank] = begins[-1] + took[-1]
            found.append(begins)
        return found

    def _us(self, num_bytes: np.ndarray) -> np.ndarray:
        return np.asarray(num_bytes / (self._machine.rdma_gb_per_s * _GB_PER_S))


def _in_turn(ready: np.ndarray, took: np.ndarray, free: float) -> np.ndarray:
    """When each begins that is ready at some time and takes so long, behind all those before it."""
    before = np.cumsum(took) - took
    return np.asarray(before + np.maximum(np.maximum.accumulate(ready - before), free))
