"""Communication schemes: each builds the plans of dispatch and combine."""

from __future__ import annotations

from moe_triton.schemes.direct import Direct
from moe_triton.schemes.fullmesh import Fullmesh
from moe_triton.schemes.site import Site

Scheme = Fullmesh | Direct


def make_scheme(site: Site) -> Scheme:
    """The scheme that a site's config names."""
    return Direct(site) if site.config.scheme == "direct" else Fullmesh(site)
