"""The servers of a group: those that `configure` names, or the hosts that its ranks have found to be on.

Ranks find their hosts whenever they make a window, which takes all of them. Until they have done so once,
what is asked of a group counts it as on one host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_triton.core.config import Config
from moe_triton.core.group_sizes import MAX_RANKS, RANKS_PER_SERVER, RanksPerServer
from moe_triton.core.topology import Topology
from moe_triton.rendezvous import hosts
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.runtime.construction import servers_on

HostsOfGroup = tuple[int | None, ...]

_found: WeakKeyDictionary[dist.ProcessGroup, HostsOfGroup] = WeakKeyDictionary()
_supposed: ContextVar[int] = ContextVar("_supposed", default=0)


def note(meeting: Meeting) -> bool:
    """Keeps the hosts of a meeting's ranks; whether they had not been known."""
    group = meeting.group
    is_new = group is not None and not are_known(group, meeting.members)
    if group is not None and is_new:
        _found[group] = meeting.hosts_of_group
    return is_new


def are_known(group: dist.ProcessGroup, members: tuple[int, ...] | None) -> bool:
    """Whether the hosts of these ranks have been found; None stands for all of the group."""
    if (found := _found.get(group)) is None:
        return False
    return all(found[member] is not None for member in members or range(len(found)))


@contextlib.contextmanager
def supposing_hosts(num_ranks: int) -> Iterator[None]:
    """Inside, a group counts as on hosts of so many ranks each, or on the servers that `configure` names."""
    token = _supposed.set(num_ranks)
    try:
        yield
    finally:
        _supposed.reset(token)


def _hosts_of(group: dist.ProcessGroup | None, num_ranks: int) -> HostsOfGroup:
    if size := _supposed.get():
        return tuple(rank // size for rank in range(min(num_ranks, MAX_RANKS)))
    found = _found.get(group, ()) if group is not None else ()
    return found if len(found) == num_ranks else ()


def sizes_of_hosts(group: dist.ProcessGroup | None, num_ranks: int) -> RanksPerServer:
    """How many ranks each host of a group has; None where these are not known to be several.

    Args:
        group: the group, or None.
        num_ranks: as a caller says; nothing is known of another number.
    """
    found = _hosts_of(group, num_ranks)
    return hosts.sizes_of(found) if len(set(found) - {None}) > 1 else None


def fields_of_servers(
    group: dist.ProcessGroup | None, num_ranks: int, given: RanksPerServer
) -> dict[str, Any]:
    """Fields of a group's `Config` that say which ranks share a server.

    Args:
        group: the group, or None.
        num_ranks: as a caller says.
        given: what `configure` says of it.

    Raises:
        ArgumentError: that does not fit the hosts that ranks are on.
    """
    if _supposed.get() and given is not None:
        return {RANKS_PER_SERVER: given, "servers_are_hosts": True}
    return servers_on(_hosts_of(group, num_ranks), given)


def is_found_with(
    config: Config, members: tuple[int, ...] | None, group: dist.ProcessGroup, given: RanksPerServer
) -> bool:
    """Whether a `Config` has the servers that ranks are on whose hosts are known.

    Args:
        config: of the ranks that take part.
        members: these, or None for all of the group.
        group: the group.
        given: what `configure` says of servers.

    Raises:
        ArgumentError: that does not fit the hosts.
    """
    size = group.size()
    fields = fields_of_servers(group, size, given)
    if not fields.get("servers_are_hosts"):
        return not config.servers_are_hosts
    whole = Topology.of(size, fields[RANKS_PER_SERVER], size)
    left = whole if members is None else whole.left(members)
    return config.servers_are_hosts and config.topology == left
