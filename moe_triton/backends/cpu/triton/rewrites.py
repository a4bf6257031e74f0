"""Edits of MLIR text between compiler passes, and why each one is needed.

Every other step of the chain is a stock pass. These are the places where no pass does the job, or
where one drops information. Each edit takes and returns the text of a module printed with
``--mlir-print-unique-ssa-ids`` and `unique_names` (SSA names are unique across the module), and leaves
a module that it does not apply to as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moe_triton.errors import ToolchainError

ENTRY_SYMBOL = "moe_triton_entry"

_PROGRAM_WORDS = 6  # programs x, y, z and program ids x, y, z, appended by the Triton adapter
_HIDDEN_POINTERS = 2  # lock and workspace, put first by the Triton adapter


def unique_names(text: str) -> str:
    """Give every result a name of its own.

    ``--mlir-print-unique-ssa-ids`` does so for numbers; blocks beside each other, such as two branches, may still
    use one word each for a result of their own. Edits that follow a name would take them for the same.
    """
    results = re.compile(r"^(?P<indent> *)(?P<name>%[A-Za-z][\w-]*) = ", flags=re.M)
    seen: set[str] = set()
    repeated = []
    for match in results.finditer(text):
        if match["name"] in seen:
            repeated.append(match)
        seen.add(match["name"])
    for number, match in reversed(list(enumerate(repeated))):
        end = re.compile(rf"^ {{0,{len(match['indent']) - 1}}}[^ \n^]", flags=re.M).search(
            text, match.start("name")
        )
        assert end is not None
        block = re.sub(
            re.escape(match["name"]) + r"(?![\w-])",
            f"%again{number}_{match['name'][1:]}",
            text[match.start() : end.start()],
        )
        text = text[: match.start()] + block + text[end.start() :]
    return text


def drop_annotations(text: str) -> str:
    """Remove ``annotation.mark``: hints to the NPU compiler, and a use that would block fusion."""
    return re.sub(r"^\s*annotation\.mark .*\n", "", text, flags=re.M)


def forward_loads(text: str) -> str:
    """Read inputs where they are, instead of copying every loaded block to a fresh buffer first.

    The adapter turns a load into alloc + copy + to_tensor. Where the pointer is a function argument
    that is only read (tensor_kind 0), the copy serves nothing: nothing can change the block between
    the load and its uses. That holds only while no output overlaps the input, so a build for
    overlapping arguments must not use this.
    """
    inputs = set(re.findall(r"(%\w+): memref<\?x\w+> \{tt\.tensor_kind = 0 : i32\}", text))
    views = {
        view: memref
        for view, base, memref in re.findall(
            r"^\s*(%[\w-]+) = memref\.reinterpret_cast (%\w+) to .* to (memref<.*>)$", text, flags=re.M
        )
        if base in inputs
    }
    load = re.compile(
        r"^(?P<indent>\s*)(?P<alloc>%[\w-]+) = memref\.alloc\(\).*\n"
        r"\s*memref\.copy (?P<view>%[\w-]+), (?P=alloc) : .*\n"
        r"\s*(?P<tensor>%[\w-]+) = bufferization\.to_tensor (?P=alloc) restrict writable : .*\n",
        flags=re.M,
    )

    def replace(match: re.Match[str]) -> str:
        memref = views.get(match["view"])
        if memref is None or _uses(text, match["alloc"]) != 3:
            return match[0]
        indent, tensor, view = match["indent"], match["tensor"], match["view"]
        return f"{indent}{tensor} = bufferization.to_tensor {view} restrict : {memref}\n"

    return load.sub(replace, text)


_GENERIC = re.compile(
    r"^(?P<indent> *)(?P<result>%[\w-]+) = linalg\.generic \{(?P<attributes>[^\n]*)\} "
    r"(?:ins\((?P<inputs>[^\n]*?)\) )?outs\([^\n]*\) \{\n(?P<body>.*?)\n(?P=indent)\} -> [^\n]*\n",
    flags=re.M | re.S,
)
_CHEAP_OPERATIONS = 8


def clone_cheap_producers(text: str) -> str:
    """Give every reader of a cheap elementwise result its own copy of the computation.

    ``--linalg-fuse-elementwise-ops`` fuses a producer only into its sole user, so a widened row that
    is read twice would be stored to memory as fp32 and read back. Recomputing a conversion costs less
    than that. Must be followed by fusion before the next ``--cse``, which would merge the copies.
    """
    for producer in list(_GENERIC.finditer(text)):
        if "reduction" in producer["attributes"] or producer["body"].count("\n") > _CHEAP_OPERATIONS:
            continue
        name = producer["result"]
        use = re.compile(re.escape(name) + r"(?![\w-])")
        readers = [g for g in _GENERIC.finditer(text) if g["inputs"] and use.search(g["inputs"])]
        if len(readers) < 2:
            continue
        for number, reader in reversed(list(enumerate(readers))):
            if number == 0:
                continue  # the original serves the first reader
            copy_name = f"%clone{number}_{name[1:]}"
            copy = _renamed(producer[0], f"clone{number}_{name[1:]}_").replace(
                name + " =", copy_name + " =", 1
            )
            edited = use.sub(copy_name, reader[0].split("{\n", 1)[0]) + "{\n" + reader[0].split("{\n", 1)[1]
            text = text[: reader.start()] + copy + edited + text[reader.end() :]
    return text


def _renamed(generic: str, prefix: str) -> str:
    """The text of a generic whose body's values carry a prefix, so that names stay unique."""
    head, body = generic.split("{\n", 1)
    local = set(re.findall(r"(%[\w-]+) =", body)) | set(re.findall(r"(%[\w-]+):", body))
    for value in local:
        body = re.sub(re.escape(value) + r"(?![\w-])", f"%{prefix}{value[1:]}", body)
    return head + "{\n" + body


def store_in_place(text: str) -> str:
    """Compute a stored row straight into its destination, instead of into a buffer that is then copied.

    Works on bufferized text: a buffer that one elementwise ``linalg.generic`` writes and one copy in the
    same block reads is replaced by the copy's destination, an argument that is only written
    (tensor_kind 1). ``--eliminate-empty-tensors`` would do it before bufferization, but gives up because
    the empty tensor is hoisted above the destination's address. As with `forward_loads`, only for
    builds whose arguments do not overlap.
    """
    outputs = set(re.findall(r"(%\w+): memref<\?x\w+> \{tt\.tensor_kind = 1 : i32\}", text))
    copies = re.findall(
        r"^ *memref\.copy (%[\w-]+), (%[\w-]+) : memref<[^>]*> to memref<.*>\n", text, flags=re.M
    )
    for buffer, view in copies:
        name = re.escape(buffer)
        copy = re.search(
            rf"^(?P<indent> *)memref\.copy {name}, {view} : memref<[^>]*> to (?P<type>memref<.*>)\n",
            text,
            flags=re.M,
        )
        writer = re.search(
            r"^(?P<indent> *)linalg\.generic \{(?P<attributes>.*)\} .*"
            rf"outs\((?P<out>{name} : memref<[^>]*>)\) \{{$",
            text,
            flags=re.M,
        )
        allocation = re.search(rf"^ *{name} = memref\.alloca?\(.*\n", text, flags=re.M)
        address = re.search(rf"^ *{view} = memref\.reinterpret_cast (%\w+) ", text, flags=re.M)
        if copy is None or writer is None or allocation is None or address is None:
            continue
        if "reduction" in writer["attributes"] or address[1] not in outputs or _uses(text, buffer) != 3:
            continue
        if address.start() > writer.start() or not _same_block(text, writer, copy):
            continue
        edits = [
            (writer.start("out"), writer.end("out"), f"{view} : {copy['type']}"),
            (allocation.start(), allocation.end(), ""),
            (copy.start(), copy.end(), ""),
        ]
        for start, end, replacement in sorted(edits, reverse=True):
            text = text[:start] + replacement + text[end:]
    return text


def _uses(text: str, value: str) -> int:
    """How often a value is named, its definition included."""
    return len(re.findall(re.escape(value) + r"(?![\w-])", text))


def _same_block(text: str, first: re.Match[str], second: re.Match[str]) -> bool:
    """Whether two operations, matched with their indent, stand in one block of the printed module."""
    indent = len(first["indent"])
    between = text[first.start() : second.start()].splitlines()
    return len(second["indent"]) == indent and all(
        len(line) - len(line.lstrip()) >= indent or line.lstrip().startswith("^") for line in between
    )


def store_bfloat16_as_integers(text: str) -> str:
    """Hold bf16 as i16 and convert with integer operations.

    x86 before AVX512-BF16 has no bf16 instructions: LLVM takes vectors of bfloat apart, lane by lane.
    Widening is a shift; narrowing rounds to nearest even by adding 0x7FFF plus the lowest kept bit,
    and maps every NaN to the quiet NaN 0x7FC0.
    """
    if re.search(r"constant .*: (tensor<[^>]*x?bf16>|bf16)$", text, flags=re.M):
        raise ToolchainError("a bf16 constant is left in a kernel: compute in fp32 and convert at the store")
    counter = iter(range(1 << 30))

    def widen(match: re.Match[str]) -> str:
        indent, result, value = match.groups()
        n = f"%bfw{next(counter)}"
        return (
            f"{indent}{n}_c = arith.constant 16 : i32\n"
            f"{indent}{n}_i = arith.extui {value} : i16 to i32\n"
            f"{indent}{n}_s = arith.shli {n}_i, {n}_c : i32\n"
            f"{indent}{result} = arith.bitcast {n}_s : i32 to f32\n"
        )

    def narrow(match: re.Match[str]) -> str:
        indent, result, value = match.groups()
        n = f"%bfn{next(counter)}"
        return (
            f"{indent}{n}_16 = arith.constant 16 : i32\n"
            f"{indent}{n}_1 = arith.constant 1 : i32\n"
            f"{indent}{n}_bias = arith.constant 32767 : i32\n"
            f"{indent}{n}_quiet = arith.constant 32704 : i32\n"
            f"{indent}{n}_b = arith.bitcast {value} : f32 to i32\n"
            f"{indent}{n}_h = arith.shrui {n}_b, {n}_16 : i32\n"
            f"{indent}{n}_l = arith.andi {n}_h, {n}_1 : i32\n"
            f"{indent}{n}_a = arith.addi {n}_b, {n}_bias : i32\n"
            f"{indent}{n}_r = arith.addi {n}_a, {n}_l : i32\n"
            f"{indent}{n}_u = arith.shrui {n}_r, {n}_16 : i32\n"
            f"{indent}{n}_n = arith.cmpf uno, {value}, {value} : f32\n"
            f"{indent}{n}_v = arith.select {n}_n, {n}_quiet, {n}_u : i32\n"
            f"{indent}{result} = arith.trunci {n}_v : i32 to i16\n"
        )

    line = r"^(\s*)(%[\w-]+) = arith\.{} (%[\w-]+) : {}\n"
    text = re.sub(line.format("extf", "bf16 to f32"), widen, text, flags=re.M)
    text = re.sub(line.format("truncf", "f32 to bf16"), narrow, text, flags=re.M)
    if re.search(r"arith\.\w+f .*\bbf16\b", text):
        raise ToolchainError("bf16 arithmetic is left in a kernel: compute in fp32")
    return re.sub(r"(?<![\w.])bf16\b|(?<=x)bf16\b", "i16", text)


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
        if start is None or _uses(text, initial) != 3 or not _same_block(text, start, loops[-1]):
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


def round_through_bits(text: str) -> str:
    """Take a rounded int8 from the bits of the sum that rounded it.

    ``(x + 1.5 * 2^23) - 1.5 * 2^23`` rounds to nearest even and the conversion truncates. The low byte of
    the sum's mantissa already is that integer: two instructions of six fewer per vector. Where the
    value is outside int8 the conversion has no defined result, so nothing is lost.
    """
    magic = set(
        re.findall(r"(%[\w-]+) = arith\.constant (?:0x4B400000|1\.2582912E\+07|12582912\.0) : f32", text)
    )
    pattern = re.compile(
        r"^(?P<indent> *)(?P<sum>%[\w-]+) = arith\.addf (?P<x>%[\w-]+), (?P<magic>%[\w-]+) : f32\n"
        r" *(?P<rounded>%[\w-]+) = arith\.subf (?P=sum), (?P=magic) : f32\n"
        r" *(?P<q>%[\w-]+) = arith\.fptosi (?P=rounded) : f32 to i8\n",
        flags=re.M,
    )

    def replace(match: re.Match[str]) -> str:
        indent, rounded, q = match["indent"], match["rounded"], match["q"]
        if match["magic"] not in magic or _uses(text, rounded) != 2:
            return match[0]
        return (
            f"{indent}{match['sum']} = arith.addf {match['x']}, {match['magic']} : f32\n"
            f"{indent}{rounded} = arith.bitcast {match['sum']} : f32 to i32\n"
            f"{indent}{q} = arith.trunci {rounded} : i32 to i8\n"
        )

    return pattern.sub(replace, text)


def widen_fp16_loops(text: str) -> str:
    """Ask for 16 lanes in loops that convert fp16.

    LLVM's cost table charges a conversion of 16 lanes as if it were taken apart, and settles for 4 lanes,
    although F16C and AVX-512 convert 8 and 16 in one instruction.
    """
    annotation = "{loop_annotation = #llvm.loop_annotation<vectorize = <disable = false, width = 16 : i32>>}"
    seen: set[str] = set()
    converts = False
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if label := re.match(r" *(\^bb\d+)", line):
            seen.add(label[1])
            converts = False
        elif re.search(r"llvm\.(fpext .* : f16 to f32|fptrunc .* : f32 to f16)", line):
            converts = True
        elif (jump := re.match(r" *llvm\.br (\^bb\d+).*[^}]$", line)) and converts and jump[1] in seen:
            lines[i] = f"{line.rstrip()} {annotation}\n"
    return "".join(lines)


def vectorize_short_loops(text: str) -> str:
    """Ask for vectors in innermost loops of 8 to 32 turns, such as those over the rows of a narrow tile.

    LLVM unrolls such a loop before it looks for vectors, and then finds a few narrow ones at best. Being
    asked, it may sum floats in any order: a loop that gathers floats in one place is left alone.
    """
    constants = dict(re.findall(r"(%[\w-]+) = llvm\.mlir\.constant\((8|16|32) : index\)", text))
    # innermost: the block after the header is all there is, and jumps back
    loop = re.compile(
        r"^(?P<head> *(?P<label>\^bb\d+)\((?P<i>%[\w-]+): i64\):.*\n"
        r" *%[\w-]+ = llvm\.icmp \"slt\" (?P=i), (?P<bound>%[\w-]+) : i64\n"
        r" *llvm\.cond_br .*\n"
        r" *\^bb\d+:.*\n(?P<body>(?:(?! *\^bb| *llvm\.(?:cond_)?br).*\n)*) *llvm\.br (?P=label)\([^)]*\))"
        r"(?P<hint> \{loop_annotation.*\})?$",
        flags=re.M,
    )

    def replace(match: re.Match[str]) -> str:
        if match["bound"] not in constants or _gathers_floats(match["body"], match["i"]):
            return match[0]
        width = min(int(constants[match["bound"]]), 16)
        hint = f"vectorize = <disable = false, width = {width} : i32>, unroll = <disable = true>"
        return f"{match['head']} {{loop_annotation = #llvm.loop_annotation<{hint}>}}"

    return loop.sub(replace, text)


def _gathers_floats(body: str, variable: str) -> bool:
    """Whether a loop's body stores a float to an address that does not depend on the loop's variable."""
    dependent = {variable}
    for line in body.splitlines():
        result, _, operation = line.partition(" = ")
        if dependent & set(re.findall(r"%[\w-]+", operation)):
            dependent.add(result.strip())
    stores = re.findall(r"llvm\.store %[\w-]+, (%[\w-]+) .*: (?:f16|f32|f64), ", body)
    return not dependent.issuperset(stores)


def prefer_wide_vectors(text: str) -> str:
    """Ask for 512-bit vectors: LLVM's default for x86-64-v4 is 256 bits, half the lanes of these loops."""
    attribute = 'passthrough = [["prefer-vector-width", "512"]]'

    def replace(match: re.Match[str]) -> str:
        if match["given"]:
            return f"{match['head']} attributes {{{attribute}, "
        return f"{match['head']} attributes {{{attribute}}} {{"

    return re.sub(
        r"^(?P<head>\s*llvm\.func @\w+\(.*\))(?P<given> attributes \{)?(?(given)| \{)",
        replace,
        text,
        flags=re.M,
    )


def set_target_triple(text: str, triple: str) -> str:
    """Name the target: LLVM's data layout is looked up by it, and crashes without it."""
    return re.sub(
        r"^module( attributes \{)?",
        lambda m: f'module attributes {{llvm.target_triple = "{triple}"' + (", " if m[1] else "} "),
        text,
        count=1,
        flags=re.M,
    ).replace("}  {", "} {", 1)


def mark_noalias(text: str, kernel: str) -> str:
    """State that no two pointer arguments overlap; ``--convert-func-to-llvm`` drops such attributes.

    Without it every vector loop carries run-time overlap checks, or is not vectorised at all.
    """
    head = re.compile(rf"^(\s*llvm\.func @{kernel}\()(.*?)(\)(?: attributes| \{{|\s*->))", flags=re.M)
    return head.sub(lambda m: m[1] + m[2].replace(": !llvm.ptr", ": !llvm.ptr {llvm.noalias}") + m[3], text)


def append_packed_entry(text: str, kernel: str, types: Sequence[str]) -> str:
    """Add ``void entry(const uint64_t* words, int32_t programs, int32_t program)``, which calls the kernel.

    One signature for every kernel lets a native runner walk a plan. Written in the IR so that LLVM
    inlines the kernel into it and drops the memref descriptors' unused parts.

    Args:
        types: of the run-time arguments, in Triton's spelling.
    """
    lines = [
        f"  llvm.func @{ENTRY_SYMBOL}(%words: !llvm.ptr, %programs: i32, %program: i32) {{",
        "    %null = llvm.mlir.zero : !llvm.ptr",
        "    %zero = llvm.mlir.constant(0 : i64) : i64",
        "    %one = llvm.mlir.constant(1 : i64) : i64",
        "    %one_program = llvm.mlir.constant(1 : i32) : i32",
        "    %first_program = llvm.mlir.constant(0 : i32) : i32",
    ]
    memref = ("!llvm.ptr", "!llvm.ptr", "i64", "i64", "i64")
    arguments: list[tuple[str, str]] = []
    for _ in range(_HIDDEN_POINTERS):
        arguments += zip(("%null", "%null", "%zero", "%zero", "%one"), memref, strict=True)
    for i, type_ in enumerate(types):
        load = "!llvm.ptr" if type_.startswith("*") else type_
        lines.append(f"    %address{i} = llvm.getelementptr %words[{i}] : (!llvm.ptr) -> !llvm.ptr, i64")
        lines.append(f"    %word{i} = llvm.load %address{i} : !llvm.ptr -> {load}")
        if type_.startswith("*"):
            arguments += zip((f"%word{i}", f"%word{i}", "%zero", "%zero", "%one"), memref, strict=True)
        else:
            arguments.append((f"%word{i}", type_))
    program = ("%programs", "%one_program", "%one_program", "%program", "%first_program", "%first_program")
    assert len(program) == _PROGRAM_WORDS
    arguments += [(name, "i32") for name in program]
    names = ", ".join(name for name, _ in arguments)
    signature = ", ".join(type_ for _, type_ in arguments)
    lines += [f"    llvm.call @{kernel}({names}) : ({signature}) -> ()", "    llvm.return", "  }"]
    end = text.rstrip().rindex("}")
    return text[:end] + "\n".join(lines) + "\n}\n"
