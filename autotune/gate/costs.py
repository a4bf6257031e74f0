"""A lower bound on a kernel's cycles, from its instruction stream alone. Nothing here is measured.

Every constant is an assumption about an A2 vector core (`autotune.model.constants`). The bound ignores
dependences between pipes: each is charged with its own work as if it never waited for another, so a kernel
takes at least as long as the busiest pipe. Its purpose is to tell which pipe that is.

It counts one iteration of every loop whose length is only known at run time, usually a token or a row, with
all iterations of the loops of constant length in it. Work outside loops, done once per program, is left out,
and so are branches that the compiler marks as unlikely, which fill up the last tile of a masked load. Of two
branches the more expensive one counts, for each pipe.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from autotune.gate.stream import Branch, Instruction, Loop, Node, Sync
from autotune.model.constants import machine_named
from autotune.model.kernel_costs.replay.instructions import DIVIDE_FACTOR

_CORE = machine_named("A2")
BANDWIDTH = _CORE.stream_bytes_per_cycle
"""Bytes per cycle between global memory and one core while 40 cores stream, both directions together."""

START_CYCLES = {"MTE2": int(_CORE.load_latency_cycles), "MTE3": int(_CORE.store_latency_cycles)}
"""Latency of a copy without its bytes; a barrier delays the next copy by it."""

VECTOR_START, VECTOR_BYTES = int(_CORE.vector_latency_cycles), int(_CORE.vector_bytes_per_cycle)
"""Latency of an instruction of V, and bytes of its widest tile per cycle."""

REDUCE_FACTOR = int(_CORE.vector_reduce_factor)
SCALAR_GLOBAL, SCALAR_UB = int(_CORE.scalar_global_cycles), int(_CORE.scalar_local_cycles)
"""Cycles for one element from or to global memory, or the unified buffer."""

FLAG_CYCLES = int(_CORE.flag_cycles)


@dataclass(frozen=True)
class Estimate:
    """Lower bounds in cycles.

    Attributes:
        bandwidth: for all bytes between global memory and the unified buffer.
        mte2, mte3: of the two copying pipes, with the time that barriers make them wait.
        v: vector pipe.
        s: scalar pipe; only accesses to memory and flags.
    """

    bandwidth: float = 0.0
    mte2: float = 0.0
    mte3: float = 0.0
    v: float = 0.0
    s: float = 0.0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, turns: int) -> Estimate:
        """The estimate of that many iterations."""
        return Estimate(*(a * turns for a in astuple(self)))

    def larger(self, other: Estimate) -> Estimate:
        """The larger of two, for each figure."""
        return Estimate(*(max(a, b) for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def bound(self) -> str:
        """What takes longest: bandwidth, or a pipe; MTE2 and MTE3 only if they mostly wait at barriers."""
        figures = dict(zip(("bandwidth", "MTE2", "MTE3", "V", "S"), astuple(self), strict=True))
        longest = max(figures, key=figures.__getitem__)
        mostly_bytes = longest in START_CYCLES and 2 * self.bandwidth >= figures[longest]
        return "bandwidth" if mostly_bytes else longest

    @property
    def cycles(self) -> float:
        """The largest figure, in cycles."""
        return max(float(figure) for figure in astuple(self))


def estimate(body: list[Node]) -> Estimate:
    """One iteration of a kernel's loops; the whole kernel if it has none."""
    return _loops(body) if any(isinstance(node, Loop) for node in _outside(body)) else _all(body)


def _outside(body: list[Node]) -> list[Node]:
    """Nodes outside loops, those in branches included."""
    inner = [node for branch in body if isinstance(branch, Branch) for node in branch.then + branch.otherwise]
    return body + (_outside(inner) if inner else [])


def _loops(body: list[Node]) -> Estimate:
    total = Estimate()
    for node in body:
        if isinstance(node, Loop):
            total += _of(node)
        elif isinstance(node, Branch) and not node.is_unlikely:
            total += _loops(node.then).larger(_loops(node.otherwise))
    return total


def _all(body: list[Node]) -> Estimate:
    return sum((_of(node) for node in body), start=Estimate())


def _of(node: Node) -> Estimate:
    if isinstance(node, Loop):
        return _all(node.body).times(1 if node.trips is None else node.trips)
    if isinstance(node, Branch):
        return Estimate() if node.is_unlikely else _all(node.then).larger(_all(node.otherwise))
    return _of_sync(node) if isinstance(node, Sync) else _of_instruction(node)


def _of_sync(sync: Sync) -> Estimate:
    # V's latency is counted with every instruction already
    cycles = START_CYCLES.get(sync.pipe, 0) if sync.kind == "barrier" else FLAG_CYCLES
    return Estimate(**{sync.pipe.lower(): cycles}) if sync.pipe in ("MTE2", "MTE3", "V", "S") else Estimate()


def _of_instruction(instruction: Instruction) -> Estimate:
    if instruction.pipe == "S":
        return Estimate(s=SCALAR_GLOBAL if instruction.is_global else SCALAR_UB)
    sizes = [buffer.num_bytes for buffer in instruction.buffers] or [0]
    if instruction.pipe in START_CYCLES:
        cycles = sizes[0] / BANDWIDTH
        return Estimate(bandwidth=cycles, **{instruction.pipe.lower(): cycles})
    if "reduce" in instruction.name:
        # the last tile of a reduction is its scratch
        return Estimate(v=VECTOR_START + REDUCE_FACTOR * sizes[0] / VECTOR_BYTES)
    factor = DIVIDE_FACTOR if "div" in instruction.name else 1
    return Estimate(v=VECTOR_START + factor * max(sizes) / VECTOR_BYTES)
