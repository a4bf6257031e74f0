"""What dispatch and combine by hierarchy share."""

from __future__ import annotations

from moe_triton.core.plan import Value
from moe_triton.schemes.hierarchy.layout import HierarchyLayout
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.site import Site


def of_rails(site: Site, layout: HierarchyLayout) -> dict[str, Value]:
    """Arguments of kernels that know of rails: which ranks there are, and where tables are."""
    return {
        **RelayTables(site.config).holes,
        "num_servers": layout.num_servers,
        "ranks_per_server": layout.ranks_per_server,
        "server_experts": layout.server_experts,
        # 1: a message for each token, as an AIV posts them; 0: one for a server, as an AICPU does.
        "by_token": int(site.posts == "aiv"),
    }


def relay_timeout_us(timeout_us: int) -> int:
    """The deadline of a relay, four fifths of the others': it says for whom it waited before they give up."""
    return timeout_us - timeout_us // 5
