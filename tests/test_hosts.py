"""Which ranks share a server where they are on several hosts, and by what these are reached."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu import fabric
from moe_triton.core.errors import ArgumentError, WindowError
from moe_triton.rendezvous import interface
from moe_triton.rendezvous.hosts import servers_of

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
    assert interface.address_here({"GLOO_SOCKET_IFNAME": "lo,eth0"}) == "127.0.0.1"
    for environment, text in (
        ({"MOE_TRITON_INTERFACE": "none7", "GLOO_SOCKET_IFNAME": "lo"}, "MOE_TRITON_INTERFACE is 'none7'"),
        ({"MOE_TRITON_INTERFACE": "lo" * 8}, "is no interface"),
        ({}, "leads to this host itself"),
        ({"MASTER_ADDR": "no.such.name.invalid"}, "no way leads to MASTER_ADDR"),
    ):
        with pytest.raises(WindowError, match=text):
            interface.address_here(environment)


def test_a_library_is_named_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fabric.find_library({"MOE_TRITON_LIBFABRIC": "/some/where.so"}) == "/some/where.so"
    monkeypatch.setattr(fabric, "_WHEEL", "no_such_wheel")
    monkeypatch.setattr(fabric.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(WindowError, match="pip install no_such_wheel"):
        fabric.find_library({})


@pytest.mark.parametrize("library", ["/no/such/library.so", "libc.so.6"])
def test_what_is_no_libfabric_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TRITON_LIBFABRIC", library)
    monkeypatch.setenv("MOE_TRITON_INTERFACE", "lo")
    with pytest.raises(WindowError, match=library.rpartition("/")[2]):
        fabric.Fabric(2, 4096, 4096, 4096, 1.0)
