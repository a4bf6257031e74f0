"""What a call puts on which stream, in which order, and with which addresses and sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_triton.backends import CAPABILITIES
from moe_triton.core import abi
from moe_triton.core.kernel import AscendCKernel
from moe_triton.core.plan import Launch, Placeholder, Plan
from moe_triton.core.region import REGION_DIMS
from moe_triton.core.row_formats import AS_THEY_ARE, INT8
from moe_triton.core.tuning import Tuning
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.processes import RankGroup
from moe_triton.schemes import make_scheme
from moe_triton.schemes.fullmesh.ascendc import DISPATCH_SEND, INBAND_RECEIVE
from moe_triton.schemes.rank_context import RankContext
from tests.distributed.cases import Case
from tests.npu import workers
from tests.npu.test_dispatch_combine import config

Ranks = Callable[[int], RankGroup]

ONE_STREAM = {
    "dispatch": """
        compute: launch route_pack
        compute: launch dispatch
        compute: launch arrange
        compute: copy
        compute: record event 0
    """,
    "combine": """
        compute: launch combine
        compute: launch weighted_sum
        compute: copy
        compute: record event 0
    """,
}
# Two parts: the second is sent and taken, or waited for, while the first is arranged, or summed.
TWO_STREAMS = {
    "dispatch": """
        compute: launch route_pack
        compute: record event 0
        communication: wait event 0
        communication: launch dispatch_in_parts
        communication: record event 1
        compute: wait event 1
        compute: launch arrange_part
        communication: launch dispatch_in_parts
        communication: record event 2
        compute: wait event 2
        compute: launch arrange_part
        compute: copy
        compute: record event 3
    """,
    "combine": """
        compute: record event 0
        communication: wait event 0
        communication: launch combine_in_parts
        communication: record event 1
        compute: wait event 1
        compute: launch weighted_sum
        communication: launch combine_in_parts
        communication: record event 2
        compute: wait event 2
        compute: launch weighted_sum
        compute: copy
        compute: record event 3
    """,
}
HALVES = Tuning(dispatch_tokens=4, combine_tokens=4, communication_blocks=1)


@pytest.mark.parametrize(
    ("tuning", "expected"), [(None, ONE_STREAM), (HALVES, TWO_STREAMS)], ids=["one", "two"]
)
def test_what_reaches_the_streams(ranks: Ranks, tuning: Tuning | None, expected: dict[str, str]) -> None:
    case = Case(config(), 3, "uniform", (8, 8), "int8", num_blocks=2)
    for said in ranks(2).run(workers.sequences, case, tuning):
        for operator, lines in expected.items():
            assert said[operator] == [line.strip() for line in lines.split("\n") if line.strip()]


def test_before_cann_9_there_is_one_part_on_one_stream(ranks: Ranks) -> None:
    """The library says that it was built where no word for the schedule mode exists."""
    case = Case(config(), 3, "uniform", (8, 8), "int8", num_blocks=2)
    for said in ranks(2).run(workers.sequences, case, HALVES, 0):
        for operator, lines in ONE_STREAM.items():
            assert said[operator] == [line.strip() for line in lines.split("\n") if line.strip()]


def test_parts_need_cores_that_communicate(ranks: Ranks) -> None:
    case = Case(config(), 3, "uniform", (8, 8), "int8", num_blocks=2)
    for said in ranks(2).run(workers.sequences, case, Tuning(dispatch_tokens=4, combine_tokens=4)):
        for operator, lines in ONE_STREAM.items():
            assert said[operator] == [line.strip() for line in lines.split("\n") if line.strip()]


def plans(target: str, scheme: str, variant: Variant, rank: int) -> list[Plan]:
    """Both zones' plans of a back end; one plan where the zone stands in device memory."""
    made = make_scheme(RankContext(config(2, scheme), rank, 2, 1000, CAPABILITIES[target]))
    zones = [0] if made.rounds.on_device else [0, 1]
    return [made.whole(variant, zone) for zone in zones]


def remote(plan: Plan) -> list[Launch]:
    """The launches that write to windows or read them there."""
    return [launch for launch in plan.launches if isinstance(launch.kernel, AscendCKernel)]


def cell_of(argument: str, launch: Launch) -> Placeholder | int:
    """Where an NPU's launch finds its zone, keeps it and turns it: three words, and the three behind them."""
    operator = 1 if launch.kernel.name.startswith("combine") else 0
    own, kept = Placeholder("zones", 4 * operator), Placeholder("zones", 4 * (3 + operator))
    if launch.kernel is INBAND_RECEIVE:
        return {"zone_at": kept, "turned": own}[argument]
    return {"zone_at": own, "kept_zone": kept, "turned": 0}[argument]


VARIANTS = [
    DispatchVariant(torch.bfloat16, row_format=INT8, smooth=False, weights=True),
    DispatchVariant(torch.float16, row_format=AS_THEY_ARE, smooth=False, weights=False),
    CombineVariant(torch.bfloat16, weights=True),
]


def _is_of_masks(name: str, value: object) -> bool:
    """Whether an argument is one of the words by which a call knows who is masked."""
    is_behind_peers = isinstance(value, Placeholder) and value.name == "peers"
    return is_behind_peers and name not in ("peers", "changes")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: type(v).__name__ + str(v.dtype))
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
@pytest.mark.parametrize("rank", [0, 1])
def test_remote_addresses_are_those_of_the_cpu_back_end(scheme: str, variant: Variant, rank: int) -> None:
    """An address is a peer's base plus what a region's words make of indices: both are the same."""
    cpu, npu = plans("cpu", scheme, variant, rank), plans("npu", scheme, variant, rank)
    for zone, plan in enumerate(cpu):
        theirs = npu[zone % len(npu)]
        assert [launch.kernel.name for launch in remote(plan)] == [
            launch.kernel.name for launch in remote(theirs)
        ]
        for ours, other in zip(remote(plan), remote(theirs), strict=True):
            assert ours.blocks == other.blocks
            for arg, here, there in zip(ours.kernel.args, ours.values, other.values, strict=True):
                if arg.name == "zone":
                    assert here == zone
                    assert there == (0 if len(npu) == 1 else zone)
                elif _is_of_masks(arg.name, here):
                    assert there == 0  # no rank is masked while a call runs there
                elif arg.name in ("zone_at", "kept_zone", "turned"):
                    assert here == 0
                    assert there == (cell_of(arg.name, other) if len(npu) == 1 else 0)
                else:
                    assert here == there, arg.name


def test_regions_are_passed_whole() -> None:
    """A region of a launch is the words of the layout's: base, and extent and stride of each dimension."""
    scheme = make_scheme(RankContext(config(), 0, 2, 1000, CAPABILITIES["npu"]))
    launch = remote(scheme.whole(VARIANTS[0], 0))[0]
    assert launch.kernel is DISPATCH_SEND
    words, _ = abi.words(launch)
    for arg, first in abi.word_offsets(launch.kernel.args):
        if arg.type in REGION_DIMS:
            region = scheme.layout.region(arg.type)
            assert tuple(words[first : first + abi.words_of(arg)]) == region.words()


def test_the_words_of_a_call_are_the_plans(ranks: Ranks) -> None:
    """Holes are filled with the call's addresses and numbers, everything else stands as the plan has it."""
    case = Case(config(), 3, "uniform", (8, 5), "int8", num_blocks=2)
    for rank, wrong in enumerate(ranks(2).run(workers.words_of_a_call, case)):
        assert wrong == [], rank
