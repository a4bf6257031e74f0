"""elastic_info: which ranks are left, and what they are now (docs/operators.md, "Lost ranks")."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.runtime.prepared_call import Deployment
from moe_triton.schemes.rules import check_config
from moe_triton.torch_npu_ops import settings

HEADER_WORDS = 4


def words_of(elastic_info: torch.Tensor) -> tuple[int, ...]:
    """The contents of elastic_info: what a plan depends on. A host whose device works on waits for them.

    Raises:
        ArgumentError: it is no list of int32; or it goes into a graph, which would keep these contents.
    """
    if elastic_info.dtype != torch.int32 or elastic_info.dim() != 1:
        shape, device = ("4 + 2 * EP",), elastic_info.device
        check_tensor("elastic_info", elastic_info, shape=shape, dtypes=(torch.int32,), device=device)
    return _read("elastic_info", elastic_info)


def timeout_of(time_out: torch.Tensor) -> int:
    """The contents of a barrier's time_out, (1,) int32, like those of elastic_info.

    Raises:
        ArgumentError: it is no such tensor, or it goes into a graph.
    """
    check_tensor("time_out", time_out, shape=(1,), dtypes=(torch.int32,), device=time_out.device)
    return _read("time_out", time_out)[0]


def _read(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    host = settings.host()
    if host.is_capturing():
        rule = "the host reads it, and a graph would keep what it says now"
        raise ArgumentError(name, "given inside a graph", rule, "Capture calls without it.")
    return tuple(host.on_host(tensor).tolist())


def deployment_of(config: Config, rank: int, words: tuple[int, ...] | None) -> Deployment:
    """The ranks that take part, from elastic_info: whether scaled, new EP, new R, new M, and both tables.

    Args:
        config: the group's settings as called.
        rank: this rank as called.
        words: 4 + 2 * EP, or None where there is no elastic_info.

    Raises:
        ArgumentError: it contradicts itself or the other arguments, or this rank is no longer one of them.
    """
    members = members_of(words, config.num_ranks)
    if words is None or members is None:
        return Deployment(config, rank)
    _, num_ranks, num_shared_ranks, num_experts = words[:HEADER_WORDS]
    _require(0 <= num_shared_ranks < num_ranks, num_shared_ranks, f"the new R is 0 to {num_ranks - 1}")
    local = config.num_local_experts
    _require(
        num_experts == local * (num_ranks - num_shared_ranks),
        num_experts,
        f"the new M is {local} experts on each of {num_ranks - num_shared_ranks} ranks",
    )
    _require(rank in members, rank, "a rank that takes part is in the tables")
    shared = config.num_shared_experts if num_shared_ranks else 0
    rule = "shared experts keep at least one rank each"
    _require(shared == config.num_shared_experts, num_shared_ranks, rule)
    try:
        scaled = replace(
            config,
            num_ranks=num_ranks,
            num_shared_ranks=num_shared_ranks,
            num_experts=num_experts,
            ranks_per_server=config.topology.left(members).sizes,
        )
        check_config(scaled)
    except ArgumentError as error:
        _require(False, f"{error.argument} of {error.value} among the ranks that are left", error.rule)
    return Deployment(scaled, members.index(rank), members)


def members_of(words: tuple[int, ...] | None, num_ranks: int) -> tuple[int, ...] | None:
    """Original ranks of those that are left, by new number; None where all of them are.

    Raises:
        ArgumentError: the tables contradict themselves.
    """
    if words is None:
        return None
    size = HEADER_WORDS + 2 * num_ranks
    if len(words) != size:
        remedy = "Pass four words, and two tables of a word for each rank."
        raise ArgumentError("elastic_info", f"of shape ({len(words)},)", f"it must be ({size},)", remedy)
    if words[0] == 0:
        return None
    left = words[1]
    to_new, to_original = words[HEADER_WORDS : HEADER_WORDS + num_ranks], words[HEADER_WORDS + num_ranks :]
    _require(1 < left <= num_ranks, left, f"the new EP is 2 to {num_ranks}")
    members = to_original[:left]
    _require(
        all(0 <= m < num_ranks for m in members) and len(set(members)) == left,
        members,
        "the second table names each remaining rank once",
    )
    expected = tuple(members.index(r) if r in members else -1 for r in range(num_ranks))
    rule = "the first table is the inverse of the second, with -1 for the rest"
    _require(to_new == expected, list(to_new), rule)
    return members


def _require(holds: bool, value: object, rule: str) -> None:
    if not holds:
        raise ArgumentError("elastic_info", f"one with {value}", rule, "Rebuild the table.")
