"""What plans, spaces and settings ask of a back end, instead of its name."""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.core.tuning import Posts


@dataclass(frozen=True)
class Capabilities:
    """What a back end can do. Each declares its own: `moe_triton.backends.CAPABILITIES`.

    Attributes:
        target: what Triton kernels are specialised for: the back end's name.
        is_asynchronous: runs end later than the calls that start them: the host reads no ids.
        captures_graphs: runs can be captured in a graph, which may run any number of times: kernels look
            their zone up in device memory.
        owns_cores: a rank has all cores of a device, which start a launch's blocks together. Elsewhere blocks
            are threads on cores that ranks share: another one takes longer to start than few words do.
        launches_cheaply: a launch takes next to nothing beside what it may hide.
        sums_across_allocations: a sum may read rows of the window and of a tensor in one launch.
        posters: who can post to other servers.
    """

    target: str
    is_asynchronous: bool
    captures_graphs: bool
    owns_cores: bool
    launches_cheaply: bool
    sums_across_allocations: bool
    posters: tuple[Posts, ...]
