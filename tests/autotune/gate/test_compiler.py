"""What is read off real modules, against what the compiler says elsewhere."""

from __future__ import annotations

import pytest

from autotune.gate import SOCS, compile_for_npu
from autotune.gate.report import buffered_ub_bytes, planned_ub_bytes
from autotune.gate.table import shown_cases, table
from autotune.npu_compiler.compile import compile_ir, npu_ir
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import Arg, TritonKernel
from moe_triton.core.soc import UB_BYTES
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.map_experts import map_experts_kernel

CASES = {case.name: case for case in shown_cases()}
A3, OUTLOOK = SOCS["Ascend910_9391"], SOCS["Ascend950PR_9589"]


@pytest.mark.parametrize("name", CASES)
def test_the_buffers_end_where_the_plan_says(name: str) -> None:
    compiled = compile_ir(npu_ir(CASES[name].kernel), A3)
    assert buffered_ub_bytes(compiled.module) == planned_ub_bytes(compiled.plan)


def test_a_loop_over_a_tokens_results_turns_k_times() -> None:
    estimates = []
    for topk in (4, 8):
        name = f"weighted_sum/bf16-h7168-k{topk}-s0-weights"
        report = compile_for_npu(table()[name].kernel)
        assert report.estimate is not None
        estimates.append(report.estimate)
    # an id and a weight for each result, from the unified buffer, and two flags
    assert [round(estimate.s) for estimate in estimates] == [4 * 2 * 12 + 2 * 6, 8 * 2 * 12 + 2 * 6]


def test_chips_have_the_unified_buffer_that_the_compiler_says() -> None:
    case = CASES["gather_counts"]
    assert compile_for_npu(case.kernel, A3.name).ub_capacity == 192 * 1024
    assert compile_for_npu(case.kernel, OUTLOOK.name).ub_capacity == 248 * 1024


@pytest.mark.long
def test_both_compilers_keep_every_copy_of_a_kernel() -> None:
    for case in CASES.values():
        ours, theirs = (compile_for_npu(case.kernel, soc.name) for soc in (A3, OUTLOOK))
        assert all(transfer.tile != "?" for transfer in (*ours.transfers, *theirs.transfers)), case.name
        kinds = [[transfer.kind for transfer in report.transfers] for report in (ours, theirs)]
        assert kinds[0] == kinds[1], case.name


@triton.jit
def _too_wide(x, y, WIDTH: tl.constexpr):  # noqa: N803
    columns = tl.arange(0, WIDTH)
    row = tl.load(x + columns)
    tl.store(y + columns, row / tl.max(row, 0))


def test_a_row_wider_than_the_unified_buffer_is_rejected() -> None:
    arguments = (Arg("x", "*fp32", "in"), Arg("y", "*fp32", "out"))
    kernel = TritonKernel("too_wide", _too_wide, arguments, {"WIDTH": UB_BYTES}, fallback=lambda *_: None)
    with pytest.raises(ToolchainError, match=r"too_wide|memory plan"):
        compile_for_npu(kernel)


def test_planned_bytes_are_the_highest_end() -> None:
    plan = (
        '{"Record": [{"error_info": "", "memory_info_array": ['
        '{"extent": 256, "offset": [0, 64]}, {"extent": 800, "offset": [32]}]}]}'
    )
    assert planned_ub_bytes(plan) == 132


@pytest.mark.parametrize(("num_logical", "num_columns"), [(256, 3), (256, 33), (700, 9)])
def test_tables_of_other_sizes_than_the_gates_fit_an_ai_core(num_logical: int, num_columns: int) -> None:
    kernel = map_experts_kernel(8, "server", num_logical, num_columns, "npu")
    assert planned_ub_bytes(compile_ir(npu_ir(kernel), A3).plan) <= UB_BYTES
