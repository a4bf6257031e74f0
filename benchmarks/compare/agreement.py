"""Routes are compared only if they deliver the same: bit for bit, but for sums in another order."""

from __future__ import annotations

import torch

from benchmarks.compare.routes import Delivered, Route

# Sums of the same fp32 products in two orders differ by a few units of fp32, and then at most by one unit of
# bf16, which has 8 bits.
RELATIVE, ABSOLUTE = 2.0**-7, 1e-5


def check_routes(routes: dict[str, Route], reference: str) -> None:
    """Runs every route, and compares what it delivered with what the reference did; collective.

    Raises:
        AssertionError: one differs; it names the route and what differs.
    """
    want = _run(routes[reference])
    assert want is not None
    for name, route in routes.items():
        if name != reference:
            have = _run(route)
            if have is not None:
                compare(name, have, want)


def _run(route: Route) -> Delivered | None:
    """What an untimed run delivers."""
    route.dispatch()
    route.combine()
    delivered = route.delivered
    route.settle()
    return delivered


def compare(name: str, have: Delivered, want: Delivered) -> None:
    """Checks one route's delivery against another's.

    Raises:
        AssertionError: they differ.
    """
    total = int(want.counts.sum())
    same = {
        "tokens": torch.equal(have.tokens[:total], want.tokens[:total]),
        "scales": _scales_equal(have.scales, want.scales, total),
        "counts": torch.equal(have.counts, want.counts),
        "output": _outputs_agree(have, want),
    }
    wrong = [what for what, good in same.items() if not good]
    if wrong:
        raise AssertionError(f"{name} delivers other {', '.join(wrong)}: nothing to compare")


def _scales_equal(have: torch.Tensor | None, want: torch.Tensor | None, total: int) -> bool:
    if have is None or want is None:
        return have is want
    return torch.equal(have[:total], want[:total])


def _outputs_agree(have: Delivered, want: Delivered) -> bool:
    if have.exact and want.exact:
        return torch.equal(have.out, want.out)
    return torch.allclose(have.out.float(), want.out.float(), rtol=RELATIVE, atol=ABSOLUTE)
