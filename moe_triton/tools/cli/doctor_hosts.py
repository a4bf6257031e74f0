"""``moe-triton doctor --hosts``: whether ranks on several hosts reach each other, and how fast.

Every rank looks at its own host, and tells the others over the store at MASTER_ADDR, which launchers name.
Then each connects to a port of every other one. Only where all of that is well are a group and windows made.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch.distributed.rendezvous import rendezvous

import moe_triton
from moe_triton.backends.cpu.fabric import Fabric, common_provider, find_library, providers
from moe_triton.core import shared_memory
from moe_triton.core.errors import MoeTritonError, WindowError
from moe_triton.core.network import Network
from moe_triton.core.threads import Deadline
from moe_triton.rendezvous.gates import Gate, Place, reach
from moe_triton.rendezvous.interface import GLOO_INTERFACE, address_here
from moe_triton.rendezvous.membership import by_value
from moe_triton.rendezvous.stores import below, read_key
from moe_triton.tools.cli.host_links import ANSWER_S, Link, measured
from moe_triton.tools.text_table import TextTable, names, numbers, say, texts

HOW = """\
No launcher has started this: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT have to be set. On each host run
torchrun --nnodes 2 --nproc-per-node 1 --node-rank NUMBER --master-addr ADDRESS \\
  --no-python moe-triton doctor --hosts
at once, with its number from 0 on, and an address of host 0 that all others reach."""
LAUNCHED = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
COME_S, GROUP_S, PORT_S, LEAVE_S = 60.0, 10.0, 5.0, 5.0
"""Seconds for ranks to come and to answer; for torch's group, whose ranks try five times to connect; for one
connection; and for all to have read."""
LOOK_S = 0.01
PROBE_BYTES = 1 << 12
PINGS = "Between hosts: 8 bytes and their answer, and messages of 1 MB"


@dataclass
class Found:
    """What a rank has found.

    Attributes:
        host: its name.
        version: of moe_triton.
        libfabric: its version.
        providers: of libfabric, the best first.
        interface: that peers reach it by, and the address there.
        memory: where windows are made, and what is free there.
        place: address and port that it listens at; empty for none.
        wrong: what is, and what mends it.
    """

    host: str = ""
    version: str = ""
    libfabric: str = ""
    providers: Sequence[str] = ()
    interface: str = ""
    memory: str = ""
    place: Sequence[Any] = ()
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Found:
        """What a rank tells, perhaps one of another version."""
        return cls(**{each.name: said[each.name] for each in fields(cls) if each.name in said})


class Ranks:
    """All ranks, which tell each other what they find over the store at MASTER_ADDR.

    Attributes:
        rank: this one.
        num_ranks: of them.

    Raises:
        WindowError: that store is out of reach.
    """

    def __init__(self) -> None:
        try:
            met = next(rendezvous("env://", timeout=timedelta(seconds=COME_S)))
        except (RuntimeError, ValueError) as error:
            at = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
            raise WindowError(
                f"rank {os.environ['RANK']} does not reach the store of all ranks at MASTER_ADDR ({at}): "
                f"{str(error).splitlines()[0]}. Name an address of the first host that all others reach, and "
                f"let connections to that port through."
            ) from error
        store, self.rank, self.num_ranks = met
        self._store = below(store, "moe_triton/doctor")

    def tell(self, stage: str, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank tells, by rank. Collective; rank 0 says who has not come.

        Args:
            stage: what it is told in; another one each time.
            own: in JSON's types.

        Raises:
            WindowError: ranks did not come.
        """
        self._store.set(f"{stage}/{self.rank}", json.dumps(own))
        deadline = Deadline(COME_S if self.rank == 0 else 2 * COME_S)
        if self.rank == 0:
            keys = [f"{stage}/{rank}" for rank in range(self.num_ranks)]
            while deadline.left() > 0 and not self._store.check(keys):
                time.sleep(LOOK_S)
            told = [json.loads(read_key(self._store, key) or "null") for key in keys]
            self._store.set(stage, json.dumps(told))
        else:
            while not (said := read_key(self._store, stage)):
                if deadline.left() <= 0:
                    raise WindowError(f"rank 0 has not answered within {2 * COME_S:g} s ({stage}).")
                time.sleep(LOOK_S)
            told = json.loads(said)
        if missing := [rank for rank, each in enumerate(told) if each is None]:
            raise WindowError(
                f"rank(s) {missing} did not come within {COME_S:g} s ({stage}). Start all hosts at once, "
                f"and see what they have said there."
            )
        return told

    def measure(self) -> dict[str, Any]:
        """What is wrong with a group of all ranks, or which hosts they are on, and this one's links."""
        store = cast(Any, below(self._store, "group"))
        wrong, hosts, links = list[str](), tuple[int, ...](), list[Link]()
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=timedelta(seconds=GROUP_S),
            )
        except RuntimeError as error:
            wrong.append(
                f"torch makes no group of these ranks: {str(error).splitlines()[0]}. Set {GLOO_INTERFACE} on "
                f"each host to the interface that others reach it by."
            )
        else:
            try:
                hosts, links = measured(COME_S)
            except MoeTritonError as error:
                wrong.append(str(error))
            dist.destroy_process_group()
        return {"wrong": wrong, "hosts": hosts, "links": [asdict(link) for link in links]}

    def part(self) -> None:
        """Until all have read what they were told: rank 0 may host the store."""
        self._store.set(f"read/{self.rank}", "")
        deadline, keys = Deadline(LEAVE_S), [f"read/{rank}" for rank in range(self.num_ranks)]
        while self.rank == 0 and deadline.left() > 0 and not self._store.check(keys):
            time.sleep(LOOK_S)


def run_doctor_on_hosts(console: Console) -> int:
    """Looks, and prints on rank 0 what all ranks have found. Collective.

    Returns:
        0 if all is well, else 1; the same on every rank.

    Raises:
        WindowError: the store at MASTER_ADDR is out of reach, or ranks did not come.
    """
    if any(name not in os.environ for name in LAUNCHED):
        say(HOW, console)
        return 1
    ranks = Ranks()
    own, gate = look_here()
    with contextlib.closing(gate) if gate else contextlib.nullcontext():
        of_all = [Found.read(each) for each in ranks.tell("hosts", asdict(own))]
        own.wrong += out_of_reach(of_all)
        if len({each.host for each in of_all}) > 1:
            own.wrong += named_loopback(own.interface)
        of_all = [Found.read(each) for each in ranks.tell("ports", asdict(own))]
    wrong = once([each.wrong for each in of_all]) + differing(of_all)
    hosts, links = list[int](), list[Link]()
    if not wrong:
        told = ranks.tell("links", ranks.measure())
        wrong = once([each["wrong"] for each in told])
        hosts = told[0]["hosts"]
        links = [Link(**link) for each in told for link in each["links"]]
        links.sort(key=lambda link: (link.source, link.target))
        wrong += [silence(link) for link in links if link.stream_gb_s is None]
    if ranks.rank == 0:
        show(console, of_all, hosts, links, wrong)
    ranks.part()
    return 1 if wrong else 0


def look_here() -> tuple[Found, Gate | None]:
    """What this rank finds without the others, and a port that it listens at, if it can."""
    found, gate = Found(socket.gethostname(), moe_triton.__version__), None
    with _noted(found):
        folder = shared_memory.folder()
        usage = os.statvfs(folder)
        found.memory = f"{folder}, {usage.f_bavail * usage.f_frsize / 2**20:.0f} MB free"
    with _noted(found):
        found.libfabric = _version(find_library())
    with _noted(found):
        address = address_here(Network())
        found.interface = f"{_interface_of(address)} {address}"
    if not found.wrong:
        with _noted(found):
            found.providers = _providers()
            gate = Gate(Network())
            found.place = list(gate.place)
    return found, gate


def out_of_reach(of_all: Sequence[Found]) -> list[str]:
    """Ports to which this rank cannot connect; of each host the first one, since each may take its time."""
    wrong: dict[str, str] = {}
    for rank, each in enumerate(of_all):
        if each.host in wrong or (place := Place.read(each.place)) is None:
            continue
        try:
            reach({rank: place}, PORT_S)[rank].close()
        except WindowError as error:
            wrong[each.host] = str(error)
    return list(wrong.values())


def named_loopback(interface: str) -> list[str]:
    """What is wrong with this host's name, by which torch's group takes its address.

    Args:
        interface: that peers reach this host by.
    """
    if os.environ.get(GLOO_INTERFACE):
        return []
    name, found = socket.gethostname(), set[str]()
    with contextlib.suppress(OSError):
        found = {str(to[0]) for *_, to in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    if any(not ip_address(each.split("%")[0]).is_loopback for each in found):
        return []
    leads = f"leads to {', '.join(sorted(found))}" if found else "leads nowhere"
    where = interface.split(" ")[0] or "the interface that others reach it by"
    return [
        f"this host's own name, {name}, {leads}: torch's group takes its address from it, and no other host "
        f"gets there. Set {GLOO_INTERFACE} to {where} here."
    ]


def once(of_all: Sequence[Sequence[str]]) -> list[str]:
    """What is wrong, by rank, once for all ranks of which it is the same."""
    ranks_of: dict[str, list[str]] = {}
    for rank, texts_of_rank in enumerate(of_all):
        for text in texts_of_rank:
            ranks_of.setdefault(text, []).append(str(rank))
    return [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}" for text, ranks in ranks_of.items()
    ]


def differing(of_all: Sequence[Found]) -> list[str]:
    """What has to be the same on all ranks, and is not."""
    wrong = []
    if said := by_value({rank: each.version for rank, each in enumerate(of_all) if each.version}):
        wrong.append(f"the version differs: {said}. Install the same moe_triton on all hosts.")
    if all(each.providers for each in of_all):
        try:
            common_provider([each.providers for each in of_all])
        except WindowError as error:
            wrong.append(str(error))
    return wrong


def silence(link: Link) -> str:
    """What is said of a link that does not carry what is written."""
    return (
        f"from host {link.source} to host {link.target}: what is written does not come within {ANSWER_S:g} "
        f"s, though ports can be reached. See what drops packets there, large ones above all (MTU)."
    )


def show(
    console: Console,
    of_all: Sequence[Found],
    hosts: Sequence[int],
    links: Sequence[Link],
    wrong: Sequence[str],
) -> None:
    """Prints what was found.

    Args:
        console: to print to.
        of_all: by rank.
        hosts: the number of each rank's host, if that is known.
        links: in the order in which they are shown.
        wrong: what is.
    """
    well, bad = Text("ok", style="green"), Text("wrong", style="red")
    number = [f"{host} " for host in hosts] or [""] * len(of_all)
    columns = (
        *(numbers("rank"), names("host"), names("state"), names("libfabric"), names("interface")),
        texts("shared memory"),
    )
    rows = [
        (
            *(rank, number[rank] + each.host, bad if each.wrong else well),
            *(", ".join(filter(None, (each.libfabric, *each.providers[:1]))), each.interface, each.memory),
        )
        for rank, each in enumerate(of_all)
    ]
    TextTable(columns, rows).print(console)
    if links:
        console.print()
        name = {host: f"{host} {of_all[rank].host}" for rank, host in reversed(list(enumerate(hosts)))}
        figures = numbers("ping, us"), numbers("stream, GB/s")
        shown = [
            (name[each.source], name[each.target], _figure(each.ping_us, 1), _figure(each.stream_gb_s, 2))
            for each in links
        ]
        TextTable((names("from"), names("to"), *figures), shown, PINGS).print(console)
    console.print()
    for text in wrong:
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    if not wrong:
        alone = len(set(hosts)) == 1
        well_said = "All ranks are on one host: nothing goes over a network." if alone else "All is well."
        console.print(well_said, style="green")


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


@contextlib.contextmanager
def _noted(found: Found) -> Iterator[None]:
    """An error of ours is among what is wrong."""
    try:
        yield
    except MoeTritonError as error:
        found.wrong.append(str(error))


def _version(library: str) -> str:
    """That of the API; "" where it cannot be loaded, which opening it says."""
    try:
        version = int(ctypes.CDLL(library).fi_version())
    except (OSError, AttributeError):
        return ""
    return f"{version >> 16}.{version & 0xFFFF}"


def _providers() -> tuple[str, ...]:
    """Those that this rank has, of which it can use the first.

    Raises:
        MoeTritonError: there is none.
    """
    memory, found = torch.zeros(PROBE_BYTES, dtype=torch.uint8), providers(Network())
    of_memory = memory.data_ptr(), PROBE_BYTES, PROBE_BYTES // 2
    Fabric(2, [1], *of_memory, COME_S, Network(), found[0]).close()  # an endpoint for a second rank
    return found


def _interface_of(address: str) -> str:
    """The interface that has an address; "" for none."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(WindowError):
            if address_here(Network(interface=name)) == address:
                return name
    return ""
