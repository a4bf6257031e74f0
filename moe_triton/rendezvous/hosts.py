"""Which ranks are on one host, and so reach each other's memory: they find each other's files.

Nothing else says it: containers of one machine share its boot id, and two machines may have one name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_triton.core import shared_memory
from moe_triton.core.errors import ArgumentError, ConfigMismatchError, WindowError
from moe_triton.core.group_sizes import RANKS_PER_SERVER, RanksPerServer
from moe_triton.core.topology import Topology, check_ranks_per_server, fits
from moe_triton.rendezvous.agreement import raise_failures, raise_together
from moe_triton.rendezvous.deaths import Watch
from moe_triton.rendezvous.gates import Place
from moe_triton.rendezvous.meeting import Meeting, values_of

PREFIX = "moe_triton_host-"
FIRST, SECOND = "what ranks are to know of each other", "ranks of each host"
NO_PROBE = {"probe": "", "folder": "", "machine": ""}
_NAME_BYTES = 16


class Probe:
    """A file of this rank that the ranks of its host find, from `find` until they have met once more.

    Attributes:
        name: of it; "" if it cannot be made.
        folder: that it is in.
    """

    def __init__(self) -> None:
        self.folder, mine = _place(), f"{PREFIX}{os.getuid()}-"
        # A file of a rank that has just died is still to be found by those that meet with it.
        shared_memory.remove_unlocked(self.folder, mine, shared_memory.STALE_AFTER_S)
        self.name, self._held = f"{mine}{secrets.token_hex(_NAME_BYTES)}", -1
        self._names = {self.name}
        try:
            self._held = shared_memory.create_locked(self.folder / self.name)
        except OSError:
            self.name = ""

    @property
    def told(self) -> dict[str, str]:
        """What other ranks are to know."""
        return {"probe": self.name, "folder": str(self.folder), "machine": own_machine()}

    def ranks_here(self, meeting: Meeting, said: Sequence[Mapping[str, Any]]) -> set[int]:
        """Those of its host, by what all have told; all ranks where one of them has no file."""
        names = values_of(said, "probe", str)
        if not all(names):
            return set(range(meeting.num_ranks))
        return {rank for rank, name in enumerate(names) if rank == meeting.rank or self._sees(name)}

    def _sees(self, name: str) -> bool:
        """Whether a peer's file is here, which goes with this one's. A name that leads elsewhere is none."""
        if not name.startswith(PREFIX) or "/" in name or not (self.folder / name).is_file():
            return False
        self._names.add(name)
        return True

    def close(self) -> None:
        """Removes it, and those of its peers, which may be dead."""
        for name in self._names:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()
        if self._held >= 0:
            os.close(self._held)
        self.name, self._names, self._held = "", set(), -1


def find(meeting: Meeting, watch: Watch, servers: Sequence[int], probe: Probe | None) -> None:
    """Has ranks meet for the first time: what their watch is offered, and which of them are on one host.

    Collective. The number of each rank's host is `Meeting.hosts` then: hosts count in the order of their
    first ranks. All are 0 where some rank cannot make its file: it cannot make a window either, and says why.

    Args:
        meeting: of the ranks.
        watch: over their deaths, which begins here.
        servers: the server of each rank, as far as that is known.
        probe: of this rank; None where it does not matter on which hosts ranks are: all are taken for one.

    Raises:
        ConfigMismatchError: of three ranks one shares memory with both others, and these do not.
        WindowError: ranks of one machine look in different folders; or one of another host is out of reach.
        CommunicationTimeoutError: a rank did not come.
    """
    if meeting.num_ranks == 1:
        return
    told = probe.told if probe else NO_PROBE
    said = meeting.exchange({**told, "offer": watch.offer(servers)}, FIRST)
    met = watch.take([each.get("offer") for each in said])
    here = {*met, *probe.ranks_here(meeting, said)} if probe else set(range(meeting.num_ranks))
    watch.take_here(here)
    # Whoever misses nobody is missed by nobody, and does not come to what follows.
    if len(here) < meeting.num_ranks:
        gate, failure = _gate_of(watch)
        mine = {"found": sorted(here), "gate": gate, "failure": failure}
        seen = meeting.exchange(mine, SECOND)
        meeting.hosts = _numbers(said, seen)
        raise_failures(meeting, seen)
        failure = watch.take_places([each.get("gate") for each in seen], here)
        # Who fails by itself meanwhile closes its gate: its own reason goes before those of others.
        raise_together(meeting, failure, "hosts are reached")


def find_unwatched(meeting: Meeting) -> None:
    """The same for ranks over which nobody watches.

    Raises:
        MoeTritonError: as `find` does.
    """
    if meeting.num_ranks == 1:
        return
    with contextlib.closing(Probe()) as probe:
        said = meeting.exchange(probe.told, FIRST)
        # By all, for files stay until all have looked.
        seen = meeting.exchange({"found": sorted(probe.ranks_here(meeting, said))}, SECOND)
        meeting.hosts = _numbers(said, seen)


def _numbers(said: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """The number of each rank's host.

    Args:
        said: what ranks have told of their files.
        seen: whose files each has found.
    """
    together = [frozenset(map(int, each)) for each in values_of(seen, "found", list)]
    places = zip(values_of(said, "machine", str), values_of(said, "folder", str), strict=True)
    _check(together, list(places))
    firsts = sorted({min(others) for others in together})
    return tuple(firsts.index(min(others)) for others in together)


def _gate_of(watch: Watch) -> tuple[Place | None, str]:
    """Where ranks of other hosts connect to, and why they cannot."""
    try:
        return watch.open_gate(), ""
    except WindowError as error:  # a rank that is missed may have failed before, which is told first
        return None, str(error)


def _check(together: Sequence[frozenset[int]], places: Sequence[tuple[str, str]]) -> None:
    """Checks that ranks share memory with each other, or do not.

    Args:
        together: ranks that each one shares memory with.
        places: the machine and the folder of each.
    """
    for rank, others in enumerate(together):
        for other, (machine, where) in enumerate(places):
            if machine == places[rank][0] and where != places[rank][1] and other not in others:
                each = ", ".join(f"{folder} on rank {number}" for number, (_, folder) in enumerate(places))
                raise WindowError(
                    f"windows would be made in {each}. Set {shared_memory.VARIABLE} alike for all ranks of a "
                    f"machine."
                )
        if any(not 0 <= other < len(places) or together[other] != others for other in others):
            raise ConfigMismatchError(
                f"rank {rank} shares memory with ranks {sorted(others)}, and not all of these do with each "
                f"other. Give all containers of a host one /dev/shm, or each its own."
            )


def own_machine() -> str:
    """What ranks of one machine have in common, in whichever containers; "" where that is not said."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _place() -> Path:
    try:
        return shared_memory.folder()
    except WindowError:  # who makes a window is told
        return shared_memory.USUAL


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
        return sizes_of(hosts)
    if not fits(len(hosts), given):
        return given  # which another rule refuses
    topology = Topology.of(len(hosts), given, 0)
    for server in range(topology.num_servers):
        if len({hosts[rank] for rank in topology.ranks_on(server)} - {None}) > 1:
            rule = f"a server cannot have ranks of two hosts, and these are on hosts {known}"
            raise ArgumentError(RANKS_PER_SERVER, given, rule, "Leave it out: hosts are the servers.")
    return topology.sizes


def sizes_of(hosts: Sequence[int | None]) -> tuple[int, ...]:
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
