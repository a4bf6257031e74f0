"""`Subject`: a kernel that plans launch and that has settings, with all its launches.

A kernel is what tables know it by: name, variant, dtype and sizes. Where several plans launch the same one,
each launch that differs counts alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch

from autotune.kernels.scope import Scope
from moe_triton import tables
from moe_triton.core.config import Config
from moe_triton.core.dtypes import DTYPES
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Plan
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.core.soc import Product
from moe_triton.limits import check_config
from moe_triton.model.clusters.group import EXPERTS, TIMEOUT_US, middle
from moe_triton.model.clusters.routing import draw_ids
from moe_triton.model.cost import Table, Work, work_of
from moe_triton.model.topology import tiers
from moe_triton.model.traffic import Traffic, traffic_of
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes import SCHEMES, make_scheme
from moe_triton.schemes.scheme import Scheme
from moe_triton.schemes.site import Site

PLANS_OF: Product = "A3"
"""The product whose plans are tuned on every machine: others have none, and launch the same kernels."""
_GIVEN_IDS = None, torch.int32, torch.int64


@dataclass(frozen=True)
class Situation:
    """One plan that launches a kernel.

    Attributes:
        label: scheme and operator, for people.
        works: the kernel's launches, of each rank that stands for the group.
    """

    label: str
    works: tuple[tuple[Work, ...], ...]

    def content(self) -> Hashable:
        """The same for situations that cost the same."""
        return tuple(tuple((w.blocks, _content(w)) for w in works) for works in self.works)


@dataclass(frozen=True)
class Subject:
    """A kernel to be tuned.

    Attributes:
        kernel: with its own settings.
        keys, sizes: what tables know it by.
        situations: of its launches.
    """

    kernel: TritonKernel
    keys: tuple[str, str, str]
    sizes: tuple[int, int, int, int]
    situations: tuple[Situation, ...] = field(default=(), compare=False)

    @property
    def label(self) -> str:
        """As ``weighted_sum weights-zoned bf16, hidden 7168, topk 8, ranks 16, tokens 128``."""
        sizes = zip(tables.SIZES, self.sizes, strict=True)
        return ", ".join([" ".join(self.keys), *(f"{name} {size}" for name, size in sizes if size > 1)])


def subjects_of(scope: Scope) -> list[Subject]:
    """The kernels with settings in the plans of all schemes, in a fixed order.

    Raises:
        ArgumentError: no scheme takes these sizes, or no kernel of these names has settings.
    """
    found: dict[tuple[tuple[str, ...], tuple[int, ...]], Subject] = {}
    for ranks, tokens, hidden, topk in product(scope.ranks, scope.tokens, scope.hidden, scope.topk):
        for comm_alg in SCHEMES[PLANS_OF]:
            for config in _configs(scope, ranks, tokens, hidden, topk, comm_alg):
                for subject in _of_config(scope, config):
                    key = subject.keys, subject.sizes
                    found[key] = _joined(found[key], subject) if key in found else subject
    if not found:
        what = f"of {', '.join(scope.kernels)} " if scope.kernels else ""
        rule = f"no plan {what}of these sizes has settings"
        raise ArgumentError("kernel", scope.kernels or "any", rule, "Name other kernels or sizes.")
    return [found[key] for key in sorted(found)]


def _configs(
    scope: Scope, ranks: int, tokens: int, hidden: int, topk: int, comm_alg: str
) -> Iterator[Config]:
    """The group's settings, if the scheme takes the sizes."""
    experts = max(-(-EXPERTS // ranks), -(-topk // ranks)) * ranks
    config = Config(ranks, tokens, hidden, topk, experts, product=PLANS_OF, scheme=comm_alg, relaxed=True)
    try:
        check_config(config)
    except ArgumentError:
        return
    yield config


def _of_config(scope: Scope, config: Config) -> Iterator[Subject]:
    traffics = _traffics(scope, config)
    target, blocks = ("cpu", 1) if scope.is_cpu else ("npu", int(scope.priced_on().cores))
    scheme = make_scheme(Site(config, traffics[0].rank, blocks, TIMEOUT_US, target))
    for plan in _plans(scheme, scope.dtypes):
        launched = {launch.kernel for launch in plan.launches if isinstance(launch.kernel, TritonKernel)}
        for kernel in sorted(launched, key=lambda kernel: kernel.name):
            if kernel.space is not None and (not scope.kernels or kernel.name in scope.kernels):
                yield _subject(kernel, plan, config, traffics)


def _subject(kernel: TritonKernel, plan: Plan, config: Config, traffics: list[Traffic]) -> Subject:
    launches = [launch for launch in plan.launches if launch.kernel == kernel]
    works = tuple(tuple(work_of(launch, traffic) for launch in launches) for traffic in traffics)
    label = f"{config.scheme} {plan.operator}, K {config.num_topk}"
    sizes = tables.sizes_of(kernel, config)
    return Subject(kernel, tables.keys_of(kernel), sizes, (Situation(label, works),))


def _joined(one: Subject, other: Subject) -> Subject:
    known = {situation.content() for situation in one.situations}
    new = tuple(each for each in other.situations if each.content() not in known)
    return replace(one, situations=one.situations + new)


def _traffics(scope: Scope, config: Config) -> list[Traffic]:
    """Of the rank that receives the median number of rows, and of the one that receives the most."""
    sizes = config.num_ranks, config.num_max_tokens_per_rank, config.num_topk, config.num_experts
    ids = draw_ids("uniform", *sizes, scope.seed)
    received = np.bincount(ids.ravel() // config.num_local_experts, minlength=config.num_ranks)
    ranks = dict.fromkeys((middle(received), int(received.argmax())))
    return [traffic_of(config, rank, ids, tiers(PLANS_OF, config.num_ranks, rank)) for rank in ranks]


def _plans(scheme: Scheme, dtypes: tuple[str, ...]) -> Iterator[Plan]:
    tokens = scheme.site.config.num_max_tokens_per_rank
    for variant in _variants(scheme, dtypes):
        operator = "dispatch" if isinstance(variant, DispatchVariant) else "combine"
        yield scheme.whole(variant, 0, scheme.site.parts(operator, tokens))


def _variants(scheme: Scheme, dtypes: tuple[str, ...]) -> Iterator[Variant]:
    """What buffers are asked for: all formats of rows and ids; results in place, as int8, or normalised."""
    hidden = scheme.site.config.hidden
    formats = [each for each in ROW_FORMATS.values() if each.fits(hidden)]
    for dtype in (DTYPES[name] for name in dtypes):
        for row_format, given_ids, weights in product(formats, _GIVEN_IDS, (False, True)):
            yield DispatchVariant(dtype, row_format, given_ids=given_ids, weights=weights)
        in_place = scheme.place("results", dtype.itemsize) is not None
        for quantize, norm in product((False,) if in_place else (False, True), (False, True)):
            if not norm or dtype == torch.bfloat16:
                yield CombineVariant(
                    dtype, weights=True, block_quantize=quantize, norm=norm, in_place=in_place
                )


def _content(work: Work) -> Hashable:
    return tuple(
        (name, None if value.values is None else value.values.tobytes())
        if isinstance(value, Table)
        else value
        for name, value in work.arguments.items()
    )
