"""A plan: the launches of one operator, in order, with placeholders that a call fills.

Nothing in a plan depends on data, so it is built once, handed to a back end once, and can be printed,
costed and compared without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from moe_triton.core.kernel import AscendCKernel, FusedKernel, TritonKernel, fused_kernel

Stream = Literal["compute", "communication"]


BEGINNING = frozenset({"ask", "ring", "round", "count", "entries"})
"""Phases that a round begins with."""
ENDING = frozenset({"fill", "fill_ahead", "place", "round"})
"""Phases that a round ends with."""
BEHIND = frozenset({"local_counts"})
"""Phases that come when the last round of a call has ended."""
NEXT = "next_"
"""Before the names of placeholders that stand for what the round behind this one binds."""
OF_ROUND = frozenset(
    {
        *("x", "topk_idx", "topk_weights", "mask", "given_ids", "num_tokens", "num_ids"),
        *("first_token", "expand_idx", "send_counts", "results_idx"),
    }
)
"""Placeholders of what sends a round's rows, which each round fills anew."""


@dataclass(frozen=True)
class Placeholder:
    """What a call fills in: a tensor's address plus ``offset`` bytes, or an integer."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Part(Placeholder):
    """The begin or the size of one of several parts of a number that a call brings.

    Attributes:
        index: of the part.
        parts: number of parts; their sizes differ by one at most.
        is_count: the size, not the begin.
    """

    index: int = 0
    parts: int = 1
    is_count: bool = False

    def of(self, total: int) -> int:
        """The begin or size, from the call's number."""
        first = total * self.index // self.parts
        return total * (self.index + 1) // self.parts - first if self.is_count else first


Value = Placeholder | int | tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel on one stream, or a phase of one.

    Attributes:
        step: what it does in the operator, for traces and errors.
        kernel: what to launch.
        values: one per argument of the kernel; a tuple where the argument is a region.
        blocks: programs (Triton) or blocks (Ascend C).
        stream: where it runs.
        alongside: it does not depend on the launch right before it, which is on the other stream, and may run
            at the same time. Otherwise a launch waits for all launches before it.
        joined: a phase of the launch before it: the same blocks go on with it (`FusedKernel`).
        on_first: a phase on the first blocks of a split launch, beside those on the blocks behind.
        fused: of the first of several phases the kernel that has them all.
    """

    step: str
    kernel: TritonKernel | AscendCKernel
    values: tuple[Value, ...]
    blocks: int
    stream: Stream
    alongside: bool = False
    joined: bool = False
    on_first: bool = False
    fused: FusedKernel | None = None


Phases = Sequence[Launch]
"""Launches that are one on the device: the first, and those that are joined to it."""


def joined(phases: Phases, kernels: Sequence[FusedKernel]) -> list[Launch]:
    """Phases of one launch, from launches of their own: the same blocks do one after the other.

    Args:
        phases: of Ascend C, in order.
        kernels: among which the first that has them all is launched.

    Raises:
        ValueError: no kernel has these phases, or they differ in blocks or stream.
    """
    first, *others = phases
    if others:
        first = replace(first, fused=_fused(phases, kernels)[0])
    blocks = {(phase.stream, phase.on_first, phase.blocks) for phase in phases}
    if len(blocks) != len({phase.on_first for phase in phases}):
        raise ValueError(f"phases of one launch differ in blocks or stream: {[p.step for p in phases]}")
    return [first, *(replace(other, joined=True) for other in others)]


def _fused(phases: Phases, kernels: Sequence[FusedKernel]) -> tuple[FusedKernel, int]:
    return fused_kernel(kernels, list(map(attrgetter("kernel"), phases)))


def split(phases: Phases, first_blocks: int, kernels: Sequence[FusedKernel]) -> list[Launch]:
    """Phases of one launch, from launches of their own: so many blocks, the first ones, do some of them, the
    others the rest at the same time.

    Args:
        phases: see `joined`.
        first_blocks: how many.
        kernels: see `joined`.

    Raises:
        ValueError: no kernel has these phases, or none of them is for other blocks; or no block is left.
    """
    kernel, mask = _fused(phases, kernels)
    others = phases[0].blocks - first_blocks
    is_first = [number in kernel.on_first for number in _running(kernel, mask)]
    if len(set(is_first)) != 2 or is_first[0] or min(first_blocks, others) < 1:
        raise ValueError(f"no split of {phases[0].blocks} blocks: {[phase.step for phase in phases]}")
    blocks = {True: first_blocks, False: others}
    parts = zip(phases, is_first, strict=True)
    return joined([replace(phase, blocks=blocks[first], on_first=first) for phase, first in parts], kernels)


def _running(kernel: FusedKernel, mask: int) -> list[int]:
    """Numbers of a kernel's phases that run."""
    return [number for number in range(len(kernel.phases)) if mask >> number & 1]


def num_first_blocks(phases: Phases) -> int:
    """Blocks of a split launch that run what is `Launch.on_first`; 0 of any other launch."""
    return next((phase.blocks for phase in phases if phase.on_first), 0)


def num_blocks(phases: Phases) -> int:
    """Blocks of a launch with all its phases."""
    return phases[0].blocks + num_first_blocks(phases)


def fused_kernel_of(phases: Phases) -> tuple[FusedKernel, int]:
    """The kernel that has several phases, and their bits in it.

    Raises:
        ValueError: they were not `joined`.
    """
    kernel = phases[0].fused
    return _fused(phases, [kernel] if kernel else [])


def device_launches(launches: Sequence[Launch]) -> list[list[Launch]]:
    """What is launched: each with its phases."""
    grouped: list[list[Launch]] = []
    for each in launches:
        if not each.joined:
            grouped.append([])
        grouped[-1].append(each)
    return grouped


def synced_phases(launches: Sequence[Launch]) -> set[int]:
    """Numbers of the phases that begin when every block has ended those before them in their launch."""
    synced: set[int] = set()
    first = 0
    for phases in device_launches(launches):
        if len(phases) > 1:
            kernel, mask = fused_kernel_of(phases)
            running = _running(kernel, mask)
            synced |= {first + i for i, number in enumerate(running) if i and number in kernel.synced}
        first += len(phases)
    return synced


def pipelined(first: Sequence[Phases], second: Sequence[Phases]) -> list[Launch]:
    """Two stages of parts on two streams: a part's second stage beside the next part's first."""
    steps = [*first[0], *second[0]]
    for (earlier, *phases), later in zip(first[1:], second[1:], strict=True):
        steps += [replace(earlier, alongside=True), *phases, *later]
    return steps


def launch(
    step: str, kernel: TritonKernel | AscendCKernel, stream: Stream, blocks: int, **values: Value
) -> Launch:
    """A launch from values by argument name.

    Raises:
        ValueError: an argument without a value, or a value without an argument.
    """
    names = list(map(attrgetter("name"), kernel.args))
    if set(names) != values.keys():
        raise ValueError(f"{kernel.name}: arguments without a match: {sorted(set(names) ^ values.keys())}")
    return Launch(step, kernel, tuple(map(values.__getitem__, names)), blocks, stream)


@dataclass(frozen=True)
class Plan:
    """The launches of one operator.

    Attributes:
        operator: "dispatch" or "combine".
        zone: the window zone that it is bound to.
        launches: in an order in which they may run one after the other; phases count one by one.
        overlap: whether each stream has its own cores, so that launches may overlap.
        phase: of an operator in rounds what of it this is; "" for all of one, or a half.
        reads_peers: whether it reads in peers' windows what they write over once they mask this rank.
    """

    operator: str
    zone: int
    launches: tuple[Launch, ...]
    overlap: bool = False
    phase: str = ""
    reads_peers: bool = False

    @property
    def two_streams(self) -> bool:
        """Whether it gains by a second stream: without a launch alongside another, events would only cost."""
        return self.overlap and any(launch.alongside for launch in self.launches)

    @property
    def ends_run(self) -> bool:
        """Whether a run of the operator is over with it: its number and its zone are then the next ones."""
        return self.phase in ENDING if self.phase else self.half != " setup"

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the placeholders, in order of first use."""
        values: Iterable[Value] = (value for launch in self.launches for value in launch.values)
        return tuple(dict.fromkeys(value.name for value in values if isinstance(value, Placeholder)))

    @property
    def half(self) -> str:
        """Which half of an operator it is, " setup" or " teardown", or which phase; empty for all of one."""
        if self.phase:
            return f" {self.phase}"
        if self.operator not in ("dispatch", "combine"):
            return ""
        steps = set(map(attrgetter("step"), self.launches))
        return " setup" if "wait" not in steps else " teardown" if not steps & {"send", "flag"} else ""

    def by_step(self, durations: Iterable[float]) -> dict[str, float]:
        """Total duration by the name of the step."""
        steps: dict[str, float] = {}
        for launch, duration in zip(self.launches, durations, strict=True):
            steps[launch.step] = steps.get(launch.step, 0.0) + duration
        return steps

    def __str__(self) -> str:
        rows = [f"{self.operator}, zone {self.zone}"]
        width = max((len(launch.step) for launch in self.launches), default=0)
        for launch in self.launches:
            values = ", ".join(
                f"{arg.name}={_show(value)}"
                for arg, value in zip(launch.kernel.args, launch.values, strict=True)
            )
            mark = "&" if launch.alongside else "+" if launch.joined else " "
            rows.append(
                f"{mark} {launch.stream:13} {launch.step:{width}} "
                f"{launch.kernel.name}x{launch.blocks}({values})"
            )
        return "\n".join(rows)


def _show(value: Value) -> str:
    if isinstance(value, Part):
        what = "size" if value.is_count else "start"
        return f"<{what} of part {value.index} of {value.parts} of {value.name}>"
    if isinstance(value, Placeholder):
        return f"<{value.name}+{value.offset}>" if value.offset else f"<{value.name}>"
    return str(value)
