"""Which Ascend C kernels run in one launch, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from moe_triton.core.ascendc import (
    COMBINE_READY,
    COMBINE_SEND,
    COMBINE_WAIT,
    DISPATCH_OFFSETS,
    DISPATCH_RECEIVE,
    DISPATCH_ROWS,
    DISPATCH_SEND,
    DISPATCH_TAKE,
    DISPATCH_WAIT,
    EXCHANGE_SEND,
    INBAND_COLLECT,
    INBAND_SEND,
    KERNELS,
    POST_STATUS,
)
from moe_triton.core.ascendc_blocks import BLOCKS_END, BLOCKS_RETURN, BLOCKS_SEND, BLOCKS_WAIT
from moe_triton.core.ascendc_direct import COUNTS_SEND, DIRECT_SEND
from moe_triton.core.ascendc_hierarchy import (
    PARTIALS_SEND,
    RAIL_RELAY,
    RAIL_SEND,
    RAIL_WAIT,
    RETURNS_LOST,
    SERVER_RETURN,
)
from moe_triton.core.ascendc_posts import COMBINE_POST, DISPATCH_POST
from moe_triton.core.kernel import AscendCKernel, FusedKernel

# An operator's half is the same kernel without the other half's phases.
FUSED: tuple[FusedKernel, ...] = (
    FusedKernel(
        "dispatch", (DISPATCH_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_ROWS), continuing=frozenset({3})
    ),
    FusedKernel("dispatch_in_parts", (DISPATCH_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_TAKE)),
    # Some blocks receive while the others send.
    FusedKernel(
        "receiving_dispatch",
        (DISPATCH_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_RECEIVE),
        continuing=frozenset({3}),
        on_first=frozenset({1, 2, 3}),
    ),
    FusedKernel("inband_dispatch", (INBAND_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS)),
    FusedKernel(
        "receiving_inband_dispatch",
        (INBAND_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS, INBAND_COLLECT),
        continuing=frozenset({3}),
        on_first=frozenset({1, 2, 3}),
    ),
    FusedKernel("combine", (COMBINE_SEND, COMBINE_WAIT)),
    FusedKernel("combine_in_parts", (COMBINE_SEND, COMBINE_READY)),
    # Flags for whole ranks: what all blocks wrote is there.
    FusedKernel("combine_by_rank", (COMBINE_SEND, POST_STATUS, DISPATCH_WAIT), frozenset({1})),
    # What is posted was written by all blocks. Nothing is where a row is that names no place: none is posted.
    FusedKernel(
        "posting_dispatch",
        (DISPATCH_SEND, DISPATCH_POST, DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_ROWS),
        synced=frozenset({1}),
        guarded=frozenset({1}),
        continuing=frozenset({4}),
    ),
    FusedKernel("posting_combine", (COMBINE_SEND, COMBINE_POST, COMBINE_WAIT), frozenset({1})),
    FusedKernel(
        "posting_combine_by_rank", (COMBINE_SEND, COMBINE_POST, POST_STATUS, DISPATCH_WAIT), frozenset({1})
    ),
    FusedKernel("exchange", (EXCHANGE_SEND, POST_STATUS, DISPATCH_WAIT), frozenset({1})),
    # Rows follow when every rank's counts are there; their flag when every block's rows are.
    FusedKernel(
        "direct_dispatch",
        (COUNTS_SEND, DISPATCH_WAIT, DIRECT_SEND, POST_STATUS, DISPATCH_OFFSETS, DISPATCH_WAIT),
        synced=frozenset({2, 3}),
        guarded=frozenset({2, 3, 4, 5}),
    ),
    # Behind the last row of a block is its flag: when every block's rows are there. Who posts has its own way
    # to know. Sums are of all counts; those that did not come are none. On a device later launches go by the
    # sums, whatever happened.
    FusedKernel(
        "blocks_dispatch", (BLOCKS_SEND, BLOCKS_END, BLOCKS_WAIT, DISPATCH_OFFSETS), synced=frozenset({1, 3})
    ),
    FusedKernel("blocks_combine", (BLOCKS_RETURN, BLOCKS_END, BLOCKS_WAIT), synced=frozenset({1})),
    # Blocks that have nothing to post, or have posted it, relay what comes from other servers meanwhile.
    FusedKernel(
        "hierarchy_dispatch", (RAIL_SEND, RAIL_RELAY, DISPATCH_WAIT, DISPATCH_OFFSETS), synced=frozenset({3})
    ),
    # Flags for whole ranks; and when every block has seen its share of theirs, who waits elsewhere hears of
    # those that are missing.
    FusedKernel(
        "hierarchy_return",
        (SERVER_RETURN, POST_STATUS, DISPATCH_WAIT, RETURNS_LOST),
        synced=frozenset({1, 3}),
    ),
    FusedKernel("hierarchy_partials", (PARTIALS_SEND, RAIL_WAIT)),
)
# All that have a launcher.
LAUNCHED: tuple[AscendCKernel | FusedKernel, ...] = (*KERNELS, *FUSED)
MAX_PHASES = max(len(kernel.phases) for kernel in FUSED)


def fused(phases: Sequence[AscendCKernel]) -> tuple[FusedKernel, int]:
    """The kernel that runs these phases in one launch, and their bits.

    Raises:
        ValueError: there is none.
    """
    for kernel in FUSED:
        mask = kernel.mask_of(phases)
        if mask is not None:
            return kernel, mask
    raise ValueError(f"no kernel runs these in one launch: {[phase.name for phase in phases]}")
