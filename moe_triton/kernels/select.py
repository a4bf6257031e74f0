"""Select: what an active mask leaves of the routing.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    B   tokens that the NPU form takes at once

A mask (T,) takes part from the first token up to the first False; what comes after that is left out,
whatever it says. A mask (T, K) takes single entries: a token takes part if any of its entries does.
Tokens that take part are numbered from 0 in ascending order.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.checks import check_positive
from moe_triton.core.kernel import Arg, TritonKernel, alike
from moe_triton.core.space import Space, named_features
from moe_triton.kernels.cases import I8, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.numbering import ID_LIMIT, far_ids, load_id, narrowed, taken_ids

BLOCK = 64
BLOCKS = 16, 32, 64, 128


@triton.jit
def _select_kernel(
    expert_ids, mask, topk_idx, active_index, num_active,
    num_tokens,
    TOPK: tl.constexpr, PER_ENTRY: tl.constexpr, SCALAR: tl.constexpr, BLOCK: tl.constexpr,
    ID_LIMIT: tl.constexpr,
):  # fmt: skip
    # numbering is one chain of dependences: the first program walks it alone
    is_first = (tl.program_id(0) == 0).to(tl.int32)
    total = 0
    if SCALAR:
        for t in range(0, num_tokens * is_first):
            takes_part = 0
            if PER_ENTRY:
                for k in range(0, TOPK):
                    is_active = (tl.load(mask + t * TOPK + k) != 0).to(tl.int32)
                    takes_part = tl.maximum(takes_part, is_active)
                    expert = load_id(expert_ids, t * TOPK + k, ID_LIMIT)
                    tl.store(topk_idx + t * TOPK + k, tl.where(is_active > 0, expert, -1))
            else:
                takes_part = ((tl.load(mask + t) != 0) & (total == t)).to(tl.int32)
                for k in range(0, TOPK):
                    expert = load_id(expert_ids, t * TOPK + k, ID_LIMIT)
                    tl.store(topk_idx + t * TOPK + k, tl.where(takes_part > 0, expert, -1))
            tl.store(active_index + t, tl.where(takes_part > 0, total, -1))
            total += takes_part
    else:
        lanes = tl.arange(0, BLOCK)
        ks = tl.arange(0, TOPK)
        up_to = (lanes[None, :] <= lanes[:, None]).to(tl.int32)
        trues = 0
        for b in range(0, tl.cdiv(num_tokens, BLOCK) * is_first):
            tokens = b * BLOCK + lanes
            inside = tokens < num_tokens
            at = tokens[:, None] * TOPK + ks[None, :]
            experts = narrowed(tl.load(expert_ids + at, mask=inside[:, None], other=-1), ID_LIMIT)
            if PER_ENTRY:
                entries = (tl.load(mask + at, mask=inside[:, None], other=0).to(tl.int32) != 0).to(tl.int32)
                takes_part = (tl.sum(entries, 1) > 0).to(tl.int32)
                trues_up_to = tl.sum(up_to * takes_part[None, :], 1) + total
                experts = tl.where(entries > 0, experts, -1)
            else:
                is_true = (tl.load(mask + tokens, mask=inside, other=0).to(tl.int32) != 0).to(tl.int32)
                trues_up_to = tl.sum(up_to * is_true[None, :], 1) + trues
                takes_part = (trues_up_to == tokens + 1).to(tl.int32)
                trues += tl.sum(is_true, 0)
                experts = tl.where(takes_part[:, None] > 0, experts, -1)
            tl.store(topk_idx + at, experts, mask=inside[:, None])
            tl.store(active_index + tokens, tl.where(takes_part > 0, trues_up_to - 1, -1), mask=inside)
            total += tl.sum(takes_part, 0)
    # a loop of one turn or none: in a branch, the CPU's compiler would give the store a buffer never freed
    for _ in range(0, is_first):
        tl.store(num_active, total)


@fallback
def _select_fallback(a: Arguments) -> None:
    num_entries = a.num_tokens * a.TOPK
    if a.PER_ENTRY:
        entries = a.mask[:num_entries].view(a.num_tokens, a.TOPK) != 0
        takes_part = entries.any(1)
    else:
        takes_part = (a.mask[: a.num_tokens] != 0).to(torch.int8).cumprod(0) > 0
        entries = takes_part[:, None].expand(a.num_tokens, a.TOPK)
    a.topk_idx[:num_entries] = torch.where(entries.reshape(-1), taken_ids(a.expert_ids[:num_entries]), -1)
    a.active_index[: a.num_tokens] = torch.where(takes_part, takes_part.cumsum(0, dtype=torch.int32) - 1, -1)
    a.num_active[0] = takes_part.sum()


@functools.cache
def select_kernel(topk: int, per_entry: bool, target: str = "cpu", int64: bool = False) -> TritonKernel:
    """Ids that an active mask leaves, and numbers of the tokens that take part.

    ``topk_idx`` gets the id of each entry that is active and -1 for the others; ``active_index`` the number
    of each token among those that take part, or -1; ``num_active`` how many those are. ``mask`` is the
    memory of a bool tensor, (T, K) with ``per_entry`` and (T,) without. The first program does all. Ids are
    int32, or ``int64``, of which those of `ID_LIMIT` or more, of either sign, become -1.

    Example, with K 2 and a mask (T,)::

        expert_ids = [4, 5, 6, 7, 8, 9, 4, 6]
        mask = [1, 1, 0, 1]
        num_tokens = 4
        topk_idx = [4, 5, 6, 7, -1, -1, -1, -1]
        active_index = [0, 1, -1, -1]
        num_active = [2]
    """
    check_positive("topk", topk)

    id_bytes = 4 + (8 if int64 else 4)

    def bytes_moved(*, num_tokens: int, **_: int) -> int:
        return num_tokens * (id_bytes * topk + 4 + (topk if per_entry else 1)) + 4

    return TritonKernel(
        name="select",
        fn=_select_kernel,
        args=(
            Arg("expert_ids", "*i64" if int64 else "*i32", "in"),
            Arg("mask", "*i8", "in"),
            *alike("*i32", "topk_idx active_index num_active", "out"),
            Arg("num_tokens", "i32", "value"),
        ),
        constants={
            "TOPK": topk,
            "PER_ENTRY": per_entry,
            "SCALAR": target == "cpu",
            "BLOCK": BLOCK,
            "ID_LIMIT": ID_LIMIT,
        },
        fallback=_select_fallback,
        bytes_moved=bytes_moved,
        space=None
        if target == "cpu"
        else Space({"BLOCK": BLOCKS}, named_features(entries=per_entry, int64=int64), sizes={"topk": topk}),
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    by_token = (torch.arange(r.tokens) < r.tokens * 3 // 4).to(I8)
    return {
        "expert_ids": far_ids(s, r),
        "mask": r.integers(0, 2, r.tokens, s.topk, dtype=I8) if s.has("per_entry") else by_token,
        "topk_idx": blank(r.tokens, s.topk),
        "active_index": blank(r.tokens),
        "num_active": blank(1),
    }


FAMILIES = (Family("select", select_kernel, _inputs),)
