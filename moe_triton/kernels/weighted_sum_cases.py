"""Inputs of weighted sums, and the variants that plans launch."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Hole
from moe_triton.kernels.cases import (
    AXES,
    F32,
    I8,
    I32,
    NUM_SPECIAL,
    Draw,
    Family,
    Inputs,
    Shape,
    blank,
    subsets,
)
from moe_triton.kernels.weighted_sum import weighted_sum_kernel
from moe_triton.kernels.weighted_sum_features import SumFeatures


def _block(s: Shape) -> int:
    return SumFeatures(wide_blocks=s.has("wide_blocks")).block


def _inputs(s: Shape, r: Draw) -> Inputs:
    width, dtype, rows_of_expert = s.topk + s.shared, s.torch_dtype, r.most_rows
    # by expert, a shared result of each token follows those of the last expert
    number = r.num_experts * rows_of_expert + r.tokens if s.has("by_expert") else r.tokens * width
    first_own = number
    if s.has("own"):  # behind the slots
        number += int(r.ends[-1])
    stride = s.hidden
    if s.has("quantized"):
        stride = s.blocks_bytes
        slots = r.integers(-127, 128, number, stride, dtype=I8)
        scales = (r.uniform(number, s.hidden // _block(s)) / 64).to(dtype)
        slots[:, s.hidden : s.hidden + 2 * scales.shape[1]] = scales.view(I8)
    else:
        slots = r.normal(number, s.hidden, dtype=dtype)
    ids, active = r.special_ids() if s.has("special") else r.ids, r.active()
    tokens = torch.randperm(r.tokens, generator=r.generator).int()
    tokens[-1] = r.tokens  # is none
    return {
        "slots": slots,
        "slot_scales": Hole("slots", s.hidden),
        "topk_idx": ids,
        "topk_weights": r.uniform(r.tokens, s.topk),
        "expand_idx": r.integers(0, rows_of_expert, r.tokens, s.topk),
        "offsets": (torch.randperm(r.tokens * width, generator=r.generator) * s.hidden).view(-1, width),
        "recv_offsets": r.ends,
        "active": active,
        "tokens": tokens,
        "bounds": torch.tensor([r.range["first_token"], r.tokens], dtype=I32),
        "shared_x": r.normal(r.tokens, s.hidden, dtype=dtype),
        "ori_x": r.normal(r.tokens, s.hidden, dtype=dtype),
        "alphas": r.uniform(r.tokens, s.topk, 2),
        "const_v": r.normal(NUM_SPECIAL, s.hidden, dtype=dtype),
        "out": blank(r.tokens, s.hidden, dtype=F32 if s.has("fp32_out") else dtype),
        "zone": torch.ones(1, dtype=I32),
        "turned": blank(1),
        "token_stride": width * stride,
        "slot_stride": stride,
        "expert_stride": rows_of_expert * stride,
        "index_stride": stride,
        "own_results": first_own * stride,
        **r.range,
        "num_experts": r.num_experts,
        "max_index": rows_of_expert,
        "first_expert": r.rank * r.num_local,
        "num_local_experts": r.num_local,
        "num_ranks": r.num_ranks,
        "rank": r.rank,
        "num_zero": NUM_SPECIAL,
        "num_copy": NUM_SPECIAL,
        "num_const": NUM_SPECIAL,
        "bytes_moved": _bytes_read_and_written(s, r, ids, active, tokens[r.range["first_token"] : -1].long()),
    }


def _bytes_read_and_written(
    s: Shape, r: Draw, ids: torch.Tensor, active: torch.Tensor, listed: torch.Tensor
) -> int:
    """What depends on the data: tokens that are left out, and entries that have no slot."""
    slot_bytes = s.hidden + 2 * s.hidden // _block(s) if s.has("quantized") else 2 * s.hidden
    if s.has("listed"):
        ids, active = ids[listed], active[listed]
    cleared = int((active < 0).sum()) if s.has("clears") else 0
    if s.has("masked"):
        ids = ids[active >= 0]
    first_copy = r.num_experts + NUM_SPECIAL
    first_const = first_copy + NUM_SPECIAL
    slots = int(((ids >= 0) & (ids < r.num_experts)).sum()) + len(ids) * s.shared
    rows = int((ids >= first_copy).sum()) + int((ids >= first_const).sum())
    rows += len(ids) * (s.has("shared_x") + (2 if s.has("fp32_out") else 1))
    rows += cleared
    return slots * slot_bytes + 2 * s.hidden * rows + 8 * r.tokens * s.topk


def _build(s: Shape) -> TritonKernel:
    # the host knows the zone of results that are found by offset, and of those beside own ones
    zoned = s.zoned and not (s.has("by_offset") or s.has("own"))
    features = SumFeatures(**{name: s.has(name) for name in _FEATURES}, zoned=zoned)
    sizes = s.torch_dtype, s.hidden, s.topk, s.shared, s.has("weights"), s.target
    return weighted_sum_kernel(*sizes, features=features)


def _as_launched(s: Shape) -> Shape:
    """V1, which finds results by expert, has one shared expert at most."""
    return replace(s, shared=min(s.shared, 1)) if s.has("by_expert") else s


_FEATURES = tuple(f.name for f in fields(SumFeatures) if f.name != "zoned")
_WEIGHTED = ("weights",)
# An operator ends with the sum, unless the sum is normalised. In parts it sums a list each, and the last one
# ends the operator.
_ENDS = (("turns",), ("fp32_out",), ("listed",), ("listed", "turns"), ("fp32_out", "listed"))
# By token all combine; results found by expert (V1) have fewer features, and come in one part. By offset the
# host knows the zone, and turns it.
# A norm clears by itself what a mask leaves out.
_SUMS = (
    *(
        (*more, *end, *(("clears",) if "masked" in more and "fp32_out" not in end else ()))
        for more in subsets(("masked", "shared_x", "special", "quantized"))
        for end in _ENDS
    ),
    *(("by_expert", *more, *end) for more in subsets(("quantized",)) for end in _ENDS[:2]),
    ("by_offset",),
)
# A hierarchy sums what came by rail by weight, and partial rows, which may be in blocks of 16, without.
_OF_SERVERS = (("weights", "by_expert", "masked"), ("by_expert", "quantized", "wide_blocks", "turns"))

FAMILIES = (
    Family(
        "weighted_sum",
        weighted_sum_kernel,
        _inputs,
        _build,
        axes=AXES,
        features=("weights", *_FEATURES),
        variants=(*((*weights, *more) for weights in (_WEIGHTED, ()) for more in _SUMS), *_OF_SERVERS),
        # what is held at a time differs most between these
        shown=(
            _WEIGHTED,
            *(("weights", name) for name in _FEATURES if name not in ("masked", "clears", "wide_blocks")),
            ("weights", "masked", "clears"),
            ("weights", "masked", "shared_x", "special", "quantized", "clears"),
            ("weights", "by_expert", "quantized"),
            ("weights", "by_expert", "quantized", "wide_blocks"),
        ),
        main=_WEIGHTED,
        as_launched=_as_launched,
        streams=True,
    ),
)
