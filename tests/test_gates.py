"""How ranks of other hosts notice each other's end: connections, strangers, and what is out of reach."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.errors import WindowError
from moe_triton.core.network import Network
from moe_triton.rendezvous import deaths
from moe_triton.rendezvous.deaths import ITSELF, Watch
from moe_triton.rendezvous.gates import Gate, Place, reach
from moe_triton.rendezvous.interface import INTERFACE, PORTS, ports_here
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.rendezvous.process_ends import BY_LINE, LEFT, Board
from tests.patience import seconds
from tests.test_deaths import signs, until


class OnTwoHosts:
    """A meeting of two ranks of different hosts."""

    group, num_ranks, hosts, num_hosts, network = None, 2, (0, 1), 2, Network()

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.fixture(autouse=True)
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo")


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    made = [Watch(cast(Meeting, OnTwoHosts(rank))) for rank in range(2)]
    yield made
    for watch in made:
        watch.close()
    until(lambda: deaths._watcher._thread is None)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate(Network())
    yield made
    made.close()


def meet(watches: list[Watch]) -> list[Any]:
    """Has them take each other's offers; returns where their gates are."""
    offers = [{**watch.offer((0, 1)), "entrance": ""} for watch in watches]  # nobody sees it on another host
    for number, watch in enumerate(watches):
        assert watch.take(offers) == set()
        watch.take_here({number})
    return [place and list(place) for place in (watch.open_gate() for watch in watches)]


def join(watches: list[Watch], places: list[Any]) -> None:
    """The one that connects comes first: to a gate whose rank does not know yet who comes."""
    for number, watch in reversed(list(enumerate(watches))):
        assert watch.take_places(places, {number}) == ""


def test_a_connection_says_how_a_rank_goes(watches: list[Watch]) -> None:
    join(watches, meet(watches))
    for watch in watches:
        watch.begin()
    until(lambda: signs(watches[0]) == [ITSELF, BY_LINE])
    until(lambda: signs(watches[1]) == [BY_LINE, ITSELF])
    assert [watch.reaches_all for watch in watches] == [True, True]
    assert watches[0].gone() == {}
    watches[1].close()
    until(lambda: 1 in watches[0].gone())
    assert watches[0].gone()[1].state == "left"
    assert watches[0].dead() == {}


def test_who_has_ended_before_it_was_reached_is_named(watches: list[Watch]) -> None:
    places = meet(watches)
    watches[1]._held.entrances[-1].listener.close()  # as the kernel does
    said = watches[0].take_places(places, {0})
    assert f"rank 1 cannot be reached at {Place(*places[1])}: nobody listens there" in said
    assert watches[0].gone() == {}


def test_who_ends_before_it_has_come_is_dead(watches: list[Watch]) -> None:
    """The earlier rank keeps its own connection until the later one's is there."""
    places = meet(watches)
    assert watches[0].take_places(places, {0}) == ""
    watches[1]._held.entrances[-1].listener.close()  # as the kernel does
    until(lambda: 1 in watches[0].dead())


def test_who_gives_up_before_it_has_come_is_not_dead(watches: list[Watch]) -> None:
    places = meet(watches)
    assert watches[0].take_places(places, {0}) == ""
    watches[1].close()
    (process,) = (peer.process for peer in watches[0]._held.peers if peer is not None)
    assert process is not None
    until(lambda: process.line is None)
    assert watches[0].dead() == {}


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"moe_triton 1 12345678", b"moe"])
def test_a_stranger_is_nobody(watches: list[Watch], said: bytes) -> None:
    places = meet(watches)
    with socket.create_connection(places[0]) as stranger:
        stranger.sendall(said)
        join(watches, places)
        for watch in watches:
            watch.begin()
        until(lambda: signs(watches[0]) == [ITSELF, BY_LINE])
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(seconds(20))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(64) in (b"", b"c")
    assert [watch.gone() for watch in watches] == [{}, {}]


def test_a_greeting_may_come_in_pieces(gate: Gate) -> None:
    board = Board()
    with contextlib.closing(board), socket.create_connection(gate.place) as line:
        near: list[socket.socket] = []
        until(lambda: (came := gate.let_in()) is not None and not near.append(came))
        heard = bytearray()
        both = socket.socketpair()
        board.greet(both[0])
        heard += both[1].recv(64)
        for each in both:
            each.close()
        with near[0], selectors.DefaultSelector() as selector:
            selector.register(near[0], selectors.EVENT_READ)
            line.sendall(heard[:5])
            assert selector.select(0.1) == []
            line.sendall(heard[5:])
            assert selector.select(seconds(20)) != []
            assert gate.greeting(near[0]) == (board.token, [])
            line.sendall(LEFT)
            assert selector.select(seconds(20)) != []


def test_who_does_not_answer_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(4):  # the kernel takes no more
            line = waiting.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(full.getsockname())
        with pytest.raises(WindowError, match=r"rank 3 cannot be reached at port \d+ of .*: no answer"):
            reach({3: Place(*full.getsockname())}, 0.3)


@given(st.recursive(st.none() | st.integers() | st.text() | st.booleans(), st.lists, max_leaves=5))
def test_a_place_is_an_address_and_a_port(said: object) -> None:
    assert Place.read(said) is None or isinstance(said, list)


@pytest.mark.parametrize("address", ["10.0.0.1", "fe80::1"])
def test_places(address: str) -> None:
    assert Place.read([address, 7]) == Place(address, 7)
    for said in ([address, 0], [address, 65536], [address, "7"], [address, True], [address], ["host", 7]):
        assert Place.read(said) is None


def test_ports_are_named(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    port = gate.place.port
    for said in ("7", "a-b", "70000-70001", "9-8", "0-8", "1-2-3"):
        with pytest.raises(WindowError, match=f"{PORTS} is '{said}'"):
            ports_here(Network(), {PORTS: said})
    assert list(ports_here(Network(), {PORTS: "50000-50002"})) == [50000, 50001, 50002]
    monkeypatch.setenv(PORTS, f"{port}-{port}")
    with pytest.raises(WindowError, match=f"no port of {port} to {port} is free at 127.0.0.1"):
        Gate(Network())
