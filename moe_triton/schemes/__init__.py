"""How tokens travel: a folder for each scheme and a line here, which is all that the rest knows of one.

docs/schemes.md tells how to add one. A scheme is imported when it is first asked for.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from moe_triton.core.config import Config, Product
    from moe_triton.layout import Layout
    from moe_triton.schemes.rank_context import RankContext
    from moe_triton.schemes.scheme import Scheme

# Where a `Scheme` is, by product and ``comm_alg``. A product's first one is its default.
SCHEMES: dict[str, dict[str, str]] = {
    "A3": {
        "fullmesh_v1": "moe_triton.schemes.fullmesh.scheme:Fullmesh",
        "fullmesh_v2": "moe_triton.schemes.fullmesh.scheme:InbandFullmesh",
        "direct": "moe_triton.schemes.direct.scheme:Direct",
        "hierarchy": "moe_triton.schemes.hierarchy.scheme:A3Hierarchy",
    },
    "A2": {
        "fullmesh": "moe_triton.schemes.a2_fullmesh.scheme:A2Fullmesh",
        "hierarchy": "moe_triton.schemes.hierarchy.scheme:Hierarchy",
    },
}


def product_of(comm_alg: str) -> Product:
    """The product that has a scheme of this name: of several that whose way between servers it is, and
    otherwise the first; the first one of all where none has.
    """
    classes = {product: schemes[comm_alg] for product, schemes in SCHEMES.items() if comm_alg in schemes}
    if len(classes) > 1:
        between = (product for product, place in classes.items() if class_at(place).between_servers)
        return cast("Product", next(between, next(iter(classes))))
    return cast("Product", next(iter(classes or SCHEMES)))


def scheme_type(config: Config) -> type[Scheme]:
    """The class of the scheme that a config names."""
    return class_at(SCHEMES[config.product][config.scheme])


@functools.cache
def class_at(place: str) -> type[Scheme]:
    """The class of a scheme, by where `SCHEMES` says that it is."""
    scheme_class: type[Scheme] = pkgutil.resolve_name(place)
    return scheme_class


def schemes_with(feature: str, product: str) -> list[str]:
    """Names of a product's schemes that do not refuse a feature (`Scheme.refuses`)."""
    return [name for name, place in SCHEMES[product].items() if feature not in class_at(place).refuses]


def make_scheme(context: RankContext) -> Scheme:
    """The scheme that a context's config names, on that context's rank."""
    return scheme_type(context.config)(context)


def layout_of(config: Config) -> Layout:
    """What lies where in the window of the scheme that a config names; the same on every rank."""
    return scheme_type(config).layout_of(config)
