"""From the arguments of a call to its plan: every rule that does not depend on data."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.hccl import buffer_megabytes
from moe_triton.core.logs import log_of
from moe_triton.limits import Call
from moe_triton.operators.description import Operator, Symbols
from moe_triton.operators.dispatch import DISPATCH, DISPATCH_OF_A2
from moe_triton.runtime.arguments import call_of, check_argument, inputs_of
from moe_triton.runtime.prepared_call import Named
from moe_triton.schemes import scheme_type, schemes_with
from moe_triton.schemes.buffer_size import check_buffer_size
from moe_triton.schemes.choice import offering, scheme_of
from moe_triton.schemes.rules import check_call, check_config, check_given
from moe_triton.torch_npu_ops import registry, servers, settings
from moe_triton.torch_npu_ops.elastic import deployment_of
from moe_triton.torch_npu_ops.names import NAMES, OURS, names_for
from moe_triton.torch_npu_ops.plans import FunctionPlan, GroupSite

_log = log_of("construction")

HALVES = "_setup", "_teardown"
OF_PRODUCT = {("A2", DISPATCH): DISPATCH_OF_A2}
"""Operators that return something else on a product."""


def make_plan(
    operator: Operator, kind: type[FunctionPlan], named: Named, words: tuple[int, ...] | None
) -> FunctionPlan:
    """Checks every argument of a call that does not depend on data.

    Args:
        operator: which one.
        kind: of the plan.
        named: the call's arguments, by torch_npu's names: attributes of Python's own types, plain tensors,
            all that is needed.
        words: contents of elastic_info.

    Raises:
        ArgumentError: a rule that does not hold, with its status code.
    """
    operator = OF_PRODUCT.get((settings.current().product, operator), operator)
    host = settings.host()
    given = in_our_words(named)
    ids = given["topk_idx"].dtype
    # no kernel but the one that copies them reads int64
    given_ids = ids if host.is_asynchronous and ids == torch.int64 else None
    s = symbols_of(operator, {**given, "given_ids": given_ids})
    device = host.device
    for argument in operator.tensors[:2]:  # what the rules are about
        check_argument(s, argument, given.get(argument.name), device)
    call = call_of(s)
    environment = registry.environment_of(s["group"])
    config, other = config_of(s, call, environment)
    has_met = not registry.may_be_on_hosts(s["group"])
    if has_met:
        _tell(other)
    context = call_context_of(s, config, words, environment)
    if not has_met:
        context.access.tell = partial(_tell, other)
    for argument in operator.tensors[2:]:
        check_argument(s, argument, given.get(argument.name), device)
    plan = kind(config, context, s.variant(), s, *inputs_of(s, given))
    check_room(plan)
    if call.is_combine:
        check_whole(plan)
    return plan


def in_our_words(named: Named) -> Named:
    """The arguments of a call by our names."""
    return {OURS.get(name, name): value for name, value in named.items()}


def symbols_of(operator: Operator, given: Named) -> Symbols:
    """Sizes of a call of a function, on the servers that the settings in force or the group's hosts say.

    Args:
        operator: which one.
        given: the call's arguments, by our names.
    """
    size = given["num_ranks"]
    of_hosts = servers.sizes_of_hosts(registry.known_group(given["group"]), size)
    sizing = settings.current().sizing_servers(size, given.get("comm_alg"), of_hosts)
    return Symbols(replace(operator, names=NAMES), {**given, "servers": sizing})


def config_of(s: Symbols, call: Call, environment: Mapping[str, str]) -> tuple[Config, str]:
    """The group's settings, checked against every limit of the product and scheme.

    Args:
        s: sizes of the call.
        call: what is asked for.
        environment: HCCL's variables as the group's calls go by them.

    Returns:
        The settings; and who says so where the scheme is another one than was asked for, or "".

    Raises:
        ArgumentError: the first rule that does not hold, with the argument's name in torch_npu.
    """
    chosen, size, comm_alg = settings.current(), s["num_ranks"], s.get("comm_alg", "")
    most = call.global_bs // size if call.global_bs and size > 0 else call.num_tokens
    group = registry.known_group(s["group"])
    topology = chosen.topology(size, comm_alg, servers.sizes_of_hosts(group, size))
    choice = scheme_of(chosen.product, comm_alg, topology.num_servers, environment)
    try:
        config = Config(
            num_ranks=size,
            num_max_tokens_per_rank=most,
            hidden=s["H"],
            num_topk=s["K"],
            num_experts=s["num_experts"],
            num_shared_experts=s["num_shared_experts"],
            num_shared_ranks=s["num_shared_ranks"],
            product=chosen.product,
            scheme=choice.scheme,
            relaxed=chosen.relaxed,
            version=call.version,
            num_special_experts=call.num_special_experts,
            generation=chosen.generation,
            **servers.fields_of_servers(group, size, chosen.ranks_per_server),
        ).normalized()
        _check_config(config)
        scheme_type(config).check_offers("torch_npu", "comm_alg", repr(comm_alg))
        if s.operator.name.endswith(HALVES):
            scheme_type(config).check_offers("torch_npu halves", "comm_alg", repr(comm_alg))
        check_call(config, call)
        check_given(scheme_type(config), config, s)
        check_buffer_size(config, buffer_megabytes(environment), tensor_parallel=call.tp_world_size == 2)
    except ArgumentError as error:
        raise choice.explained(error).renamed(names_for(call)) from None
    return config, choice.source if choice.is_other else ""


def _check_config(config: Config) -> None:
    try:
        check_config(config)
    except ArgumentError as error:
        raise offering(error, ("", *schemes_with("torch_npu", config.product))) from None


@functools.cache
def _tell(source: str) -> None:
    """Warns, once in a process, of a scheme that is another one than was asked for."""
    if source:
        _log.warning("%s", source)


def call_context_of(
    s: Symbols, config: Config, words: tuple[int, ...] | None, environment: Mapping[str, str]
) -> GroupSite:
    """Checks ranks and sizes against the groups, and what elastic_info says.

    Args:
        s: sizes of the call.
        config: of the group.
        words: contents of elastic_info.
        environment: that the config was found under.

    Raises:
        ArgumentError: they contradict each other.
    """
    group, rank = s["group"], s["rank"]
    registry.check_membership(group, "group_ep", ep_world_size=s["EP"], ep_rank_id=rank)
    group_tp, exchange_rank = "", None
    if s["exchange"]:
        group_tp, exchange_rank = s["tp_group"], s["tp_rank_id"]
        registry.check_membership(group_tp, "group_tp", tp_world_size=2, tp_rank_id=exchange_rank)
    deployment = deployment_of(config, rank, words)
    place = registry.Place(group, group_tp, deployment.config, deployment.members)
    return GroupSite(deployment, registry.Access(place, environment), exchange_rank)


def check_room(plan: FunctionPlan) -> None:
    """Checks that ep_recv_counts, as published, has room for what a dispatch keeps for combine.

    Raises:
        ArgumentError: it has not: in groups and batches that are smaller than any published one.
    """
    s = plan.symbols
    room, needed = 2 * s["G"] * s["K"] * s["servers"], plan.tables.num_words if plan.tables else 0
    if needed > room:
        rule = f"{needed} words for combine follow the counts in ep_recv_counts, which has room for {room}"
        raise ArgumentError("ep_world_size", s["EP"], rule, "Use more ranks, or a larger global_bs.")


def check_whole(plan: FunctionPlan) -> None:
    """Checks that combine is given dispatch's outputs whole where the original demands it.

    V2 does; so do two tensor-parallel ranks, whose rows are added before anybody knows how many there are.

    Raises:
        ArgumentError: expand_x has fewer rows than a rank can receive, there are too few origins or counts,
            or none of the peer's. Nothing was sent.
    """
    s, v1 = plan.symbols, plan.symbols.operator.version == 1
    rows, most = s["rows"], s["A"] * s["tp"]
    if rows < most and (not v1 or s["exchange"]):
        rule = f"this rank can have received {most}, whether or not it has"
        remedy = "Pass as many rows as dispatch's expand_x has."
        raise ArgumentError("expand_x", f"of {rows} rows", rule, remedy)
    index = plan.index
    words, (needed, why) = math.prod(s.given[index]), _index_words(plan)
    if words < needed:
        raise ArgumentError(
            s.operator.called(index),
            f"of {words} elements",
            f"it must have at least {why} = {needed}",
            "Pass dispatch's third output whole.",
        )
    if (counts := s.given.get("recv_offsets")) is not None:
        _check_counts(plan, math.prod(counts))
    if s["exchange"] and not s.is_given("exchange_counts"):
        check_tensor("tp_send_counts", None, shape=(), dtypes=())


def _check_counts(plan: FunctionPlan, given: int) -> None:
    """Checks that combine is given a count for each pair of expert and rank, and the tables behind them.

    Raises:
        ArgumentError: there are fewer elements.
    """
    counts, tables, value = plan.num_entries, plan.tables, f"of {given} elements"
    if given < counts:
        rule = f"this rank has {counts} pairs of local expert and source rank"
        remedy = "Pass ep_recv_counts of the matching dispatch."
        raise ArgumentError("ep_send_counts", value, rule, remedy)
    if tables and given < counts + tables.num_words:
        rule = f"with {plan.config.scheme} {tables.num_words} more follow the {counts} counts"
        remedy = "Pass ep_recv_counts of the matching dispatch whole."
        raise ArgumentError("ep_send_counts", value, rule, remedy)


def _index_words(plan: FunctionPlan) -> tuple[int, str]:
    """How many words combine's index has at least, and how many of what.

    Operators that find results by the ids have a number for each of these, as A2's published host checks have
    it; A3's second version has an origin for each row. A teardown's is checked where there is a setup.
    """
    s = plan.symbols
    if s.operator.name == "combine_teardown":
        return 0, ""
    if plan.finds_by_ids:
        return s["BS"] * s["K"], f"{s['BS']} * {s['K']}"
    return s["A"] * 128, f"{s['A']} * 128"
