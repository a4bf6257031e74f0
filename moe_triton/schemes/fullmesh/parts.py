"""Combine in parts by readiness: what is sent early, and what is summed first."""

from __future__ import annotations

from collections.abc import Sequence

from moe_triton.core.abi import words_of
from moe_triton.core.plan import Hole, Launch, Value, joined
from moe_triton.core.region import REGION_DIMS
from moe_triton.layout import WORD_BYTES
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes.fullmesh.ascendc import COMBINE_READY, COMBINE_SEND, FUSED
from moe_triton.schemes.site import Site, launch_matching

# What a wait is given where it has nothing to send.
_NOTHING: dict[str, Value] = {
    arg.name: (0,) * words_of(arg) if arg.type in REGION_DIMS else 0 for arg in COMBINE_READY.args
}


def by_readiness(
    site: Site,
    variant: CombineVariant,
    send: Sequence[Launch],
    wait: Launch,
    parts: int,
    summed: Sequence[Sequence[int]],
) -> list[list[Launch]]:
    """Launches that send a part of the results each, and wait for a part of this rank's tokens.

    Part p sends to tokens ``[p, p + 1) * Site.part_tokens`` of every rank. Then there are as many complete
    tokens here as part p sums, and which they are stands in ``ready_tokens``.

    Args:
        site: where they run.
        variant: of the combine.
        send: the launch that sends all results; empty if they have been sent.
        wait: the launch that waits for all tokens.
        parts: how many.
        summed: parts that are summed by one launch, for each such launch.
    """
    blocks = site.blocks("communication", parts)
    first_of = {part: group[0] for group in summed for part in group}
    # What is quantised beside sending is not there yet, however long a wait takes.
    sends_early = send and not variant.block_quantize
    launches = []
    for part in range(parts):
        of_part: dict[str, Value] = {
            "part": part,
            "num_parts": parts,
            "part_tokens": site.part_tokens["combine"].tokens,
            "progress": Hole("part_progress"),
        }
        sends = [launch_matching("send", COMBINE_SEND, s.stream, blocks, _values(s) | of_part) for s in send]
        given = _NOTHING | (_values(send[0]) if sends_early else {}) | _values(wait) | of_part
        given |= {
            "waited_us": Hole("waited"),
            "is_timed": int(variant.waits),
            "num_tokens": Hole("num_tokens"),
            "pending": Hole("pending_results"),
            "ready_tokens": Hole("ready_tokens"),
            "first_part": first_of[part],
            "bounds": bounds_of(first_of[part]),
        }
        waits = launch_matching("wait", COMBINE_READY, wait.stream, blocks, given)
        launches.append(joined([*sends, waits], FUSED))
    return launches


def bounds_of(part: int) -> Hole:
    """Where tokens begin and end in ``ready_tokens`` of the part, or of those that begin with it."""
    return Hole("ready_bounds", 2 * WORD_BYTES * part)


def _values(launch: Launch) -> dict[str, Value]:
    return {arg.name: value for arg, value in zip(launch.kernel.args, launch.values, strict=True)}
