"""`Work`: a launch with its placeholders filled. `Cost`: what it takes. `Body`: the function between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from autotune.model.constants import Machine
from autotune.model.traffic import Traffic
from moe_triton.core.errors import MoeTritonError
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Launch, Part, Placeholder, Value


class UnknownWorkError(MoeTritonError, LookupError):
    """The model does not know what a launch has to do: a number, a table or a feature of its call."""


class NoNetworkError(UnknownWorkError):
    """A launch posts to other ranks, and the machine lacks constants of a network, or of who posts."""


@dataclass(frozen=True)
class Messages:
    """What a launch posts to queues, in the order in which a rank's port takes it.

    Attributes:
        peers: (N,) ranks.
        num_bytes: (N,) of each message.
        posted_us: (N,) when each has been posted, from the end of the launch's own work on: posts of its
            cores come before that, those of a processor that its cores ring for after it.
    """

    peers: np.ndarray
    num_bytes: np.ndarray
    posted_us: np.ndarray


@dataclass(frozen=True)
class Cost:
    """What a launch takes, from its first block's begin to its last one's end, without waits for other ranks.

    Attributes:
        parts: microseconds by what took them; their sum is the time.
        read, written: bytes of this device's global memory.
        sent: bytes written to other devices, or read from them.
        detail: by pipe of the slowest core, cycles busy; empty where nothing was replayed.
        look_us: of one look at all that is still missing, where a launch takes what comes as it comes.
        taking_us: of these parts, what is done with what has come.
        is_in_series: nothing is done with it before all of it has come.
        blocks_us: of each of its cores, without what wires and hops take longer; empty where nobody knows.
        posting: numbers of the cores that post to queues.
        messages: that it posts, whose bytes are not among those sent; None if there are none.
    """

    parts: Mapping[str, float]
    read: int = 0
    written: int = 0
    sent: int = 0
    detail: Mapping[str, float] = field(default_factory=dict)
    look_us: float = 0.0
    taking_us: float = 0.0
    is_in_series: bool = False
    blocks_us: tuple[float, ...] = ()
    posting: tuple[int, ...] = ()
    messages: Messages | None = None

    @property
    def leaving(self) -> int:
        """Bytes that leave this device: written to others, read from them, or posted."""
        return self.sent + (0 if self.messages is None else int(self.messages.num_bytes.sum()))

    @property
    def others_us(self) -> float:
        """Microseconds until the cores that post nothing have ended; all of it, where there are none."""
        others = [us for block, us in enumerate(self.blocks_us) if block not in self.posting]
        return max(others, default=self.us) if self.posting else self.us

    def after_last_us(self, coming_us: float) -> float:
        """Microseconds from the arrival of the last thing that a launch waits for to the launch's end.

        Of a launch that takes what comes as it comes, at an even rate: it looks at all that is missing and
        takes what it finds, round after round. Where that keeps up, a round lasts ``look / (1 - rate)``, if
        they get as far: each lasts longer than the one before by a look at most. The last thing comes right
        behind its look in the worst case, so that this round is ended, and another one. Where it does not
        keep up, the rest is left. Never more than a look and all that there is to take.

        Args:
            coming_us: in which everything came.
        """
        if not self.look_us:
            return 0.0
        if self.is_in_series:
            return self.look_us + self.taking_us
        left = max(0.0, self.taking_us - coming_us)
        turn = math.sqrt(2 * max(0.0, coming_us) * self.look_us)
        if coming_us > self.taking_us:
            turn = min(turn, self.look_us / (1 - self.taking_us / coming_us))
        return min(self.look_us + self.taking_us, left + 2 * max(turn, self.look_us))

    @property
    def us(self) -> float:
        """Microseconds."""
        return sum(self.parts.values())

    def after_sync(self, sync_us: float) -> Cost:
        """The same for a phase that begins with a SyncAll."""
        return replace(self, parts={**self.parts, "barrier": self.parts.get("barrier", 0.0) + sync_us})

    @property
    def bound(self) -> str:
        """What takes the largest part of it."""
        return max(self.parts, key=lambda name: self.parts[name], default="nothing")


@dataclass(frozen=True)
class Table:
    """What the model knows of memory that an argument points to.

    Attributes:
        values: the integers from the argument's address on; None where they are not known, such as rows.
    """

    values: np.ndarray | None = None


class Run(Protocol):
    """A run of a plan's Ascend C kernels on some ranks: `autotune.model.kernel_costs.counted.run.PlanRun`."""

    rings: bool

    def ran(self, index: int) -> Sequence[Any]:
        """What a launch did on each of them."""

    def made(self, index: int, number: int) -> Mapping[str, np.ndarray]:
        """Tables that a launch finds, made by those before it."""

    def cores(self, index: int) -> int:
        """The number of cores of the launch on the device that a launch is a phase of."""


@dataclass(frozen=True)
class Place:
    """Where in a plan a launch is.

    Attributes:
        run: of the plan.
        index: of the launch in it.
        number: of the rank, among those of the run.
    """

    run: Run
    index: int
    number: int


@dataclass(frozen=True)
class Work:
    """One launch with its placeholders filled.

    Attributes:
        kernel: that is launched.
        blocks: on how many cores.
        arguments: a number or a table for each argument of the kernel; a tuple of numbers for a region.
        traffic: what this rank's call moves.
        place: where in a plan it is, for what depends on the launches before it.
    """

    kernel: TritonKernel | AscendCKernel
    blocks: int
    arguments: Mapping[str, int | tuple[int, ...] | Table]
    traffic: Traffic
    place: Place | None = None

    def number(self, name: str) -> int:
        """The value of an argument that is a number."""
        value = self.arguments[name]
        assert isinstance(value, int), name
        return value

    def has(self, name: str) -> bool:
        """Whether a pointer is given."""
        return isinstance(self.arguments[name], Table)


KernelCost = Callable[[Work, Machine], Cost]
"""The time of one launch on a machine, from its blocks and what it has to move."""


def work_of(launch: Launch, traffic: Traffic, place: Place | None = None) -> Work:
    """A launch of a plan with the numbers and tables of one rank's call.

    Args:
        launch: of a plan.
        traffic: its `Traffic.numbers` and `Traffic.tables` fill the placeholders.
        place: of the launch; what the launches before it have made fills the other placeholders.
    """
    made = {} if place is None else place.run.made(place.index, place.number)

    def filled(value: Value, is_pointer: bool) -> int | tuple[int, ...] | Table:
        if isinstance(value, tuple | int):
            return value
        if is_pointer:
            return Table(_from(traffic.tables.get(value.name, made.get(value.name)), value.offset))
        number = traffic.numbers[value.name]
        return value.of(number) if isinstance(value, Part) else number

    pairs = zip(launch.kernel.args, launch.values, strict=True)
    arguments = {
        arg.name: filled(value, isinstance(value, Placeholder) and arg.is_pointer) for arg, value in pairs
    }
    return Work(launch.kernel, launch.blocks, arguments, traffic, place)


def _from(values: np.ndarray | None, offset: int) -> np.ndarray | None:
    """The integers from a byte on."""
    if values is None or offset % values.itemsize or not 0 <= offset // values.itemsize <= values.size:
        return None
    return values[offset // values.itemsize :]
