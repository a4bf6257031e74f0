"""What the NPU compiler planned for a kernel, counted."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autotune.gate.costs import Estimate, estimate
from autotune.gate.stream import ELEMENT_BITS, Buffer, Instruction, Loop, Node, Pipe, Sync, parse, walk
from autotune.npu_compiler.socs import SOCS
from moe_triton.core.errors import ToolchainError
from moe_triton.core.soc import UB_BYTES

PIPES: tuple[Pipe, ...] = ("MTE2", "MTE3", "V", "S")


class Transfer(NamedTuple):
    """One copy between global memory and the unified buffer.

    Attributes:
        tile: type of the tile in the unified buffer, as ``"7168xbf16"``.
        double_buffered: two tiles are used in turn, so that the copy overlaps with the work on the other one.
            The compiler drops this silently if the unified buffer is too small.
    """

    kind: Literal["load", "store"]
    tile: str
    double_buffered: bool

    @property
    def is_element(self) -> bool:
        """Whether it copies a single element."""
        return Buffer(self.tile).is_element


@dataclass(frozen=True)
class GateReport:
    """What the NPU compiler planned. Instructions are counted statically.

    Attributes:
        kernel: name.
        soc: target.
        ub_bytes: unified buffer in use: the end of the highest planned buffer.
        ub_capacity: unified buffer of a vector core of this target, in bytes.
        transfers: copies between global memory and the unified buffer.
        instructions: by pipe: MTE2, MTE3, V and S. Of S only loads and stores of single elements.
        flags_set, flags_waited: between pipes.
        barriers: by the pipe that waits for itself; ALL ends every kernel.
        loops: in the program.
        scalar_loops: loops over single elements: without instructions of V or copies of whole tiles.
        switched_off: options that the compiler switched off to fit the unified buffer.
        estimate: cycles, None for an outlook.
        module: the final module (``module.hivm.opt.mlir``).
    """

    kernel: str
    soc: str
    ub_bytes: int
    transfers: tuple[Transfer, ...]
    module: str = field(repr=False)
    ub_capacity: int = UB_BYTES
    instructions: Mapping[str, int] = field(default_factory=dict, hash=False)
    flags_set: int = 0
    flags_waited: int = 0
    barriers: Mapping[str, int] = field(default_factory=dict, hash=False)
    loops: int = 0
    scalar_loops: int = 0
    switched_off: tuple[str, ...] = ()
    estimate: Estimate | None = None

    def double_buffered(self, kind: Literal["load", "store"]) -> tuple[int, int]:
        """The number of double-buffered copies of whole tiles, and the number of all copies of whole tiles.

        Copies of single elements are left out: only S waits for them.
        """
        are_double_buffered = [
            t.double_buffered for t in self.transfers if t.kind == kind and not t.is_element
        ]
        return sum(are_double_buffered), len(are_double_buffered)

    @property
    def ub_share(self) -> float:
        """Share of the unified buffer in use, 0 to 1."""
        return self.ub_bytes / self.ub_capacity

    @property
    def fits(self) -> bool:
        """Whether the plan stays within the unified buffer."""
        return self.ub_bytes <= self.ub_capacity


def report_of(
    kernel: str, soc: str, module: str, plan: str = "", switched_off: tuple[str, ...] = ()
) -> GateReport:
    """Counts the instructions of a final module.

    Args:
        plan: the memory plan as JSON; without it, the UB in use is computed from the module's buffers.
    """
    body = parse(module)
    nodes = list(walk(body))
    syncs = [node for node in nodes if isinstance(node, Sync)]
    loops = [node for node in nodes if isinstance(node, Loop)]
    pipes = Counter(node.pipe for node in nodes if isinstance(node, Instruction))
    capacity = re.search(r'"UB_SIZE", (\d+) : i32', module)
    is_outlook = soc in SOCS and SOCS[soc].is_outlook
    return GateReport(
        kernel,
        soc,
        planned_ub_bytes(plan) if plan else buffered_ub_bytes(module),
        _transfers(nodes),
        module,
        ub_capacity=int(capacity[1]) // 8 if capacity else UB_BYTES,
        instructions={pipe: pipes[pipe] for pipe in PIPES},
        flags_set=sum(sync.kind == "set" for sync in syncs),
        flags_waited=sum(sync.kind == "wait" for sync in syncs),
        barriers=dict(sorted(Counter(sync.pipe for sync in syncs if sync.kind == "barrier").items())),
        loops=len(loops),
        scalar_loops=sum(_is_scalar(loop) for loop in loops),
        switched_off=switched_off,
        estimate=None if is_outlook else estimate(body),
    )


def _is_scalar(loop: Loop) -> bool:
    inside = [node for node in walk(loop.body) if isinstance(node, Instruction)]
    on_tiles = (n.pipe == "V" or (n.pipe != "S" and not _tile_of(n).is_element) for n in inside)
    return bool(inside) and not any(on_tiles)


def _transfers(nodes: list[Node]) -> tuple[Transfer, ...]:
    copies = (node for node in nodes if isinstance(node, Instruction) and node.pipe in ("MTE2", "MTE3"))
    tiles = [("load" if node.pipe == "MTE2" else "store", _tile_of(node)) for node in copies]
    return tuple(Transfer(kind, tile.tile, tile.double_buffered) for kind, tile in tiles)  # type: ignore[arg-type]


def _tile_of(copy: Instruction) -> Buffer:
    return copy.buffers[0] if copy.buffers else Buffer("?")


def planned_ub_bytes(plan: str) -> int:
    """The end of the highest buffer of a memory plan (``memory_info_aiv.json``)."""
    highest = 0
    for record in json.loads(plan)["Record"]:
        if record["error_info"]:
            raise ToolchainError(f"the NPU compiler's memory plan failed: {record['error_info']}")
        for buffer in record["memory_info_array"]:
            length = buffer["extent"] // 8  # in bits
            highest = max(highest, *(offset + length for offset in buffer["offset"]))
    return highest


def buffered_ub_bytes(module: str) -> int:
    """The end of the highest buffer of a final module, for compilers that print no memory plan."""
    constants = dict(re.findall(r"(%\w+) = \w+(?:\.mlir)?\.constant\(?\s*(\d+) : i64", module))
    pattern = r"hivm\.hir\.pointer_cast\((%\w+)\) : memref<((?:\d+x)*(?:" + "|".join(ELEMENT_BITS) + r"))\b"
    ends = [
        int(constants[offset]) + Buffer(tile).num_bytes
        for offset, tile in re.findall(pattern, module)
        if offset in constants
    ]
    return max(ends, default=0)
