"""Rewrites in the LLVM dialect that ask for memory before it is needed.

A processor's own prefetchers stop at the end of a page and ask for no line to write, so that rows of some
kilobytes, which no cache has, arrive at two thirds of the pace that a core could take. These do for what
Triton kernels copy and read what kernels_ascendc/emulation/memory.h does for Ascend C's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Set

from moe_triton.backends.cpu.triton.ir import Block, Operation, read_blocks
from moe_triton.backends.cpu.triton.rewrite_llvm import add_function, call, constant, element

COPY_SYMBOL = "moe_triton_copy_ahead"

# As in kernels_ascendc/emulation/memory.h.
PIECE_BYTES, AHEAD_BYTES, LINE_BYTES = 256, 1024, 64
_HINT_L1, _HINT_L2 = 3, 2  # LLVM's "locality"

# Iterations of a loop between which lines are asked for: fewer, and the loop inside has too little to do.
STRIP_ITERATIONS, FEWEST_ITERATIONS = 128, 32
# Shorter rows end before asking ahead has gained anything.
LONG_BYTES = 2048
_BYTES = {"i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}

_LESS, _AT_MOST = "<{predicate = 2 : i64}>", "<{predicate = 7 : i64}>"  # signed, unsigned
_GOING_ON = "<{operandSegmentSizes = array<i32: 1, 0, 1>}>"  # the second takes one
_CHOICE = "<{operandSegmentSizes = array<i32: 1, 0, 0>}>"  # of blocks without arguments


def copy_ahead(module: Operation) -> None:
    """Copies long rows in pieces, and asks ahead of each for the next lines of both sides.

    The size of most copies is a constant, and then nothing is left of the loop in short ones. The function is
    written in the IR: nothing but libc is linked to kernels.
    """
    copies = module.walk("llvm.intr.memcpy")
    for copy in copies:
        copy.replace(call(COPY_SYMBOL, copy.operands, copy.operand_types))
    if not copies:
        return
    body = f"""
        {constant("%zero", 0)}
        {constant("%piece", PIECE_BYTES)}
        {constant("%reach", AHEAD_BYTES + PIECE_BYTES)}
        %is_long = "llvm.icmp"(%reach, %bytes) {_AT_MOST} : (i64, i64) -> i1
        "llvm.cond_br"(%is_long, %zero)[^first, ^head] {_GOING_ON} : (i1, i64) -> ()
      ^first:
        {_ask_both("", range(0, AHEAD_BYTES, LINE_BYTES))}
        "llvm.br"(%zero)[^head] : (i64) -> ()
      ^head(%at: i64):
        %end = "llvm.add"(%at, %reach) : (i64, i64) -> i64
        %more = "llvm.icmp"(%end, %bytes) {_AT_MOST} : (i64, i64) -> i1
        "llvm.cond_br"(%more)[^body, ^tail] {_CHOICE} : (i1) -> ()
      ^body:
        {element("%to_piece", "%to", "%at")}
        {element("%from_piece", "%from", "%at")}
        {_ask_both("_piece", range(AHEAD_BYTES, AHEAD_BYTES + PIECE_BYTES, LINE_BYTES))}
        {_COPY.format("%to_piece, %from_piece, %piece")}
        %next = "llvm.add"(%at, %piece) : (i64, i64) -> i64
        "llvm.br"(%next)[^head] : (i64) -> ()
      ^tail:
        {element("%to_rest", "%to", "%at")}
        {element("%from_rest", "%from", "%at")}
        %rest = "llvm.sub"(%bytes, %at) : (i64, i64) -> i64
        {_COPY.format("%to_rest, %from_rest, %rest")}
    """
    arguments = {"%to": "!llvm.ptr", "%from": "!llvm.ptr", "%bytes": "i64"}
    add_function(module, COPY_SYMBOL, arguments, body, **_INLINED)


_INLINED = {"linkage": "#llvm.linkage<internal>", "passthrough": '["alwaysinline"]'}
_COPY = '"llvm.intr.memcpy"({}) <{{isVolatile = false}}> : (!llvm.ptr, !llvm.ptr, i64) -> ()'


def _ask_both(start: str, offsets: range) -> str:
    """Asks for lines that are so many bytes after the starts of both sides of a copy."""
    lines = []
    for offset in offsets:
        lines.append(_ask(f"%from{start}_{offset}", f"%from{start}", offset, writes=False, hint=_HINT_L2))
        lines.append(_ask(f"%to{start}_{offset}", f"%to{start}", offset, writes=True, hint=_HINT_L1))
    return "\n".join(lines)


def _ask(name: str, address: str, offset: int, *, writes: bool, hint: int) -> str:
    """Asks for the line that is so many bytes after an address."""
    options = f"<{{cache = 1 : i32, hint = {hint} : i32, rw = {int(writes)} : i32}}>"
    line = element(name, address, offset)
    return f'{line}\n"llvm.intr.prefetch"({name}) {options} : (!llvm.ptr) -> ()'


def read_ahead(module: Operation) -> None:
    """Asks, between strips of a loop over rows, for what the next strip reads and writes of each row.

    The old loop goes through one strip, in a new one over strips: LLVM vectorises it as before, which it
    would not with anything in it that is no arithmetic.
    """
    values = {each.result: each.attributes["value"] for each in module.walk("llvm.mlir.constant")}
    constants = {name: int(v.split()[0]) for name, v in values.items() if v.endswith((": index", ": i64"))}
    stacked = {buffer.result for buffer in module.walk("llvm.alloca")}
    for function in module.walk("llvm.func"):
        blocks = function.regions[0]
        for head, body in list(itertools.pairwise(blocks)):
            if strip := _strip(function, head, body, constants):
                stop = constants[head.operations[0].operands[1]]
                if asks := _asks(head, body, strip, stop, stacked):
                    at = blocks.index(head)
                    blocks[at : at + 2] = _in_strips(head, body, strip, asks)


def _strip(function: Operation, head: Block, body: Block, constants: dict[str, int]) -> int:
    """Iterations of a strip of the loop that two blocks are; 0 if they are none, or do not count from 0."""
    if [each.name for each in head.operations] != ["llvm.icmp", "llvm.cond_br"] or len(head.arguments) != 1:
        return 0
    (test, choice), (index,), last = head.operations, head.arguments, body.operations[-1]
    jumps = [each for each in function.walk() if head.label in each.successors]
    starts = [jump.operands for jump in jumps if jump is not last]
    step = next((each for each in body.operations if each.results == last.operands), None)
    is_loop = (
        (test.operands[0], test.attributes["predicate"]) == (index, "2 : i64")
        and (choice.operands, choice.successors[0]) == (test.results, body.label)
        and last in jumps
        and all(len(start) == 1 and constants.get(start[0]) == 0 for start in starts)
        and step is not None
        and (step.name, step.operands[0]) == ("llvm.add", index)
    )
    strip = math.gcd(constants.get(test.operands[1], 1), STRIP_ITERATIONS)
    if not is_loop or step is None or strip < FEWEST_ITERATIONS:
        return 0
    return 0 if strip % constants.get(step.operands[1], strip + 1) else strip


def _asks(head: Block, body: Block, strip: int, stop: int, stacked: Set[str]) -> str:
    """What asks for the next strip of each long row in memory: its address does not depend on the index."""
    (index,) = head.arguments
    made = {result: each for each in body.operations for result in each.results}
    uses = [each for each in body.operations if each.name in ("llvm.load", "llvm.store")]
    asks: dict[str, list[str]] = {}
    for use in uses:
        pointer = made.get(use.operands[-1])
        if pointer is None or pointer.name != "llvm.getelementptr" or pointer.operands[1:] != [index]:
            continue
        address, type_ = pointer.operands[0], pointer.attributes["elem_type"]
        definition, size = made.get(address), _BYTES.get(type_, 0)
        operands = definition.operands if definition else []
        is_fixed = {index, *made}.isdisjoint(operands) and stacked.isdisjoint([address, *operands])
        if not is_fixed or stop * size < LONG_BYTES:
            continue
        name = f"%ahead_{address[1:]}"
        start = str(definition).replace(address, name, 1) if definition else ""
        row = element(f"{name}_at", name if definition else address, f"%strip_{index[1:]}", type_)
        offsets, writes = range(strip * size, 2 * strip * size, LINE_BYTES), use.name == "llvm.store"
        lines = [_ask(f"{name}_{x}", f"{name}_at", x, writes=writes, hint=_HINT_L1) for x in offsets]
        asks.setdefault(address, [start + row, *lines])
    return "\n".join(itertools.chain(*asks.values()))


def _in_strips(head: Block, body: Block, strip: int, asks: str) -> list[Block]:
    """The blocks of a loop, in a loop over strips that has its label."""
    (old,), (test, choice) = head.arguments, head.operations
    label, index, (_, after) = head.label, f"%strip_{old[1:]}", choice.successors
    outer = f"""
        {label}({index}: i64):
          {index}_test = "llvm.icmp"({index}, {test.operands[1]}) {_LESS} : (i64, i64) -> i1
          "llvm.cond_br"({index}_test)[{label}_ask, {after}] {_CHOICE} : (i1) -> ()
        {label}_ask:
          {constant(f"{index}_size", strip)}
          {index}_end = "llvm.add"({index}, {index}_size) : (i64, i64) -> i64
          {asks}
          "llvm.br"({index})[{label}_in] : (i64) -> ()
        {label}_out:
          "llvm.br"({index}_end)[{label}] : (i64) -> ()
    """
    start, ask, out = read_blocks(outer)
    head.label, test.operands[1], choice.successors[1] = f"{label}_in", f"{index}_end", out.label
    body.operations[-1].successors = [head.label]
    return [start, ask, head, body, out]
