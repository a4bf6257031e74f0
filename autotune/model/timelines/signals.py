"""Which launches tell other ranks something, and which wait for it: by kernel, as their sources do.

What is told travels over a channel: the entries or slots of a window that one kernel writes and the other
polls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_triton.core import ascendc
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Hole, Launch, Value
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_END, BLOCKS_RETURN, BLOCKS_SEND, BLOCKS_WAIT
from moe_triton.schemes.common.ascendc import DISPATCH_OFFSETS, EXCHANGE_SEND
from moe_triton.schemes.direct.ascendc import COUNTS_SEND, DIRECT_SEND
from moe_triton.schemes.fullmesh.ascendc import (
    COMBINE_POST,
    COMBINE_READY,
    COMBINE_SEND,
    COMBINE_WAIT,
    DISPATCH_POST,
    DISPATCH_RECEIVE,
    DISPATCH_ROWS,
    DISPATCH_SEND,
    DISPATCH_TAKE,
    INBAND_COLLECT,
    INBAND_RECEIVE,
    INBAND_SEND,
)

Moment = Literal["begin", "end", "rows", "messages"]
"""When a launch tells its peers: as it begins, when it has ended, with each row, or with what it posts."""

Channel = tuple[Value, ...]


@dataclass(frozen=True)
class Signal:
    """What a launch tells every peer.

    Attributes:
        channel: over which.
        moment: when.
    """

    channel: Channel
    moment: Moment


class UnknownLaunchError(LookupError):
    """The timeline does not know what a launch tells its peers, or what it waits for."""

    def __init__(self, launch: Launch, why: str) -> None:
        super().__init__(f"step {launch.step!r}, kernel {launch.kernel.name}: {why}")
        self.launch = launch


SENDERS: dict[str, tuple[tuple[str, Moment, str], ...]] = {
    # Per signal: the argument that names the channel; when; the argument that is 0 where there is none.
    DISPATCH_SEND.name: (("status", "begin", "post_status"), ("slots", "end", "")),
    INBAND_SEND.name: (("status", "begin", "post_status"), ("slots", "end", "")),
    COUNTS_SEND.name: (("status", "end", ""),),
    COMBINE_SEND.name: (("status", "rows", "flag_rows"),),
    ascendc.POST_STATUS.name: (("status", "end", ""), ("status", "messages", "out_offset")),
    DISPATCH_POST.name: (("status", "messages", ""),),
    COMBINE_POST.name: (("status", "messages", "flag_rows"),),
    BLOCKS_SEND.name: (("peer_blocks", "messages", "out_offset"),),
    BLOCKS_RETURN.name: (("peer_blocks", "messages", "out_offset"),),
    BLOCKS_END.name: (("peer_blocks", "end", ""),),
    DIRECT_SEND.name: (),
    DISPATCH_OFFSETS.name: (),
    EXCHANGE_SEND.name: (),
}
POSTERS = frozenset(
    kernel.name for kernel in (ascendc.POST_STATUS, DISPATCH_POST, COMBINE_POST, BLOCKS_SEND, BLOCKS_RETURN)
)
"""Their deadline is for room in a queue, of which there is enough."""
WAITERS = {
    ascendc.DISPATCH_WAIT.name: "status",
    COMBINE_WAIT.name: "status",
    COMBINE_READY.name: "status",
    DISPATCH_ROWS.name: "slots",
    DISPATCH_RECEIVE.name: "slots",
    DISPATCH_TAKE.name: "slots",
    INBAND_RECEIVE.name: "slots",
    INBAND_COLLECT.name: "slots",
    BLOCKS_WAIT.name: "peer_blocks",
}


def signals_of(launch: Launch) -> tuple[Signal, ...]:
    """What a launch tells its peers.

    Raises:
        UnknownLaunchError: an Ascend C kernel that is in no table here, or one for another group of ranks.
    """
    if isinstance(launch.kernel, TritonKernel) or launch.kernel.name in WAITERS:
        return ()
    if launch.kernel.name not in SENDERS:
        raise UnknownLaunchError(launch, "nobody has said what it tells its peers")
    values = _values(launch)
    return tuple(
        Signal(_channel(launch, values, "peers", argument), moment)
        for argument, moment, condition in SENDERS[launch.kernel.name]
        if not condition or values[condition]
    )


def awaited_by(launch: Launch) -> Channel | None:
    """The channel that a launch waits for; None if it waits for nobody.

    Raises:
        UnknownLaunchError: it has a deadline, so it waits, but it is in no table here.
    """
    values = _values(launch)
    if launch.kernel is DISPATCH_TAKE and values["part"] != int(str(values["num_parts"])) - 1:
        return None
    if launch.kernel.name in WAITERS:
        return _channel(launch, values, "window", WAITERS[launch.kernel.name])
    if "timeout_us" in values and launch.kernel.name not in POSTERS:
        raise UnknownLaunchError(launch, "it waits, and nobody has said for what")
    return None


def _channel(launch: Launch, values: dict[str, Value], memory: str, argument: str) -> Channel:
    """The window by the prefix of its holes, its zone, and the place in it."""
    hole = values[memory]
    if not isinstance(hole, Hole) or hole.name != memory:
        name = hole.name if isinstance(hole, Hole) else hole
        raise UnknownLaunchError(launch, f"its peers are another group's ({name}), whose times are not known")
    return values["zone"], values[argument]


def _values(launch: Launch) -> dict[str, Value]:
    return {arg.name: value for arg, value in zip(launch.kernel.args, launch.values, strict=True)}
