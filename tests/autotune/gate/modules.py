"""Final modules as the NPU compiler writes them, but for everything that the gate does not read."""

from __future__ import annotations

UB, GM = "#hivm.address_space<ub>", "#hivm.address_space<gm>"
LIBRARY = f"  func.func private @load_gm_to_ubuf_1d_float(memref<?xf32, {GM}>) attributes {{x}}\n"


def module(*lines: str, ub_bits: int = 1572864) -> str:
    """A module of one kernel with these lines as its body."""
    body = "".join(f"    {line}\n" for line in (*lines, "return"))
    head = f'module attributes {{a = #dlti.dl_entry<"UB_SIZE", {ub_bits} : i32>}} {{\n{LIBRARY}'
    kernel = f"  func.func @_kernel(%arg0: memref<?xf32, {GM}>) attributes {{hacc.entry}} {{\n"
    return f"{head}{kernel}{body}  }}\n}}\n"


def buffer(name: str, offset: int, tile: str) -> list[str]:
    """A buffer at a byte of the unified buffer."""
    return [
        f"%c{offset}_i64 = arith.constant {offset} : i64",
        f"{name} = hivm.hir.pointer_cast(%c{offset}_i64) : memref<{tile}, {UB}>",
    ]


def two_buffers(name: str, tile: str) -> list[str]:
    """Two buffers, and the one of them that this turn uses."""
    return [
        *buffer("%first", 0, tile),
        *buffer("%second", 65536, tile),
        f"{name} = arith.select %turn, %second, %first : memref<{tile}, {UB}>",
    ]


def load(value: str) -> str:
    """A copy from global memory into a value of any view of a buffer."""
    kinds = f"memref<?xf32, strided<[?], offset: ?>, {GM}>, memref<?xf32, strided<[?], offset: ?>, {UB}>"
    return f"func.call @load_gm_to_ubuf_1d_float(%arg0, {value}, %c0_i32) : ({kinds}, i32) -> ()"


def store(value: str) -> str:
    """A copy back."""
    kinds = f"memref<?xf32, strided<[?], offset: ?>, {UB}>, memref<?xf32, strided<[?], offset: ?>, {GM}>"
    return f"func.call @store_ubuf_to_gm_1d_float({value}, %arg0, %c0_i32) : ({kinds}, i32) -> ()"


def vector(function: str, *values: str) -> str:
    """An instruction of V."""
    return f"func.call @{function}({', '.join(values)}) : (memref<?xf32, {UB}>) -> ()"


CONSTANTS = (
    "%c0_i32 = arith.constant 0 : i32",
    "%c1_i32 = arith.constant 1 : i32",
    "%c8_i32 = arith.constant 8 : i32",
)
ELEMENT_FROM_GM = f"%e = memref.load %arg0[%c0] : memref<1xf32, strided<[1], offset: ?>, {GM}>"
ELEMENT_TO_UB = f"memref.store %e, %b[%c0] : memref<1xf32, {UB}>"
