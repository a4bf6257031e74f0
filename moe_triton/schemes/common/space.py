"""What can be set for a rank: the spaces that schemes declare for `autotune`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.space import Settings, Space
from moe_triton.core.tuning import usual_on_cpu
from moe_triton.schemes.site import USUAL_TOKENS, usual_receiving_blocks

BLOCKS = (1, 2, 4)
CACHED_BYTES = (0, 1 << 18, 1 << 22)
SPINS, YIELDS = (0, 50, 1000), (0, 20, 200, 2000)
PART_TOKENS = (16, 32, 64, 128, 256, 512)
SHARES = (1 / 4, 1 / 3, 1 / 2, 2 / 3)
"""Shares of a device's cores that may do nothing but receive."""


def waiting_space(config: Config, capabilities: Capabilities, cores: int) -> Space:
    """Blocks; on a CPU how rows are copied and flags waited for as well.

    Args:
        config: the group's settings.
        capabilities: of the back end.
        cores: that a rank's blocks run on.
    """
    if capabilities.owns_cores:
        return Space({"num_blocks": (max(1, cores // 2), cores)}, usual={"num_blocks": cores})
    blocks = tuple(count for count in BLOCKS if count <= max(1, cores))
    copies = {"cached_bytes": CACHED_BYTES, "spins": SPINS, "yields": YIELDS}
    return Space({"num_blocks": blocks, **copies}, usual=usual_on_cpu(config.num_ranks, cores))


def with_parts(space: Space, config: Config, capabilities: Capabilities, cores: int) -> Space:
    """A space with the sizes of parts, one part among them, and the blocks that communicate meanwhile.

    Where launches are costly there are parts only where blocks of their own communicate.
    """
    most = config.num_max_tokens_per_rank
    sizes = (*(tokens for tokens in PART_TOKENS if tokens < most), most)
    names = "dispatch_tokens", "combine_tokens"
    is_cheap = capabilities.launches_cheaply
    usual = min(USUAL_TOKENS, most) if is_cheap else most

    def allows(values: Settings) -> bool:
        communicating = values.get("communication_blocks", 0)
        if not communicating:
            return is_cheap or all(values.get(name, most) == most for name in names)
        return communicating < values.get("num_blocks", MAX_BLOCKS + 1)

    choices = {**dict.fromkeys(names, sizes), "communication_blocks": (0, max(1, cores // 2))}
    return _extended(space, choices, {**dict.fromkeys(names, usual), "communication_blocks": 0}, allows)


def with_receivers(space: Space, capabilities: Capabilities, cores: int) -> Space:
    """A space with the blocks that do nothing but receive while the others send."""
    name = "receiving_blocks"
    counts = {0, *(max(1, int(cores * share)) for share in SHARES)}

    def allows(values: Settings) -> bool:
        return values.get(name, 0) < values.get("num_blocks", MAX_BLOCKS + 1)

    usual = {name: usual_receiving_blocks(capabilities, cores)}
    return _extended(space, {name: tuple(sorted(counts))}, usual, allows)


def _extended(
    space: Space, choices: dict[str, tuple[int, ...]], usual: Settings, allows: Callable[[Settings], bool]
) -> Space:
    """A space with more settings, and what goes together of them."""
    return replace(
        space,
        choices={**choices, **space.choices},
        usual={**space.usual, **usual},
        allows=lambda values: space.allows(values) and allows(values),
    )
