"""The least that an operator has to move, counted by hand."""

from __future__ import annotations

import torch

from autotune.model.constants import machine_named
from autotune.model.cost import Cost
from autotune.model.floor import Floor, floor_of, floor_of_cost
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from tests.autotune.model.hand_made import traffics_of

# Rank 0 sends 1 row away and receives 3, of 64 elements.
CROWDED = traffics_of([[[0, 1], [0, -1]], [[0, -1], [0, -1]], [[0, -1], [-1, -1]]], num_experts=3)[0]


def test_rows_are_counted_where_they_begin_and_end() -> None:
    plain, packed = 2 * 64, 64 + 4
    dispatch = DispatchVariant(torch.bfloat16, ROW_FORMATS["int8"])
    assert floor_of(dispatch, CROWDED) == Floor(2 * plain + 5 * packed, 3 * packed)
    assert floor_of(DispatchVariant(torch.bfloat16), CROWDED) == Floor(7 * plain, 3 * plain)
    assert floor_of(CombineVariant(torch.bfloat16), CROWDED) == Floor(7 * plain, 3 * plain)


def test_the_slower_of_memory_and_link_counts() -> None:
    machine = machine_named("A3").replaced({"memcpy_gb_per_s": 1000, "remote_write_gb_per_s": 100})
    assert Floor(2_000_000, 50_000).us(machine) == 1
    assert Floor(2_000_000, 300_000).us(machine) == 3
    assert floor_of_cost(Cost({}, read=1_000_000, written=2_000_000, sent=10)).us(machine) == 1.5
