"""Whom a wait is for: read from memory while it goes on, or from what it left behind when it gave up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from moe_triton.core.ascendc import DISPATCH_WAIT, POST_STATUS, REPORT_TIMEOUT
from moe_triton.core.plan import Launch, Placeholder
from moe_triton.core.region import MAX_INT32, Region, region_in
from moe_triton.layout import FLAG_BITS
from moe_triton.schemes.common.ascendc import TABLES_SEND
from moe_triton.schemes.rank_context import Memory, RankContext


@dataclass(frozen=True)
class TimedOut:
    """A wait whose deadline passed.

    Attributes:
        context: where it ran.
        launch: the wait.
        zone: of its operator.
        memory: what its plan's placeholders held, by their names.
        report: (blocks, words) int32 on the host: code, the first number concerned, how many from there on.
    """

    context: RankContext
    launch: Launch
    zone: int
    memory: Memory
    report: torch.Tensor

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Gives the launch's arguments by name: placeholders, numbers and regions."""
        return arguments_of(self.launch)

    @property
    def timeout_us(self) -> int:
        """How long it waited: a relay less long than others."""
        timeout_us: int = self.arguments["timeout_us"]
        return timeout_us

    def tensor(self, argument: str) -> torch.Tensor:
        """What an argument's placeholder held: all of it, or from where the argument points on, flat."""
        return held_by(self.memory, self.arguments[argument])


class Finder(NamedTuple):
    """How the ranks that a wait is for are found.

    Attributes:
        timed_out: those whose flags did not come.
        pending: called with the rank's context, the launch's arguments (addresses, numbers and regions) and
            the numbers that a block waits for; gives the rank of each flag that is not there yet.
        words: (rank, call word) of all that has come, where it does not lie in the entries of ``status``.
        said: what an error says of these ranks, before the time.
        told: by relay, those of these ranks that it says are lost; None where nobody relays.
        refused: what an error says of what came and was refused; None for a row that names no place.
        rank_of: called with a number that a report has; gives the rank that it stands for. None where it is
            that of an entry for a rank of the group, or stands for none.
    """

    timed_out: Callable[[TimedOut], list[int]]
    pending: Callable[[RankContext, dict[str, Any], range], Iterator[int]]
    words: Callable[[TimedOut], Iterator[tuple[int, int]]] | None = None
    said: str = "their flags did not come within"
    told: Callable[[TimedOut], Mapping[int, Sequence[int]]] | None = None
    refused: Callable[[TimedOut], str] | None = None
    rank_of: Callable[[TimedOut, int], int] | None = None


def held_by(memory: Memory, placeholder: Placeholder) -> torch.Tensor:
    """What a placeholder points at: all of it, or from its offset on, flat."""
    held = memory[placeholder.name]
    assert isinstance(held, torch.Tensor)
    return held.view(-1)[placeholder.offset // held.element_size() :] if placeholder.offset else held


def arguments_of(launch: Launch) -> dict[str, Any]:
    """A launch's arguments by name: placeholders, numbers and regions."""
    pairs = zip(launch.kernel.args, launch.values, strict=True)
    return {
        arg.name: region_in(arg.type, value) if isinstance(value, tuple) else value for arg, value in pairs
    }


def int32_at(address: int, index: int = 0) -> int:
    """A number in memory of this process."""
    return ctypes.c_int32.from_address(address + 4 * index).value


def next_number(before: int) -> int:
    """The number of the round after one, never 0, as fresh memory is (``RoundNumber`` in flags.h)."""
    return before % MAX_INT32 + 1


def round_of(wait: TimedOut) -> int:
    """The number of the round that a wait belonged to."""
    return next_number(int(wait.tensor("numbers").view(-1)[wait.zone]))


def running_round(arguments: Mapping[str, Any]) -> int:
    """The number of the round that a wait belongs to, from its launch's arguments."""
    return next_number(int32_at(arguments["numbers"], arguments["zone"]))


def counts_of(arguments: Mapping[str, Any], memory: Memory) -> torch.Tensor:
    """(experts, ranks) what came with the flags that a wait for entries saw, -1 where none came."""
    return held_by(memory, arguments["recv_counts"]).view(arguments["num_local_experts"], -1)


def entries_timed_out(wait: TimedOut) -> list[int]:
    """Ranks of the entries without a count."""
    counts = counts_of(wait.arguments, wait.memory)
    return [int(rank) for rank in (counts < 0).any(dim=0).nonzero().flatten()]


def _entries_pending(context: RankContext, arguments: dict[str, Any], places: range) -> Iterator[int]:
    """In the order in which they lie in the window: by source, then by expert."""
    status: Region = arguments["status"]
    for place in places:
        source, expert = divmod(place, status.extent("expert"))
        offset = status.offset(zone=arguments["zone"], expert=expert, source=source)
        if int32_at(arguments["window"] + offset) != FLAG_BITS:
            yield source


def _posts_timed_out(wait: TimedOut) -> list[int]:
    """A block that has waited in vain for room in a queue posts no more."""
    return sorted({first for code, first in wait.report[:, :2].tolist() if code == REPORT_TIMEOUT})


def _posts_pending(context: RankContext, arguments: dict[str, Any], ranks: range) -> Iterator[int]:
    """Where a block waits for room."""
    return iter(ranks)


POSTS = Finder(_posts_timed_out, _posts_pending, said="the queues to them stayed full for")
"""Finds the ranks that a kernel that posts waits for: those whose queues have no room."""
ENTRY_FINDERS = {
    DISPATCH_WAIT.name: Finder(entries_timed_out, _entries_pending),
    POST_STATUS.name: POSTS,
    TABLES_SEND.name: POSTS,
}
