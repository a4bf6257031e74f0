"""The instructions that one program of a kernel issues, in the order of its scalar pipe.

Among them are the library functions that the NPU compiler calls: pipe, which operands are data, and how dear
they are. The compiler's package has them as LLVM bitcode only (``lib/meta_op.aiv.c220.bc``). Each is taken to
be one instruction of its pipe over the whole tile; operands that are only scratch do not count. For an
integer reduction, which in the bitcode halves its tile step by step, `vector_reduce_factor` makes up for the
steps: 146 cycles for 64 x 64 instead of six latencies and a tile, 172.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from moe_triton.core.errors import ToolchainError

Factor = Literal["", "divide", "reduce"]

DIVIDE_FACTOR = 4
"""How many times as long a division takes. Assumed, 2 to 8: no price of a plan depends on it by more than
0.01% of its change."""

Kind = Literal["scalar", "element", "copy", "vector", "set", "wait", "barrier", "turn", "end"]


@dataclass(frozen=True)
class Function:
    """One family of library functions.

    Attributes:
        pipe: that executes it.
        tiles: operands that are read or written; the largest counts.
        factor: why it takes longer than others, by `DIVIDE_FACTOR` or `vector_reduce_factor`.
    """

    pipe: str
    tiles: tuple[int, ...]
    factor: Factor = ""


_ONE, _TWO = Function("V", (0, 1)), Function("V", (0, 1, 2))
_WITH_SCALAR = Function("V", (0, 2))
_REDUCE = Function("V", (0,), "reduce")

FUNCTIONS = {
    "load_gm_to_ubuf_": Function("MTE2", (1,)),
    "store_ubuf_to_gm_": Function("MTE3", (0,)),
    "copy_ubuf_to_ubuf_": _ONE,
    "arange_": Function("V", (0,)),
    "broadcast_scalar_": Function("V", (1,)),
    "broadcast_first_axis_": _ONE,
    "broadcast_last_axis_": _ONE,
    "reduce_max_": _REDUCE,
    "reduce_sum_": _REDUCE,
    "enablevc_reduce_max_": _REDUCE,
    "enablevc_reduce_sum_": _REDUCE,
    "vabs_": _ONE,
    "vadd_": _TWO,
    "vadds_vs_": _WITH_SCALAR,
    "vand_": _TWO,
    "vcast_": _ONE,
    "vcmp_": _TWO,
    "vcmps_": _WITH_SCALAR,
    "vdiv_": Function("V", (0, 1, 2), "divide"),
    "vmax_": _TWO,
    "vmaxs_vs_": _WITH_SCALAR,
    "vmins_vs_": _WITH_SCALAR,
    "vmul_": _TWO,
    "vmuls_vs_": _WITH_SCALAR,
    "vnot_": _ONE,
    "vor_": _TWO,
    "vsel_ss_": Function("V", (0, 3)),
    "vsel_sv_": Function("V", (0, 2, 3)),
    "vsel_vs_": Function("V", (0, 1, 3)),
    "vsel_vv_": Function("V", (0, 1, 2, 3)),
    "vsub_": _TWO,
    "vshrs_vs_": _WITH_SCALAR,
}
"""By the beginning of the name; what follows it is the shape and the types."""


def function_named(name: str) -> Function:
    """A library function.

    Raises:
        ToolchainError: it is not in the table.
    """
    for prefix, function in FUNCTIONS.items():
        if name.startswith(prefix):
            return function
    raise ToolchainError(
        f"the model does not know the library function {name}: "
        "add it to autotune.model.kernel_costs.replay.instructions"
    )


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
