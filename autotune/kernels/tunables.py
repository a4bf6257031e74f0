"""`Tunable`: a kernel that plans launch and that has settings, with all its launches.

A kernel is what tables know it by: name, variant, dtype and sizes. Where several plans launch the same one,
each launch that differs counts alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Set
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.kernels.occasions import configs, rare_plans, usual_plans
from autotune.kernels.scope import Scope
from autotune.model.clusters.group import TIMEOUT_US, middle
from autotune.model.clusters.routing import draw_ids
from autotune.model.cost import Table, Work, work_of
from autotune.model.topology import tiers
from autotune.model.traffic import Traffic, traffic_of
from moe_triton import tables
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Plan
from moe_triton.schemes import SCHEMES, make_scheme
from moe_triton.schemes.rank_context import RankContext


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
class Tunable:
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


def tunables_of(scope: Scope) -> list[Tunable]:
    """The kernels with settings in the plans of all schemes, in a fixed order.

    Raises:
        ArgumentError: no scheme takes these sizes, or no kernel of these names has settings.
    """
    tunables_by_key: dict[tuple[tuple[str, ...], tuple[int, ...]], Tunable] = {}
    for config in configs(scope):
        for tunable in _of_config(scope, config):
            key = tunable.keys, tunable.sizes
            tunables_by_key[key] = (
                _joined(tunables_by_key[key], tunable) if key in tunables_by_key else tunable
            )
    if not tunables_by_key:
        what = f"of {', '.join(scope.kernels)} " if scope.kernels else ""
        rule = f"no plan {what}of these sizes has settings"
        raise ArgumentError("kernel", scope.kernels or "any", rule, "Name other kernels or sizes.")
    return [tunables_by_key[key] for key in sorted(tunables_by_key)]


def _of_config(scope: Scope, config: Config) -> Iterator[Tunable]:
    traffics = _traffics(scope, config)
    target, blocks = ("cpu", 1) if scope.is_cpu else ("npu", int(scope.priced_on().cores))
    context = RankContext(config, traffics[0].rank, blocks, TIMEOUT_US, CAPABILITIES[target])
    usual: set[str] = set()
    for plan in usual_plans(make_scheme(context), scope.dtypes):
        usual |= {launch.kernel.name for launch in plan.launches}
        yield from _of_plan(scope, plan, config, traffics)
    if config.scheme != next(iter(SCHEMES[config.product])):
        return  # rare plans of a product's other schemes launch the kernels of its default's
    for version in (2, 1):
        other = replace(config, version=version)
        for plan in rare_plans(make_scheme(replace(context, config=other))):
            yield from _of_plan(scope, plan, other, traffics, usual)


def _of_plan(
    scope: Scope, plan: Plan, config: Config, traffics: list[Traffic], known: Set[str] = frozenset()
) -> Iterator[Tunable]:
    """The kernels with settings, but for those of known names."""
    launched = {launch.kernel for launch in plan.launches if isinstance(launch.kernel, TritonKernel)}
    for kernel in sorted(launched, key=lambda kernel: kernel.name):
        if (
            kernel.space is None
            or kernel.name in known
            or (scope.kernels and kernel.name not in scope.kernels)
        ):
            continue
        if not scope.by_hidden or "hidden" in kernel.space.sizes:
            yield _tunable(kernel, plan, config, traffics)


def _tunable(kernel: TritonKernel, plan: Plan, config: Config, traffics: list[Traffic]) -> Tunable:
    launches = [launch for launch in plan.launches if launch.kernel == kernel]
    works = tuple(tuple(work_of(launch, traffic) for launch in launches) for traffic in traffics)
    label = f"{config.scheme} {plan.operator}, K {config.num_topk}"
    sizes = tables.sizes_of(kernel, config)
    return Tunable(kernel, tables.keys_of(kernel), sizes, (Situation(label, works),))


def _joined(one: Tunable, other: Tunable) -> Tunable:
    known = {situation.content() for situation in one.situations}
    new = tuple(each for each in other.situations if each.content() not in known)
    return replace(one, situations=one.situations + new)


def _traffics(scope: Scope, config: Config) -> list[Traffic]:
    """Traffic of the rank that receives the median number of rows, and of the one that receives the most."""
    sizes = config.num_ranks, config.num_max_tokens_per_rank, config.num_topk, config.num_experts
    ids = draw_ids("uniform", *sizes, scope.seed)
    received = np.bincount(ids.ravel() // config.num_local_experts, minlength=config.num_ranks)
    ranks = dict.fromkeys((middle(received), int(received.argmax())))
    return [traffic_of(config, rank, ids, tiers(config.product, config.num_ranks, rank)) for rank in ranks]


def _content(work: Work) -> Hashable:
    return tuple(
        (name, None if value.values is None else value.values.tobytes())
        if isinstance(value, Table)
        else value
        for name, value in work.arguments.items()
    )
