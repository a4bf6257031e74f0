"""Rewrites in the LLVM dialect: what its code generator is to know, and the entry that is called."""

from __future__ import annotations

from collections.abc import Sequence

from moe_triton.backends.cpu.triton.ir import Operation, read_blocks

ENTRY_SYMBOL = "moe_triton_entry"

_HIDDEN_POINTERS = 2  # lock and workspace, put first by the Triton adapter


def widen_fp16_loops(module: Operation, lanes: int) -> None:
    """Ask for so many lanes in loops that convert fp16; 0 asks for nothing."""
    if not lanes:
        return
    wide = f"#llvm.loop_annotation<vectorize = <disable = false, width = {lanes} : i32>>"
    for function in module.walk("llvm.func"):
        seen: set[str] = set()
        for block in function.regions[0]:
            seen.add(block.label)
            conversions = [each for each in block.operations if each.name in ("llvm.fpext", "llvm.fptrunc")]
            converts = any("f16" in each.operand_types + each.result_types for each in conversions)
            last = block.operations[-1]
            if converts and last.name == "llvm.br" and seen.issuperset(last.successors):
                last.attributes["loop_annotation"] = wide


def prefer_wide_vectors(module: Operation, bits: int) -> None:
    """Ask for vectors of so many bits; 0 asks for nothing."""
    for function in module.walk("llvm.func") if bits else ():
        function.attributes.setdefault("passthrough", f'[["prefer-vector-width", "{bits}"]]')


def mark_noalias(module: Operation) -> None:
    """State that no two pointer arguments overlap; ``--convert-func-to-llvm`` drops such attributes.

    Without it every vector loop carries run-time overlap checks, or is not vectorised at all.
    """
    for function in module.walk("llvm.func"):
        types = function.body.arguments.values()
        marks = ["{llvm.noalias}" if type_ == "!llvm.ptr" else "{}" for type_ in types]
        function.attributes["arg_attrs"] = f"[{', '.join(marks)}]"


def set_target_triple(module: Operation, triple: str) -> None:
    """Name the target: LLVM's data layout is looked up by it, and crashes without it."""
    module.attributes["llvm.target_triple"] = f'"{triple}"'


def add_function(
    module: Operation, name: str, arguments: dict[str, str], body: str, **attributes: str
) -> None:
    """Put a function without results at the end of a module.

    Args:
        arguments: types by name.
        body: its operations, and blocks after the first one.
        attributes: those that a function need not have.
    """
    types = ", ".join(type_.removeprefix("!llvm.") for type_ in arguments.values())
    attributes |= {"function_type": f"!llvm.func<void ({types})>", "sym_name": f'"{name}"'}
    blocks = read_blocks(f'{body}\n"llvm.return"() : () -> ()')
    blocks[0].label, blocks[0].arguments = "^start", arguments
    module.body.insert(
        len(module.body.operations), Operation("llvm.func", attributes=attributes, regions=[blocks])
    )


def constant(name: str, value: int, type_: str = "i64") -> str:
    """An operation that makes a number."""
    return f'{name} = "llvm.mlir.constant"() <{{value = {value} : {type_}}}> : () -> {type_}'


def element(name: str, base: str, index: int | str, type_: str = "i8") -> str:
    """An operation that makes the address of an element of an array, by a number or by a value."""
    known, operand, of = (index, "", "") if isinstance(index, int) else (-(1 << 31), f", {index}", ", i64")
    properties = f"elem_type = {type_}, rawConstantIndices = array<i32: {known}>"
    return f'{name} = "llvm.getelementptr"({base}{operand}) <{{{properties}}}> : (!llvm.ptr{of}) -> !llvm.ptr'


def call(name: str, operands: Sequence[str], types: Sequence[str]) -> str:
    """An operation that calls a function without results."""
    # Triton's LLVM, newer than that of the passes, counts the operands.
    attributes = (
        f"callee = @{name}, operandSegmentSizes = array<i32: {len(types)}, 0>, op_bundle_sizes = array<i32>"
    )
    return f'"llvm.call"({", ".join(operands)}) {{{attributes}}} : ({", ".join(types)}) -> ()'


def append_packed_entry(module: Operation, kernel: str, types: Sequence[str]) -> None:
    """Add ``void entry(const uint64_t* words, int32_t programs, int32_t program)``, which calls the kernel.

    One signature for every kernel lets a native runner walk a plan. Written in the IR so that LLVM
    inlines the kernel into it and drops the memref descriptors' unused parts.

    Args:
        types: of the run-time arguments, in Triton's spelling.
    """
    lines = [
        '%null = "llvm.mlir.zero"() : () -> !llvm.ptr',
        constant("%zero", 0),
        constant("%one", 1),
        constant("%one_program", 1, "i32"),
        constant("%first_program", 0, "i32"),
    ]
    values = [("%null", "*i8")] * _HIDDEN_POINTERS
    for i, type_ in enumerate(types):
        loaded = "!llvm.ptr" if type_.startswith("*") else type_
        lines.append(element(f"%address{i}", "%words", i, "i64"))
        lines.append(
            f'%word{i} = "llvm.load"(%address{i}) <{{ordering = 0 : i64}}> : (!llvm.ptr) -> {loaded}'
        )
        values.append((f"%word{i}", type_))
    # programs x, y, z and program ids x, y, z, appended by the Triton adapter
    program = ("%programs", "%one_program", "%one_program", "%program", "%first_program", "%first_program")
    values += [(name, "i32") for name in program]
    passed: list[tuple[str, str]] = []
    for value, type_ in values:
        if type_.startswith("*"):  # as a memref: twice the address, offset, size and stride
            passed += [(value, "!llvm.ptr")] * 2 + [("%zero", "i64"), ("%zero", "i64"), ("%one", "i64")]
        else:
            passed.append((value, type_))
    names, signature = zip(*passed, strict=True)
    lines.append(call(kernel, names, signature))
    words = {"%words": "!llvm.ptr", "%programs": "i32", "%program": "i32"}
    add_function(module, ENTRY_SYMBOL, words, "\n".join(lines))
