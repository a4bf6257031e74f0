"""A store for a group that has none: hosted by its first rank, where only its ranks are meant to reach it.

It listens on one address: the loopback if all ranks are on one host, else that of the interface by which
other hosts reach this one; or, where nobody says which that is, the one from which packets leave for them.
Whoever reaches that may write to it, so that ranks share a secret, which goes over the group
with the store's address, and tells their values from others (`moe_triton.rendezvous.stores.SealedStore`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_triton.core.errors import WindowError
from moe_triton.core.network import Network
from moe_triton.rendezvous import interface

SECRET_BYTES = 32
_TEXT_BYTES = 256
_LOOPBACKS = (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")
_BOOT_ID, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_DISCARD_PORT = 9  # nothing is sent: a connected datagram socket has an address of its own


class Hosted(NamedTuple):
    """A store of our own.

    Attributes:
        store: this rank's connection to it; the first rank hosts it.
        secret: that its ranks share.
    """

    store: Any
    secret: bytes


def host_store(group: dist.ProcessGroup) -> Hosted:
    """A store hosted by the group's first rank. It takes two collectives of the group.

    Raises:
        WindowError: the first rank cannot host one.
    """
    rank = dist.get_rank(group)
    hosts = _all_texts(group, f"{_network()} {socket.gethostname()}")
    store, said = None, ""
    if rank == 0:
        try:
            store = _listening(_others(hosts))
        except Exception as error:  # whatever it is: the others wait for the address
            said = f"! {type(error).__name__}: {error}"
        else:
            said = f"{store.host} {store.port} {secrets.token_hex(SECRET_BYTES)}"
    said = _first_text(group, said)
    if said.startswith("!"):
        raise WindowError(
            f"the group has no store, and its first rank can host none ({said[2:]}). Use a group with a "
            "store, as torch.distributed.init_process_group and new_group make them."
        )
    host, port, secret = said.split(" ")
    if store is None:
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    return Hosted(store, bytes.fromhex(secret))


def _network() -> str:
    """What ranks share that reach each other's loopback: the machine's start, and the network namespace."""
    try:
        state = _NETWORK.stat()
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()}/{state.st_dev}/{state.st_ino}"
    except OSError:  # then no two ranks are said to share anything
        return secrets.token_hex(8)


def _others(hosts: Sequence[str]) -> list[str]:
    """Names of the hosts, but for those that share the first one's network."""
    pairs = [text.split(" ", 1) for text in hosts]
    return list(dict.fromkeys(name for network, name in pairs if network != pairs[0][0]))


def _listening(others: Sequence[str]) -> Any:
    """A store that listens for ranks on other hosts, or for those of this one alone."""
    if not others:
        for family, address in _LOOPBACKS:
            with contextlib.suppress(OSError):
                return _listening_on(family, address)
    elif (own_address := _own_address() or address_towards(others)) is not None:
        return _listening_on(*own_address)
    # There is no one address: names do not say where the others are, or they are in several networks.
    return dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _own_address() -> tuple[int, str] | None:
    """Address family and address that ranks on other hosts reach this one by; None where nobody says it.

    Names come second: a host's own one may lead to its loopback, and nobody may resolve those of others.

    Raises:
        WindowError: a variable names an interface that is not there.
    """
    try:
        address = interface.address_here(Network())
    except WindowError:
        if any(os.environ.get(variable) for variable in (interface.INTERFACE, interface.GLOO_INTERFACE)):
            raise
        return None
    return int(interface.family_of(address)), address


def _listening_on(family: int, address: str) -> Any:
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.bind((address, 0))
        port = bound.getsockname()[1]
        # The store closes what it listens on.
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(bound.fileno())
        )


def address_towards(hosts: Sequence[str]) -> tuple[int, str] | None:
    """Address family and address from which packets leave this host for others; None if there is not one.

    Args:
        hosts: names of the others.
    """
    addresses = set()
    for host in hosts:
        with contextlib.suppress(OSError):
            kind, *_, there = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(there)
                addresses.add((int(kind), str(probe.getsockname()[0])))
    if len(addresses) != 1:
        return None
    ((family, address),) = addresses
    is_local = ipaddress.ip_address(address.split("%")[0])
    return None if is_local.is_loopback or is_local.is_link_local else (family, address)


def _all_texts(group: dist.ProcessGroup, text: str) -> list[str]:
    """Each rank's text, by rank."""
    own = _packed(text)
    packed = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(packed, own, group=group)
    return [_unpacked(each) for each in packed]


def _first_text(group: dist.ProcessGroup, text: str) -> str:
    """The first rank's text."""
    packed = _packed(text)
    dist.broadcast(packed, group=group, group_src=0)
    return _unpacked(packed)


def _packed(text: str) -> torch.Tensor:
    data = text.encode()[:_TEXT_BYTES]
    return torch.frombuffer(bytearray(data.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> str:
    return bytes(packed.tolist()).rstrip(b"\0").decode(errors="replace")
