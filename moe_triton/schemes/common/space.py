"""What can be set for a rank: the spaces that schemes declare for `autotune`."""

from __future__ import annotations

from dataclasses import replace

from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.config import Config
from moe_triton.core.space import Settings, Space

BLOCKS = (1, 2, 4)
CACHED_BYTES = (0, 1 << 18, 1 << 22)
SPINS, YIELDS = (0, 50, 1000), (0, 20, 200, 2000)
PART_TOKENS = (16, 32, 64, 128, 256, 512)


def _has_room(values: Settings) -> bool:
    """Whether a block is left to compute."""
    communicating = values.get("communication_blocks", 0)
    return communicating == 0 or communicating < values.get("num_blocks", MAX_BLOCKS + 1)


def waiting_space(config: Config, target: str, cores: int) -> Space:
    """Blocks; on a CPU how rows are copied and flags waited for as well.

    Args:
        config: the group's settings.
        target: name of the back end.
        cores: that a rank's blocks run on.
    """
    if target == "npu":  # a rank has all cores of a device
        return Space({"num_blocks": (max(1, cores // 2), cores)}, allows=_has_room)
    blocks = tuple(count for count in BLOCKS if count <= max(1, cores))
    copies = {"cached_bytes": CACHED_BYTES, "spins": SPINS, "yields": YIELDS}
    return Space({"num_blocks": blocks, **copies}, allows=_has_room)


def with_parts(space: Space, config: Config, cores: int) -> Space:
    """A space with the sizes of parts, one part among them, and the blocks that communicate meanwhile."""
    most = config.num_max_tokens_per_rank
    sizes = (*(tokens for tokens in PART_TOKENS if tokens < most), most)
    parts = {"dispatch_tokens": sizes, "combine_tokens": sizes}
    communication = {"communication_blocks": (0, max(1, cores // 2))}
    return replace(space, choices={**parts, **communication, **space.choices})
