"""Edits before bufferization, while values are tensors."""

from __future__ import annotations

import re

from moe_triton.backends.cpu.triton.rewrite_names import uses
from moe_triton.core.errors import ToolchainError


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
        if memref is None or uses(text, match["alloc"]) != 3:
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


def store_bfloat16_as_integers(text: str) -> str:
    """Hold bf16 as i16 and convert with integer operations.

    x86 before AVX512-BF16 has no bf16 instructions: LLVM takes vectors of bfloat apart, lane by lane.
    Widening is a shift; narrowing rounds to nearest even by adding 0x7FFF plus the lowest kept bit,
    and maps every NaN to the quiet NaN 0x7FC0, unless it is one that rounding leaves a NaN anyway.
    """
    if re.search(r"constant .*: (tensor<[^>]*x?bf16>|bf16)$", text, flags=re.M):
        raise ToolchainError("a bf16 constant is left in a kernel: compute in fp32 and convert at the store")
    counter = iter(range(1 << 30))
    short = _values_with_short_nans(text)

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
        choice = (
            f"{indent}{n}_n = arith.cmpf uno, {value}, {value} : f32\n"
            f"{indent}{n}_v = arith.select {n}_n, {n}_quiet, {n}_u : i32\n"
        )
        rounded = f"{n}_u" if value in short else f"{n}_v"
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
            f"{choice if value not in short else ''}"
            f"{indent}{result} = arith.trunci {rounded} : i32 to i16\n"
        )

    line = r"^(\s*)(%[\w-]+) = arith\.{} (%[\w-]+) : {}\n"
    text = re.sub(line.format("extf", "bf16 to f32"), widen, text, flags=re.M)
    text = re.sub(line.format("truncf", "f32 to bf16"), narrow, text, flags=re.M)
    if re.search(r"arith\.\w+f .*\bbf16\b", text):
        raise ToolchainError("bf16 arithmetic is left in a kernel: compute in fp32")
    return re.sub(r"(?<![\w.])bf16\b|(?<=x)bf16\b", "i16", text)


def _values_with_short_nans(text: str) -> set[str]:
    """Results of arithmetic whose NaNs have nothing but zeros in their low 16 bits.

    Such a NaN is what an operation makes of numbers, 0xFFC00000, or a quiet one handed on from a bf16. An
    fp32 number from memory may be a NaN of all ones, which rounding would turn into a zero.
    """
    operation = re.compile(
        r"^ *(%[\w-]+) = (?:arith\.(extf %[\w-]+ : bf16 to f32|[su]itofp .* to f32|"
        r"constant -?\d\.\d+[eE][-+]\d+ : f32)|arith\.(?:addf|subf|mulf|divf) (.*) : f32)$",
        flags=re.M,
    )
    sources: set[str] = set()
    results: set[str] = set()
    for result, source, operands in operation.findall(text):
        if source:
            sources.add(result)
        elif (sources | results).issuperset(operands.split(", ")):
            results.add(result)
    return results


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
        if match["magic"] not in magic or uses(text, rounded) != 2:
            return match[0]
        return (
            f"{indent}{match['sum']} = arith.addf {match['x']}, {match['magic']} : f32\n"
            f"{indent}{rounded} = arith.bitcast {match['sum']} : f32 to i32\n"
            f"{indent}{q} = arith.trunci {rounded} : i32 to i8\n"
        )

    return pattern.sub(replace, text)
