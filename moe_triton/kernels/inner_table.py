"""Inner table: which experts of this server each token has that came by the rail, ascending, and where.

Shape symbols:
    S   servers
    N   tokens of a rank at most; there are places for S * N
    K   experts per token
    W   words of a token's choices: K, rounded up to 8
    X   experts of a server

A token has come as `moe_triton.kernels.outer_table` made it: W words of choices, then its K weights.

One source serves two machines, as in `moe_triton.kernels.numbering`: ``SCALAR`` chooses. A CPU compares 8
choices as a tile, of which a row is a vector, and any other number of them one by one.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import TritonKernel, alike, chosen_args, numbers
from moe_triton.core.records import POSITION_SHIFT
from moe_triton.kernels.cases import Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.programs import part_of
from moe_triton.kernels.zones import ZONE, ZONE_STRIDE, in_zone, zone_offset
from moe_triton.layout import UB_ALIGN, WORD_BYTES, align


@triton.jit
def _local(word, first_expert, server_experts, SHIFT: tl.constexpr):
    """An expert's number on this server; as many as there are for one that is not here."""
    expert = (word & ((1 << SHIFT) - 1)) - first_expert
    is_here = (word >= 0) & (expert >= 0) & (expert < server_experts)
    return tl.where(is_here, expert, server_experts)


@triton.jit
def _inner_table_kernel(
    tokens, rail_counts, inner_ids, inner_positions, inner_weights, inner_active_index, zone,
    num_servers, max_tokens, first_expert, server_experts, server_stride, token_stride, zone_stride,
    TOPK: tl.constexpr, WORDS: tl.constexpr, SHIFT: tl.constexpr, SCALAR: tl.constexpr,
):  # fmt: skip
    if zone is not None:
        tokens += zone_offset(zone, zone_stride)
    total = num_servers * max_tokens
    begin, end = part_of(total)
    for row in range(begin, end):
        server = row // max_tokens
        number = row % max_tokens
        # a count that came from another rank must not lead past the end: numbers do not
        is_there = number < tl.load(rail_counts + server)
        tl.store(inner_active_index + row, tl.where(is_there, 0, -1))
        # a loop of one turn or none: in a branch, the CPU's compiler would never free the stores' buffers
        for _ in range(0, is_there.to(tl.int32)):
            token = tokens + server.to(tl.int64) * server_stride + number.to(tl.int64) * token_stride
            first = server * server_experts
            if SCALAR:
                here = 0
                for k in range(0, TOPK):
                    word = tl.load(token + k)
                    expert = _local(word, first_expert, server_experts, SHIFT)
                    if expert < server_experts:
                        place = 0
                        for other_k in range(0, TOPK):
                            other = _local(tl.load(token + other_k), first_expert, server_experts, SHIFT)
                            is_before = (other < expert) | ((other == expert) & (other_k < k))
                            place += is_before.to(tl.int32)
                        tl.store(inner_ids + row * TOPK + place, first + expert)
                        tl.store(inner_positions + row * TOPK + place, word >> SHIFT)
                        tl.store(inner_weights + row * TOPK + place, tl.load(token + WORDS + k))
                        here += 1
                for place in range(here, TOPK):
                    tl.store(inner_ids + row * TOPK + place, -1)
                    tl.store(inner_positions + row * TOPK + place, 0)
                    tl.store(inner_weights + row * TOPK + place, 0)
            else:
                # each choice is compared with all others; each place takes the one that has so many before it
                ks = tl.arange(0, WORDS)
                words = tl.load(token + ks)
                weights = tl.load(token + WORDS + ks)
                # floats: to compare integers takes four instructions
                experts = _local(words, first_expert, server_experts, SHIFT).to(tl.float32)
                columns = ks.to(tl.float32)
                other, own = experts[None, :], experts[:, None]
                is_before = (other < own) | ((other == own) & (columns[None, :] < columns[:, None]))
                places = tl.sum(is_before.to(tl.float32), 1)
                is_here = experts < server_experts.to(tl.float32)
                takes = (places[None, :] == columns[:, None]) & is_here[None, :]
                chosen = tl.max(tl.where(takes, words[None, :], -1), 1)
                # bits of any sign, each alone in its sum
                bits = tl.sum(tl.where(takes, weights[None, :], 0), 1)
                at, is_place = row * TOPK + ks, ks < TOPK
                local = first - first_expert + (chosen & ((1 << SHIFT) - 1))
                tl.store(inner_ids + at, tl.where(chosen >= 0, local, -1), mask=is_place)
                tl.store(inner_positions + at, tl.where(chosen >= 0, chosen >> SHIFT, 0), mask=is_place)
                tl.store(inner_weights + at, bits, mask=is_place)


@fallback
def _inner_table_fallback(a: Arguments) -> None:
    tokens = in_zone(a.tokens, a.zone, a.zone_stride)
    total = a.num_servers * a.max_tokens
    is_there = torch.arange(a.max_tokens) < a.rail_counts[: a.num_servers, None]
    a.inner_active_index[:total] = torch.where(is_there, 0, -1).view(-1).int()
    servers, numbers_there = is_there.nonzero(as_tuple=True)
    if not len(servers):
        return
    begin = servers * a.server_stride + numbers_there * a.token_stride
    words = tokens[begin[:, None] + torch.arange(a.TOPK)]
    weights = tokens[begin[:, None] + a.WORDS + torch.arange(a.TOPK)]
    experts = (words & (1 << a.SHIFT) - 1) - a.first_expert
    is_here = (words >= 0) & (experts >= 0) & (experts < a.server_experts)
    order = torch.where(is_here, experts, a.server_experts).argsort(dim=1, stable=True)
    rows = servers * a.max_tokens + numbers_there
    for out, values, none in (
        (a.inner_ids, experts + (servers * a.server_experts)[:, None], -1),
        (a.inner_positions, words >> a.SHIFT, 0),
        (a.inner_weights, weights, 0),
    ):
        outputs = torch.where(is_here, values, none).gather(1, order).int()
        out[: total * a.TOPK].view(-1, a.TOPK)[rows] = outputs


@functools.cache
def inner_table_kernel(topk: int, target: str = "cpu", zoned: bool = False) -> TritonKernel:
    """The choices on this server of the token at place (s, i), for each i < ``rail_counts[s]``, by experts::

        inner_ids[s * N + i, j] = s * X + the j-th expert's number on this server; then -1
        inner_positions[s * N + i, j] = the token's number among its rank's for that expert; then 0
        inner_weights[s * N + i, j] = its weight, as int32 bits; then 0
        inner_active_index[s * N + i] = 0; -1 where i >= rail_counts[s], for which nothing else is written

    Word 0 of token i of server s is ``s * server_stride + i * token_stride`` words after ``tokens``; expert
    ``first_expert`` is the first one of this server. With ``zoned``, ``tokens`` is zone 0's, and
    ``zone_stride`` words lead to the other.

    Example, with K 2: one token, whose experts are 3, for which it is its rank's second, and 2::

        tokens = [65539, 2, -1, -1, -1, -1, -1, -1, 7, 8]
        rail_counts = [1]
        num_servers = 1
        max_tokens = 2
        first_expert = 2
        server_experts = 2
        server_stride = 10
        token_stride = 10
        inner_ids = [0, 1]
        inner_positions = [0, 1]
        inner_weights = [8, 7]
        inner_active_index = [0, -1]
    """
    check_positive("topk", topk)
    args, absent = chosen_args(
        (True, alike("*i32", "tokens rail_counts", "in")),
        (True, alike("*i32", "inner_ids inner_positions inner_weights inner_active_index", "out")),
        (zoned, ZONE),
        (True, numbers("i32", "num_servers max_tokens first_expert server_experts")),
        (True, numbers("i64", "server_stride token_stride")),
        (zoned, ZONE_STRIDE),
    )
    return TritonKernel(
        name="inner_table",
        fn=_inner_table_kernel,
        args=args,
        constants={
            **absent,
            "TOPK": topk,
            "WORDS": align(topk, UB_ALIGN // WORD_BYTES),
            "SHIFT": POSITION_SHIFT,
            # measured: of 4 or 16 choices, tiles take twice and one and a half times as long (decision 0013)
            "SCALAR": target == "cpu" and topk != 8,
        },
        fallback=_inner_table_fallback,
    )


NUM_SERVERS = 4


def _inputs(s: Shape, r: Draw) -> Inputs:
    words = align(s.topk, UB_ALIGN // WORD_BYTES)
    stride = 2 * words + 24
    tokens = r.words(NUM_SERVERS, r.tokens, stride)
    tokens[:, :, : s.topk] = torch.where(r.ids >= 0, r.ids | r.integers(0, r.tokens, *r.ids.shape) << 16, -1)
    tokens[:, :, s.topk : words] = -1
    counts = r.integers(0, r.tokens + 1, NUM_SERVERS)
    counts[0] = -1
    most = NUM_SERVERS * r.tokens
    return {
        "tokens": tokens,
        "rail_counts": counts,
        "inner_ids": blank(most, s.topk),
        "inner_positions": blank(most, s.topk),
        "inner_weights": blank(most, s.topk),
        "inner_active_index": blank(most),
        "num_servers": NUM_SERVERS,
        "max_tokens": r.tokens,
        "first_expert": r.num_experts // NUM_SERVERS,
        "server_experts": r.num_experts // NUM_SERVERS,
        "server_stride": r.tokens * stride,
        "token_stride": stride,
        "bytes_moved": int(counts.clamp(0).sum()) * 4 * (2 * words + 3 * s.topk) + 4 * (most + NUM_SERVERS),
    }


FAMILIES = (Family("inner_table", inner_table_kernel, _inputs, window="tokens"),)
