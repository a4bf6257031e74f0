"""The cases of the selftest, drawn at random over the whole of what a buffer takes."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from moe_triton.core.config import Config
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.core.tuning import Tuning
from moe_triton.schemes import product_of
from moe_triton.tools.selftest.cases import Case, Inputs, experts_of, ids_of, inputs_of, smooth_scales_of

__all__ = [
    "Case",
    "Inputs",
    "as_on_npu",
    "cases",
    "experts_of",
    "ids_of",
    "inputs_of",
    "small_case",
    "smooth_scales_of",
    "with_scheme",
]

HIDDEN = (32, 64, 128, 160, 384, 512)


SCHEMES = "fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"


@st.composite
def cases(draw: st.DrawFn, num_ranks: int, scheme: str | None = None) -> Case:
    """Groups of a given size over the whole of what a buffer takes, by any scheme or a given one."""
    scheme = scheme or draw(st.sampled_from(["fullmesh_v1", *SCHEMES]))
    has_shared = num_ranks > 2 and product_of(scheme) == "A3"
    num_shared = draw(st.sampled_from([0, 0, 0, 1])) if has_shared else 0
    shared_ranks = num_shared * draw(st.integers(1, max(1, num_ranks // 2 - 1)))
    moe_ranks = num_ranks - shared_ranks
    num_experts = moe_ranks * draw(st.integers(1, 4))
    max_tokens = draw(st.integers(1, 9))
    quantize = draw(st.sampled_from(tuple(ROW_FORMATS)))
    config = Config(
        num_ranks=num_ranks,
        num_max_tokens_per_rank=max_tokens,
        hidden=draw(st.sampled_from(HIDDEN)),
        num_topk=draw(st.integers(1, min(num_experts, 8))),
        num_experts=num_experts,
        num_shared_experts=num_shared,
        num_shared_ranks=shared_ranks,
        product=product_of(scheme),
        scheme=scheme,
        relaxed=True,
    )
    return Case(
        config=config,
        seed=draw(st.integers(0, 2**20)),
        routing=draw(st.sampled_from(["uniform", "skewed", "one expert set", "sparse", "none"])),
        tokens=tuple(draw(st.lists(st.integers(0, max_tokens), min_size=num_ranks, max_size=num_ranks))),
        quantize=quantize,
        weights=draw(st.booleans()),
        smooth=quantize is not None and draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        # Native code takes over once there is a plan for either zone: from the third round on.
        rounds=draw(st.sampled_from([1, 2, 4])),
        num_blocks=draw(st.sampled_from([None, 1, 2, 3])),
    )


def as_on_npu(case: Case) -> Tuning:
    """Half of a case's blocks receive while the others send, as an NPU's do by default."""
    return Tuning(receiving_blocks=(case.num_blocks or 1) // 2)


def with_scheme(case: Case, scheme: str) -> Case:
    """The same case by another scheme."""
    return replace(case, config=replace(case.config, scheme=scheme, product=product_of(scheme)))


def small_case(
    num_ranks: int, scheme: str = "fullmesh_v1", quantize: str | None = None, **changes: object
) -> Case:
    """A plain case to vary."""
    hidden = ROW_FORMATS[quantize].elements_per_scale or 64
    sizes = num_ranks, 4, hidden, 2, 2 * num_ranks
    config = Config(*sizes, product=product_of(scheme), scheme=scheme, relaxed=True)
    case = Case(config, 1, "uniform", (4,) * num_ranks, quantize)
    return replace(case, **changes)  # type: ignore[arg-type]
