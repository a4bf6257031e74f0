"""Construction of a communicator: everything that can fail on one rank, checked before ranks meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from moe_triton.backends.base import Backend
from moe_triton.core import logs
from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.checks import check_choice, check_integer, check_seconds, shown
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import RANKS_PER_SERVER, RanksPerServer
from moe_triton.core.hccl import LOGIC_SUPERPOD_ID, check_window_limit, read_environment
from moe_triton.core.kept_memory import kept_bytes
from moe_triton.core.network import Network, checked_network
from moe_triton.core.records import PROTOCOL_VERSION
from moe_triton.core.tuning import Tuning, checked_tuning
from moe_triton.rendezvous import hosts
from moe_triton.rendezvous.agreement import KERNELS, agree
from moe_triton.rendezvous.deaths import Gone, Watch
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.runtime import dump_signal
from moe_triton.runtime.on_lost import (
    KERNELS_WAIT,
    KERNELS_WAIT_MORE_S,
    ON_LOST,
    OnLost,
)
from moe_triton.runtime.recorder import is_wanted
from moe_triton.runtime.status import status_of_process
from moe_triton.runtime.traces import TraceFile, TracePath
from moe_triton.schemes import make_scheme, scheme_type
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.rules import check_config
from moe_triton.schemes.scheme import Scheme
from moe_triton.tables import KernelSettings, machine_of
from moe_triton.tables.installed import version_of
from moe_triton.tables.pipelines import Pipeline, filled

DEFAULT_TIMEOUT_S = 60.0
TENSOR_SERVERS = 0, 0
"""The server of each rank of a tensor-parallel group, whose windows are mapped."""


@dataclass(frozen=True)
class Order:
    """What a rank was asked for, before any of it is checked.

    Attributes:
        config: returns the group's settings, or raises.
        make: makes the back end.
        check_window: called with the bytes of the group's data windows; raises if they are too many.
        num_blocks: blocks per kernel, None for the machine's default.
        timeout_s: seconds that one wait may take.
        on_lost: what becomes of ranks that do not come.
        tuning: how operators are cut into parts; None for the defaults.
        trace: file for a trace of all ranks, None for none.
        environment: HCCL's variables.
        agreed_at: number of an earlier meeting of the same ranks, for whose communicator and this one they
            agree together on who is masked; None for this one's own.
        on_hosts: whether windows are memory of a host, which ranks of others do not reach.
        network: between hosts.
        servers: returns the server of each rank as it is before ranks have met, or raises.
    """

    config: Callable[[], Config]
    make: Callable[[], Backend]
    check_window: Callable[[int], None] = lambda num_bytes: None
    num_blocks: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    on_lost: OnLost = "raise"
    tuning: Tuning | None = None
    trace: TracePath | None = None
    environment: Mapping[str, str] = field(default_factory=read_environment)
    agreed_at: int | None = None
    on_hosts: bool = False
    network: Network | None = None
    servers: Callable[[], Sequence[int]] = tuple


FROM_CONTEXT = "posts", "post_parts", "message_tokens", "return_pieces"
"""Settings that ranks compare as they are once a context has filled in what is left open."""


@dataclass(frozen=True)
class Prepared:
    """An order, checked and resolved on this rank.

    Attributes:
        config: the group's settings as they were asked for. The scheme's are `Config.padded`.
        scheme: how tokens travel, with its rank's context.
        kernel_settings: those of its Triton kernels.
        backend: what plans run on.
        file: of the trace, or None.
        super_node: that HCCL takes this rank for one of, or None.
        on_lost: what becomes of ranks that do not come.
        timeout_s: seconds after which they count as such.
    """

    config: Config
    scheme: Scheme
    kernel_settings: KernelSettings
    backend: Backend
    file: TraceFile | None
    super_node: str | None = None
    on_lost: OnLost = "raise"
    timeout_s: float = DEFAULT_TIMEOUT_S

    def settings(self) -> dict[str, Any]:
        """What the ranks of a group compare, by name."""
        context = self.scheme.context
        sizes = {f"{operator}_tokens": part.tokens for operator, part in context.part_tokens.items()}
        tuning = dataclasses.asdict(context.tuning) | sizes
        del tuning["tables"]  # a folder of this rank's; what its tables say is compared
        tuning |= {name: getattr(context, name) for name in FROM_CONTEXT}
        compared = {LOGIC_SUPERPOD_ID: self.super_node} if self.scheme.compares_super_nodes else {}
        return {
            "protocol": PROTOCOL_VERSION,
            "moe_triton": version_of("moe_triton"),
            "torch": torch.__version__,
            **dataclasses.asdict(self.config) | {RANKS_PER_SERVER: self.config.topology.sizes},
            **self.backend.identity(),
            "num_blocks": context.num_blocks,
            "keeps_order": context.keeps_order,
            "timeout_s": self.timeout_s,
            "on_lost": self.on_lost,
            **{f"tuning.{name}": value for name, value in tuning.items()},
            KERNELS: self.kernel_settings.compared,
            **compared,
        }


def seconds_to_meet(timeout_s: object) -> float:
    """How long a rank waits for others at construction: ``timeout_s``, or the default if that is invalid."""
    try:
        return check_seconds("timeout_s", timeout_s)
    except ArgumentError:
        return DEFAULT_TIMEOUT_S


def servers_of_group(meeting: Meeting, given: RanksPerServer) -> dict[str, Any]:
    """Fields of the `Config` of a meeting's whole group that say which ranks share a server.

    Args:
        meeting: of its ranks that are left.
        given: what the caller says of it.

    Raises:
        ArgumentError: it does not fit the hosts that ranks are on.
    """
    return servers_on(meeting.hosts_of_group, given)


def servers_on(hosts_of_group: Sequence[int | None], given: RanksPerServer) -> dict[str, Any]:
    """The same of a group whose ranks' hosts are known; None stands for those of lost ranks.

    Raises:
        ArgumentError: what is given does not fit the hosts.
    """
    if len(set(hosts_of_group) - {None}) <= 1:
        return {RANKS_PER_SERVER: given}
    return {RANKS_PER_SERVER: hosts.servers_of(hosts_of_group, given), "servers_are_hosts": True}


def _lost_of(lost: object, size: int) -> frozenset[int]:
    """Numbers of lost ranks of a group of this size.

    Raises:
        ArgumentError: they are none.
    """
    is_text = isinstance(lost, (str, bytes, Mapping))
    try:
        ranks = [-1] if is_text else [check_integer("lost_ranks", rank) for rank in cast(Any, lost)]
    except TypeError:
        ranks = [-1]
    if not all(0 <= rank < size for rank in ranks):
        rule = f"these are ranks of the group, 0 to {size - 1}"
        raise ArgumentError("lost_ranks", shown(lost), rule, "Name those that take no part any more.")
    return frozenset(ranks)


def meet(
    group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup | None,
    lost_ranks: Collection[int],
    timeout_s: float,
) -> tuple[Meeting, Meeting | None]:
    """The meeting of a group without its lost ranks, and that of a tensor-parallel group where there is one.

    Raises:
        ArgumentError: one of them is no group of this process's, or these are no ranks of it: the others are
            told. Or this rank is lost.
    """
    meeting = Meeting(group, timeout_s)
    try:
        exchange = None if tp_group is None else Meeting(tp_group, timeout_s)
        if exchange and (exchange.num_ranks != 2 or exchange.group is meeting.group):
            value = (
                "the group itself" if exchange.group is meeting.group else f"of {exchange.num_ranks} ranks"
            )
            rule = "it has two ranks, each of another expert-parallel group"
            raise ArgumentError("tp_group", value, rule, "Pass a group of the two ranks, or None.")
        lost = _lost_of(lost_ranks, meeting.num_ranks)
    except ArgumentError as error:
        told = error.renamed({"group": "tp_group"})
        meeting.refuse(told)
        raise told from None
    if meeting.rank in lost:  # the others do not ask this rank
        rule, remedy = f"this rank, {meeting.rank}, is one of them", "Ranks that are lost construct none."
        raise ArgumentError("lost_ranks", sorted(lost), rule, remedy)
    left = [rank for rank in meeting.of_group if rank not in lost]
    return Meeting(group, timeout_s, left), exchange


def prepare(
    order: Order,
    meeting: Meeting,
    exchange: Meeting | None,
    watches: Sequence[Watch],
    probe: hosts.Probe | None = None,
) -> Prepared:
    """Checks an order, makes the back end, and compares both with those of the other ranks.

    Args:
        order: of this rank.
        meeting: the group.
        exchange: the tensor-parallel group of two, if there is one.
        watches: one for each of these groups.
        probe: by which ranks find their hosts, where that matters. Others may look for it until this returns
            or, where this raises, until they know why.

    Raises:
        MoeTritonError: this rank cannot be constructed. The others have not been told yet.
        ConfigMismatchError: another rank cannot be constructed, or settings differ.
        RankLostError: a rank has died that is known here.
        CommunicationTimeoutError: a rank did not arrive.
    """
    if exchange:  # whoever is missing in one may be waiting in the other
        meeting.beside, exchange.beside = (
            f"they may be waiting in their {name} group" for name in ("tensor-parallel", "expert-parallel")
        )
    meetings = [meeting, *([exchange] if exchange else [])]
    for one, watch in zip(meetings, watches, strict=True):
        for gone in watch.known_before().values():
            one.lose(gone.rank, gone.in_words)
    network, backend = checked_network(order.network), _make(order)
    servers = _servers_of_one_host(order, meeting), TENSOR_SERVERS
    for one, watch, of_server in zip(meetings, watches, servers, strict=False):
        watch.listen(partial(_give_up_without, one))
        one.network = network
        hosts.find(one, watch, of_server, probe)
    prepared = check(order, backend, meeting, exchange)
    settings, file = prepared.settings(), prepared.file
    agree(meeting, settings | {"trace": str(file.given) if file else None})
    if exchange:
        agree(exchange, settings)
    watches[0].take_servers(prepared.config.topology.servers)
    return prepared


def _make(order: Order) -> Backend:
    """The back end, behind what can be checked before ranks meet: some may come late, or not at all.

    Raises:
        MoeTritonError: something is wrong, on whichever hosts ranks are.
    """
    check_seconds("timeout_s", order.timeout_s)
    checked_tuning(order.tuning)
    if order.num_blocks is not None:
        _check_num_blocks(check_integer("num_blocks", order.num_blocks))
    check_choice("on_lost", order.on_lost, ON_LOST)
    logs.use_variable()
    kept_bytes()  # what it says is used later, when nobody could be told
    is_wanted()  # likewise
    backend = order.make()
    dump_signal.watch(backend.watch_signal, status_of_process)
    return backend


def _servers_of_one_host(order: Order, meeting: Meeting) -> Sequence[int]:
    """Servers that one host plays: before ranks have met nobody knows whether there are several.

    Raises:
        ArgumentError: settings that cannot be, whether all ranks are on one host or each on its own.
    """
    for_one = (0,) * meeting.num_ranks
    try:
        servers = order.servers()
        return servers if len(servers) == meeting.num_ranks else for_one
    except ArgumentError as error:
        refused = error
    if order.on_hosts:
        meeting.hosts = tuple(range(meeting.num_ranks))
        try:
            order.servers()
            return for_one
        except ArgumentError as error:
            if str(error) != str(refused):  # which is said when they are known
                return for_one
        finally:
            meeting.hosts = for_one
    raise refused


def _give_up_without(meeting: Meeting, gone: Gone) -> None:
    """A rank has gone while others construct, or later, when nobody meets any more."""
    if gone.is_lost:
        meeting.lose(gone.rank, gone.in_words)


def check_tuning(tuning: Tuning, config: Config, blocks: int, capabilities: Capabilities) -> None:
    """Checks what a caller says of how operators run, where no table adds anything.

    Args:
        tuning: the caller's.
        config: one that keeps every rule.
        blocks: per kernel.
        capabilities: of the back end.

    Raises:
        ArgumentError: a buffer cannot have it.
    """
    _check_parts(tuning, config)
    _check_blocks(tuning, config, blocks, capabilities)


def _check_parts(tuning: Tuning, config: Config) -> None:
    """Before a table fills in the rest: parts that it names are not cut where rows are posted."""
    if config.topology.num_servers > 1:
        tuning.check_posts(config.num_max_tokens_per_rank)
    tuning.check_post_parts(config.scheme, scheme_type(config).settings, config.topology.num_servers)
    tuning.check_messages(config.scheme, scheme_type(config).settings, config.topology.num_servers)


def _check_num_blocks(blocks: int) -> None:
    if not 1 <= blocks <= MAX_BLOCKS:
        raise ArgumentError("num_blocks", blocks, f"it must be 1 to {MAX_BLOCKS}", "Pass None.")


def _check_blocks(tuning: Tuning, config: Config, blocks: int, capabilities: Capabilities) -> None:
    _check_num_blocks(blocks)
    tuning.check(blocks)
    tuning.check_poster(config.scheme, scheme_type(config).settings, capabilities.posters)


def check(order: Order, backend: Backend, meeting: Meeting, exchange: Meeting | None) -> Prepared:
    """Checks everything that this rank can check by itself, once it is known where ranks are.

    Raises:
        MoeTritonError: it cannot be constructed.
    """
    timeout_s = check_seconds("timeout_s", order.timeout_s)
    config = order.config()
    check_config(config)
    tuning = checked_tuning(order.tuning)
    _check_parts(tuning, config)
    num_blocks = None if order.num_blocks is None else check_integer("num_blocks", order.num_blocks)
    file = None
    if order.trace is not None:
        own_host = None if meeting.num_hosts == 1 else meeting.hosts[meeting.rank]
        file = TraceFile(order.trace, own_host)
        file.check_writable()
    machine = machine_of(backend.name, config.product)
    moved = config.padded
    if meeting.num_hosts == 1:
        pipeline = filled(machine, moved, backend.cores(), order.tuning and tuning, num_blocks)
    else:  # tables are of ranks that share one machine's cores, and hosts' may differ
        pipeline = Pipeline(tuning, num_blocks)
    backend.tuning = tuning = pipeline.tuning
    blocks = backend.num_blocks(meeting.num_beside) if pipeline.num_blocks is None else pipeline.num_blocks
    _check_blocks(tuning, config, blocks, backend.capabilities)
    if not backend.overlaps:
        tuning = dataclasses.replace(tuning, communication_blocks=0)
    exchange_rank = exchange.rank if exchange else None
    on_lost = _checked_on_lost(
        order.on_lost, config, backend, exchange is not None, blocks=tuning.receiving_blocks
    )
    if exchange and exchange.num_hosts > 1:
        rule = "tensor-parallel ranks write to each other's memory, and these are on two hosts"
        raise ArgumentError("tp_group", "of two ranks", rule, "Make pairs of ranks of one host.")
    timeout_us = int(timeout_s * 1e6)
    if on_lost == "mask":  # kernels are not the ones that say how long
        timeout_us = int((KERNELS_WAIT * timeout_s + KERNELS_WAIT_MORE_S) * 1e6)
        timeout_us = int(timeout_us / scheme_type(config).relay_share)
    at = meeting.rank, blocks, timeout_us, backend.capabilities, exchange_rank, tuning, pipeline.sources
    has_hosts = meeting.num_hosts > 1
    keeps_order = backend.keeps_order and not has_hosts
    scheme = make_scheme(RankContext(moved, *at, keeps_order, gathers_posts=has_hosts))
    windows = scheme.windows
    order.check_window(sum(window.data_bytes for window in windows if window.peers.group == "expert"))
    for window in windows:
        check_window_limit(backend.window_limit(order.environment), window.data_bytes)
    kernels, super_node = (
        KernelSettings(machine, moved, tuning.tables),
        order.environment.get(LOGIC_SUPERPOD_ID),
    )
    return Prepared(config, scheme, kernels, backend, file, super_node, on_lost, timeout_s)


def _checked_on_lost(
    value: object, config: Config, backend: Backend, has_exchange: bool, *, blocks: int | None
) -> OnLost:
    """What becomes of ranks that do not come, where that can be had.

    Raises:
        ArgumentError: it cannot.
    """
    on_lost = check_choice("on_lost", value, ON_LOST)
    if on_lost == "raise":
        return on_lost
    remedy = "Pass on_lost='raise', and go on without those that are lost by lost_ranks or elastic_info."
    if has_exchange:
        rule = "of tensor-parallel ranks one cannot go on without the other"
        raise ArgumentError("on_lost", value, rule, remedy)
    if backend.is_asynchronous:
        rule = "on this device hosts do not see waits, and cannot end them"
        raise ArgumentError("on_lost", value, rule, remedy)
    if not {"dispatch", "combine"} <= scheme_type(config).goes_on:
        rule = f"with comm_alg={config.scheme!r} a call cannot go on without a rank that is lost in it"
        raise ArgumentError("on_lost", value, rule, f"Use another comm_alg. Or: {remedy}")
    if scheme_type(config).marks_in_handle and not config.is_of_buffer:
        rule = f"with comm_alg={config.scheme!r} only a handle says what was summed without a rank"
        raise ArgumentError("on_lost", value, rule, f"Use an EPBuffer. Or: {remedy}")
    if rule := scheme_type(config).no_masks(config):
        raise ArgumentError("on_lost", value, rule, remedy)
    if blocks:
        rule = "blocks that receive while others send (Tuning(receiving_blocks)) leave rows where they are"
        raise ArgumentError("on_lost", value, rule, "Leave receiving_blocks out.")
    return on_lost
