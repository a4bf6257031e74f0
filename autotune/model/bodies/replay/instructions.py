"""The instructions that one program of a kernel issues, in the order of its scalar pipe."""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from autotune.model.bodies.replay.functions import Factor

Kind = Literal[
    "scalar",
    "element",
    "copy",
    "vector",
    "set",
    "wait",
    "barrier",
    "turn",
    "end",
]


@dataclass(frozen=True)
class Instruction:
    """One instruction, or a mark in the stream.

    Attributes:
        kind: ``scalar``: `count` instructions of S on registers. ``element``: a scalar access to memory.
            ``copy``, ``vector``: a library function. ``set``, ``wait``: a flag. ``barrier``: of `pipe` with
            itself, or of all. ``turn``, ``end``: where a turn of a loop begins, and where the loop ends.
        pipe: that executes it; ``"ALL"`` for a barrier of all.
        name: of the function or operation.
        num_bytes: that it moves or works on.
        factor: what multiplies the time of a vector instruction.
        is_global: an element lies in global memory.
        other: the pipe at the other end of a flag.
        event: number of a flag.
        count: of scalar instructions; number of the loop of a mark.
    """

    kind: Kind
    pipe: str
    name: str = ""
    num_bytes: int = 0
    factor: Factor = ""
    is_global: bool = False
    other: str = ""
    event: int = 0
    count: int = 0


@dataclass(frozen=True)
class Stream:
    """What one program issues.

    Attributes:
        codes: indices into `instructions`, in order.
        instructions: every different one.
        innermost: loops of run-time length without another such loop in them.
    """

    codes: array[int]
    instructions: list[Instruction] = field(repr=False)
    innermost: frozenset[int] = frozenset()

    def bytes_of(self, pipe: str) -> int:
        """Bytes of global memory that a pipe moves; S its elements."""
        return sum(
            count * one.num_bytes
            for code, count in self._counts.items()
            if (one := self.instructions[code]).pipe == pipe and (one.kind == "copy" or one.is_global)
        )

    @functools.cached_property
    def _counts(self) -> Counter[int]:
        return Counter(self.codes)
