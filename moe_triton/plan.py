"""A plan: the launches of one operator, in order, with holes for what a call brings.

Nothing in a plan depends on data, so it is built once, handed to a back end once, and can be printed,
costed and compared without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moe_triton.kernel import AscendCKernel, TritonKernel

Stream = Literal["compute", "communication"]


@dataclass(frozen=True)
class Hole:
    """What a call fills in: a tensor's address plus ``offset`` bytes, or an integer."""

    name: str
    offset: int = 0


Value = Hole | int | tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel on one stream.

    Attributes:
        step: what it does in the operator, for traces and errors.
        kernel: what to launch.
        values: one per argument of the kernel; a tuple where the argument is a region.
        blocks: programs (Triton) or blocks (Ascend C).
        stream: where it runs. Launches of one stream run in order; a launch also waits for everything
            that stands before it on the other stream.
    """

    step: str
    kernel: TritonKernel | AscendCKernel
    values: tuple[Value, ...]
    blocks: int
    stream: Stream


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
    """

    operator: str
    zone: int
    launches: tuple[Launch, ...]

    @property
    def holes(self) -> tuple[str, ...]:
        """Names of what a call must bring, in order of first use."""
        values: Iterable[Value] = (value for launch in self.launches for value in launch.values)
        return tuple(dict.fromkeys(value.name for value in values if isinstance(value, Hole)))

    def __str__(self) -> str:
        rows = [f"{self.operator}, zone {self.zone}"]
        width = max((len(launch.step) for launch in self.launches), default=0)
        for launch in self.launches:
            values = ", ".join(
                f"{arg.name}={_show(value)}"
                for arg, value in zip(launch.kernel.args, launch.values, strict=True)
            )
            rows.append(
                f"  {launch.stream:13} {launch.step:{width}} {launch.kernel.name}x{launch.blocks}({values})"
            )
        return "\n".join(rows)


def _show(value: Value) -> str:
    if isinstance(value, Hole):
        return f"<{value.name}+{value.offset}>" if value.offset else f"<{value.name}>"
    return str(value)
