"""Outer table: to which servers each of a rank's tokens goes, its number there, and its choices for the way.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    M   experts of all ranks (num_experts), ``server_experts`` of them on each server
    S   servers
    W   words of a token's choices: K, rounded up to 8

One source serves two machines, as in `moe_triton.kernels.numbering`: ``SCALAR`` chooses.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, alike, numbers
from moe_triton.core.records import POSITION_SHIFT
from moe_triton.kernels.cases import Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.layout import UB_ALIGN, WORD_BYTES, align

ROWS = 32  # tokens of a tile


@triton.jit
def _goes(topk_idx, at, cols, end, first, last, TOPK: tl.constexpr):
    """1.0 for each token whose ids have one in [first, last); 0.0 from ``end`` on.

    Floats: to compare integers takes four instructions.
    """
    ids = tl.load(topk_idx + at * TOPK + cols, mask=(at < end) & (cols < TOPK), other=-1).to(tl.float32)
    return tl.max(((ids >= first) & (ids < last)).to(tl.float32), 1)


@triton.jit
def _outer_table_kernel(
    topk_idx, expand_idx, outer_ids, outer_rows, outer_counts, route_words,
    num_tokens, num_experts, server_experts,
    TOPK: tl.constexpr, WORDS: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, SERVERS: tl.constexpr,
    SCALAR: tl.constexpr,
):  # fmt: skip
    if SCALAR:
        if tl.program_id(0) == 0:
            for server in range(0, SERVERS):
                tl.store(outer_counts + server, 0)
            for token in range(0, num_tokens):
                for server in range(0, SERVERS):
                    tl.store(outer_ids + token * SERVERS + server, -1)
                    tl.store(outer_rows + token * SERVERS + server, tl.load(outer_counts + server))
                for k in range(0, TOPK):
                    expert = tl.load(topk_idx + token * TOPK + k)
                    word = -1
                    if (expert >= 0) & (expert < num_experts):
                        word = expert | (tl.load(expand_idx + token * TOPK + k) << SHIFT)
                        server = expert // server_experts
                        place = token * SERVERS + server
                        if tl.load(outer_ids + place) < 0:
                            tl.store(outer_ids + place, server)
                            tl.store(outer_counts + server, tl.load(outer_counts + server) + 1)
                    tl.store(route_words + token * WORDS + k, word)
                for k in range(TOPK, WORDS):
                    tl.store(route_words + token * WORDS + k, -1)
    else:
        # some tokens, each compared with those of the tile before it; those of other tiles are counted
        num_tiles = tl.maximum(tl.cdiv(num_tokens, ROWS), 1)
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            begin, is_last = tile * ROWS, tile == num_tiles - 1
            lanes, words, servers = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, SERVERS)
            at = begin + lanes[:, None]
            is_id = (at < num_tokens) & (words[None, :] < TOPK)
            ids = tl.load(topk_idx + at * TOPK + words[None, :], mask=is_id, other=-1)
            positions = tl.load(expand_idx + at * TOPK + words[None, :], mask=is_id, other=0)
            is_expert = ids == tl.minimum(tl.maximum(ids, 0), num_experts - 1)
            choices = tl.where(is_expert, ids + positions * (1 << SHIFT), -1)
            tl.store(route_words + at * WORDS + words[None, :], choices, mask=at < num_tokens)
            is_before = (lanes[None, :] < lanes[:, None]).to(tl.float32)
            tile_ids = tl.full((ROWS, SERVERS), -1, tl.int32)
            tile_rows = tl.zeros((ROWS, SERVERS), tl.int32)
            totals = tl.zeros((SERVERS,), tl.int32)
            for server in tl.static_range(SERVERS):
                first = (server * server_experts).to(tl.float32)
                last = tl.minimum((server + 1) * server_experts, num_experts).to(tl.float32)
                count = 0.0
                for start in range(0, begin, ROWS):
                    goes = _goes(topk_idx, start + lanes[:, None], words[None, :], begin, first, last, TOPK)
                    count += tl.sum(goes, 0)
                goes = _goes(topk_idx, at, words[None, :], num_tokens, first, last, TOPK)
                number = (count + tl.sum(is_before * goes[None, :], 1)).to(tl.int32)
                is_column = servers[None, :] == server
                tile_ids = tl.where(is_column & (goes[:, None] > 0), server, tile_ids)
                tile_rows = tl.where(is_column, number[:, None], tile_rows)
                total = (count + tl.sum(goes, 0)).to(tl.int32)
                totals = tl.where(servers == server, total, totals)
            place = at * SERVERS + servers[None, :]
            tl.store(outer_ids + place, tile_ids, mask=at < num_tokens)
            tl.store(outer_rows + place, tile_rows, mask=at < num_tokens)
            # a loop of one turn or none: in a branch, the CPU's compiler would never free the store's buffer
            for _ in range(0, is_last.to(tl.int32)):
                tl.store(outer_counts + servers, totals)


@fallback
def _outer_table_fallback(a: Arguments) -> None:
    ids = a.topk_idx[: a.num_tokens * a.TOPK].view(-1, a.TOPK)
    positions = a.expand_idx[: a.num_tokens * a.TOPK].view(-1, a.TOPK)
    is_expert = (ids >= 0) & (ids < a.num_experts)
    words = a.route_words[: a.num_tokens * a.WORDS].view(-1, a.WORDS)
    words.fill_(-1)
    words[:, : a.TOPK] = torch.where(is_expert, ids | positions << a.SHIFT, -1)
    servers = torch.where(is_expert, ids // a.server_experts, -1)
    goes = (servers[:, :, None] == torch.arange(a.SERVERS)).any(1).int()
    numbers_there = goes.cumsum(0, dtype=torch.int32) - goes
    size = a.num_tokens * a.SERVERS
    a.outer_ids[:size] = torch.where(goes > 0, torch.arange(a.SERVERS, dtype=torch.int32), -1).view(-1)
    a.outer_rows[:size] = numbers_there.view(-1)
    a.outer_counts[: a.SERVERS] = goes.sum(0, dtype=torch.int32)


@functools.cache
def outer_table_kernel(topk: int, num_servers: int, target: str = "cpu") -> TritonKernel:
    """Where tokens go, of ids (T, K) and of each one's number among its rank's for its expert::

        outer_ids[t, q] = q if token t has an expert on server q, otherwise -1
        outer_rows[t, q] = #{u < t: outer_ids[u, q] == q}
        outer_counts[q] = #{t: outer_ids[t, q] == q}
        route_words[t, k] = topk_idx[t, k] | expand_idx[t, k] << 16, -1 without an expert and from K to W on

    Ids outside [0, M) are no expert. On the CPU the first program does all.

    Example, with K 2 and two servers::

        topk_idx = [0, 1, 3, 0, 2, 3]
        expand_idx = [0, 0, 0, 1, 0, 1]
        num_tokens = 3
        num_experts = 4
        server_experts = 2
        outer_ids = [0, -1, 0, 1, -1, 1]
        outer_rows = [0, 0, 1, 0, 2, 1]
        outer_counts = [2, 2]
    """
    check_positive("topk", topk)
    check_positive("num_servers", num_servers)
    return TritonKernel(
        name="outer_table",
        fn=_outer_table_kernel,
        args=(
            *alike("*i32", "topk_idx expand_idx", "in"),
            Arg("outer_ids", "*i32", "inout"),
            Arg("outer_rows", "*i32", "out"),
            Arg("outer_counts", "*i32", "inout"),
            Arg("route_words", "*i32", "out"),
            *numbers("i32", "num_tokens num_experts server_experts"),
        ),
        constants={
            "TOPK": topk,
            "WORDS": align(topk, UB_ALIGN // WORD_BYTES),
            "SHIFT": POSITION_SHIFT,
            "ROWS": ROWS,
            "SERVERS": num_servers,
            "SCALAR": target == "cpu",
        },
        fallback=_outer_table_fallback,
        bytes_moved=lambda *, num_tokens, **_: (
            4
            * (num_tokens * (2 * topk + align(topk, UB_ALIGN // WORD_BYTES) + 2 * num_servers) + num_servers)
        ),
    )


NUM_SERVERS = 4


def _inputs(s: Shape, r: Draw) -> Inputs:
    return {
        "expand_idx": r.integers(0, r.tokens, r.tokens, s.topk),
        "outer_ids": blank(r.tokens, NUM_SERVERS),
        "outer_rows": blank(r.tokens, NUM_SERVERS),
        "outer_counts": blank(NUM_SERVERS),
        "route_words": blank(r.tokens, align(s.topk, UB_ALIGN // WORD_BYTES)),
        "server_experts": r.num_experts // NUM_SERVERS,
    }


def _build(s: Shape) -> TritonKernel:
    return outer_table_kernel(s.topk, NUM_SERVERS, s.target)


FAMILIES = (Family("outer_table", outer_table_kernel, _inputs, _build, axes=("topk",)),)
