from __future__ import annotations

import ctypes
import functools
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_triton.backends.cpu.triton import launch, launch_fallback, load, overlaps, prepare
from moe_triton.backends.cpu.triton.codegen import compile_object, link, undefined_symbols
from moe_triton.backends.cpu.triton.targets import TARGETS, cpu_flags, target_named, this_target
from moe_triton.core.errors import ArgumentError, ToolchainError
from moe_triton.core.installing import install
from moe_triton.core.kernel import Arg, TritonKernel
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.route import route_kernel
from moe_triton.kernels.weighted_sum import weighted_sum_kernel
from moe_triton.layout import SlotLayout


@triton.jit
def _double(x, y, num_rows, ROW: tl.constexpr):  # noqa: N803
    columns = tl.arange(0, ROW)
    for i in range(0, num_rows):
        tl.store(y + i * ROW + columns, tl.load(x + i * ROW + columns) * 2)


@functools.cache
def double_kernel(row: int) -> TritonKernel:
    args = (Arg("x", "*fp32", "in"), Arg("y", "*fp32", "out"), Arg("num_rows", "i32", "value"))
    return TritonKernel("double", _double, args, {"ROW": row}, fallback=lambda *_, **__: None)


def test_the_packed_entry_is_callable_by_address() -> None:
    compiled = load(double_kernel(32))
    x, y = torch.arange(64.0), torch.zeros(64)
    words = (ctypes.c_uint64 * 3)(x.data_ptr(), y.data_ptr(), 2)
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)(compiled.entry)
    entry(ctypes.addressof(words), 1, 0)
    assert torch.equal(y, 2 * x)


def test_load_returns_the_same_code_again() -> None:
    assert load(double_kernel(32)) is load(double_kernel(32))
    assert load(double_kernel(32)).entry != load(double_kernel(64)).entry
    assert load(double_kernel(32)).entry != load(double_kernel(32), noalias=False).entry


def test_overlapping_arguments_give_the_result_of_row_by_row_execution() -> None:
    """y starts half a row after x: each row is read after the one before was written."""
    rows, row, shift = 5, 96, 48
    memory = torch.arange(float(rows * row + shift))
    want = memory.clone()
    for i in range(rows):
        want[shift + i * row : shift + (i + 1) * row] = want[i * row : (i + 1) * row].clone() * 2
    launch(double_kernel(row), [memory[: rows * row], memory[shift:], rows])
    assert torch.equal(memory, want)


def test_in_place_weighted_sum() -> None:
    slots = torch.randn((4, 1, 64)).bfloat16()
    ids, weights = torch.zeros((4, 1), dtype=torch.int32), torch.rand((4, 1))
    want = (slots[:, 0].float() * weights).bfloat16()
    launch(weighted_sum_kernel(torch.bfloat16, 64, 1), [slots, ids, weights, slots, 64, 64, 0, 4, 1])
    assert torch.equal(slots[:, 0], want)


def test_overlaps() -> None:
    kernel = double_kernel(32)
    assert overlaps(kernel, [(0, 100), (99, 100), None])
    assert not overlaps(kernel, [(0, 100), (100, 100), None])
    assert not overlaps(kernel, [(0, 100), (50, 0), None])
    slots = pack_kernel(torch.bfloat16, 32)
    fields: list[tuple[int, int] | None] = [(1000, 64), (0, 512), (32, 480)]
    assert not overlaps(slots, fields + [None] * 4)
    assert overlaps(slots, [(500, 64), *fields[1:]] + [None] * 4)
    inputs = arrange_kernel(SlotLayout(32, 1, 1), has_weight=False)
    memory = [(0, 512), (0, 512), (0, 8), (600, 4), (64, 64), (700, 8), (800, 8), (900, 8)]
    assert not overlaps(inputs, [*memory, None, None])
    assert overlaps(inputs, [*memory[:5], (64, 8), *memory[6:], None, None])


def test_stack_does_not_grow_with_the_number_of_rows() -> None:
    """Buffers inside the row loop would take 128 MB of stack here."""
    rows, row = 65536, 256
    memory = torch.ones(rows * row + 8)
    launch(double_kernel(row), [memory[: rows * row], memory[8:], rows])
    assert load(double_kernel(row), noalias=False)


def test_prepared_calls_see_new_contents() -> None:
    x, y = torch.ones(32), torch.zeros(32)
    call = prepare(double_kernel(32), [x, y, 1])
    call()
    x.fill_(5)
    call()
    assert y.tolist() == [10.0] * 32


def test_arguments_are_checked() -> None:
    x = torch.ones(32)
    with pytest.raises(ArgumentError, match="number of arguments"):
        launch(double_kernel(32), [x, x])
    with pytest.raises(ArgumentError, match=r"double: x .*float32"):
        launch(double_kernel(32), [x.double(), x, 1])
    with pytest.raises(ArgumentError, match="must be a tensor"):
        launch(double_kernel(32), [0, x, 1])
    with pytest.raises(ArgumentError, match="32 bits"):
        launch(double_kernel(32), [x, x.clone(), 1 << 31])
    with pytest.raises(ArgumentError, match="programs"):
        launch(double_kernel(32), [x, x.clone(), 1], 0)


LEVELS = [each.name for each in TARGETS if platform.machine() in each.machines]


@pytest.mark.parametrize("cpu", LEVELS)
def test_all_levels_give_the_same_bits(cpu: str) -> None:
    if not target_named(cpu).needs <= cpu_flags():
        pytest.skip("this CPU has another level")
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        slots = torch.randn((3, 4, 96), generator=generator).to(dtype)
        slots[0, 0, :4] = torch.tensor([float("nan"), float("inf"), 1e-7, -0.0])
        ids = torch.tensor([[0, 1, -1, 2]] * 3, dtype=torch.int32)
        weights = torch.rand((3, 4), generator=generator)
        kernel = weighted_sum_kernel(dtype, 96, 4)
        results = [torch.empty((3, 96), dtype=dtype) for _ in range(2)]
        arguments = [slots, ids, weights, results[0], 4 * 96, 96, 0, 3, 3]
        words = (ctypes.c_uint64 * 9)(*(a if isinstance(a, int) else a.data_ptr() for a in arguments))
        load(kernel, cpu=cpu).function(ctypes.addressof(words), 1, 0)
        arguments[3] = results[1]
        launch_fallback(kernel, arguments)
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


def _sqrt_module(callee: str) -> str:
    return (
        f'module attributes {{llvm.target_triple = "{this_target().triple}"}} {{\n'
        f"  llvm.func @{callee}(f32) -> f32\n"
        "  llvm.func @moe_triton_entry(%x: f32) -> f32 {\n"
        f"    %0 = llvm.call @{callee}(%x) : (f32) -> f32\n"
        "    llvm.return %0 : f32\n  }\n}\n"
    )


def test_code_that_calls_the_unknown_is_not_linked() -> None:
    code = compile_object(_sqrt_module("memrefCopy"), this_target())
    assert undefined_symbols(code) == {"memrefCopy"}
    with pytest.raises(ToolchainError, match="memrefCopy"):
        link(code)


@triton.jit
def _multiplies_bf16(x, y):
    columns = tl.arange(0, 32)
    tl.store(y + columns, tl.load(x + columns).to(tl.bfloat16) * tl.load(y + columns).to(tl.bfloat16))


def test_a_kernel_that_cannot_be_lowered_is_an_error_not_a_crash() -> None:
    args = (Arg("x", "*fp32", "in"), Arg("y", "*fp32", "inout"))
    kernel = TritonKernel("bf16_product", _multiplies_bf16, args, {}, fallback=lambda *_, **__: None)
    with pytest.raises(ToolchainError, match="bf16"):
        load(kernel)


@triton.jit
def _rejected(x):
    tl.store(x, undefined_name)  # noqa: F821


def test_an_error_in_a_kernel_names_the_kernel() -> None:
    kernel = TritonKernel(
        "broken", _rejected, (Arg("x", "*fp32", "out"),), {}, fallback=lambda *_, **__: None
    )
    with pytest.raises(ToolchainError, match="broken"):
        load(kernel)


_LOAD_IN_CHILD = """
import torch
from moe_triton.kernels.route import route_kernel
from moe_triton.backends.cpu.triton import launch, load
print(load(route_kernel()).path)
ids, index, counts = (torch.zeros(4, dtype=torch.int32) for _ in range(3))
launch(route_kernel(), [ids, index, counts, 4, 4])
assert counts.tolist() == [4, 0, 0, 0]
"""


def test_a_damaged_library_is_compiled_again_by_the_next_process() -> None:
    path = load(route_kernel()).path
    sound = path.read_bytes()
    # another file in its place: the one this process has mapped must stay as it is
    damaged = path.with_suffix(".damaged")
    damaged.write_bytes(sound[:4000])
    damaged.replace(path)
    child = subprocess.run([sys.executable, "-c", _LOAD_IN_CHILD], capture_output=True, text=True, check=True)
    assert Path(child.stdout.strip()) == path
    assert len(path.read_bytes()) == len(sound)


def test_without_triton_kernels_import_and_the_error_says_what_to_do() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from moe_triton.backends.cpu.triton import launch, launch_fallback, probe
from moe_triton.core.errors import ToolchainError
from moe_triton.kernels.route import route_kernel
ids = torch.tensor([1, 1, 0, 1], dtype=torch.int32)
index, counts = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
launch_fallback(route_kernel(), [ids, index, counts, 4, 2])
print(index.tolist())
assert not probe()[0].ok
try:
    launch(route_kernel(), [ids, index, counts, 4, 2])
except ToolchainError as error:
    print(error)
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[0, 1, 0, 2]" in child.stdout
    assert install("cpu") in child.stdout
    assert 'kernels="torch"' in child.stdout
