"""What a caller says of the network between hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from moe_triton.core.checks import check_integer, check_record, check_text, shown
from moe_triton.core.errors import ArgumentError

MOST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class Network:
    """How ranks on several hosts reach each other, on the CPU back end (docs/hosts.md). Ranks may differ.

    Attributes:
        interface: name of the interface by which other hosts are reached; None for what
            $MOE_TRITON_INTERFACE or $GLOO_SOCKET_IFNAME names, or else the way to $MASTER_ADDR.
        ports: first and last port that this rank may listen at, 1 to 65,535; None for those that
            $MOE_TRITON_PORTS names, or any that is free.
        provider: of libfabric; None for what $MOE_TRITON_PROVIDER names, or the first of "tcp" and
            "tcp;ofi_rxm" that all ranks have.
        nic_cpu: processor that the thread runs on which sends and receives; None for any.

    Raises:
        ArgumentError: one of them is none of these.
    """

    interface: str | None = None
    ports: Sequence[int] | None = None
    provider: str | None = None
    nic_cpu: int | None = None

    def __post_init__(self) -> None:
        """Checks all of them, and makes integers Python's."""
        for name in ("interface", "provider"):
            if (value := getattr(self, name)) is not None and not check_text(f"network.{name}", value):
                rule = "it must be a name"
                raise ArgumentError(f"network.{name}", value, rule, "Pass None for the usual one.")
        if self.ports is not None:
            object.__setattr__(self, "ports", _checked_ports(self.ports))
        if self.nic_cpu is not None:
            object.__setattr__(self, "nic_cpu", check_integer("network.nic_cpu", self.nic_cpu))


def _checked_ports(value: object) -> tuple[int, int]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == 2:
        first, last = (check_integer("network.ports", each) for each in value)
        if 0 < first <= last <= MOST_PORT:
            return first, last
    rule = f"they are the first and the last of some ports, 1 to {MOST_PORT}"
    raise ArgumentError("network.ports", shown(value), rule, "Pass two, as (50000, 50999), or None for any.")


def checked_network(given: object) -> Network:
    """What the caller says, or the defaults for None.

    Raises:
        ArgumentError: it is something else, or names a processor that this process does not run on.
    """
    network = check_record("network", given, Network)
    if network.nic_cpu is not None and network.nic_cpu not in os.sched_getaffinity(0):
        rule = f"this process runs on {sorted(os.sched_getaffinity(0))}"
        raise ArgumentError("network.nic_cpu", network.nic_cpu, rule, "Pass one of these, or None.")
    return network
