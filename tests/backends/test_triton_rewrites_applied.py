"""Which rewrites change which kernels: one that no longer knows what it is for must not pass unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from moe_triton.backends.cpu.triton import (
    lowering,
    rewrite_ahead,
    rewrite_buffers,
    rewrite_llvm,
    rewrite_tensors,
)
from moe_triton.backends.cpu.triton.frontend import tensor_ir
from moe_triton.backends.cpu.triton.ir import Operation
from moe_triton.backends.cpu.triton.targets import this_target
from moe_triton.kernels import Sizes, kernel_cases

REWRITES = [
    (rewrite_tensors, "drop_annotations"),
    (rewrite_tensors, "forward_loads"),
    (rewrite_tensors, "clone_cheap_producers"),
    (rewrite_tensors, "round_through_bits"),
    (rewrite_tensors, "store_bfloat16_as_integers"),
    (rewrite_buffers, "carry_in_place"),
    (rewrite_buffers, "hoist_buffers"),
    (rewrite_buffers, "copy_partial_blocks_with_loops"),
    (rewrite_buffers, "store_in_place"),
    (lowering, "vectorize_rows"),
    (lowering, "narrow_by_shuffles"),
    (lowering, "fuse_loops"),
    (rewrite_llvm, "mark_noalias"),
    (rewrite_llvm, "widen_fp16_loops"),
    (rewrite_ahead, "read_ahead"),
    (rewrite_ahead, "copy_ahead"),
]
CASES = {
    "share/by_position": {"copy_partial_blocks_with_loops", "mark_noalias", "copy_ahead"},
    "arrange_own/h7168-k8-s0": {"forward_loads", "hoist_buffers", "mark_noalias", "copy_ahead"},
    "add_rows/bf16-h7168": {"forward_loads", "store_bfloat16_as_integers", "store_in_place", "read_ahead"},
    "block_quantize/fp16-h7168": {
        "drop_annotations",
        "forward_loads",
        "clone_cheap_producers",
        "round_through_bits",
        "store_in_place",
        "vectorize_rows",
        "widen_fp16_loops",
    },
    "rms_norm/h7168": {"vectorize_rows", "narrow_by_shuffles", "fuse_loops", "read_ahead"},
    "weighted_sum/bf16-h7168-k8-s0-weights-special": {"hoist_buffers", "read_ahead"},
    "weighted_sum/bf16-h7168-k8-s0-weights": {"carry_in_place"},
}
# A sum carries its tensor from turn to turn where a setting leaves the loop over experts rolled.
SETTINGS = {"weighted_sum/bf16-h7168-k8-s0-weights": {"UNROLL": 0}}


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the rewrites that have changed anything."""
    found: set[str] = set()

    def watch(module: ModuleType, name: str) -> None:
        rewrite: Callable[..., None] = getattr(module, name)

        def watched(tree: Operation, *settings: object) -> None:
            before = str(tree)
            rewrite(tree, *settings)
            if str(tree) != before:
                found.add(name)

        monkeypatch.setattr(module, name, watched)

    for module, name in REWRITES:
        watch(module, name)
    return found


@pytest.mark.parametrize(("name", "rewrites"), CASES.items(), ids=CASES.keys())
def test_rewrites_change_the_kernels_that_they_are_for(
    applied: set[str], name: str, rewrites: set[str]
) -> None:
    cases = [case for hidden in (0, 7168) for case in kernel_cases(Sizes(), hidden, "cpu")]
    kernel = next(case.kernel for case in cases if case.name == name)
    kernel = replace(kernel, constants={**kernel.constants, **SETTINGS.get(name, {})})
    lowering.lower(tensor_ir(kernel, named_ops=False), kernel, noalias=True, target=this_target())
    assert rewrites <= applied


def test_each_rewrite_is_for_one_of_these_kernels() -> None:
    assert set().union(*CASES.values()) == {name for _, name in REWRITES}
