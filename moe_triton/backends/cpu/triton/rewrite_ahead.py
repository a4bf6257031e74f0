"""Rewrites in the LLVM dialect that ask for memory before it is needed.

A processor's own prefetchers stop at the end of a page and ask for no line to write, so that rows of some
kilobytes, which no cache has, arrive at two thirds of the pace that a core could take. These do for what
Triton kernels copy and read what kernels_ascendc/emulation/row_copies.h does for Ascend C's.
"""

from __future__ import annotations

import itertools
import math

from moe_triton.backends.cpu.triton.ir import Block, Operation, read_blocks
from moe_triton.backends.cpu.triton.rewrite_llvm import add_function, call, constant, element
from moe_triton.backends.cpu.triton.rows import (
    Loop,
    Row,
    find_loop,
    is_always_before,
    read_constants,
    rows_of,
    strides,
)

COPY_SYMBOL, _STREAM_SYMBOL = "moe_triton_copy_ahead", "moe_triton_copy_past_caches"

# As in kernels_ascendc/emulation/row_copies.h.
PIECE_BYTES, AHEAD_BYTES, LINE_BYTES = 256, 1024, 64
_HINT_L1, _HINT_L2 = 3, 2  # LLVM's "locality"

# Iterations of a loop between which lines are asked for: fewer, and the loop inside has too little to do.
STRIP_ITERATIONS, FEWEST_ITERATIONS = 128, 32
# Shorter rows end before asking ahead has gained anything.
LONG_BYTES = 2048
# How far ahead of its turn a loop over vectors asks, and for how many rows: a sum of eight, which computes
# for longer than memory takes, only loses by it.
TURNS_AHEAD_BYTES, MOST_ROWS = 2048, 4

_LESS, _AT_MOST = "<{predicate = 2 : i64}>", "<{predicate = 7 : i64}>"  # signed, unsigned
_GOING_ON = "<{operandSegmentSizes = array<i32: 1, 0, 1>}>"  # the second takes one
_CHOICE = "<{operandSegmentSizes = array<i32: 1, 0, 0>}>"  # of blocks without arguments


def copy_ahead(module: Operation) -> None:
    """Copies long rows in pieces, and asks ahead of each for the next lines of both sides.

    The size of most copies is a constant, and then nothing is left of the loop in short ones. The function is
    written in the IR: nothing but libc is linked to kernels.
    """
    if _has_copies_by(COPY_SYMBOL, module):
        _add_copy(module)


def copy_past_caches(module: Operation) -> None:
    """Copies long rows with stores that bypass the caches: nobody reads soon what no cache would hold.

    An ordinary store into a line that is in no cache reads it first, and then evicts one that was in use.
    These stores take whole lines: where a row does not begin with one it is copied as by `copy_ahead`. They
    are in no order until a fence, which follows the launch.
    """
    if not _has_copies_by(_STREAM_SYMBOL, module):
        return
    body = f"""
        {constant("%zero", 0)}
        {constant("%piece", PIECE_BYTES)}
        {constant("%reach", AHEAD_BYTES + PIECE_BYTES)}
        {constant("%line", LINE_BYTES - 1)}
        %address = "llvm.ptrtoint"(%to) : (!llvm.ptr) -> i64
        %off = "llvm.and"(%address, %line) : (i64, i64) -> i64
        %is_line = "llvm.icmp"(%off, %zero) <{{predicate = 0 : i64}}> : (i64, i64) -> i1
        %is_long = "llvm.icmp"(%reach, %bytes) {_AT_MOST} : (i64, i64) -> i1
        %is_streamed = "llvm.and"(%is_line, %is_long) : (i1, i1) -> i1
        "llvm.cond_br"(%is_streamed)[^first, ^whole] {_CHOICE} : (i1) -> ()
      ^first:
        {_ask_source("", range(0, AHEAD_BYTES, LINE_BYTES))}
        "llvm.br"(%zero)[^head] : (i64) -> ()
      ^head(%at: i64):
        %end = "llvm.add"(%at, %piece) : (i64, i64) -> i64
        %more = "llvm.icmp"(%end, %bytes) {_AT_MOST} : (i64, i64) -> i1
        "llvm.cond_br"(%more)[^body, ^tail] {_CHOICE} : (i1) -> ()
      ^body:
        {element("%to_piece", "%to", "%at")}
        {element("%from_piece", "%from", "%at")}
        {_ask_source("_piece", range(AHEAD_BYTES, AHEAD_BYTES + PIECE_BYTES, LINE_BYTES))}
        {_STREAM_LINES}
        "llvm.br"(%end)[^head] : (i64) -> ()
      ^tail:
        {element("%to_rest", "%to", "%at")}
        {element("%from_rest", "%from", "%at")}
        %rest = "llvm.sub"(%bytes, %at) : (i64, i64) -> i64
        {_COPY.format("%to_rest, %from_rest, %rest")}
        "llvm.br"()[^last] : () -> ()
      ^whole:
        {call(COPY_SYMBOL, ("%to", "%from", "%bytes"), tuple(_ARGUMENTS.values()))}
        "llvm.br"()[^last] : () -> ()
      ^last:
    """
    _add_copy(module)
    add_function(module, _STREAM_SYMBOL, dict(_ARGUMENTS), body, **_INLINED)


def _has_copies_by(function: str, module: Operation) -> bool:
    """Has a function do all copies, and tells whether there are any."""
    copies = module.walk("llvm.intr.memcpy")
    for copy in copies:
        copy.replace(call(function, copy.operands, copy.operand_types))
    return bool(copies)


def _add_copy(module: Operation) -> None:
    """The function that asks ahead."""
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
    add_function(module, COPY_SYMBOL, dict(_ARGUMENTS), body, **_INLINED)


_ARGUMENTS = {"%to": "!llvm.ptr", "%from": "!llvm.ptr", "%bytes": "i64"}
_INLINED = {"linkage": "#llvm.linkage<internal>", "passthrough": '["alwaysinline"]'}
_COPY = '"llvm.intr.memcpy"({}) <{{isVolatile = false}}> : (!llvm.ptr, !llvm.ptr, i64) -> ()'


_LINE = f"vector<{LINE_BYTES}xi8>"
_PAST = f"<{{alignment = {LINE_BYTES} : i64, nontemporal}}> : ({_LINE}, !llvm.ptr) -> ()"
_STREAM_LINES = "\n".join(
    f"""
        {element(f"%to_{at}", "%to_piece", at)}
        {element(f"%from_{at}", "%from_piece", at)}
        %line_{at} = "llvm.load"(%from_{at}) <{{alignment = 1 : i64}}> : (!llvm.ptr) -> {_LINE}
        "llvm.store"(%line_{at}, %to_{at}) {_PAST}
    """
    for at in range(0, PIECE_BYTES, LINE_BYTES)
)


def _ask_source(start: str, offsets: range) -> str:
    """Asks for lines that are so many bytes after the start of what is copied."""
    lines = [_ask(f"%ask{start}_{at}", f"%from{start}", at, writes=False, hint=_HINT_L2) for at in offsets]
    return "\n".join(lines)


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
    """Asks, in loops over long rows, for what they are going to read and write.

    A loop over vectors asks in every turn. One over numbers goes through one strip, in a new loop over strips
    that asks: LLVM vectorises it as before, which it would not with anything in it that is no arithmetic.
    A row that an earlier loop went through is in a cache: there the next row is asked for, if it is known.
    """
    constants = read_constants(module)
    stacked = {buffer.result for buffer in module.walk("llvm.alloca")}
    for function in module.walk("llvm.func"):
        blocks, seen = function.regions[0], list[tuple[str, str]]()
        for head, body in list(itertools.pairwise(blocks)):
            loop = find_loop(function, head, body, constants)
            if loop is None:
                continue
            rows, grown = rows_of(loop, constants, stacked), strides(blocks, loop, constants)
            cached = {place for label, place in seen if is_always_before(blocks, label, head)}
            cached.update(function.body.arguments)  # the same row in every turn of the loop around
            seen += [(head.label, row.place) for row in rows]
            next_rows = {row: row.next_row(grown) for row in rows if row.place in cached}
            wanted = [row for row in rows if row.bytes >= LONG_BYTES and next_rows.get(row, True)]
            if any(row.is_vectors for row in rows):
                _ask_in_turns(wanted if len(wanted) <= MOST_ROWS else [], next_rows)
            elif strip := _strip(loop):
                _ask_between_strips(blocks, loop, strip, wanted, next_rows)


def _ask_in_turns(rows: list[Row], next_rows: dict[Row, int]) -> None:
    for row in rows:
        ahead = next_rows.get(row, TURNS_AHEAD_BYTES)
        row.access.insert_before(_ask_row(row, row.pointer.result, ahead, row.turn_bytes))


def _ask_between_strips(
    blocks: list[Block], loop: Loop, strip: int, rows: list[Row], next_rows: dict[Row, int]
) -> None:
    asks = []
    for row in rows:
        # two loops may go through a row of one address
        name = f"%ahead_{row.address[1:]}_{loop.index[1:]}"
        size = strip // loop.step * row.turn_bytes
        start = str(row.start).replace(row.address, name, 1) if row.start else ""
        at = element(
            f"{name}_at", name if row.start else row.address, f"%strip_{loop.index[1:]}", row.element
        )
        asks.append(start + at)
        asks.append(_ask_row(row, f"{name}_at", next_rows.get(row, size), size))
    if asks:
        place = blocks.index(loop.head)
        blocks[place : place + 2] = _in_strips(loop.head, loop.body, strip, "\n".join(asks))


def _ask_row(row: Row, address: str, ahead: int, size: int) -> str:
    """Asks for so many bytes of a row, which are so far behind an address."""
    lines = []
    for offset in range(ahead, ahead + size, LINE_BYTES):
        name = f"%line_{address[1:]}_{offset}"
        lines.append(_ask(name, address, offset, writes=row.writes, hint=_HINT_L1))
    return "\n".join(lines)


def _strip(loop: Loop) -> int:
    """Iterations of a loop over numbers between which it is to ask; 0 if it is to stay as it is.

    A reduction is: LLVM would reduce a vector to one number at the end of each strip.
    """
    strip = math.gcd(loop.stop, STRIP_ITERATIONS)
    return 0 if loop.reduces or strip < FEWEST_ITERATIONS or strip % loop.step else strip


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
