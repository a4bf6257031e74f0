"""By which address and ports of this host ranks on other hosts reach this one."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from pathlib import Path

from moe_triton.core.errors import WindowError
from moe_triton.core.network import MOST_PORT, Network

INTERFACE, GLOO_INTERFACE, PORTS = "MOE_TRITON_INTERFACE", "GLOO_SOCKET_IFNAME", "MOE_TRITON_PORTS"
ADDRESSES_V6 = Path("/proc/net/if_inet6")
ANY_PORT = range(1)
_LOOPBACKS = "127.", "::1"
_DISCARD, _LONGEST_NAME, _SIOCGIFADDR = 9, 15, 0x8915
_GLOBAL = "00"  # scope of an address that other hosts know


def address_here(network: Network, environment: Mapping[str, str] = os.environ) -> str:
    """This host's address, IPv4 or else IPv6, that peers reach it by: `Network.interface` says which.

    Raises:
        WindowError: there is none.
    """
    if network.interface is not None:
        return _address_of(network.interface, "network.interface")
    for variable in (INTERFACE, GLOO_INTERFACE):
        if names := environment.get(variable):
            return _address_of(names.split(",")[0], variable)  # gloo takes a list
    master = environment.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, _, _, to = socket.getaddrinfo(master, _DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise WindowError(
            f"no way leads to MASTER_ADDR ({master}): {error}. Set {INTERFACE} to the interface that other "
            f"hosts are reached by."
        ) from error
    if address.startswith(_LOOPBACKS):
        raise WindowError(
            f"MASTER_ADDR ({master}) leads to this host itself, where no other one gets. Set {INTERFACE} to "
            f"the interface that other hosts are reached by."
        )
    return address


def _address_of(name: str, variable: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", name.encode() if len(name) <= _LONGEST_NAME else b"")
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    except OSError as error:
        if address := _address_v6_of(name):
            return address
        there = [each for _, each in socket.if_nameindex()]
        raise WindowError(
            f"{variable} is {name!r}, which is no interface with an address ({error.strerror}). There are "
            f"{there}."
        ) from error


def _address_v6_of(name: str) -> str:
    """The first one of an interface that other hosts know; "" for none."""
    lines = ADDRESSES_V6.read_text().splitlines() if ADDRESSES_V6.exists() else []
    for address, _, _, scope, _, of_interface in map(str.split, lines):
        if of_interface == name and scope == _GLOBAL:
            return str(IPv6Address(bytes.fromhex(address)))
    return ""


def family_of(address: str) -> socket.AddressFamily:
    """That of sockets for an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def ports_here(network: Network, environment: Mapping[str, str] = os.environ) -> Sequence[int]:
    """Ports that this rank may listen at, by `Network.ports`; 0 for any that is free.

    Raises:
        WindowError: $MOE_TRITON_PORTS names none.
    """
    if network.ports is not None:
        first, last = network.ports
        return range(first, last + 1)
    if not (said := environment.get(PORTS)):
        return ANY_PORT
    if found := re.fullmatch(r"(\d{1,5})-(\d{1,5})", said):
        first, last = map(int, found.groups())
        if 0 < first <= last <= MOST_PORT:
            return range(first, last + 1)
    raise WindowError(f"{PORTS} is {said!r}. It has to be two ports, as 50000-50999: the first and the last.")


def none_free(address: str, ports: Sequence[int]) -> WindowError:
    """All ports are in use."""
    return WindowError(
        f"no port of {ports[0]} to {ports[-1]} is free at {address}. Widen {PORTS}: each rank of a host "
        f"needs for each buffer one more than there are ranks on other hosts."
    )
