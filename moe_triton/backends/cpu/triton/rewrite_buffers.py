"""Rewrites after bufferization, while values lie in memory and loops are structured."""

from __future__ import annotations

import re

from moe_triton.backends.cpu.triton.ir import Operation
from moe_triton.backends.cpu.triton.rewrite_tensors import arguments_of_kind


def store_in_place(module: Operation) -> None:
    """Compute a stored row straight into its destination, instead of into a buffer that is then copied.

    A buffer that one elementwise ``linalg.generic`` writes and one copy in the same block reads is
    replaced by the copy's destination, an argument that is only written. ``--eliminate-empty-tensors``
    would do it before bufferization, but gives up because the empty tensor is hoisted above the
    destination's address. As with `forward_loads`, only for builds whose arguments do not overlap.
    """
    outputs, makers = arguments_of_kind(module, 1), module.makers()
    order = {operation: number for number, operation in enumerate(module.walk())}

    def is_turn(writer: Operation, copy: Operation) -> bool:
        """Whether one writes all of a buffer, and the other copies it to where it could have been written."""
        if (writer.name, copy.name) != ("linalg.generic", "memref.copy") or writer.block is not copy.block:
            return False
        address = makers.get(copy.operands[1])
        return (
            address is not None
            and address.name == "memref.reinterpret_cast"
            and address.operands[0] in outputs
            and order[address] < order[writer]
            and writer.operands[-1] == copy.operands[0]
            and "reduction" not in writer.attributes["iterator_types"]
        )

    for buffer in module.walk("memref.alloc", "memref.alloca"):
        users = module.users(buffer.result)
        turns = list(zip(users[::2], users[1::2], strict=False))  # two rows may take turns in a buffer
        if turns and len(users) % 2 == 0 and all(is_turn(*turn) for turn in turns):
            for writer, copy in turns:
                writer.operands[-1], writer.operand_types[-1] = copy.operands[1], copy.operand_types[1]
                copy.erase()
            buffer.erase()


def carry_in_place(module: Operation) -> None:
    """Update a tensor that a loop carries in the buffer it started in.

    Bufferization allocates a new buffer in every turn, copies the new value into it and yields that, and
    nothing frees them. The previous value is dead by then, so its buffer can take the new one.
    """
    makers = module.makers()
    for loop in module.walk("scf.for"):
        names, last = list(loop.body.arguments)[1:], loop.body.operations[-1]
        for i, (name, initial, new) in enumerate(zip(names, loop.operands[3:], last.operands, strict=True)):
            # written by one copy right before the loop, and read by nothing but the loop
            start, *readers = module.users(initial)
            is_start = start.name == "memref.copy" and start.operands[1] == initial
            if not is_start or readers != [loop] or start.block is not loop.block:
                continue
            buffer, copies = makers.get(new), module.users(new)
            if buffer is not None and buffer.name == "memref.alloc" and len(copies) == 2:
                copies[0].operands[1] = last.operands[i] = name
                buffer.erase()
            elif copies == [last] and _written_in_place(module, buffer, name):
                last.operands[i] = name


_MAP = re.compile(r"affine_map<.*?->.*?\)>")


def _written_in_place(module: Operation, collapsed: Operation | None, previous: str) -> bool:
    """Has the elementwise loop that makes a value in another shape write it over the previous one.

    That is where nothing else reads the previous one, and each element only its own. Returns whether it does.
    """
    if collapsed is None or collapsed.name != "memref.collapse_shape":
        return False
    buffer = module.makers().get(collapsed.operands[0])
    if buffer is None or buffer.name != "memref.alloc":
        return False
    (writer, *others), expanded = module.users(buffer.result), module.users(previous)
    if writer.name != "linalg.generic" or others != [collapsed]:
        return False
    if len(expanded) != 1 or module.users(expanded[0].results[0]) != [writer]:
        return False
    read, maps = expanded[0], _MAP.findall(writer.attributes["indexing_maps"])
    is_inverse = read.name == "memref.expand_shape" and read.result_types == collapsed.operand_types
    if not is_inverse or "reduction" in writer.attributes["iterator_types"]:
        return False
    if maps[writer.operands.index(read.result)] != maps[-1] or writer.operands[-1] != buffer.result:
        return False
    writer.operands[-1] = read.result
    collapsed.erase()
    buffer.erase()
    return True


def hoist_buffers(module: Operation) -> None:
    """Move buffers of fixed size from inside loops and branches to the top of the function.

    ``--buffer-loop-hoisting`` leaves those of a branch inside a loop where they are, and the stack would
    grow with every turn. A buffer on the stack does not outlive its block, so all turns can share one.
    """
    for function in module.walk("func.func"):
        buffers = [buffer for buffer in function.walk("memref.alloca") if not buffer.operands]
        for index, buffer in enumerate(b for b in buffers if b.block is not function.body):
            buffer.erase()
            function.body.insert(index, buffer)


def copy_partial_blocks_with_loops(module: Operation) -> None:
    """Turn copies of a size known only at run time into loops.

    ``--finalize-memref-to-llvm`` would call ``memrefCopy``, a function of a run-time library that is not
    part of any package. Such copies come from masked loads and stores.
    """
    for copy in module.walk("memref.copy"):
        if all(type_.startswith("memref<?") for type_ in copy.operand_types):
            shape = copy.operand_types[0].partition(",")[0].rstrip(">")
            element = re.split("x(?=[a-z])", shape)[-1]
            copy.replace(f"""
                "linalg.copy"({", ".join(copy.operands)}) <{{operandSegmentSizes = array<i32: 1, 1>}}> ({{
                ^bb0(%from{copy.operands[0][1:]}: {element}, %to{copy.operands[1][1:]}: {element}):
                  "linalg.yield"(%from{copy.operands[0][1:]}) : ({element}) -> ()
                }}) : ({", ".join(copy.operand_types)}) -> ()
            """)
