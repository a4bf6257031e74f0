"""How ranks notice the end of a process on another host: by a TCP connection, which its kernel closes.

While ranks construct each listens at a port of its own, its *gate*, and connects to those of all ranks on
other hosts. Who connects has to say a token that the group alone knows. Of a host that loses its power, or of
a cable that is cut, such a connection says nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import NamedTuple

from moe_triton.core.errors import WindowError
from moe_triton.core.network import MOST_PORT, Network
from moe_triton.core.threads import Deadline
from moe_triton.rendezvous.interface import INTERFACE, PORTS, address_here, family_of, none_free, ports_here
from moe_triton.rendezvous.process_ends import BACKLOG, HELLO_BYTES, Entrance, token_in

CONNECTING_S = 10.0


class Place(NamedTuple):
    """Where a gate is.

    Attributes:
        address, port: of its host.
    """

    address: str
    port: int

    @staticmethod
    def read(said: object) -> Place | None:
        """What a rank says of its gate; None if that is none: nothing from a peer is trusted."""
        if isinstance(said, list) and len(said) == len(Place._fields):
            address, port = said
            with contextlib.suppress(ValueError):
                if type(port) is int and 0 < port <= MOST_PORT:
                    return Place(str(ip_address(str(address))), port)
        return None

    def __str__(self) -> str:
        return f"port {self.port} of {self.address}"


class Gate(Entrance):
    """A socket that ranks of other hosts connect to while ranks construct.

    Args:
        network: where it may be.

    Attributes:
        place: of it.

    Raises:
        WindowError: no interface, or no port, for it.
    """

    is_for_hosts = True

    def __init__(self, network: Network) -> None:
        address, ports = address_here(network), ports_here(network)
        self.name = ""
        self.listener = socket.socket(family_of(address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.listener.setblocking(False)
            # Connections of an earlier buffer, which the kernel keeps for a minute, do not hold the port.
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listen(address, list(ports))
        except OSError as error:
            self.listener.close()
            raise WindowError(f"nothing can listen at {address}: {error}") from error
        except BaseException:
            self.listener.close()
            raise
        self.place = Place(*self.listener.getsockname()[:2])

    def _listen(self, address: str, ports: list[int]) -> None:
        for port in ports:
            try:
                self.listener.bind((address, port))
                self.listener.listen(BACKLOG)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise none_free(address, ports)

    def let_in(self) -> socket.socket | None:
        """The next one who has connected, whoever that is; None if all are in."""
        try:
            line, _ = self.listener.accept()
        except OSError:
            return None
        line.setblocking(False)
        # A connection may bring half of a greeting first: nobody looks at it before all of it is there.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELLO_BYTES)
        return line

    def greeting(self, line: socket.socket) -> tuple[str, list[int]] | None:
        """What somebody says who has connected."""
        try:
            token = token_in(line.recv(HELLO_BYTES))
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # words are shorter
            return token, []
        except BlockingIOError:
            return None
        except OSError:
            return "", []

    def close(self) -> None:
        """Removes it."""
        self.listener.close()


def reach(places: Mapping[int, Place], within_s: float) -> dict[int, socket.socket]:
    """Connects to gates of other hosts, to all at once.

    Args:
        places: of the gates, by rank.
        within_s: seconds that it may take.

    Returns:
        A connection to each.

    Raises:
        WindowError: one is out of reach, or its process has ended.
    """
    reached: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as failed:
        for rank, (address, port) in places.items():
            line = socket.socket(family_of(address), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            failed.enter_context(line)
            line.setblocking(False)
            code = line.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                selector.register(line, selectors.EVENT_WRITE, rank)
            else:
                reached[rank] = _taken(rank, places, line, code)
        deadline = Deadline(within_s)
        while selector.get_map():
            ready = selector.select(max(deadline.left(), 0))
            if not ready:
                waiting = [key.data for key in selector.get_map().values()]
                raise _out_of_reach(waiting[0], places, f"no answer within {within_s:g} s")
            for key, _ in ready:
                line = key.fileobj  # type: ignore[assignment]
                selector.unregister(line)
                code = line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                reached[key.data] = _taken(key.data, places, line, code)
        failed.pop_all()
    return reached


def _taken(rank: int, places: Mapping[int, Place], line: socket.socket, code: int) -> socket.socket:
    if code in (errno.ECONNREFUSED, errno.ECONNRESET):
        why = "nobody listens there. Its process has ended, or that address leads elsewhere"
        raise _out_of_reach(rank, places, why)
    if code:
        raise _out_of_reach(rank, places, os.strerror(code))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def _out_of_reach(rank: int, places: Mapping[int, Place], why: str) -> WindowError:
    return WindowError(
        f"rank {rank} cannot be reached at {places[rank]}: {why}. Let hosts connect to each other's ports, "
        f"all or those that {PORTS} names; or set {INTERFACE} there to the interface that leads to it."
    )
