"""When what peers send is there: for ranks that are alike, or for all ranks of a group at once.

What a launch waits for, and which launches send it, is what a run of the kernels says
(`autotune.model.kernel_costs.counted.run`). It is there when its sender has got as far and the last hop and
the
poll that sees it have passed, but not before the bytes that reach the receiver until then have come through
its link.

What is posted has times of its own, on its way through the network port of the sender, and that of the
receiver (`Ports`). A port sends one message after the other, in the order in which they are posted, and takes
those that come in the order in which they begin. A message passes both at once: it takes as long as through
one of them, a constant and its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.model.constants import Machine
from autotune.model.cost import Cost, Messages
from autotune.model.kernel_costs import movement
from autotune.model.kernel_costs.counted.run import PlanRun
from autotune.model.topology import NETWORK, hop_us
from autotune.model.traffic import Traffic


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

    def deliver_alike(
        self, messages: Sequence[Messages], ends: np.ndarray, coming_us: np.ndarray
    ) -> np.ndarray:
        """The same on ranks that stand for others, each sent to as the slowest of them sends.

        Args:
            messages, ends: as in `deliver`.
            coming_us: (R,) in which what reaches each of them passes its port.
        """
        all_begins = self._begins(messages, ends)
        if not any(each.size for each in all_begins):
            return np.full(ends.size, -np.inf)
        last = max(self._sent[rank] for rank, each in enumerate(all_begins) if each.size)
        first = min(float(each.min()) for each in all_begins if each.size)
        self._taken = np.maximum(first, self._taken) + coming_us
        return np.asarray(np.maximum(last, self._taken) + self._machine.rdma_latency_us)

    def _begins(self, messages: Sequence[Messages], ends: np.ndarray) -> list[np.ndarray]:
        """When each message begins to leave its rank, whose port is busy until the last one has left."""
        begins_by_rank = []
        for rank, each in enumerate(messages):
            took = self._us(each.num_bytes)
            begins = _in_turn(ends[rank] + each.posted_us, took, self._sent[rank])
            if begins.size:
                self._sent[rank] = begins[-1] + took[-1]
            begins_by_rank.append(begins)
        return begins_by_rank

    def _us(self, num_bytes: np.ndarray) -> np.ndarray:
        return movement.rdma_us(self._machine, num_bytes.astype(float))


def _in_turn(ready: np.ndarray, took: np.ndarray, free: float) -> np.ndarray:
    """When each begins that is ready at some time and takes so long, behind all those before it."""
    before = np.cumsum(took) - took
    return np.asarray(before + np.maximum(np.maximum.accumulate(ready - before), free))


@dataclass(frozen=True)
class _Sent:
    """One launch, on all ranks: (R,) us.

    Attributes:
        begin, took: of the launch.
        opens: when the receiver's link begins to take the launch's bytes.
        link: how long they take there.
        arrived: when the last message that is posted is there; -inf where none comes.
    """

    begin: np.ndarray
    took: np.ndarray
    opens: np.ndarray
    link: np.ndarray
    arrived: np.ndarray


class WalkedRanks:
    """The ranks of a walk: all of a group, or some that stand for ranks that are like them.

    Args:
        run: of the plan, on these ranks.
        traffics: what each of them sends and receives.
        machine: that each of them is.
        stands_for_others: whether they are not all. Then each of the others sends as the slowest of them.
    """

    def __init__(
        self, run: PlanRun, traffics: Sequence[Traffic], machine: Machine, stands_for_others: bool
    ) -> None:
        ranks = [traffic.rank for traffic in traffics]
        self._is_alike = stands_for_others
        if not self._is_alike and ranks != list(range(traffics[0].config.num_ranks)):
            raise ValueError(f"the ranks of a group are walked all, in order, not {ranks}")
        self.run, self.traffics, self.machine = run, traffics, machine
        self._sent: list[_Sent] = []
        self._link_free = np.zeros(len(traffics))
        self._ports = Ports(machine, len(traffics))
        self._number = np.full(traffics[0].config.num_ranks, -1)
        self._number[ranks] = np.arange(len(ranks))
        # To other servers go messages only.
        tiers = {tier for traffic in traffics for tier in traffic.tiers}
        hops = {tier: 0.0 if tier == NETWORK else hop_us(machine, tier) for tier in tiers}
        self._hops = np.array([[hops[tier] for tier in traffic.tiers] for traffic in traffics])

    def send(self, costs: Sequence[Cost], begin: np.ndarray, end: np.ndarray) -> None:
        """Notes what the next launch of all ranks sends."""
        ran = self.run.ran(len(self._sent))
        # What a Triton kernel sends it reads from other ranks: that comes here.
        coming = [each.written for each in ran] or [cost.sent for cost in costs]
        link = np.array([movement.wire(self.machine, num_bytes) for num_bytes in coming])
        opens = np.maximum(begin.min(), self._link_free)
        self._link_free = np.where(link > 0, opens + link, self._link_free)
        arrived = np.full(len(costs), -np.inf)
        messages = [cost.messages for cost in costs if cost.messages is not None]
        if messages and self._is_alike:
            coming_us = [movement.rdma_us(self.machine, float(each.posted), each.messages) for each in ran]
            arrived = self._ports.deliver_alike(messages, end, np.array(coming_us))
        elif messages:
            arrived = self._ports.deliver(messages, end)
        self._sent.append(_Sent(begin, end - begin, opens, link, arrived))

    def arrivals(self) -> np.ndarray | None:
        """(R,) us at which all that the next launch waits for is there; -inf where nothing has to come.

        None if it waits for nobody on any rank.
        """
        index = len(self._sent)
        there = np.array([self._there(index, number) for number in range(len(self.traffics))])
        return None if np.isneginf(there).all() else there + self.machine.flag_latency_us

    def _there(self, index: int, number: int) -> float:
        awaited = self.run.awaited(index, number)
        last = -np.inf
        for launch in np.unique(awaited.launch).tolist():
            sent, here = self._sent[launch], awaited.launch == launch
            if awaited.posted[here].any():
                last = max(last, float(sent.arrived[number]))
            written = here & ~awaited.posted
            share, ranks = awaited.share[written], awaited.rank[written]
            if not share.size:
                continue
            senders = self._number[ranks]
            at = sent.begin[senders] + share * sent.took[senders]
            slowest = (sent.begin + share[:, None] * sent.took).max(axis=1)
            seen = np.where(senders >= 0, at, slowest) + self._hops[number, ranks]
            last = max(last, float(seen.max()), float(sent.opens[number] + share.max() * sent.link[number]))
        return last
