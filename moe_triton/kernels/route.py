"""Route: where each (token, k) goes within its expert.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    M   experts of all ranks (num_experts)
"""

from __future__ import annotations

import functools

from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.space import Space, named_features
from moe_triton.kernels.cases import Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.numbering import (
    ID_LIMIT,
    TAKING,
    TILES,
    WIDE_TILE,
    given_ids,
    id_arguments,
    number_by_comparing,
    number_fallback,
    number_scalar,
    numbering_bytes,
    tile_fits,
)


@triton.jit
def _route_kernel(
    given, topk_idx, expand_idx, counts,
    num_entries, num_experts,
    SCALAR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ID_LIMIT: tl.constexpr,
):  # fmt: skip
    ids, taken = (topk_idx, None) if given is None else (given, topk_idx)
    if SCALAR:
        if tl.program_id(0) == 0:
            number_scalar(ids, taken, expand_idx, counts, num_entries, num_experts, ID_LIMIT)
    else:
        number_by_comparing(
            ids, taken, expand_idx, counts, num_entries, num_experts, tl.program_id(0), tl.num_programs(0),
            ROWS, COLS, ID_LIMIT,
        )  # fmt: skip


@functools.cache
def route_kernel(target: str = "cpu", takes: bool = False, int64: bool = False) -> TritonKernel:
    """``expand_idx[i] = #{j < i : topk_idx[j] == topk_idx[i]}`` and ``counts[e]``, over T*K flat ids.

    Ids outside [0, M) are "no expert": index 0, not counted. On the CPU the first program does all. With
    ``takes`` the ids are in ``given``, of int32 or ``int64``, and ``topk_idx`` becomes their copy, in which
    int64 ids of `ID_LIMIT` or more, of either sign, are -1.

    Example::

        topk_idx = [3, 0, 3, -1]
        num_entries = 4
        num_experts = 5
        expand_idx = [0, 0, 1, 0]
        counts = [1, 0, 0, 2, 0]

    Raises:
        ArgumentError: ``int64`` without ``takes``.
    """
    args, absent = chosen_args(
        *id_arguments(takes, int64),
        (True, (Arg("expand_idx", "*i32", "out"), Arg("counts", "*i32", "inout"))),
        (True, numbers("i32", "num_entries num_experts")),
    )
    return TritonKernel(
        name="route",
        fn=_route_kernel,
        args=args,
        constants={**absent, **WIDE_TILE, "SCALAR": target == "cpu", "ID_LIMIT": ID_LIMIT},
        fallback=number_fallback,
        bytes_moved=lambda *, num_entries, num_experts, **_: numbering_bytes(
            num_entries, num_experts, takes, int64
        ),
        space=None
        if target == "cpu"
        else Space(TILES, named_features(takes=takes, int64=int64), allows=tile_fits),
    )


def route_inputs(s: Shape, r: Draw) -> Inputs:
    """Every argument of any variant."""
    return {
        **given_ids(s, r),
        "expand_idx": blank(r.tokens * s.topk),
        "counts": blank(r.num_experts),
        "num_entries": r.tokens * s.topk,
    }


FAMILIES = (Family("route", route_kernel, route_inputs, variants=TAKING),)
