"""Candidates on an NPU, by the model: what the slowest rank takes (`moe_triton.model.clusters`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.intervals import Interval
from autotune.pipeline.race import FORMATS, Result
from moe_triton.core.errors import ArgumentError
from moe_triton.model.bodies.body import body_of
from moe_triton.model.bodies.remembered import Remembered
from moe_triton.model.clusters import cluster
from moe_triton.model.clusters.group import Group
from moe_triton.model.clusters.parts import source
from moe_triton.model.constants import Machine, machine_named
from moe_triton.schemes import SCHEMES, scheme_type
from moe_triton.tables.pipelines import COMMUNICATION

__all__ = ["Modelled", "source"]
NS_PER_US = 1000


class Modelled:
    """Prices of one product's candidates.

    Args:
        product: whose machine the model has.
    """

    def __init__(self, product: str = "A3") -> None:
        self.machine: Machine = machine_named(product)
        self.product = product
        self._bodies = Remembered(body_of)

    def price(self, sizes: Sizes, candidate: Candidate) -> Result:
        """A candidate's time; the ratio is to be held against that of another."""
        try:
            us = sum(self._us(sizes, candidate, quantize) for quantize in FORMATS)
        except ArgumentError as error:
            return Result(candidate, 0, Interval.exact(1.0), str(error))
        return Result(candidate, round(us * NS_PER_US), Interval.exact(1.0))

    def _us(self, sizes: Sizes, candidate: Candidate, quantize: str | None) -> float:
        s, settings = sizes, candidate.settings
        parts = -(-s.tokens // settings["combine_tokens"]) if "combine_tokens" in settings else None
        group = Group(
            s.ranks,
            s.tokens,
            s.hidden,
            s.topk,
            quantize=quantize,
            comm_alg=candidate.scheme,
            parts=parts,
            communication_blocks=settings.get(COMMUNICATION),
        )
        if not group.may_be_captured(self.machine):
            group = replace(group, mode="stream")
        return cluster.price(group, self.machine, self._bodies).us

    def schemes(self, sizes: Sizes) -> list[Result]:
        """Every scheme, the product's own one first."""
        return _against_first([self.price(sizes, Candidate(name)) for name in SCHEMES[self.product]])

    def settings(self, sizes: Sizes, scheme: str) -> list[Result]:
        """A scheme's settings, its defaults first: parts of one size, and half of the cores communicating."""
        return _against_first([self.price(sizes, each) for each in self._candidates(sizes, scheme)])

    def _candidates(self, sizes: Sizes, scheme: str) -> Iterator[Candidate]:
        yield Candidate(scheme)
        space = scheme_type(sizes.config(scheme)).space(sizes.config(scheme), "npu", int(self.machine.cores))
        for tokens in space.choices.get("combine_tokens", ()):
            for blocks in filter(None, space.choices[COMMUNICATION]):
                if tokens < sizes.tokens and tokens * 4 >= sizes.tokens:
                    settings = {"dispatch_tokens": tokens, "combine_tokens": tokens, COMMUNICATION: blocks}
                    yield Candidate(scheme, settings)


def _against_first(results: list[Result]) -> list[Result]:
    own = results[0].ns or 1
    return [each._replace(ratio=Interval.exact(each.ns / own)) for each in results]
