"""Kernels by hand, in MLIR's generic form as the NPU compiler's modules have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autotune.model.constants import Machine, machine_named
from autotune.model.cost import Table
from autotune.model.kernel_costs.replay.instructions import Stream
from autotune.model.kernel_costs.replay.kernel_cost import Argument, Replay, recorded, timed
from autotune.model.kernel_costs.replay.translate import translated
from autotune.npu_compiler.compile import entry_of
from moe_triton.backends.cpu.triton.ir import read
from moe_triton.core.kernel import Arg, TritonKernel

BYTES_PER_CYCLE = 8.0
MACHINE = machine_named("A3").replaced(
    {
        "load_latency_cycles": 100,
        "store_latency_cycles": 50,
        "vector_latency_cycles": 10,
        "vector_bytes_per_cycle": 256,
        "vector_reduce_factor": 2,
        "scalar_global_cycles": 300,
        "scalar_local_cycles": 20,
        "scalar_cycles": 1,
        "issue_cycles": 1,
        "flag_cycles": 5,
        "queue_entries": 32,
    }
)

GM, UB = "#hivm.address_space<gm>", "#hivm.address_space<ub>"
INTEGERS = f"memref<?xi32, {GM}>"
TILE_BYTES = 4096
TILE = f"memref<1024xf32, {UB}>"
"""16 cycles of V and its latency; 512 of a copy."""

VECTOR, COPY = 10 + 16, 512


def constant(name: str, value: int, type_: str = "i32") -> str:
    return f'%{name} = "arith.constant"() <{{value = {value} : {type_}}}> : () -> {type_}'


def tile(name: str, type_: str = TILE) -> str:
    segments = "operandSegmentSizes = array<i32: 1, 0>"
    return f'%{name} = "hivm.hir.pointer_cast"(%zero) <{{{segments}}}> : (i64) -> {type_}'


def call(function: str, *operands: str) -> str:
    """A library function on tiles; operands that are no tile are the constant 0."""
    types = ", ".join("i64" if operand == "zero" else TILE for operand in operands)
    values = ", ".join(f"%{operand}" for operand in operands)
    return f'"func.call"({values}) <{{callee = @{function}}}> : ({types}) -> ()'


def load(target: str = "x") -> str:
    return call("load_gm_to_ubuf_1d_float", "zero", target)


def store(source: str = "x") -> str:
    return call("store_ubuf_to_gm_1d_float", source, "zero")


def add(source: str = "x") -> str:
    return call("vadds_vs_1d_float", source, "zero", source, source)


def flag(kind: str, source: str, target: str, event: int | str = 0) -> str:
    pipes = f"set_pipe = #hivm.pipe<PIPE_{source}>, wait_pipe = #hivm.pipe<PIPE_{target}>"
    if isinstance(event, str):
        return f'"hivm.hir.{kind}_flag"(%{event}) <{{{pipes}}}> : (i64) -> ()'
    static = f"static_event_id = #hivm.event<EVENT_ID{event}>"
    return f'"hivm.hir.{kind}_flag"() <{{{static}, {pipes}}}> : () -> ()'


def pass_on(source: str, target: str) -> list[str]:
    """A flag from one pipe to another."""
    return [flag("set", source, target), flag("wait", source, target)]


def barrier(pipe: str) -> str:
    return f'"hivm.hir.pipe_barrier"() <{{pipe = #hivm.pipe<PIPE_{pipe}>}}> : () -> ()'


def loop(low: str, high: str, *kernel_cost: str, index: str = "i") -> list[str]:
    """Of 32-bit integers in steps of 1."""
    return [
        f'"scf.for"(%{low}, %{high}, %one) ({{',
        f"^bb0(%{index}: i32):",
        *kernel_cost,
        '"scf.yield"() : () -> ()',
        "}) : (i32, i32, i32) -> ()",
    ]


def element(name: str, argument: str, place: str) -> list[str]:
    """A scalar load from an argument."""
    attributes = (
        "operandSegmentSizes = array<i32: 1, 1, 0, 0>, static_offsets = array<i64: -9223372036854775808>, "
        "static_sizes = array<i64: 1>, static_strides = array<i64: 1>"
    )
    view = f"memref<1xi32, strided<[1], offset: ?>, {GM}>"
    return [
        f'%{name}_at = "arith.index_cast"(%{place}) : (i32) -> index',
        f'%{name}_view = "memref.reinterpret_cast"(%{argument}, %{name}_at) <{{{attributes}}}> : '
        f"({INTEGERS}, index) -> {view}",
        f'%{name} = "memref.load"(%{name}_view, %first) : ({view}, index) -> i32',
    ]


def function(*kernel_cost: str, types: Sequence[str] = ()) -> str:
    """A module with these lines as its kernel; arguments are ``%a``, ``%b`` and so on."""
    system = f"%s0: i64, %s1: memref<?xi8, {GM}>, %s2: memref<?xi8, {GM}>"
    given = "".join(f", %{chr(97 + i)}: {type_}" for i, type_ in enumerate(types))
    lines = [
        '"builtin.module"() ({',
        '"func.func"() <{sym_name = "_hand_made"}> ({',
        f"^bb0({system}{given}, %gx: i32, %gy: i32, %gz: i32):",
        constant("zero", 0, "i64"),
        constant("first", 0, "index"),
        constant("none", 0),
        constant("one", 1),
        *kernel_cost,
        '"func.return"() : () -> ()',
        "}) {hacc.entry} : () -> ()",
        "}) : () -> ()",
    ]
    return "\n".join(lines)


def streams(
    *kernel_cost: str, arguments: Mapping[str, int | list[int] | None] | None = None, programs: int = 1
) -> list[Stream]:
    """What the programs of a kernel issue.

    Args:
        arguments: numbers, integers behind a pointer, or None for a pointer to something unknown.
    """
    given = arguments or {}
    types = ["i32" if isinstance(value, int) else INTEGERS for value in given.values()]
    args = tuple(
        Arg(name, "i32" if isinstance(value, int) else "*i32", "value") for name, value in given.items()
    )
    kernel = TritonKernel("hand_made", None, args, {}, fallback=lambda *_: None)
    translation = translated(entry_of(read(function(*kernel_cost, types=types)), kernel.name))
    return recorded(kernel, translation, {name: _argument(value) for name, value in given.items()}, programs)


def _argument(value: int | list[int] | None) -> Argument:
    if isinstance(value, int):
        return value
    return Table(None if value is None else np.array(value, np.int32))


def replay(
    *kernel_cost: str,
    arguments: Mapping[str, int | list[int] | None] | None = None,
    machine: Machine = MACHINE,
    with_spans: bool = False,
) -> Replay:
    """One program on one core."""
    return timed(streams(*kernel_cost, arguments=arguments), machine, BYTES_PER_CYCLE, with_spans)
