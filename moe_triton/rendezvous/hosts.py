"""Which ranks are on one host, and so reach each other's memory: they find each other's files.

Nothing else says it: containers of one machine share its boot id, and two machines may have one name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections import Counter
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

    All 0 where some rank cannot make its file: it cannot make a window either, and says why.

    Raises:
        ConfigMismatchError: of three ranks one shares memory with both others, and these do not.
        WindowError: ranks of one machine look in different folders.
        CommunicationTimeoutError: a rank did not come.
    """
    if meeting.num_ranks == 1:
        return (0,)
    folder, mine = _place(), f"{PREFIX}{os.getuid()}-"
    shared_memory.remove_unlocked(folder, mine)
    path, held = folder / f"{mine}{secrets.token_hex(_NAME_BYTES)}", -1
    try:
        with contextlib.suppress(OSError):
            held = shared_memory.create_locked(path)
        told = {"probe": path.name if held >= 0 else "", "folder": str(folder), "machine": _machine()}
        said = meeting.exchange(told, "a file for its host")
        names = values_of(said, "probe", str)
        found = [rank for rank, name in enumerate(names) if _is_there(folder, name)]
        seen = meeting.exchange({"found": [*found, meeting.rank]}, "whose files it has found")
    finally:
        path.unlink(missing_ok=True)
        if held >= 0:
            os.close(held)
    if not all(names):
        return (0,) * meeting.num_ranks
    places = list(zip(values_of(said, "machine", str), values_of(said, "folder", str), strict=True))
    together = [frozenset(map(int, each)) for each in values_of(seen, "found", list)]
    for rank, others in enumerate(together):
        for other, (machine, where) in enumerate(places):
            if machine == places[rank][0] and where != places[rank][1] and other not in others:
                each = ", ".join(f"{folder} on rank {number}" for number, (_, folder) in enumerate(places))
                raise WindowError(
                    f"windows would be made in {each}. Set {shared_memory.VARIABLE} alike for all ranks of a "
                    f"machine."
                )
        if any(not 0 <= other < meeting.num_ranks or together[other] != others for other in others):
            raise ConfigMismatchError(
                f"rank {rank} shares memory with ranks {sorted(others)}, and not all of these do with each "
                f"other. Give all containers of a host one /dev/shm, or each its own."
            )
    firsts = sorted({min(others) for others in together})
    return tuple(firsts.index(min(others)) for others in together)


def _machine() -> str:
    """What ranks of one machine have in common, in whichever containers; "" where that is not said."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _place() -> Path:
    try:
        return shared_memory.folder()
    except WindowError:  # who makes a window is told
        return shared_memory.USUAL


def _is_there(folder: Path, name: str) -> bool:
    """Whether a peer's file is here. A name that leads elsewhere is none."""
    return name.startswith(PREFIX) and "/" not in name and (folder / name).is_file()


def servers_of(hosts: Sequence[int | None], given: RanksPerServer) -> RanksPerServer:
    """Ranks of each server, where ranks are on several hosts: these are the servers.

    Args:
        hosts: the number of each rank's host; None of ranks that are lost.
        given: how many ranks of the group each server has to have, which may be less than a host's; or None.

    Raises:
        ArgumentError: a host's ranks are no neighbours, or a server would have ranks of two hosts.
    """
    known = [host for host in hosts if host is not None]
    if len(list(itertools.groupby(known))) > len(set(known)):
        rule = f"the ranks of a host have to be neighbours, and these are on hosts {known}"
        remedy = "Number ranks host by host, as torchrun does."
        raise ArgumentError("group", f"of {len(hosts)} ranks", rule, remedy)
    given = check_ranks_per_server(given)
    if given is None:
        return _sizes(hosts)
    if not fits(len(hosts), given):
        return given  # which another rule refuses
    topology = Topology.of(len(hosts), given, 0)
    for server in range(topology.num_servers):
        if len({hosts[rank] for rank in topology.ranks_on(server)} - {None}) > 1:
            rule = f"a server cannot have ranks of two hosts, and these are on hosts {known}"
            raise ArgumentError(RANKS_PER_SERVER, given, rule, "Leave it out: hosts are the servers.")
    return topology.sizes


def _sizes(hosts: Sequence[int | None]) -> tuple[int, ...]:
    """Those of all hosts. Lost ranks count as of a host beside them, the one that has fewer."""
    sizes = Counter(host for host in hosts if host is not None)
    before: int | None = None
    for place, host in enumerate(hosts):
        if host is None:
            behind = next((other for other in hosts[place:] if other is not None), before)
            beside = [other for other in (before, behind) if other is not None]
            before = min(beside, key=lambda other: sizes[other])
            sizes[before] += 1
        else:
            before = host
    return tuple(sizes[host] for host in sorted(sizes))
