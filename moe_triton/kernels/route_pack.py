"""Route and pack in one launch: what `route` and `pack` do, neither of which reads what the other writes.

Shape symbols:
    T   tokens of this rank
    H   hidden size, a multiple of 32
    K   experts per token
    M   experts of all ranks (num_experts)
    N   ids: T*K, flat
    R   rows per token: 1, or K + S with smooth scales
    P   programs

On an NPU the last programs pack and those before them route, shared out so that both end together. On the
CPU the first program routes, and packs fewer tokens than the others.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from moe_triton.core.dtypes import NAMES
from moe_triton.core.kernel import Arg, TritonKernel, chosen_args, numbers
from moe_triton.core.space import Space, named_features
from moe_triton.kernels.cases import AXES, Draw, Family, Features, Inputs, Shape
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.numbering import (
    TAKING,
    TILE,
    TILES,
    id_arguments,
    number_by_comparing,
    number_fallback,
    number_scalar,
    numbering_bytes,
    tile_fits,
)
from moe_triton.kernels.pack import IN_BLOCKS, pack_inputs, pack_kernel, pack_tokens
from moe_triton.kernels.route import route_inputs

ELEMENTS_PER_TILE = 1280
"""Elements of rows that take as long to pack as one tile of ids takes to compare, on an AI core: 347 cycles
for the tile, 1893 for a row of 7168 (``moe-triton model kernel``)."""

ELEMENTS_PER_ID = 16
"""Likewise for one id in the scalar form on a CPU: about 1 ns for the id, 0.48 us for a row of 7168."""


@triton.jit
def _route_pack_kernel(
    given, topk_idx, expand_idx, counts, x, smooth_scales, rows, scales,
    num_entries, num_experts, first_token, num_tokens, scale_row_offset, num_scale_rows, row_stride,
    scale_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, NUM_SHARED: tl.constexpr,
    FLOAT_MAX: tl.constexpr, SCALAR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TOKEN_WORK: tl.constexpr, ID_LIMIT: tl.constexpr,
):  # fmt: skip
    # whoever needs ids reads them where they were given: no program may read what another one writes
    ids, taken = (topk_idx, None) if given is None else (given, topk_idx)
    if SCALAR:
        begin, end = _tokens_beside_scalar(num_entries, num_tokens, TOKEN_WORK)
        if tl.program_id(0) == 0:
            number_scalar(ids, taken, expand_idx, counts, num_entries, num_experts, ID_LIMIT)
    else:
        packers = _num_packers(num_entries, num_experts, num_tokens, ROWS, TOKEN_WORK)
        per_packer = tl.cdiv(num_tokens, packers)
        first_packer = tl.num_programs(0) - packers
        begin = tl.maximum(tl.program_id(0) - first_packer, -1) * per_packer
        end = tl.minimum(begin + per_packer, num_tokens)
        begin = tl.maximum(begin, 0)
        routers = tl.maximum(first_packer, 1)
        if tl.program_id(0) < routers:
            number_by_comparing(
                ids, taken, expand_idx, counts, num_entries, num_experts, tl.program_id(0), routers, ROWS,
                COLS, ID_LIMIT,
            )  # fmt: skip
    pack_tokens(
        x, ids, smooth_scales, rows, scales, first_token, begin, end, scale_row_offset, num_scale_rows,
        row_stride, scale_stride, HIDDEN, BLOCK, TOPK, NUM_SHARED, FLOAT_MAX, ID_LIMIT,
    )  # fmt: skip


@triton.jit
def _tokens_beside_scalar(num_entries, num_tokens, IDS_PER_TOKEN: tl.constexpr):
    """The tokens of this program: as if there were more of them, of which the first ones route."""
    routing = num_entries // IDS_PER_TOKEN
    per_program = tl.cdiv(routing + num_tokens, tl.num_programs(0))
    begin = tl.program_id(0) * per_program - routing
    end = tl.minimum(begin + per_program, num_tokens)
    return tl.maximum(begin, 0), end


@triton.jit
def _num_packers(num_entries, num_experts, num_tokens, ROWS: tl.constexpr, TILES_PER_TOKEN: tl.constexpr):
    """How many programs pack. Never all of them, but for a single program, which does both."""
    num_programs = tl.num_programs(0)
    num_blocks = tl.cdiv(num_entries, ROWS)
    # each block is compared with those before it and itself, each group of experts with all
    tiles = num_blocks * (num_blocks + 1) // 2 + num_blocks * tl.cdiv(num_experts, ROWS)
    pack_tiles = num_tokens * TILES_PER_TOKEN
    packers = tl.cdiv(num_programs * pack_tiles, tl.maximum(tiles + pack_tiles, 1))
    packers = tl.maximum(tl.minimum(packers, num_programs - 1), 1)
    # whoever would have no more tokens than others routes instead
    tokens_each = tl.maximum(tl.cdiv(num_tokens, packers), 1)
    return tl.maximum(tl.cdiv(num_tokens, tokens_each), 1)


@fallback
def _route_pack_fallback(a: Arguments) -> None:
    number_fallback(1, **vars(a))
    a.packs.fallback(1, **vars(a))


@functools.cache
def route_pack_kernel(
    dtype: torch.dtype,
    hidden: int,
    topk: int = 1,
    smooth: bool = False,
    target: str = "cpu",
    num_shared: int = 0,
    block: int = 0,
    takes: bool = False,
    int64: bool = False,
) -> TritonKernel:
    """`route_kernel` for all ids, and `pack_kernel` for tokens [first_token, first_token + num_tokens).

    Arguments mean what they mean there. All programs may run at the same time, in any order.

    Raises:
        ArgumentError: as there.
    """
    packs = pack_kernel(dtype, hidden, topk, smooth, target, num_shared, block)
    elements = hidden * ((topk + num_shared) if smooth else 1)
    per_token = {arg.name: arg for arg in packs.args}
    args, absent = chosen_args(
        *id_arguments(takes, int64),
        (True, (Arg("expand_idx", "*i32", "out"), Arg("counts", "*i32", "inout"), per_token["x"])),
        (smooth, Arg("smooth_scales", "*fp32", "in")),
        (True, (per_token["rows"], per_token["scales"])),
        (True, numbers("i32", "num_entries num_experts first_token num_tokens")),
        (smooth, numbers("i32", "scale_row_offset num_scale_rows")),
        (True, numbers("i64", "row_stride scale_stride")),
    )
    chosen = {arg.name for arg in args}
    features = {"block": block, "takes": takes, "int64": int64}
    if smooth:
        features |= {"k": topk, "s": num_shared}
    work = elements // ELEMENTS_PER_ID if target == "cpu" else elements / ELEMENTS_PER_TILE
    return TritonKernel(
        name="route_pack_smooth" if smooth else "route_pack",
        fn=_route_pack_kernel,
        args=args,
        constants={
            **{name: value for name, value in packs.constants.items() if name not in chosen},
            **absent,
            **TILE,
            "SCALAR": target == "cpu",
            "TOKEN_WORK": max(round(work), 1),
        },
        fallback=functools.partial(_route_pack_fallback, packs=packs),
        bytes_moved=lambda *, num_entries, num_experts, **sizes: (
            numbering_bytes(num_entries, num_experts, takes, int64)
            + (packs.bytes_moved(**sizes) if packs.bytes_moved else 0)
        ),
        space=_space(dtype, hidden, target, work, features),
    )


def _space(dtype: torch.dtype, hidden: int, target: str, work: float, features: Mapping[str, int]) -> Space:
    """Tiles of comparisons, and how the programs are shared between the two: the work of packing a token."""
    shares = tuple(sorted({max(round(work * share), 1) for share in (0.5, 0.7, 1, 1.5, 2)}))
    return Space(
        {"TOKEN_WORK": shares} if target == "cpu" else {**TILES, "TOKEN_WORK": shares},
        named_features(**features),
        NAMES[dtype],
        {"hidden": hidden},
        (lambda values: True) if target == "cpu" else tile_fits,
    )


def _inputs(s: Shape, r: Draw, rows_per_token: int) -> Inputs:
    return {**pack_inputs(s, r, rows_per_token), **route_inputs(s, r)}


def _kernel_of(s: Shape, smooth: bool) -> TritonKernel:
    rows = {"topk": s.topk, "num_shared": s.shared} if smooth else {}
    return route_pack_kernel(
        s.torch_dtype,
        s.hidden,
        smooth=smooth,
        target=s.target,
        block=s.row_format.elements_per_scale or 0,
        takes=s.has("takes"),
        int64=s.has("int64"),
        **rows,
    )


_VARIANTS: tuple[Features, ...] = tuple((*b, *taking) for b in ((), IN_BLOCKS) for taking in TAKING)
_SHOWN: tuple[Features, ...] = ((), (*IN_BLOCKS, *TAKING[-1]))
_FEATURES = (*IN_BLOCKS, *TAKING[-1])

FAMILIES = (
    Family(
        "route_pack",
        route_pack_kernel,
        lambda s, r: _inputs(s, r, 1),
        lambda s: _kernel_of(s, False),
        axes=("dtype", "hidden"),
        features=_FEATURES,
        variants=_VARIANTS,
        shown=_SHOWN,
    ),
    Family(
        "route_pack_smooth",
        route_pack_kernel,
        lambda s, r: _inputs(s, r, s.topk + s.shared),
        lambda s: _kernel_of(s, True),
        axes=AXES,
        features=_FEATURES,
        variants=_VARIANTS,
        shown=_SHOWN,
    ),
)
