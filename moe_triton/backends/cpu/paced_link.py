"""A slow link in front of peers' windows, for tests and benchmarks (`paced_link.h`).

It is no setting of `Tuning`: it makes nothing faster, it belongs to no machine, and nobody who serves a model
wants it. It is a property of the emulated device, so buffers that are made while it is in use share one.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from moe_triton.backends.cpu.native import U64, fields
from moe_triton.core.checks import check_number
from moe_triton.core.errors import ArgumentError

_KILO, _GIGA = 1000, 10**9
# A write has at most 2 MB, and its nanoseconds fit 64 bits.
_MOST_GIGABYTES_PER_S, _MOST_LATENCY_US, _MOST_BUCKET_BYTES = 10_000.0, 1_000_000.0, 1 << 30
_in_use: list[PacedLink] = []


class PacedLinkStruct(ctypes.Structure):
    """``moe::PacedLink``."""

    _fields_ = fields(bytes_per_second=U64, latency_ns=U64, bucket_bytes=U64, idle_at_ns=U64, taken_bytes=U64)


class PacedLink:
    """The link of one emulated device: writes to peers' windows sleep until it has carried them.

    N bytes arrive no sooner than N / rate and a latency, whatever number of blocks sends them. Reads of
    peers' windows are not paced: those of combine with ``comm_alg="direct"``.

    Args:
        gigabytes_per_s: 10**9 bytes a second, more than 0 and at most 10,000.
        latency_us: from the end of a write to its arrival, 0 to 1,000,000.
        bucket_bytes: that senders may be ahead of the wire, 0 to 2**30. One who is further ahead sleeps until
            seven eighths of them are carried, and flags may arrive later by as much. A nap costs its core 20
            to 40 us, so naps of less than some 50 us take the core instead of leaving it, and lower the rate.

    Attributes:
        address: of the ``moe::PacedLink``.

    Raises:
        ArgumentError: a number is out of its range.
    """

    def __init__(self, gigabytes_per_s: float, latency_us: float = 0.0, bucket_bytes: int = 1 << 16) -> None:
        self._struct = PacedLinkStruct()
        self.address = ctypes.addressof(self._struct)
        self.set(gigabytes_per_s, latency_us, bucket_bytes)

    def set(self, gigabytes_per_s: float, latency_us: float = 0.0, bucket_bytes: int = 1 << 16) -> None:
        """Changes it, between calls.

        Raises:
            ArgumentError: a number is out of its range.
        """
        rate = in_range("gigabytes_per_s", gigabytes_per_s, 1 / _GIGA, _MOST_GIGABYTES_PER_S)
        latency_ns = int(in_range("latency_us", latency_us, 0, _MOST_LATENCY_US) * _KILO)
        bucket = int(in_range("bucket_bytes", bucket_bytes, 0, _MOST_BUCKET_BYTES))
        self._struct.bytes_per_second, self._struct.latency_ns = max(1, int(rate * _GIGA)), latency_ns
        self._struct.bucket_bytes = bucket

    @property
    def taken_bytes(self) -> int:
        """Bytes that it was given so far."""
        return int(self._struct.taken_bytes)


@contextlib.contextmanager
def paced(link: PacedLink) -> Iterator[PacedLink]:
    """Buffers of this process that are made inside send over this link, as long as they live."""
    _in_use.append(link)
    try:
        yield link
    finally:
        _in_use.pop()


def in_use() -> PacedLink | None:
    """The link of buffers that are made now; None for as fast as the core writes."""
    return _in_use[-1] if _in_use else None


def in_range(name: str, value: float, low: float, high: float) -> float:
    """A number of the emulated device.

    Raises:
        ArgumentError: it is no number, or out of its range.
    """
    check_number(name, value)  # before it is compared
    if not low <= value <= high:
        raise ArgumentError(name, value, f"it must be {low:g} to {high:g}", "Pass a number in this range.")
    return value
