"""A plan: the launches of one operator, in order, with holes that a call fills.

Nothing in a plan depends on data, so it is built once, handed to a back end once, and can be printed,
costed and compared without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moe_triton.core.kernel import AscendCKernel, TritonKernel

Stream = Literal["compute", "communication"]


@dataclass(frozen=True)
class Hole:
    """What a call fills in: a tensor's address plus ``offset`` bytes, or an integer."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Part(Hole):
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


Value = Hole | int | tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel on one stream.

    Attributes:
        step: what it does in the operator, for traces and errors.
        kernel: what to launch.
        values: one per argument of the kernel; a tuple where the argument is a region.
        blocks: programs (Triton) or blocks (Ascend C).
        stream: where it runs.
        alongside: it does not depend on the launch right before it, which is on the other stream, and may run
            at the same time. Otherwise a launch waits for all launches before it.
    """

    step: str
    kernel: TritonKernel | AscendCKernel
    values: tuple[Value, ...]
    blocks: int
    stream: Stream
    alongside: bool = False


def pipelined(first: Sequence[Launch], second: Sequence[Launch]) -> list[Launch]:
    """Two stages of parts on two streams: a part's second stage beside the next part's first."""
    steps = [first[0], second[0]]
    for earlier, later in zip(first[1:], second[1:], strict=True):
        steps += [replace(earlier, alongside=True), later]
    return steps


def launch(
    step: str, kernel: TritonKernel | AscendCKernel, stream: Stream, blocks: int, **values: Value
) -> Launch:
    """A launch from values by argument name.

    Raises:
        ValueError: an argument without a value, or a value without an argument.
    """
    names = [arg.name for arg in kernel.args]
    if set(names) != values.keys():
        raise ValueError(f"{kernel.name}: arguments without a match: {sorted(set(names) ^ values.keys())}")
    return Launch(step, kernel, tuple(values[name] for name in names), blocks, stream)


@dataclass(frozen=True)
class Plan:
    """The launches of one operator.

    Attributes:
        operator: "dispatch" or "combine".
        zone: the window zone that it is bound to.
        launches: in an order in which they may run one after the other.
        overlap: whether each stream has its own cores, so that launches may overlap.
    """

    operator: str
    zone: int
    launches: tuple[Launch, ...]
    overlap: bool = False

    @property
    def holes(self) -> tuple[str, ...]:
        """Names of the holes, in order of first use."""
        values: Iterable[Value] = (value for launch in self.launches for value in launch.values)
        return tuple(dict.fromkeys(value.name for value in values if isinstance(value, Hole)))

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
            rows.append(
                f"{'&' if launch.alongside else ' '} {launch.stream:13} {launch.step:{width}} "
                f"{launch.kernel.name}x{launch.blocks}({values})"
            )
        return "\n".join(rows)


def _show(value: Value) -> str:
    if isinstance(value, Part):
        what = "size" if value.is_count else "start"
        return f"<{what} of part {value.index} of {value.parts} of {value.name}>"
    if isinstance(value, Hole):
        return f"<{value.name}+{value.offset}>" if value.offset else f"<{value.name}>"
    return str(value)
