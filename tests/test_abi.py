"""The launch boundary: both sides agree on every argument, and who does not is told by name."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from moe_triton.backends.cpu import native
from moe_triton.core import abi
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import Arg, AscendCKernel, TritonKernel
from moe_triton.core.plan import Launch, Part, Placeholder
from moe_triton.kernels import Shape, families
from moe_triton.kernels.add_rows import add_rows_kernel
from moe_triton.kernels.language import HAVE_TRITON
from moe_triton.schemes.ascendc import FUSED, KERNELS, LAUNCHED, Tables
from moe_triton.schemes.common.ascendc import EXCHANGE_SEND
from moe_triton.tools import codegen
from tests.patience import seconds
from tests.surroundings import cxx

SOURCES = Path(__file__).resolve().parents[1] / "kernels_ascendc"
SMALL = AscendCKernel(
    "small",
    (
        Arg("rows", "*i8", "in"),
        Arg("slots", "indexed_slots", "value"),
        Arg("count", "i64", "value"),
    ),
)


def launched(kernel: AscendCKernel | TritonKernel, *values: object) -> Launch:
    return Launch("step", kernel, values, 1, "communication")  # type: ignore[arg-type]


# Words.


def test_words_stand_in_the_order_of_the_table() -> None:
    words, placeholders = abi.words(launched(SMALL, Placeholder("x", 64), (1, 2, 3, 4, 5), -1))
    assert words == [0, 1, 2, 3, 4, 5, 2**64 - 1]
    assert placeholders == [(0, Placeholder("x", 64))]


def test_a_placeholder_behind_a_region_is_found_behind_its_words() -> None:
    part = Part("tokens", index=1, parts=3)
    _, placeholders = abi.words(launched(SMALL, 4096, (1, 2, 3, 4, 5), part))
    assert placeholders == [(6, part)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, (1, 2, 3), 0), r"small: slots is \(1, 2, 3\), but indexed_slots takes 5 word"),
        ((0, 7, 0), "small: slots is 7, but indexed_slots takes 5 word"),
        ((0, Placeholder("slots"), 0), "small: slots is .*, but indexed_slots takes 5 word"),
        (((1,), (1, 2, 3, 4, 5), 0), r"small: rows is \(1,\), but \*i8 takes 1 word"),
        ((0, (1, 2, 3, 4, 5), 2**64), "small: count is 18446744073709551616, more than 64 bits"),
        ((0, (1, 2, 3, 4, -(2**63) - 1), 0), "small: slots is .* more than 64 bits"),
    ],
)
def test_a_value_that_its_argument_cannot_take_is_refused(values: Sequence[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abi.words(launched(SMALL, *values))


def test_a_value_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        abi.words(launched(SMALL, 0, (1, 2, 3, 4, 5)))


# Libraries.


def test_the_library_says_what_the_tables_say() -> None:
    library = native.library()
    library.moe_abi.restype = ctypes.c_char_p
    assert library.moe_abi().decode() == abi.text(KERNELS, FUSED)


def renamed(kernel: AscendCKernel) -> AscendCKernel:
    return replace(kernel, args=(replace(kernel.args[0], name="other"), *kernel.args[1:]))


def swapped(kernel: AscendCKernel) -> AscendCKernel:
    return replace(kernel, args=(kernel.args[1], kernel.args[0], *kernel.args[2:]))


def retyped(kernel: AscendCKernel) -> AscendCKernel:
    return replace(kernel, args=(replace(kernel.args[0], type="i64"), *kernel.args[1:]))


def longer(kernel: AscendCKernel) -> AscendCKernel:
    return replace(kernel, args=(*kernel.args, Arg("extra", "i64", "value")))


def other_region(kernel: AscendCKernel) -> AscendCKernel:
    # As many words, other dimensions.
    return replace(kernel, args=tuple(replace(a, type="exchange_headers") for a in kernel.args))


CHANGES = [renamed, swapped, retyped, longer, other_region]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_table_changes_its_line(change: Callable[[AscendCKernel], AscendCKernel]) -> None:
    kernel = replace(SMALL, args=(SMALL.args[1],)) if change is other_region else SMALL
    before, after = abi.line_of(kernel), abi.line_of(change(kernel))
    assert before != after
    assert before.split()[2] != after.split()[2]


class Abi:
    """The function ``moe_abi`` of a library."""

    restype: object = None

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self) -> bytes:
        assert self.restype is ctypes.c_char_p  # without it an address comes back, cut to 32 bits
        return self.text.encode()


class FakeLibrary:
    """A library of which only ``moe_abi`` matters."""

    def __init__(self, text: str) -> None:
        self.moe_abi = Abi(text)


def checked(text: str) -> None:
    library = FakeLibrary(text)
    abi.Abi(library, Path("libmoe.so"), "Build it anew.").check(*LAUNCHED)  # type: ignore[arg-type]


def refused(text: str) -> str:
    with pytest.raises(ToolchainError) as caught:
        checked(text)
    return str(caught.value)


def test_a_library_of_these_tables_is_taken() -> None:
    checked(abi.text(KERNELS, FUSED))


@pytest.mark.parametrize("change", CHANGES[:4])
def test_a_library_of_other_tables_is_refused_by_name(
    change: Callable[[AscendCKernel], AscendCKernel],
) -> None:
    theirs = [change(k) if k.name == "exchange_send" else k for k in KERNELS]
    message = refused(abi.text(theirs, FUSED))
    ours = EXCHANGE_SEND
    (changed,) = [k for k in theirs if k.name == "exchange_send"]
    assert "libmoe.so does not fit this moe_triton: exchange_send differs" in message
    assert abi.layout_of(ours) in message
    assert abi.layout_of(changed) in message
    assert message.endswith("Build it anew.")
    assert "combine_send" not in message


def test_all_kernels_that_differ_are_named() -> None:
    message = refused(abi.text([renamed(k) if "combine" in k.name else k for k in KERNELS], FUSED))
    assert "combine_send, combine_wait, combine_ready, combine_post differ." in message


def test_kernels_that_the_library_lacks_are_named() -> None:
    *others, last = KERNELS
    assert f"{last.name} in the library: no such kernel" in refused(abi.text(others, FUSED))
    checked(abi.text([*KERNELS, SMALL], FUSED))  # another one's is no matter


def test_constants_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(abi.CONSTANTS, "REPORT_TIMEOUT", 8)
    other = abi.text(KERNELS, FUSED)
    monkeypatch.undo()
    message = refused(other)
    assert "constants differs" in message
    assert "REPORT_TIMEOUT=8" in message
    assert "REPORT_TIMEOUT=1" in message


def test_an_old_library_is_told_from_a_wrong_one() -> None:
    with pytest.raises(ToolchainError, match=r"libc\.so does not say which arguments"):
        abi.Abi(ctypes.CDLL(None), Path("libc.so"), "Build it anew.")


def test_a_struct_that_is_not_packed_so_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "moe_layout.h").write_text(codegen.render(Tables(KERNELS, FUSED)))
    (tmp_path / "moe_abi.h").write_text(
        codegen.render_abi(
            Tables(tuple(swapped(k) if k.name == "post_status" else k for k in KERNELS), FUSED)
        )
    )
    (tmp_path / "main.cpp").write_text('#include "kernel_operator.h"\n#include "moe_abi.h"\n')
    command = [*cxx(), "-std=c++17", "-fsyntax-only", "-I.", f"-I{SOURCES}/emulation", "main.cpp"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=seconds(60)
    )
    assert done.returncode != 0
    assert "num_ranks is moved" in done.stderr


# Triton kernels: their arguments are words in the order of the function's parameters.

BF16 = torch.bfloat16


def parameters_of(kernel: TritonKernel) -> tuple[str, ...]:
    """The parameters of a kernel's function that a launch passes, in order."""
    return tuple(p.name for p in kernel.fn.params if not p.is_constexpr and p.name not in kernel.constants)


def built() -> Iterator[TritonKernel]:
    """Every variant of every kernel, in each form."""
    for family, target, zoned in product(families().values(), ("cpu", "npu"), (False, True)):
        for features, shared in product(family.variants, (0, 1)):
            shape = Shape("bf16", 128, 2, shared, frozenset(features), target, zoned)
            yield family.kernel(family.as_launched(shape))


@pytest.mark.skipif(not HAVE_TRITON, reason="without Triton a kernel's parameters are not known")
def test_triton_arguments_are_the_parameters_in_order() -> None:
    looked_at = 0
    for kernel in built():
        assert parameters_of(kernel) == tuple(arg.name for arg in kernel.args), kernel.name
        bound = {arg.name for arg in kernel.args} | set(kernel.constants)
        assert bound == {parameter.name for parameter in kernel.fn.params}, kernel.name
        looked_at += 1
    assert looked_at > 8 * len(families())


@pytest.mark.skipif(not HAVE_TRITON, reason="without Triton a kernel's parameters are not known")
def test_triton_arguments_in_another_order_are_seen() -> None:
    kernel = add_rows_kernel(BF16, 64)
    wrong = replace(kernel, args=kernel.args[::-1])
    assert parameters_of(wrong) != tuple(arg.name for arg in wrong.args)


def test_every_word_of_a_triton_launch_is_one_argument() -> None:
    kernel = add_rows_kernel(BF16, 64)
    words, placeholders = abi.words(
        launched(kernel, Placeholder("rows"), Placeholder("slots"), Placeholder("counts"), 16, 0, 5, 64)
    )
    assert words == [0, 0, 0, 16, 0, 5, 64]
    assert [position for position, _ in placeholders] == [0, 1, 2]


def test_the_launchers_have_the_shape_that_is_declared() -> None:
    source = (SOURCES / "launch" / "moe_kernels.asc").read_text()
    launchers = re.findall(r"^MOE_LAUNCHER\((\w+), (\w+)\)$", source, flags=re.M)
    assert launchers == [(codegen.camel(kernel.name), kernel.name) for kernel in KERNELS]
    fused = re.findall(r"^MOE_FUSED_LAUNCHER\((\w+), (\w+)\)$", source, flags=re.M)
    assert fused == [(codegen.camel(kernel.name), kernel.name) for kernel in FUSED]
    assert "int moe_##name(uint32_t blocks, void* stream, const moe::Name##Args* args)" in source
