"""What the kernels that only move rows within a rank may take: a scalar load more in each row is seen."""

from __future__ import annotations

import pytest
import torch

from autotune.gate.families import parse_case
from autotune.model.constants import machine_named
from autotune.model.cost import work_of
from autotune.model.kernel_costs.replay import replayed
from autotune.model.kernel_costs.replay.case import replay_case
from autotune.npu_compiler.socs import SOC_OF_PRODUCT
from moe_triton.core.plan import Launch, Placeholder, launch
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.kernels import Case, Shape, Sizes, families
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout
from tests.autotune.model.calls import CORES, config, launch_of, traffic

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
        ("weighted_sum", None, 16, 3.1),
        ("weighted_sum", None, 128, 11.6),
    ],
)
def test_16_ranks(kernel: str, quantize: str | None, tokens: int, most_us: float) -> None:
    settings = config(16, tokens)
    cost = replayed(work_of(launch_of(kernel, settings, quantize), traffic(settings)), CORE)
    assert cost.us <= most_us
    assert cost.parts["scalar loads"] < 0.25 * cost.us


def arrange(quantize: str | None) -> Launch:
    """As 16 ranks have it on an NPU."""
    settings = config(16)
    slot = SlotLayout.of(settings.hidden, ROW_FORMATS[quantize], torch.bfloat16)
    kernel = arrange_kernel(slot, has_weight=True, zoned=True)
    values = {arg.name: Placeholder(arg.name) for arg in kernel.args}
    num_entries = settings.num_ranks * settings.num_local_experts
    values["num_rows"] = Placeholder("recv_offsets", WORD_BYTES * (num_entries - 1))
    sizes = {"capacity": 1 << 20, "num_entries": num_entries, "zone_stride": 1 << 15}
    return launch("arrange", kernel, "compute", CORES, **{**values, **sizes})


@pytest.mark.parametrize(
    ("quantize", "tokens", "most_us"),
    [("int8", 16, 2.8), ("int8", 128, 10.6), (None, 16, 3.6), (None, 128, 19.2)],
)
def test_rows_that_a_table_finds_are_spread_over_all_cores(
    quantize: str | None, tokens: int, most_us: float
) -> None:
    cost = replayed(work_of(arrange(quantize), traffic(config(16, tokens))), CORE)
    assert cost.us <= most_us
    assert cost.parts["scalar loads"] < 0.4


@pytest.mark.parametrize(
    ("name", "tokens", "most_us"),
    [
        ("route", 16, 1.15),
        ("route", 128, 2.8),
        ("route/takes-int64", 128, 2.9),
        ("route_pack", 16, 1.6),
        ("route_pack", 128, 5.2),
        ("route_pack/takes-int64", 128, 5.2),
        ("route_pack_smooth/takes", 128, 53),
    ],
)
def test_routing_is_shared_out(name: str, tokens: int, most_us: float) -> None:
    """256 experts, 8 for each token, on all cores."""
    family, shape = parse_case(name)
    case = Case(family, shape, Sizes(tokens, 256, 16, unrouted=0, first_token=0))
    found = replay_case(case, SOC_OF_PRODUCT["A3"], CORE, CORES)
    assert found.slowest.cycles / (CORE.clock_ghz * 1e3) <= most_us
    assert found.slowest.parts["scalar loads"] < 0.25 * found.slowest.cycles


@pytest.mark.parametrize(
    ("features", "tokens", "most_us"),
    [("turns", 16, 3.2), ("turns", 128, 11.8), ("listed", 16, 3.6), ("listed", 128, 13)],
)
def test_what_a_sum_does_besides_summing(features: str, tokens: int, most_us: float) -> None:
    shape, sizes = Shape(features=frozenset(("weights", features))), Sizes(tokens, 256, 16, 0.0, 0)
    case = Case(families()["weighted_sum"], shape, sizes)
    cost = replay_case(case, "Ascend910_9391", CORE, CORES)
    assert cost.slowest.cycles / (1e3 * CORE.clock_ghz) <= most_us
