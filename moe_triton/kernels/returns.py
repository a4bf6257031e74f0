"""Returns: where V1's combine sends each row back to, computed from the counts of dispatch alone.

Shape symbols:
    E    experts of this rank
    EP   ranks
    R    ranks of V1's shared expert, [0, R)
    M    routed experts
    N    E*EP entries, expert-major: n = e * EP + source
    A    rows of this rank at most
    BS   tokens of a rank

V1's origins have no token: rows are identified by their expert and their number among those from their
source. An origin (rank, index, expert) names the slot that a result goes to; the shared expert has number M,
and its results are numbered by token. See `moe_triton.kernels.share` for F(i) = i * BS // R.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.records import ORIGIN
from moe_triton.core.space import PROGRAMS, Space
from moe_triton.kernels.cases import I32, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of

BLOCK = 64
BLOCKS = 16, 32, 64, 128
ORIGIN_WORDS = ORIGIN.num_words


@triton.jit
def _returns_kernel(
    recv_offsets, origins,
    num_entries, num_ranks, capacity, first_expert, rank, num_tokens, num_shared_ranks, num_experts,
    SHARED: tl.constexpr, SCALAR: tl.constexpr, BLOCK: tl.constexpr, ORIGIN_WORDS: tl.constexpr,
):  # fmt: skip
    begin, end = part_of(num_entries)
    for n in range(begin, end):
        if SHARED:
            # entries below R stand for this rank's own tokens, whose rows are in token order
            is_own = n < num_shared_ranks
            before = n * num_tokens // num_shared_ranks
            token = (rank + n) * num_tokens // num_shared_ranks - before
            source, expert = tl.where(is_own, rank, n), num_experts
        else:
            expert = first_expert + n // num_ranks
            source = n % num_ranks
        # the offsets come from the caller: no row lies outside [0, capacity)
        start = tl.where(n > 0, tl.load(recv_offsets + tl.maximum(n - 1, 0)), 0)
        start = tl.minimum(tl.maximum(start, 0), capacity)
        stop = tl.minimum(tl.maximum(tl.load(recv_offsets + n), 0), capacity)
        first_index = tl.where(is_own, start, token) if SHARED else 0
        if SCALAR:
            # an entry has few rows: most of a block would be unused
            for row in range(start, stop):
                at = origins + tl.cast(row, tl.int64) * ORIGIN_WORDS
                tl.store(at, source)
                tl.store(at + 1, row - start + first_index)
                tl.store(at + 2, expert)
        else:
            lanes = tl.arange(0, BLOCK)
            for b in range(0, tl.cdiv(tl.maximum(stop - start, 0), BLOCK)):
                i = b * BLOCK + lanes
                inside = i < stop - start
                at = origins + tl.cast(start, tl.int64) * ORIGIN_WORDS + i * ORIGIN_WORDS
                tl.store(at, i * 0 + source, mask=inside)
                tl.store(at + 1, i + first_index, mask=inside)
                tl.store(at + 2, i * 0 + expert, mask=inside)


@fallback
def _returns_fallback(a: Arguments) -> None:
    ends = a.recv_offsets[: a.num_entries].clamp(0, a.capacity).tolist()
    for n, (start, stop) in enumerate(zip([0, *ends][:-1], ends, strict=True)):
        if not a.SHARED:
            source, first_index, expert = n % a.num_ranks, 0, a.first_expert + n // a.num_ranks
        elif n < a.num_shared_ranks:
            source, first_index, expert = a.rank, start, a.num_experts
        else:
            before = n * a.num_tokens // a.num_shared_ranks
            first_index = (a.rank + n) * a.num_tokens // a.num_shared_ranks - before
            source, expert = n, a.num_experts
        if start < stop:
            rows = a.origins[ORIGIN_WORDS * start : ORIGIN_WORDS * stop].view(-1, ORIGIN_WORDS)
            rows[:, 0] = source
            rows[:, 1] = torch.arange(first_index, first_index + stop - start, dtype=torch.int32)
            rows[:, 2] = expert


@functools.cache
def returns_kernel(shared: bool, target: str = "cpu") -> TritonKernel:
    """Origins (destination rank, index, expert) of every row that a rank of V1 received.

    ``recv_offsets`` is the inclusive prefix sum of the rows per entry, as dispatch reported it. It is an
    argument of the caller, so rows outside [0, capacity) are never written. Entries may be split over
    programs.

    Args:
        shared: on a rank of the shared expert, whose first rows are its own tokens; otherwise
            experts are numbered from ``first_expert`` on.

    Example, of two ranks; experts 2 and 3 are here, and expert 2 has one row from rank 0 and two from 1::

        recv_offsets = [1, 3, 3, 4]
        num_entries = 4
        num_ranks = 2
        capacity = 8
        first_expert = 2
        origins = [0, 0, 2, 1, 0, 2, 1, 1, 2, 1, 0, 3]
    """
    args, absent = chosen_args(
        (True, (Arg("recv_offsets", "*i32", "in"), Arg("origins", "*i32", "out"))),
        (True, Arg("num_entries", "i32", "value")),
        (not shared, Arg("num_ranks", "i32", "value")),
        (True, Arg("capacity", "i32", "value")),
        (not shared, Arg("first_expert", "i32", "value")),
        (shared, numbers("i32", "rank num_tokens num_shared_ranks num_experts")),
    )
    is_scalar = target == "cpu"
    return TritonKernel(
        name=f"returns{'_shared' * shared}",
        fn=_returns_kernel,
        args=args,
        constants={
            **absent,
            "SHARED": shared,
            "SCALAR": is_scalar,
            "BLOCK": BLOCK,
            "ORIGIN_WORDS": ORIGIN_WORDS,
        },
        fallback=_returns_fallback,
        space=None if is_scalar else Space({"BLOCK": BLOCKS, PROGRAMS: (0, 8, 16)}),
    )


@triton.jit
def _own_offsets_kernel(
    recv_offsets, out, num_ranks, num_shared_ranks, rank, num_tokens, BLOCK: tl.constexpr
):
    first, last = part_of(num_shared_ranks)
    before = rank * num_tokens // num_shared_ranks
    for i in range(first, last):
        tl.store(out + i, (rank + i + 1) * num_tokens // num_shared_ranks - before)

    lanes = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(num_ranks - num_shared_ranks, BLOCK)
    first_block, last_block = part_of(num_blocks)
    for b in range(first_block, last_block):
        at = num_shared_ranks + b * BLOCK + lanes
        tl.store(out + at, tl.load(recv_offsets + at, mask=at < num_ranks), mask=at < num_ranks)


@fallback
def _own_offsets_fallback(a: Arguments) -> None:
    ranks = torch.arange(a.rank, a.rank + a.num_shared_ranks + 1)
    pieces = ranks.mul(a.num_tokens).floor_divide(a.num_shared_ranks)
    a.out[: a.num_shared_ranks] = (pieces[1:] - pieces[0]).int()
    a.out[a.num_shared_ranks : a.num_ranks] = a.recv_offsets[a.num_shared_ranks : a.num_ranks]


@functools.cache
def own_offsets_kernel(target: str = "cpu") -> TritonKernel:
    """What a rank of V1's shared expert reports: its own tokens split into R pieces, one per shared rank.

    Its tokens come from itself alone, yet ``out[i]`` for i < R ends at the i-th piece of them; from R on the
    offsets are the true ones. The same form serves every target.

    Example, of rank 0 of 3, two of which are of the shared expert, with 3 tokens::

        recv_offsets = [3, 3, 4]
        num_ranks = 3
        num_shared_ranks = 2
        rank = 0
        num_tokens = 3
        out = [1, 3, 4]
    """
    return TritonKernel(
        name="own_offsets",
        fn=_own_offsets_kernel,
        args=(
            Arg("recv_offsets", "*i32", "in"),
            Arg("out", "*i32", "out"),
            *numbers("i32", "num_ranks num_shared_ranks rank num_tokens"),
        ),
        constants={"BLOCK": BLOCK},
        fallback=_own_offsets_fallback,
        space=Space({"BLOCK": BLOCKS}),
        bytes_moved=lambda *, num_ranks, num_shared_ranks, **_: 4 * (2 * num_ranks - num_shared_ranks),
    )


def _shared_inputs(s: Shape, r: Draw) -> Inputs:
    """The inputs on a shared rank of V1: its own tokens come first, then those of the other ranks."""
    ends = (torch.arange(r.num_ranks, dtype=I32) - 1) * (r.tokens // 2) + r.tokens
    ends[:2] = torch.tensor([r.tokens // 2, r.tokens])
    rows = int(ends[-1])
    return {
        "recv_offsets": ends,
        "origins": blank(rows, ORIGIN_WORDS),
        "out": blank(r.num_ranks),
        "num_entries": r.num_ranks,
        "capacity": rows,
        "rank": 1,
        "num_shared_ranks": 2,
        "bytes_moved": 12 * rows + 4 * r.num_ranks,
    }


def _inputs(s: Shape, r: Draw) -> Inputs:
    if s.has("shared_rank"):
        return _shared_inputs(s, r)
    rows = int(r.ends[-1])
    return {
        "origins": blank(rows, ORIGIN_WORDS),
        "num_entries": r.entries,
        "capacity": rows,
        "first_expert": r.num_local,
        "bytes_moved": 12 * rows + 4 * r.entries,
    }


FAMILIES = (
    Family(
        "returns",
        returns_kernel,
        _inputs,
        lambda s: returns_kernel(s.has("shared_rank"), s.target),
        features=("shared_rank",),
    ),
    Family("own_offsets", own_offsets_kernel, _shared_inputs),
)
