"""Share: which rank of shared experts each token goes to, and its place among what goes there.

Shape symbols:
    T   tokens of this rank
    S   shared experts
    R   ranks of shared experts, [0, R)

V2: shared expert s lives on the R/S ranks ``s * (R/S) + i``, and a source rank sends all its tokens to the
one with ``i = rank % (R/S)``.

V1: there is one shared expert, and each rank's tokens are cut into R pieces. With ``F(i) = i * T // R``,
piece m of rank r holds tokens [F(m + r) - F(r), F(m + r + 1) - F(r)). Where R does not divide T, some pieces
are one token longer, and not the same ones on every rank: R consecutive source ranks give every
shared rank exactly T rows. A shared rank keeps its own tokens.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.space import Space, named_features
from moe_triton.kernels.cases import Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of

BLOCK, WIDE_BLOCK = 64, 256
BLOCKS = 16, 32, 64, 128, 256


@triton.jit
def _share_kernel(
    active_index, shared_ranks, shared_slots, shared_counts,
    num_tokens, num_shared_experts, num_shared_ranks, rank,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    replicas = num_shared_ranks // num_shared_experts
    replica = rank % replicas
    num_blocks = tl.cdiv(num_tokens, BLOCK)
    # a store waits for the one before it: the three outputs are of different programs, while there are any
    begin, end = _items_from(0, num_blocks)
    for b in range(begin, end):
        tokens = b * BLOCK + lanes
        slots = tokens
        if MASKED:
            slots = tl.load(active_index + tokens, mask=tokens < num_tokens, other=-1)
        tl.store(shared_slots + tokens, slots, mask=tokens < num_tokens)

    begin, end = _items_from(num_blocks, num_blocks)
    for b in range(begin, end):
        tokens = b * BLOCK + lanes
        left_out = lanes * 0
        if MASKED:
            # the sign: to compare takes an instruction for each element where a store has a stride
            left_out = tl.load(active_index + tokens, mask=tokens < num_tokens, other=-1) >> 31
        for s in range(0, num_shared_experts):
            ranks = left_out | (lanes * 0 + s * replicas + replica)
            tl.store(shared_ranks + tokens * num_shared_experts + s, ranks, mask=tokens < num_tokens)

    begin, end = _items_from(2 * num_blocks, num_shared_ranks)
    sent = num_tokens
    if MASKED:
        for b in range(0, tl.where(begin < end, num_blocks, 0)):
            tokens = b * BLOCK + lanes
            slots = tl.load(active_index + tokens, mask=tokens < num_tokens, other=0)
            sent += tl.sum(slots >> 31, 0)
    for m in range(begin, end):
        tl.store(shared_counts + m, tl.where(m % replicas == replica, sent, 0))


@triton.jit
def _items_from(first_program, num_items):
    """This program's items, [begin, end), of which the first ones are ``first_program``'s."""
    per_program = tl.cdiv(num_items, tl.num_programs(0))
    turned = tl.program_id(0) + tl.num_programs(0) - first_program % tl.num_programs(0)
    begin = turned % tl.num_programs(0) * per_program
    return begin, tl.minimum(begin + per_program, num_items)


@triton.jit
def _share_by_position_kernel(
    shared_ranks, shared_slots, shared_counts, num_tokens, num_shared_ranks, rank, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    local_bypass = rank < num_shared_ranks
    before = rank * num_tokens // num_shared_ranks
    first, last = part_of(num_shared_ranks)
    for m in range(first, last):
        begin = (rank + m) * num_tokens // num_shared_ranks - before
        end = (rank + m + 1) * num_tokens // num_shared_ranks - before
        begin = tl.where(local_bypass, 0, begin)
        end = tl.where(local_bypass, tl.where(m == rank, num_tokens, 0), end)
        tl.store(shared_counts + m, end - begin)
        for b in range(0, tl.cdiv(end - begin, BLOCK)):
            slots = b * BLOCK + lanes
            tl.store(shared_ranks + begin + slots, slots * 0 + m, mask=slots < end - begin)
            tl.store(shared_slots + begin + slots, slots, mask=slots < end - begin)


@fallback
def _share_fallback(a: Arguments) -> None:
    replicas = a.num_shared_ranks // a.num_shared_experts
    slots = torch.arange(a.num_tokens, dtype=torch.int32)
    if a.MASKED:
        slots = a.active_index[: a.num_tokens]
    to = torch.arange(a.num_shared_experts, dtype=torch.int32) * replicas + a.rank % replicas
    sent = slots >= 0
    ranks = torch.where(sent[:, None], to, -1)
    a.shared_ranks[: a.num_tokens * a.num_shared_experts] = ranks.reshape(-1)
    a.shared_slots[: a.num_tokens] = slots
    a.shared_counts[: a.num_shared_ranks] = 0
    a.shared_counts[to.long()] = sent.sum(dtype=torch.int32)


@fallback
def _share_by_position_fallback(a: Arguments) -> None:
    if a.rank < a.num_shared_ranks:
        counts = torch.zeros(a.num_shared_ranks, dtype=torch.int64)
        counts[a.rank] = a.num_tokens
    else:
        ranks = torch.arange(a.rank, a.rank + a.num_shared_ranks + 1)
        counts = ranks.mul(a.num_tokens).floor_divide(a.num_shared_ranks).diff()
    pieces = torch.arange(a.num_shared_ranks).repeat_interleave(counts)
    begins = counts.cumsum(0) - counts
    a.shared_ranks[: a.num_tokens] = pieces.int()
    a.shared_slots[: a.num_tokens] = (torch.arange(a.num_tokens) - begins[pieces]).int()
    a.shared_counts[: a.num_shared_ranks] = counts.int()


@functools.cache
def share_kernel(by_position: bool, masked: bool, target: str = "cpu") -> TritonKernel:
    """Tables of what a rank sends to shared experts, as `moe_triton.schemes.fullmesh.ascendc` takes them.

    ``shared_ranks`` (T, S) names the rank that each shared result comes from, -1 where the token is not sent;
    ``shared_slots`` (T,) is the token's number among those sent to that rank; ``shared_counts`` (R,) says how
    many tokens go to each shared rank.

    Args:
        by_position: V1's rule; V2's otherwise. V1 has one shared expert and no mask.
        masked: ``active_index`` numbers the tokens that take part and is negative for the others (`select`).
        target: the same form serves every target; on an NPU blocks are wider.

    Example, of 3 tokens of rank 3 with two ranks of shared experts, by position::

        num_tokens = 3
        num_shared_ranks = 2
        rank = 3
        shared_ranks = [0, 0, 1]
        shared_slots = [0, 1, 0]
        shared_counts = [2, 1]
    """
    outputs = alike("*i32", "shared_ranks shared_slots shared_counts", "out")
    block = BLOCK if target == "cpu" else WIDE_BLOCK

    def bytes_moved(*, num_tokens: int, num_shared_ranks: int, num_shared_experts: int = 1, **_: int) -> int:
        return 4 * (num_tokens * (num_shared_experts + 1 + masked) + num_shared_ranks)

    if by_position:
        if masked:
            raise ArgumentError("masked", masked, "must be False by position", "V1 takes no mask.")
        return TritonKernel(
            name="share_by_position",
            fn=_share_by_position_kernel,
            args=(*outputs, *numbers("i32", "num_tokens num_shared_ranks rank")),
            constants={"BLOCK": block},
            fallback=_share_by_position_fallback,
            bytes_moved=bytes_moved,
            space=Space({"BLOCK": BLOCKS}),
        )
    sizes = numbers("i32", "num_tokens num_shared_experts num_shared_ranks rank")
    args, absent = chosen_args((masked, Arg("active_index", "*i32", "in")), (True, (*outputs, *sizes)))
    return TritonKernel(
        name="share",
        fn=_share_kernel,
        args=args,
        constants={**absent, "MASKED": masked, "BLOCK": block},
        fallback=_share_fallback,
        bytes_moved=bytes_moved,
        space=Space({"BLOCK": BLOCKS}, named_features(masked=masked)),
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    experts = 1 if s.has("by_position") else 2
    return {
        "active_index": r.active_index(),
        "shared_ranks": blank(r.tokens, experts),
        "shared_slots": blank(r.tokens),
        "shared_counts": blank(4),
        "num_shared_experts": experts,
        "num_shared_ranks": 4,
        "rank": 6,
    }


# by position, in V1, there is no mask
FAMILIES = (Family("share", share_kernel, _inputs, variants=((), ("masked",), ("by_position",))),)
