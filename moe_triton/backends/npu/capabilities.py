"""What the NPU back end can do."""

from __future__ import annotations

from moe_triton.core.capabilities import Capabilities

CAPABILITIES = Capabilities(
    target="npu",
    is_asynchronous=True,
    captures_graphs=True,
    owns_cores=True,
    launches_cheaply=False,  # microseconds each
    sums_across_allocations=False,  # it would be one more unproven assumption of the sum
    posters=("aiv",),  # AICPU's batch writes would need HCCL's operator package
)
