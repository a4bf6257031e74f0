"""Kernels that look their zone up: what they do in either zone is what they do where there is one only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_triton.kernels import Case, Family, Shape, Sizes, families
from tests.kernels.routes import LAUNCHES, Launch, assert_same_bits

GARBAGE = 0x7B
READS_ITS_ZONE = {("zone", "in"), ("zone_stride", "value")}


def cases(family: Family) -> list[Case]:
    shapes = [Shape(hidden=128, topk=2, features=frozenset(f), target="cpu") for f in family.shown]
    found = [Case(family, shape, Sizes(9)) for shape in shapes]
    return [case for case in found if {(a.name, a.direction) for a in case.kernel.args} >= READS_ITS_ZONE]


ZONED = [family for family in families().values() if cases(family)]


def test_every_kernel_that_reads_a_window_is_looked_at() -> None:
    assert {family.name for family in ZONED} == {
        "add_rows",
        "append",
        "gather_counts",
        "inner_table",
        "local_ids",
        "starts",
        "weighted_sum",
    }


@pytest.mark.parametrize("zone", [0, 1])
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("family", ZONED, ids=lambda family: family.name)
def test_a_zone_that_is_looked_up_is_the_one_that_is_read(family: Family, launch: Launch, zone: int) -> None:
    for case in cases(family):
        plain = replace(case, shape=replace(case.shape, zoned=False))
        memory = plain.inputs[family.window]
        assert isinstance(memory, torch.Tensor)
        garbage = torch.full((memory.nbytes,), GARBAGE, dtype=torch.uint8).view(memory.dtype)
        zones = [memory.view(-1), garbage]
        given = {family.window: torch.cat(zones[::-1] if zone else zones), "zone_stride": memory.numel()}
        cell = {"zone": torch.tensor([zone], dtype=torch.int32)}
        zoned = Case(family, case.shape, case.sizes, given | cell)
        plain = replace(plain, given=cell)
        want, got = plain.run(launch, 2), zoned.run(launch, 2)
        for name in plain.outputs:
            assert_same_bits(got[name], want[name])
