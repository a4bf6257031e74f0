"""Which ranks are on one host, and so reach each other's memory: they find each other's files.

Nothing else says it: containers of one machine share its boot id, and two machines may have one name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from moe_triton.core import shared_memory
from moe_triton.core.errors import ArgumentError, ConfigMismatchError, WindowError
from moe_triton.core.group_sizes import RANKS_PER_SERVER, RanksPerServer
from moe_triton.core.topology import Topology, check_ranks_per_server, fits
from moe_triton.rendezvous.meeting import Meeting, values_of

PREFIX = "moe_triton_host-"
_NAME_BYTES = 16


def find(meeting: Meeting) -> tuple[int, ...]:
    """The number of each rank's host: hosts count in the order of their first ranks. Collective.

    Raises:
        ConfigMismatchError: of three ranks one shares memory with both others, and these do not.
        CommunicationTimeoutError: a rank did not come.
    """
    if meeting.num_ranks == 1:
        return (0,)
    folder, mine = _place(), f"{PREFIX}{os.getuid()}-"
    shared_memory.remove_unlocked(folder, mine)
    path, held = folder / f"{mine}{secrets.token_hex(_NAME_BYTES)}", -1
    try:
        with contextlib.suppress(OSError):  # who has no such folder fails at its window, and says why
            held = shared_memory.create_locked(path)
        names = values_of(meeting.exchange({"probe": path.name}, "a file for its host"), "probe", str)
        found = [rank for rank, name in enumerate(names) if _is_there(folder, name)]
        seen = meeting.exchange({"found": [*found, meeting.rank]}, "whose files it has found")
    finally:
        path.unlink(missing_ok=True)
        if held >= 0:
            os.close(held)
    together = [frozenset(map(int, each)) for each in values_of(seen, "found", list)]
    for rank, others in enumerate(together):
        for other in others:
            if not 0 <= other < meeting.num_ranks or together[other] != others:
                raise ConfigMismatchError(
                    f"rank {rank} shares memory with ranks {sorted(others)}, and rank {other} with others. "
                    f"Give all containers of a host one /dev/shm, or each its own."
                )
    firsts = sorted({min(others) for others in together})
    return tuple(firsts.index(min(others)) for others in together)


def _place() -> Path:
    try:
        return shared_memory.folder()
    except WindowError:  # who makes a window is told
        return shared_memory.USUAL


def _is_there(folder: Path, name: str) -> bool:
    """Whether a peer's file is here. A name that leads elsewhere is none."""
    return name.startswith(PREFIX) and "/" not in name and (folder / name).is_file()


def servers_of(hosts: Sequence[int], given: RanksPerServer) -> tuple[int, ...]:
    """Ranks of each server, where ranks are on several hosts: these are the servers.

    Args:
        hosts: the number of each rank's host.
        given: how many ranks of the group each server has to have, which may be less than a host's; or None.

    Raises:
        ArgumentError: a host's ranks are no neighbours, or a server would have ranks of two hosts.
    """
    runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
    if len(runs) > len(set(hosts)):
        rule = "the ranks of a host have to be neighbours, and these are on hosts"
        remedy = "Number ranks host by host, as torchrun does."
        raise ArgumentError("group", f"of {len(hosts)} ranks", f"{rule} {list(hosts)}", remedy)
    given = check_ranks_per_server(given)
    if given is None or not fits(len(hosts), given):
        return tuple(size for _, size in runs)
    servers = Topology.of(len(hosts), given, 0).servers
    for server, host in set(zip(servers, hosts, strict=True)):
        if any(other != host for other, its in zip(hosts, servers, strict=True) if its == server):
            rule = f"a server cannot have ranks of two hosts, and these are on hosts {list(hosts)}"
            remedy = "Leave it out: hosts are the servers."
            raise ArgumentError(RANKS_PER_SERVER, given, rule, remedy)
    return Topology.of(len(hosts), given, 0).sizes
