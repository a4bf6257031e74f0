"""elastic_info and servers: those that are left keep theirs, or the table is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.torch_npu_ops.elastic import deployment_of


def config_of(servers: tuple[int, ...], shared: int = 0) -> Config:
    ranks = sum(servers)
    sizes = ranks, 4, 1024, 2, 2 * (ranks - shared), int(shared > 0), shared
    return Config(*sizes, ranks_per_server=servers)


def words(config: Config, members: Sequence[int], shared: int = 0) -> tuple[int, ...]:
    """elastic_info of these ranks."""
    ranks = range(config.num_ranks)
    to_new = [members.index(r) if r in members else -1 for r in ranks]
    to_original = [members[r] if r < len(members) else -1 for r in ranks]
    return (1, len(members), shared, 2 * (len(members) - shared), *to_new, *to_original)


@pytest.mark.parametrize(
    ("servers", "members", "left"),
    [
        ((4, 4), (0, 1, 2, 4, 5, 6, 7), (3, 4)),
        ((4, 4), (4, 5, 6, 7), (4,)),
        ((2, 2, 2), (0, 1, 4, 5), (2, 2)),
        ((3, 1), (0, 1, 2), (3,)),
        ((2, 2), (3, 2, 0), (2, 1)),
    ],
)
def test_the_ranks_that_are_left_stay_on_their_servers(
    servers: tuple[int, ...], members: tuple[int, ...], left: tuple[int, ...]
) -> None:
    config = config_of(servers)
    deployment = deployment_of(config, members[-1], words(config, members))
    assert deployment.config.topology.sizes == left
    assert (deployment.rank, deployment.members) == (len(members) - 1, members)
    neighbours = deployment.config.topology.neighbours(deployment.rank)
    assert [members[new] for new in neighbours] == [
        old for old in members if old in config.topology.neighbours(members[-1])
    ]


def test_a_table_that_takes_a_server_apart_is_refused() -> None:
    config = config_of((2, 2))
    with pytest.raises(
        ArgumentError, match=r"elastic_info is one with ranks_per_server of \[2, 2\] .* neighbours"
    ):
        deployment_of(config, 0, words(config, (0, 2, 1)))
    one_server = config_of((4,))
    assert deployment_of(one_server, 0, words(one_server, (0, 2, 1))).config.topology.sizes == (3,)
