"""Every constant of the data file is read by some answer: none is there for show."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moe_triton.model.body import body_of
from moe_triton.model.constants import Machine, machine_named
from moe_triton.model.prices import Call, Sizes
from moe_triton.model.published import ROWS, predict
from moe_triton.model.pulls import with_pulls
from moe_triton.model.remembered import Remembered
from moe_triton.model.sensitivity import Answer, constants_read
from moe_triton.operators.variants import Variant
from moe_triton.schemes import SCHEMES

# Three nodes, and rows in parts: every tier, and both streams.
SIZES = Sizes(ranks=48, tokens=8, experts=48, parts=2)


def answers() -> Iterator[tuple[str, Answer]]:
    """Published operators, and every scheme's plans as a host launches them and as graphs."""
    for row in ROWS:
        yield row.product, partial(predict, row)
    for comm_alg in SCHEMES["A3"]:
        sizes = Sizes(**{**vars(SIZES), "comm_alg": comm_alg})
        call = Call(sizes, sizes.traffic(), Remembered(with_pulls(body_of)))
        for variant in sizes.variants():
            yield "A3", partial(seen_by_host, call, variant)
            if comm_alg != "direct":
                yield "A3", partial(in_a_graph, call, variant)


def seen_by_host(call: Call, variant: Variant, machine: Machine) -> float:
    return call.priced(variant, machine, "stream").seen_by_host_us(machine)


def in_a_graph(call: Call, variant: Variant, machine: Machine) -> float:
    return call.priced(variant, machine, "graph").us


def test_every_constant_is_read() -> None:
    known = {product: machine_named(product) for product in ("A2", "A3")}
    read: set[str] = set()
    for product, answer in answers():
        read |= constants_read(answer, known[product])
    everything = known["A2"].constants.keys() | known["A3"].constants.keys()
    assert read == everything
