"""What the kernels that only move rows within a rank may take: a scalar load more in each row is seen."""

from __future__ import annotations

import pytest

from moe_triton.model.bodies.replay import replayed
from moe_triton.model.constants import machine_named
from moe_triton.model.cost import work_of
from tests.model.calls import config, launch_of, traffic

# a machine of this test's own: the bounds are about the kernels, whatever constants are fitted later
CORE = machine_named("A3").replaced(
    {
        "clock_ghz": 1.85,
        "cores": 48,
        "vector_latency_cycles": 18,
        "vector_bytes_per_cycle": 256,
        "load_latency_cycles": 450,
        "store_latency_cycles": 250,
        "stream_bytes_per_cycle": 18,
        "stream_bytes_per_cycle_alone": 128,
        "scalar_global_cycles": 350,
        "scalar_local_cycles": 12,
        "scalar_cycles": 1,
        "issue_cycles": 2,
        "queue_entries": 32,
        "flag_cycles": 6,
    }
)


@pytest.mark.parametrize(
    ("kernel", "quantize", "tokens", "most_us"),
    [
        ("arrange", "int8", 16, 5.5),
        ("arrange", "int8", 128, 15.5),
        ("arrange", None, 128, 23),
        ("weighted_sum", None, 16, 3.8),
        ("weighted_sum", None, 128, 12),
    ],
)
def test_16_ranks(kernel: str, quantize: str | None, tokens: int, most_us: float) -> None:
    settings = config(16, tokens)
    cost = replayed(work_of(launch_of(kernel, settings, quantize), traffic(settings)), CORE)
    assert cost.us <= most_us
    assert cost.parts["scalar loads"] < 0.25 * cost.us
