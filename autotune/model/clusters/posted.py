"""Plans that post: step by step against the closed forms of the same schemes between A2's servers, and the
stages of its hierarchy against each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.model.clusters import a2
from autotune.model.clusters.cluster import Load
from autotune.model.clusters.group import OPERATORS, Group, OperatorName
from autotune.model.clusters.prices import Call
from autotune.model.constants import Machine
from autotune.model.kernel_costs.remembered import KernelCosts
from autotune.model.timelines.timeline import Timeline
from autotune.model.topology import RANKS_PER_NODE
from moe_triton.schemes.rank_context import usual_post_parts

STAGES = "until posted", "on the way", "behind it"
"""Until the launch that posts has done its work; until the last block is there; until the end."""
POSTING, WAITING = ("send", "post"), "wait"  # steps
_UNTIL_POSTED = "start", "cores", "pack", "sync"
_ON_THE_WAY = "posts", "rdma", "latency"


@dataclass(frozen=True)
class Compared:
    """One operator of one group, on its slowest rank, in us.

    Attributes:
        operator, ranks, tokens: which.
        timeline_us: of A2's fullmesh, launch by launch.
        closed_us: by its closed form, which is that of Ascend's operators, with blocks made in parts: of
            packing all but the first part's is hidden by the link.
        stages: of the first and of the second, by `STAGES`.
        rows_us: of A3's fullmesh_v1 on the same ranks, which posts rows by themselves.
    """

    operator: str
    ranks: int
    tokens: int
    timeline_us: float
    closed_us: float
    stages: dict[str, tuple[float, float]]
    rows_us: float

    @property
    def difference(self) -> float:
        """By how much the timeline is longer than the closed form, as a share of the latter."""
        return self.timeline_us / self.closed_us - 1


def compare(ranks: int, tokens: int, machine: Machine, kernel_costs: KernelCosts) -> list[Compared]:
    """Dispatch and combine of a group of several servers of A2.

    Args:
        ranks: a multiple of 8, at least 16.
        tokens: of each rank; experts are drawn uniformly.
        machine: with a network.
        kernel_costs: of kernels.
    """
    blocks = Group(ranks, tokens, comm_alg="fullmesh", product="A2")
    rows = Group(ranks, tokens, comm_alg="fullmesh_v1", product="A3", ranks_per_server=RANKS_PER_NODE["A2"])
    ids = blocks.draw()
    closed = a2.price(blocks, machine, ids)
    walked = Load.of(blocks, ids, machine).representatives()
    calls = [Call.of(group, kernel_costs, ids, *walked) for group in (blocks, rows)]
    comparisons = []
    for operator in OPERATORS:
        line, of_rows = (_slowest([p.timeline for p in call.priced(operator, machine)]) for call in calls)
        form = closed.operators[operator].parts
        form = {**form, "pack": form["pack"] / usual_post_parts(ranks)}
        both = zip(_stages(line), _stages_of_form(form), strict=True)
        stages = dict(zip(STAGES, both, strict=True))
        us = line.total_us, sum(form.values())
        comparisons.append(Compared(operator, ranks, tokens, *us, stages, of_rows.total_us))
    return comparisons


POST_CONSTANT = "post_aiv_us"
POSTS_US = 0.5, None, 2.9
"""What a vector core's post may take: the least, what is fitted, and the most (`constants.toml`)."""
SECOND, THIRD = "aicpu", "aiv"
"""Who posts in stage 2 of A2's hierarchy, and in stage 3."""


@dataclass(frozen=True)
class StagesOf:
    """Both stages of A2's hierarchy by their plans, on the rank that receives the median number of rows.

    Attributes:
        ranks, tokens: of the group.
        post_us: of a vector core.
        us: dispatch and combine, by who posts.
    """

    ranks: int
    tokens: int
    post_us: float
    us: Mapping[str, Mapping[OperatorName, float]]

    @property
    def gain(self) -> float:
        """How many times as long stage 2 takes."""
        second, third = (sum(self.us[posts].values()) for posts in (SECOND, THIRD))
        return second / third


def stages(
    ranks: int,
    tokens: int,
    machine: Machine,
    kernel_costs: KernelCosts,
    posts_us: Sequence[float | None] = POSTS_US,
) -> list[StagesOf]:
    """Both stages of A2's hierarchy, for posts that take so long.

    Args:
        ranks, tokens, machine, kernel_costs: as in `compare`.
        posts_us: None for the machine's own.
    """
    groups = {
        posts: Group(ranks, tokens, comm_alg="hierarchy", product="A2", posts=posts)  # type: ignore[arg-type]
        for posts in (SECOND, THIRD)
    }
    calls = {posts: Call.typical(group, kernel_costs) for posts, group in groups.items()}
    found = []
    for post_us in posts_us:
        used = machine if post_us is None else machine.replaced({POST_CONSTANT: post_us})
        us = {
            posts: {operator: call.priced(operator, used)[0].us for operator in OPERATORS}
            for posts, call in calls.items()
        }
        found.append(StagesOf(ranks, tokens, used.post_aiv_us, us))
    return found


def _slowest(lines: Sequence[Timeline]) -> Timeline:
    return max(lines, key=lambda line: line.total_us)


def _stages(line: Timeline) -> tuple[float, float, float]:
    ends = {span.launch.step: span.end_us for span in line.spans}
    posted = next(ends[step] for step in POSTING if step in ends)
    return posted, ends[WAITING] - posted, line.total_us - ends[WAITING]


def _stages_of_form(parts: dict[str, float]) -> tuple[float, float, float]:
    before = sum(parts.get(name, 0.0) for name in _UNTIL_POSTED)
    way = sum(parts.get(name, 0.0) for name in _ON_THE_WAY)
    return before, way, sum(parts.values()) - before - way
