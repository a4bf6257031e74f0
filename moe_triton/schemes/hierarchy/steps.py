"""What dispatch and combine by hierarchy share."""

from __future__ import annotations

from moe_triton.core.plan import Hole, Value
from moe_triton.schemes.hierarchy.layout import HierarchyLayout
from moe_triton.schemes.site import Operator, Site


def of_rail(site: Site, layout: HierarchyLayout, *, is_local: bool = False) -> dict[str, Value]:
    """Which ranks there are, of a kernel that reaches them, or that only knows of them."""
    ranks: dict[str, Value] = {
        "num_servers": layout.num_servers,
        "ranks_per_server": layout.ranks_per_server,
        "rank": site.rank,
    }
    return ranks if is_local else {"peers": Hole("peers"), **ranks}


def of_round(site: Site, operator: Operator, zone: int, call: int) -> dict[str, Value]:
    """Which round it is. Operators count theirs by themselves, as they have zones of their own."""
    return {"numbers": site.numbers(operator), **site.zone_of(operator, zone), "call": call}


def by_token(site: Site) -> int:
    """1: a message for each token, as an AIV posts them; 0: one for a server, as an AICPU does."""
    return int(site.posts == "aiv")


def relay_timeout_us(timeout_us: int) -> int:
    """The deadline of a relay, four fifths of the others': it says for whom it waited before they give up."""
    return timeout_us - timeout_us // 5
