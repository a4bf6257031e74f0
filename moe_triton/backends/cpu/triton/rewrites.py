"""Edits of MLIR text between compiler passes, and why each one is needed.

Every other step of the chain is a stock pass. These are the places where no pass does the job, or
where one drops information. Each edit takes and returns the text of a module printed with
``--mlir-print-unique-ssa-ids`` and `unique_names` (SSA names are unique across the module), and leaves
a module that it does not apply to as it is. There is a module for each state of the text: tensors,
buffers, the LLVM dialect.
"""

from moe_triton.backends.cpu.triton.rewrite_ahead import copy_ahead, read_ahead
from moe_triton.backends.cpu.triton.rewrite_buffers import (
    carry_in_place,
    copy_partial_blocks_with_loops,
    hoist_buffers,
    store_in_place,
)
from moe_triton.backends.cpu.triton.rewrite_llvm import (
    ENTRY_SYMBOL,
    append_packed_entry,
    mark_noalias,
    prefer_wide_vectors,
    set_target_triple,
    widen_fp16_loops,
)
from moe_triton.backends.cpu.triton.rewrite_names import (
    unique_names,
)
from moe_triton.backends.cpu.triton.rewrite_tensors import (
    clone_cheap_producers,
    drop_annotations,
    forward_loads,
    round_through_bits,
    store_bfloat16_as_integers,
)
from moe_triton.backends.cpu.triton.rewrite_vectors import vectorize_rows

__all__ = [
    "ENTRY_SYMBOL",
    "append_packed_entry",
    "carry_in_place",
    "clone_cheap_producers",
    "copy_ahead",
    "copy_partial_blocks_with_loops",
    "drop_annotations",
    "forward_loads",
    "hoist_buffers",
    "mark_noalias",
    "prefer_wide_vectors",
    "read_ahead",
    "round_through_bits",
    "set_target_triple",
    "store_bfloat16_as_integers",
    "store_in_place",
    "unique_names",
    "vectorize_rows",
    "widen_fp16_loops",
]
