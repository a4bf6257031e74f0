"""Plans of every feature have a price: what a call may bring is known to the model, or an error names it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autotune.model.constants import machine_named
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from moe_triton.backends import CAPABILITIES
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext
from tests.autotune.model.calls import CORES, config, traffic
from tests.autotune.model.hand_made import walk

DISPATCH = DispatchVariant(torch.bfloat16)
COMBINE = CombineVariant(torch.bfloat16, weights=True)
VARIANTS: dict[str, Variant] = {
    "plain": DISPATCH,
    "masked": replace(DISPATCH, mask="entries"),
    "waits": replace(DISPATCH, waits=True),
    "smooth": replace(DISPATCH, row_format=ROW_FORMATS["int8"], smooth=True),
    "int8_128": replace(DISPATCH, row_format=ROW_FORMATS["int8_128"]),
    "weights": replace(DISPATCH, weights=True),
    "cumulative": replace(DISPATCH, cumulative=True),
    "statistics": replace(DISPATCH, recv_stats=True),
    "combine": COMBINE,
    "combine masked": replace(COMBINE, mask="tokens"),
    "combine waits": replace(COMBINE, waits=True),
    "combine int8": replace(COMBINE, block_quantize=True),
    "combine shared": replace(COMBINE, shared_x=True),
    "combine norm": replace(COMBINE, norm=True),
    "combine special": replace(COMBINE, special=(1, 1, 1)),
}
KNOWN = traffic(config(8, 16))


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2"])
@pytest.mark.parametrize("name", VARIANTS)
def test_it_takes_about_as_much_as_without_at_least(name: str, scheme: str) -> None:
    built = make_scheme(RankContext(config(8, 16, scheme=scheme), 0, CORES, 60_000_000, CAPABILITIES["npu"]))

    def us(variant: Variant) -> float:
        return walk(built.whole(variant, 0), KNOWN, machine_named("A3"), kernel_costs=kernel_cost_of).total_us

    plain = us(DISPATCH if isinstance(VARIANTS[name], DispatchVariant) else COMBINE)
    cheaper = name in ("int8_128", "combine int8")  # they send fewer bytes
    assert us(VARIANTS[name]) > 0.99 * plain or cheaper
