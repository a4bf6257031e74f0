from __future__ import annotations

import re

import pytest
import torch

from moe_triton import ascendc
from moe_triton.config import Config
from moe_triton.plan import Hole, Plan, launch
from moe_triton.schemes.fullmesh import Fullmesh
from moe_triton.schemes.site import Site
from moe_triton.schemes.variants import CombineVariant, DispatchVariant

SCHEME = Fullmesh(Site(Config(4, 8, 1024, 2, 8), rank=1, num_blocks=2, timeout_us=1000, target="cpu"))


def dispatch_plan(quantize: bool, smooth: bool = False, weights: bool = True, zone: int = 0) -> Plan:
    return SCHEME.whole(DispatchVariant(torch.bfloat16, quantize, smooth, weights), zone)


def test_a_plan_is_the_same_each_time_it_is_built() -> None:
    assert str(dispatch_plan(True)) == str(dispatch_plan(True))


def test_zones_differ_in_addresses_only() -> None:
    first, second = str(dispatch_plan(True, zone=0)), str(dispatch_plan(True, zone=1))
    assert first != second
    assert re.sub(r"\d+", "#", first) == re.sub(r"\d+", "#", second)


def test_a_call_brings_only_what_its_variant_needs() -> None:
    plain = set(dispatch_plan(False, weights=False).holes)
    assert "packed" not in plain
    assert "scales" not in plain
    assert set(dispatch_plan(False, weights=True).holes) - plain == {"topk_weights", "weights"}
    assert set(dispatch_plan(True, weights=False).holes) - plain == {"packed", "scales"}
    assert "smooth_scales" in dispatch_plan(True, smooth=True).holes


def test_rows_leave_before_anything_waits() -> None:
    for plan in (dispatch_plan(True), SCHEME.whole(CombineVariant(torch.bfloat16, True), 0)):
        steps = [launched.step for launched in plan.launches]
        assert steps.index("send") < steps.index("wait")
        streams = {launched.step: launched.stream for launched in plan.launches}
        assert streams["send"] == streams["wait"] == "communication"


def test_a_launch_needs_a_value_for_each_argument() -> None:
    with pytest.raises(ValueError, match="recv_counts"):
        launch("wait", ascendc.DISPATCH_WAIT, "communication", 1, window=Hole("window"))
