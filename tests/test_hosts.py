"""Which ranks share a server where they are on several hosts, and by what these are reached."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu import fabric
from moe_triton.core.errors import ArgumentError, WindowError
from moe_triton.core.network import Network
from moe_triton.rendezvous import interface
from moe_triton.rendezvous.hosts import servers_of
from moe_triton.rendezvous.meeting import MAX_MESSAGE_BYTES
from tests.surroundings import NOWHERE


def has_libfabric() -> bool:
    with contextlib.suppress(WindowError):
        return bool(fabric.find_library())
    return False


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def hosts_of(sizes: list[int]) -> list[int]:
    return [host for host, size in enumerate(sizes) for _ in range(size)]


@given(SIZES)
def test_hosts_are_servers(sizes: list[int]) -> None:
    assert servers_of(hosts_of(sizes), None) == tuple(sizes)


@given(SIZES, st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_servers_may_be_smaller_and_never_cross(sizes: list[int], split: list[int]) -> None:
    hosts = hosts_of(sizes)
    while sum(split) > len(hosts):
        split = split[:-1]
    split = [*split, *([1] * (len(hosts) - sum(split)))]
    ends, of_hosts = set(itertools.accumulate(split)), set(itertools.accumulate(sizes))
    if of_hosts <= ends:
        assert servers_of(hosts, split) == tuple(split)
    else:
        with pytest.raises(ArgumentError, match="ranks of two hosts"):
            servers_of(hosts, split)


@pytest.mark.parametrize(("given_size", "said"), [(1, (1, 1, 1, 1)), (2, (2, 2)), (4, None), (3, None)])
def test_one_number_for_all_servers(given_size: int, said: tuple[int, ...] | None) -> None:
    if said is None:
        with pytest.raises(ArgumentError, match="ranks_per_server"):
            servers_of([0, 0, 1, 1], given_size)
    else:
        assert servers_of([0, 0, 1, 1], given_size) == said


def test_ranks_of_a_host_are_neighbours() -> None:
    with pytest.raises(ArgumentError, match="neighbours"):
        servers_of([0, 1, 0, 1], None)


def test_an_interface_is_named_or_found() -> None:
    assert interface.address_here(Network(), {"GLOO_SOCKET_IFNAME": "lo,eth0"}) == "127.0.0.1"
    for environment, text in (
        ({"MOE_TRITON_INTERFACE": "none7", "GLOO_SOCKET_IFNAME": "lo"}, "MOE_TRITON_INTERFACE is 'none7'"),
        ({"MOE_TRITON_INTERFACE": "lo" * 8}, "is no interface"),
        ({}, "leads to this host itself"),
        ({"MASTER_ADDR": "no.such.name.invalid"}, "no way leads to MASTER_ADDR"),
    ):
        with pytest.raises(WindowError, match=text):
            interface.address_here(Network(), environment)


def test_a_library_is_named_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fabric.find_library({"MOE_TRITON_LIBFABRIC": "/some/where.so"}) == "/some/where.so"
    monkeypatch.setattr(fabric, "_WHEEL", "no_such_wheel")
    monkeypatch.setattr(fabric.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(WindowError, match="pip install no_such_wheel"):
        fabric.find_library({})


@pytest.mark.parametrize("library", [f"{NOWHERE}/library.so", "libc.so.6"])
def test_what_is_no_libfabric_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TRITON_LIBFABRIC", library)
    monkeypatch.setenv("MOE_TRITON_INTERFACE", "lo")
    with pytest.raises(WindowError, match=library.rpartition("/")[2]):
        fabric.providers(Network())


def test_providers_that_all_ranks_have() -> None:
    tcp, rxm = fabric.PROVIDERS
    assert fabric.common_provider([[tcp, rxm], [rxm, tcp], [tcp]]) == tcp
    assert fabric.common_provider([[tcp, rxm], [rxm]]) == rxm
    with pytest.raises(WindowError, match=r"no provider of libfabric in common: .*'tcp'.* on rank 0"):
        fabric.common_provider([[tcp], [rxm]])


@pytest.mark.skipif(not has_libfabric(), reason="no libfabric is installed")
def test_a_provider_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loopback = Network(interface="lo")
    assert fabric.PROVIDERS[0] in fabric.providers(on_loopback)
    monkeypatch.setenv("MOE_TRITON_PROVIDER", "verbs;ofi_rxm")
    with pytest.raises(WindowError, match="by 'verbs;ofi_rxm', which was asked for"):
        fabric.providers(on_loopback)
    assert fabric.providers(replace(on_loopback, provider="tcp")) == ("tcp",)


@pytest.mark.skipif(not has_libfabric(), reason="no libfabric is installed")
def test_ports_of_libfabric() -> None:
    memory = ctypes.create_string_buffer(1 << 13)
    first = _free_pair()
    network = Network(interface="lo", ports=(first, first + 1))
    made = [ctypes.addressof(memory), 1 << 13, 1 << 12, 1.0, network, "tcp"]
    holder = fabric.Fabric(3, [0, 2], *made)  # type: ignore[arg-type]
    try:
        # One for each rank of another host.
        assert holder.names.keys() == {0, 2}
        assert all(f"{port:04x}" in holder.names[rank] for rank, port in ((0, first), (2, first + 1)))
        with pytest.raises(WindowError, match=f"no port of {first} to {first + 1} is free"):
            fabric.Fabric(2, [1], *made)  # type: ignore[arg-type]
    finally:
        holder.close()
    with pytest.raises(WindowError, match=f"no port of {first} to {first + 1} is free"):
        fabric.Fabric(4, [0, 1, 2], *made)  # type: ignore[arg-type]


@pytest.mark.skipif(not has_libfabric(), reason="no libfabric is installed")
@pytest.mark.parametrize("provider", fabric.PROVIDERS)
def test_peers_have_endpoints_of_their_own_where_these_take_little(provider: str) -> None:
    memory = ctypes.create_string_buffer(1 << 13)
    if provider not in fabric.providers(Network(interface="lo")):
        pytest.skip("this libfabric has not that provider")
    made = [ctypes.addressof(memory), 1 << 13, 1 << 12, 1.0, Network(interface="lo"), provider]
    several = fabric.Fabric(4, [0, 2, 3], *made)  # type: ignore[arg-type]
    try:
        assert several.names.keys() == {0, 2, 3}
        assert len(set(several.names.values())) == (3 if provider in fabric.APART else 1)
    finally:
        several.close()


@pytest.mark.skipif(not has_libfabric(), reason="no libfabric is installed")
def test_what_peers_say_of_addresses_is_checked() -> None:
    memory = ctypes.create_string_buffer(1 << 13)
    made = [ctypes.addressof(memory), 1 << 13, 1 << 12, 1.0, Network(interface="lo"), fabric.PROVIDERS[0]]
    mine = fabric.Fabric(2, [1], *made)  # type: ignore[arg-type]
    try:
        name, place = mine.names[1], mine.memory
        mine.connect(1, name, place)
        for other in ((name, ""), ("", place), ("zz", place), (name, place + "00"), ("00" * 100, place)):
            with pytest.raises(WindowError, match="rank 1 has told no address of libfabric"):
                mine.connect(1, *other)
        with pytest.raises(WindowError, match="rank 1 cannot be reached by libfabric: its window takes"):
            mine.connect(1, name, place[:-16] + "00" * 8)
    finally:
        mine.close()
    # All names go in one message of the rendezvous, of the largest group.
    assert len(name) < MAX_MESSAGE_BYTES / 768 / 2


def test_memory_that_cannot_be_locked_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(moe_fabric_error=lambda: b"fi_mr_reg: Cannot allocate memory")
    monkeypatch.setattr(fabric.native, "library", lambda: library)
    assert fabric._error().endswith("(ulimit -l unlimited).")


def _free_pair() -> int:
    """The first of two ports, one behind the other, that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError, OverflowError):
            port: int = first.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("interface", ""),
        ("interface", 3),
        ("ports", 50_000),
        ("ports", (2, 1)),
        ("ports", (0, 1)),
        ("ports", "12"),
        ("ports", (1, 2, 3)),
        ("ports", (1.5, 2)),
        ("provider", b"tcp"),
        ("nic_cpu", "0"),
        ("nic_cpu", True),
    ],
)
def test_what_is_said_of_a_network_is_checked(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"network.{name} is "):
        Network(**{name: value})  # type: ignore[arg-type]
