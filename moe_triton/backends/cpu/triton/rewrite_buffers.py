"""Edits after bufferization, while values lie in memory and loops are structured."""

from __future__ import annotations

import re

from moe_triton.backends.cpu.triton.rewrite_names import same_block, uses


def store_in_place(text: str) -> str:
    """Compute a stored row straight into its destination, instead of into a buffer that is then copied.

    Works on bufferized text: a buffer that one elementwise ``linalg.generic`` writes and one copy in the
    same block reads is replaced by the copy's destination, an argument that is only written
    (tensor_kind 1). ``--eliminate-empty-tensors`` would do it before bufferization, but gives up because
    the empty tensor is hoisted above the destination's address. As with `forward_loads`, only for
    builds whose arguments do not overlap.
    """
    outputs = set(re.findall(r"(%\w+): memref<\?x\w+> \{tt\.tensor_kind = 1 : i32\}", text))
    for name in dict.fromkeys(re.findall(r"^ *memref\.copy (%[\w-]+), %[\w-]+ : ", text, flags=re.M)):
        edits = _edits_in_place(text, name, outputs)
        for start, end, replacement in sorted(edits, reverse=True):
            text = text[:start] + replacement + text[end:]
    return text


def _edits_in_place(text: str, buffer: str, outputs: set[str]) -> list[tuple[int, int, str]]:
    """What does away with a buffer, if every use of it is to be written once and then copied."""
    name = re.escape(buffer)
    copies = re.finditer(
        rf"^(?P<indent> *)memref\.copy {name}, (?P<view>%[\w-]+) : memref<[^>]*> to (?P<type>memref<.*>)\n",
        text,
        flags=re.M,
    )
    writers = re.finditer(
        r"^(?P<indent> *)linalg\.generic \{(?P<attributes>.*)\} .*"
        rf"outs\((?P<out>{name} : memref<[^>]*>)\) \{{$",
        text,
        flags=re.M,
    )
    allocation = re.search(rf"^ *{name} = memref\.alloca?\(.*\n", text, flags=re.M)
    if allocation is None:
        return []
    edits = [(allocation.start(), allocation.end(), "")]
    # two rows of one shape may take turns in a buffer
    turns = list(zip(writers, copies, strict=False))
    for i, (writer, copy) in enumerate(turns):
        address = re.search(rf"^ *{copy['view']} = memref\.reinterpret_cast (%\w+) ", text, flags=re.M)
        next_start = turns[i + 1][0].start() if i + 1 < len(turns) else len(text)
        if address is None or address[1] not in outputs or "reduction" in writer["attributes"]:
            return []
        if not address.start() < writer.start() < copy.start() < next_start:
            return []
        if not same_block(text, writer, copy):
            return []
        edits.append((writer.start("out"), writer.end("out"), f"{copy['view']} : {copy['type']}"))
        edits.append((copy.start(), copy.end(), ""))
    return edits if uses(text, buffer) == 1 + 2 * len(turns) else []


def carry_in_place(text: str) -> str:
    """Update a tensor that a loop carries in the buffer it started in.

    Bufferization allocates a new buffer in every turn, copies the new value into it and yields that, and
    nothing frees them. The previous value is dead by then, so its buffer can take the new one. Works on
    bufferized text.
    """
    pattern = re.compile(
        r"^(?P<indent> *)(?P<new>%[\w-]+) = memref\.alloc\(\).*\n"
        r" *memref\.copy (?P<value>%[\w-]+), (?P=new) : (?P<type>memref<[^>]*>) to .*\n"
        r" *scf\.yield (?P<yields>.*?) : .*\n",
        flags=re.M,
    )
    for match in reversed(list(pattern.finditer(text))):
        outer, yields = match["indent"][:-2], match["yields"].split(", ")
        header = rf"^(?P<indent>{outer})(?:%.* = )?scf\.for .* iter_args\((?P<carried>.*?)\) -> "
        loops = list(re.finditer(header, text[: match.start()], flags=re.M))
        if not loops or match["new"] not in yields:
            continue
        carried = [pair.split(" = ") for pair in loops[-1]["carried"].split(", ")]
        name, initial = carried[yields.index(match["new"])]
        # written by one copy right before the loop, and read by nothing but the loop
        start = re.search(rf"^(?P<indent> *)memref\.copy %[\w-]+, {re.escape(initial)} : ", text, flags=re.M)
        if start is None or uses(text, initial) != 3 or not same_block(text, start, loops[-1]):
            continue
        indent, value, type_ = match["indent"], match["value"], match["type"]
        last = re.sub(re.escape(match["new"]) + r"(?![\w-])", name, match[0].splitlines()[-1])
        copy = f"{indent}memref.copy {value}, {name} : {type_} to {type_}\n"
        text = text[: match.start()] + copy + last + "\n" + text[match.end() :]
    return text


def hoist_buffers(text: str) -> str:
    """Move buffers of fixed size from inside loops and branches to the top of the function.

    ``--buffer-loop-hoisting`` leaves those of a branch inside a loop where they are, and the stack would
    grow with every turn. A buffer on the stack does not outlive its block, so all turns can share one. Works
    on bufferized text.
    """
    start = re.search(r"^  func\.func @.*\{\n", text, flags=re.M)
    if start is None:
        return text
    inner = re.compile(r"^ {6,}(%[\w-]+ = memref\.alloca\(\).*\n)", flags=re.M)
    buffers = "".join(f"    {buffer}" for buffer in inner.findall(text))
    return text[: start.end()] + buffers + inner.sub("", text[start.end() :])


def copy_partial_blocks_with_loops(text: str) -> str:
    """Turn copies of a size known only at run time into loops.

    ``--finalize-memref-to-llvm`` would call ``memrefCopy``, a function of a run-time library that is not
    part of any package. Such copies come from masked loads and stores.
    """
    return re.sub(
        r"^( *)memref\.copy (%[\w-]+), (%[\w-]+) : (memref<\?.*>) to (memref<\?.*>)$",
        r"\1linalg.copy ins(\2 : \4) outs(\3 : \5)",
        text,
        flags=re.M,
    )
