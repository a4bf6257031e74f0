"""What the CPU back end can do."""

from __future__ import annotations

from moe_triton.core.capabilities import Capabilities

CAPABILITIES = Capabilities(
    target="cpu",
    is_asynchronous=False,
    captures_graphs=False,
    owns_cores=False,
    launches_cheaply=True,
    sums_across_allocations=True,
    posters=("aiv", "aicpu"),
)
