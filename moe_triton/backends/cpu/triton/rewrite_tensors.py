"""Rewrites before bufferization, while values are tensors."""

from __future__ import annotations

import re

from moe_triton.backends.cpu.triton.ir import Operation, read, read_blocks
from moe_triton.core.errors import ToolchainError


def drop_annotations(module: Operation) -> None:
    """Remove ``annotation.mark``: hints to the NPU compiler, and a use that would block fusion."""
    for mark in module.walk("annotation.mark"):
        mark.erase()


def arguments_of_kind(module: Operation, kind: int) -> set[str]:
    """Pointer arguments that the kernel only reads (0), only writes (1), or both (2)."""
    (function,) = module.walk("func.func")
    attributes = re.findall(r"\{(.*?)\}", function.attributes.get("arg_attrs", ""))
    named = zip(function.body.arguments, attributes, strict=False)
    return {name for name, attribute in named if attribute == f"tt.tensor_kind = {kind} : i32"}


def forward_loads(module: Operation) -> None:
    """Read inputs where they are, instead of copying every loaded block to a fresh buffer first.

    The adapter turns a load into alloc + copy + to_tensor. Where the pointer is a function argument
    that is only read, the copy serves nothing: nothing can change the block between the load and its
    uses. That holds only while no output overlaps the input, so a build for overlapping arguments must
    not use this.
    """
    inputs, makers = arguments_of_kind(module, 0), module.makers()
    for buffer in module.walk("memref.alloc"):
        users = module.users(buffer.result)
        if [user.name for user in users] != ["memref.copy", "bufferization.to_tensor"]:
            continue
        copy, tensor = users
        view = makers.get(copy.operands[0])
        if view is None or view.name != "memref.reinterpret_cast" or view.operands[0] not in inputs:
            continue
        if copy.block is tensor.block:
            tensor.operands, tensor.operand_types = view.results, view.result_types
            tensor.attributes.pop("writable", None)
            copy.erase()
            buffer.erase()


_CHEAP_OPERATIONS = 8


def clone_cheap_producers(module: Operation) -> None:
    """Give every reader of a cheap elementwise result its own copy of the computation.

    ``--linalg-fuse-elementwise-ops`` fuses a producer only into its sole user, so a widened row that
    is read twice would be stored to memory as fp32 and read back. Recomputing a conversion costs less
    than that. Must be followed by fusion before the next ``--cse``, which would merge the copies.
    """
    for producer in module.walk("linalg.generic"):
        if "reduction" in producer.attributes["iterator_types"] or not producer.results:
            continue
        if len(producer.body.operations) > _CHEAP_OPERATIONS:
            continue
        readers = dict.fromkeys(
            user for user in module.users(producer.result) if user.name == "linalg.generic"
        )
        for number, reader in enumerate(readers):
            if number:  # the original serves the first reader
                copy = _copied(producer, f"%clone{number}_")
                reader.insert_before(str(copy))
                reader.operands = [copy.result if x == producer.result else x for x in reader.operands]


def _copied(operation: Operation, prefix: str) -> Operation:
    """An operation whose results, and those of its body, carry a prefix, so that names stay unique."""
    own = {*operation.results, *operation.body.arguments, *operation.makers()}
    text = re.sub(r"%\w+", lambda m: prefix + m[0][1:] if m[0] in own else m[0], str(operation))
    return read_blocks(text)[0].operations[0]


def store_bfloat16_as_integers(module: Operation) -> None:
    """Hold bf16 as i16 and convert with integer operations.

    x86 before AVX512-BF16 has no bf16 instructions: LLVM takes vectors of bfloat apart, lane by lane.
    Widening is a shift; narrowing rounds to nearest even by adding 0x7FFF plus the lowest kept bit,
    and maps every NaN to the quiet NaN 0x7FC0, unless it is one that rounding leaves a NaN anyway.
    """
    short = _values_with_short_nans(module)
    for number, operation in enumerate(module.walk("arith.extf", "arith.truncf")):
        types = operation.operand_types + operation.result_types
        if types == ["bf16", "f32"]:
            operation.replace(_widened(operation, f"%bfw{number}"))
        elif types == ["f32", "bf16"]:
            operation.replace(_narrowed(operation, f"%bfn{number}", operation.operands[0] in short))
    for operation in module.walk():
        types = operation.operand_types + operation.result_types
        if operation.name == "arith.constant" and types[0].endswith(("bf16", "bf16>")):
            raise ToolchainError(
                "a bf16 constant is left in a kernel: compute in fp32 and convert at the store"
            )
        if operation.name.startswith("arith.") and operation.name.endswith("f") and "bf16" in types:
            raise ToolchainError("bf16 arithmetic is left in a kernel: compute in fp32")
    text = re.sub(r"(?<![\w.])bf16\b|(?<=x)bf16\b", "i16", str(module))
    module.regions = read(text).regions


def _widened(operation: Operation, n: str) -> str:
    return f"""
        {n}_c = "arith.constant"() <{{value = 16 : i32}}> : () -> i32
        {n}_i = "arith.extui"({operation.operands[0]}) : (i16) -> i32
        {n}_s = "arith.shli"({n}_i, {n}_c) : (i32, i32) -> i32
        {operation.result} = "arith.bitcast"({n}_s) : (i32) -> f32
    """


def _narrowed(operation: Operation, n: str, has_short_nan: bool) -> str:
    value = operation.operands[0]
    choice = f"""
        {n}_n = "arith.cmpf"({value}, {value}) <{{predicate = 14 : i64}}> : (f32, f32) -> i1
        {n}_v = "arith.select"({n}_n, {n}_quiet, {n}_r) : (i1, i32, i32) -> i32
    """
    return f"""
        {n}_16 = "arith.constant"() <{{value = 16 : i32}}> : () -> i32
        {n}_1 = "arith.constant"() <{{value = 1 : i32}}> : () -> i32
        {n}_bias = "arith.constant"() <{{value = 32767 : i32}}> : () -> i32
        {n}_quiet = "arith.constant"() <{{value = 2143289344 : i32}}> : () -> i32
        {n}_b = "arith.bitcast"({value}) : (f32) -> i32
        {n}_h = "arith.shrui"({n}_b, {n}_16) : (i32, i32) -> i32
        {n}_l = "arith.andi"({n}_h, {n}_1) : (i32, i32) -> i32
        {n}_a = "arith.addi"({n}_b, {n}_bias) : (i32, i32) -> i32
        {n}_r = "arith.addi"({n}_a, {n}_l) : (i32, i32) -> i32
        {"" if has_short_nan else choice}
        {n}_u = "arith.shrui"({n}_{"r" if has_short_nan else "v"}, {n}_16) : (i32, i32) -> i32
        {operation.result} = "arith.trunci"({n}_u) : (i32) -> i16
    """


def _values_with_short_nans(module: Operation) -> set[str]:
    """Results of arithmetic whose NaNs have nothing but zeros in their low 16 bits.

    Such a NaN is what an operation makes of numbers, 0xFFC00000, or a quiet one handed on from a bf16. An
    fp32 number from memory may be a NaN of all ones, which rounding would turn into a zero.
    """
    sources: set[str] = set()
    results: set[str] = set()
    for operation in module.walk():
        if operation.result_types != ["f32"]:
            continue
        if operation.name in ("arith.addf", "arith.subf", "arith.mulf", "arith.divf"):
            if (sources | results).issuperset(operation.operands):
                results.add(operation.result)
        elif (
            operation.name in ("arith.sitofp", "arith.uitofp")
            or (operation.name == "arith.extf" and operation.operand_types == ["bf16"])
            or (operation.name == "arith.constant" and re.match(r"-?\d\.\d", operation.attributes["value"]))
        ):
            sources.add(operation.result)
    return results


def round_through_bits(module: Operation) -> None:
    """Take a rounded int8 from the bits of the sum that rounded it.

    ``(x + 1.5 * 2^23) - 1.5 * 2^23`` rounds to nearest even and the conversion truncates. The low byte of
    the sum's mantissa already is that integer: two instructions of six fewer per vector. Where the
    value is outside int8 the conversion has no defined result, so nothing is lost.
    """
    makers = module.makers()
    constants = module.walk("arith.constant")
    magic = {each.result for each in constants if each.attributes["value"] == "0x4B400000 : f32"}
    for quantized in module.walk("arith.fptosi"):
        rounded = makers.get(quantized.operands[0])
        if quantized.result_types != ["i8"] or rounded is None or rounded.name != "arith.subf":
            continue
        total = makers.get(rounded.operands[0])
        if total is None or total.name != "arith.addf" or len(module.users(rounded.result)) != 1:
            continue
        if total.operands[1] == rounded.operands[1] and total.operands[1] in magic:
            rounded.replace(f'{rounded.result} = "arith.bitcast"({total.result}) : (f32) -> i32')
            quantized.replace(f'{quantized.result} = "arith.trunci"({rounded.result}) : (i32) -> i8')
