"""When what peers send is there: for ranks that are alike, or for all ranks of a group at once.

A rank's data is there when the sender has sent it and the last hop and the poll that sees it have passed,
but not before all bytes that reach the receiver have come through its link. What is posted has times of its
own: see `autotune.model.timelines.ports`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.model.bodies.combines import sent_in_part, tokens_of_part
from autotune.model.constants import Machine
from autotune.model.cost import Cost, Messages, Table, Work
from autotune.model.timelines.ports import Ports
from autotune.model.timelines.signals import Channel, Moment, UnknownLaunchError, signals_of
from autotune.model.topology import NETWORK, hop_us
from autotune.model.traffic import Traffic
from moe_triton.core.plan import Launch
from moe_triton.layout.call_word import operator_of


@dataclass(frozen=True)
class _Told:
    """One launch's signal, on all ranks.

    Attributes:
        moment: when it is told.
        begin, end: (R,) us of the launch.
        opens: (R,) us at which the receiver's link begins to take the launch's bytes.
        link_us: (R,) how long they take there.
        works: the launch of each rank.
    """

    moment: Moment
    begin: np.ndarray
    end: np.ndarray
    opens: np.ndarray
    link_us: np.ndarray
    works: Sequence[Work]


class WalkedRanks:
    """The ranks of a walk: all of a group, or some that stand for ranks that are like them.

    Args:
        traffics: what each rank of the walk sends and receives.
        machine: that each of them is.
        stands_for_others: whether they are not all. Then each is sent to as the slowest of them sends, and
            from as far away as the farthest rank.
    """

    def __init__(self, traffics: Sequence[Traffic], machine: Machine, stands_for_others: bool) -> None:
        ranks = [traffic.rank for traffic in traffics]
        self.is_alike = stands_for_others
        if not self.is_alike and ranks != list(range(traffics[0].config.num_ranks)):
            raise ValueError(f"the ranks of a group are walked all, in order, not {ranks}")
        self.traffics, self.machine = traffics, machine
        self._told: dict[Channel, _Told] = {}
        self._link_free = np.zeros(len(traffics))
        self._arrived: dict[Channel, np.ndarray] = {}  # (R,) us at which the last message is there
        self._ports = Ports(machine, len(traffics))
        # To other servers go messages only.
        tiers = {tier for traffic in traffics for tier in traffic.tiers}
        hops = {tier: 0.0 if tier == NETWORK else hop_us(machine, tier) for tier in tiers}
        # (sender, receiver); of those that stand for others, from each to them
        self._hops = np.array([[hops[tier] for tier in traffic.tiers] for traffic in traffics])

    def send(
        self, launch: Launch, works: Sequence[Work], costs: Sequence[Cost], begin: np.ndarray, end: np.ndarray
    ) -> None:
        """Notes what a launch of all ranks sends and tells."""
        sent = np.array([float(cost.sent) for cost in costs])
        link_us = self._bytes_in(launch, sent) / self.machine.remote_write_gb_per_s / 1e3
        opens = np.maximum(begin.min(), self._link_free)
        self._link_free = np.where(link_us > 0, opens + link_us, self._link_free)
        signals = signals_of(launch)
        messages = [cost.messages for cost in costs]
        if any(message is not None for message in messages):
            arrived = self._deliver(works, [message for message in messages if message is not None], end)
            for signal in signals:
                if signal.moment == "messages":
                    before = self._arrived.get(signal.channel, -np.inf)
                    self._arrived[signal.channel] = np.maximum(before, arrived)
        for signal in signals:
            if signal.moment == "messages":
                continue
            self._told[signal.channel] = _Told(signal.moment, begin, end, opens, link_us, works)

    def _deliver(self, works: Sequence[Work], messages: Sequence[Messages], end: np.ndarray) -> np.ndarray:
        """(R,) us at which the last message of a launch of all ranks is there on each of them."""
        if not self.is_alike:
            return self._ports.deliver(messages, end)
        posted = np.array([float(each.num_bytes.sum()) for each in messages])
        peers = [np.unique(each.peers) for each in messages]
        pairs = list(zip(self.traffics, peers, strict=True))
        sent = np.array([traffic.sent[to].sum() for traffic, to in pairs])
        received = np.array([traffic.received[to].sum() for traffic, to in pairs])
        is_dispatch = "call" in works[0].arguments and operator_of(works[0].number("call")) == "dispatch"
        leaving, entering = (sent, received) if is_dispatch else (received, sent)
        coming = entering * (posted.sum() / leaving.sum()) if leaving.sum() else posted
        return self._ports.deliver_alike(messages, end, coming)

    def _bytes_in(self, launch: Launch, sent: np.ndarray) -> np.ndarray:
        """(R,) bytes that reach each rank, where each sends so many to other ranks in all."""
        if not sent.any():
            return sent
        names = {arg.name for arg in launch.kernel.args}
        if "rows" not in names:  # flags and counts: as much to each
            leaving = entering = self._remote
        elif "topk_idx" in names:
            leaving, entering = self._dispatched, self._combined
        else:
            leaving, entering = self._combined, self._dispatched
        per_row = sent / np.maximum(1, leaving.sum(axis=1))
        arriving: np.ndarray = per_row.max() * entering.sum(axis=1) if self.is_alike else per_row @ leaving
        return arriving

    @cached_property
    def _remote(self) -> np.ndarray:
        """(R, EP) 1.0 for every other rank whose memory is mapped."""
        near = [[float(tier not in ("self", NETWORK)) for tier in traffic.tiers] for traffic in self.traffics]
        return np.array(near)

    @cached_property
    def _dispatched(self) -> np.ndarray:
        """(R, EP) rows that a dispatch sends to each other rank."""
        rows: np.ndarray = self._remote * [traffic.sent for traffic in self.traffics]
        return rows

    @cached_property
    def _combined(self) -> np.ndarray:
        """(R, EP) rows that a combine sends back to each other rank."""
        rows: np.ndarray = self._remote * [traffic.received for traffic in self.traffics]
        return rows

    def arrivals(self, launch: Launch, channel: Channel, works: Sequence[Work]) -> np.ndarray:
        """(R,) us at which all that a launch waits for is there.

        Raises:
            UnknownLaunchError: nothing before it in the plan tells anything over its channel.
        """
        told, arrived = self._told.get(channel), self._arrived.get(channel)
        if told is None and arrived is None:
            raise UnknownLaunchError(launch, "nothing before it in the plan sends what it waits for")
        there = np.full(len(self.traffics), -np.inf) if arrived is None else arrived
        if told is not None:
            there = np.maximum(there, self._seen(told, works))
        return np.asarray(there + self.machine.flag_latency_us)

    def _seen(self, told: _Told, works: Sequence[Work]) -> np.ndarray:
        """(R,) us at which what a launch writes to all ranks is there."""
        if told.moment == "rows":
            share = _shares_sent(told.works, works)
            took = (told.end - told.begin)[:, None]
            seen = np.where(share >= 0, told.begin[:, None] + share * took + self._hops, -np.inf)
            link = told.opens + share.max(axis=0 if not self.is_alike else None) * told.link_us
        else:
            at = told.end if told.moment == "end" else told.begin
            seen = at[:, None] + self._hops
            link = told.opens + told.link_us if told.moment == "end" else np.full(len(at), -np.inf)
        last = seen.max(axis=None if self.is_alike else 0)
        return np.asarray(np.maximum(last, link))


def _shares_sent(senders: Sequence[Work], waits: Sequence[Work]) -> np.ndarray:
    """(R, EP) the part of its rows that a sender has sent with the last one that a receiver waits for.

    -1 where there is none.

    Blocks send even shares of the rows, in their order (``combine_send.h``); of a part, what is not sent has
    been sent before.
    """
    first, count = np.array([_awaited_tokens(wait) for wait in waits]).T
    end = first + count
    shares = np.full((len(senders), len(senders[0].traffic.tiers)), -1.0)
    for sender, found in zip(senders, shares, strict=True):
        origins = sender.arguments["origins"]
        assert isinstance(origins, Table)
        assert origins.values is not None
        source, token = origins.values[: 3 * sender.traffic.num_rows].reshape(-1, 3).T[:2]
        wait = source if len(waits) == len(found) else np.zeros_like(source)
        is_sent = sent_in_part(sender)
        is_awaited = is_sent & (first[wait] <= token) & (token < end[wait])
        np.maximum.at(found, source[is_awaited], _progress(is_sent, sender.blocks)[is_awaited])
    return shares


def _awaited_tokens(wait: Work) -> tuple[int, int]:
    """First token and number of those that a launch waits for."""
    if "num_parts" in wait.arguments:
        return tokens_of_part(wait)
    return wait.number("first_token"), wait.number("num_tokens")


def _progress(is_sent: np.ndarray, blocks: int) -> np.ndarray:
    """(rows,) the part of the longest block's rows that is sent when a row is."""
    bounds = len(is_sent) * np.arange(blocks + 1) // blocks
    sent = np.r_[0, is_sent.cumsum()]
    each = sent[bounds]
    block = np.searchsorted(bounds, np.arange(len(is_sent)), side="right") - 1
    return np.asarray((sent[1:] - each[block]) / np.diff(each).max(initial=1))
