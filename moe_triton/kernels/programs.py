"""What each program of a launch works on."""

from __future__ import annotations

from moe_triton.kernels.language import tl, triton


@triton.jit
def part_of(number):
    """This program's part of so many items, [begin, end); the last programs may have fewer or none."""
    per_program = tl.cdiv(number, tl.num_programs(0))
    begin = tl.program_id(0) * per_program
    return begin, tl.minimum(begin + per_program, number)
