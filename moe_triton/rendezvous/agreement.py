"""Ranks compare their settings before any of them allocates memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moe_triton.core.errors import ConfigMismatchError, WindowError
from moe_triton.core.group_sizes import RANKS_PER_SERVER
from moe_triton.core.hccl import LOGIC_SUPERPOD_ID
from moe_triton.core.logs import RankLog, log_of
from moe_triton.core.space import text_of
from moe_triton.core.topology import Topology
from moe_triton.rendezvous.meeting import MAX_REASON, Meeting, values_of
from moe_triton.rendezvous.membership import SAME_SETTINGS, by_value

_log = log_of("construction")

KERNELS = "settings of kernels"
"""By kernel what tables set, as a text; a kernel that keeps its own settings has none."""

# Settings that may differ: neither flags nor results depend on them. An operator has one flag per expert and
# source, row or rank, whichever block sends it and however many parts there are.
_TUNED = "dispatch_tokens combine_tokens communication_blocks receiving_blocks cached_bytes spins yields"
MAY_DIFFER: dict[str, str] = {
    "timeout_s": "the rank that waits least gives up first, and the others only when their own time is up",
    **dict.fromkeys(
        ("num_blocks", "kernels", KERNELS, *(f"tuning.{name}" for name in _TUNED.split())),
        "calls take as long as on the slowest rank",
    ),
}
# Settings that the ranks of a server have alike, and why: servers may differ.
OF_SERVERS: dict[str, str] = {
    LOGIC_SUPERPOD_ID: "its ranks write to each other's memory, and HCCL takes them for those of several "
    "super nodes; set one id for each server, or none, or say by ranks_per_server which ranks share one",
}
_OWN = text_of({})
_MOST_KERNELS = 4  # that a message names


def agree(meeting: Meeting, settings: Mapping[str, Any], purpose: str = "settings") -> None:
    """Compares settings. A difference is an error on every rank, or a warning where it is allowed.

    Args:
        meeting: the group.
        settings: by name; JSON's types.
        purpose: for the error.

    Raises:
        ConfigMismatchError: a rank cannot be constructed, or settings differ; it names ranks and fields.
        CommunicationTimeoutError: a rank did not come.
    """
    messages = meeting.exchange({"settings": settings}, purpose)
    try:
        of_rank = log_of("construction", rank=meeting.rank, num_ranks=meeting.num_ranks)
        check_same(values_of(messages, "settings", dict), log=of_rank)
    except ConfigMismatchError:
        meeting.end()  # every rank sees this
        raise


def check_same(
    settings: Sequence[Mapping[str, Any]],
    may_differ: Collection[str] = MAY_DIFFER,
    log: RankLog = _log,
) -> None:
    """Checks that every rank was constructed with the same settings.

    Args:
        settings: one mapping per rank.
        may_differ: fields that are only warned of.
        log: of this rank.

    Raises:
        ConfigMismatchError: names each field that differs, and which ranks have which value.
    """
    fields = dict.fromkeys(name for setting in settings for name in setting)
    errors: list[str] = []
    warnings: dict[str, str] = {}
    for name in fields:
        given = [setting.get(name) for setting in settings]
        if name in OF_SERVERS:
            errors += _in_servers(name, given, settings[0])
        elif values := _kernels_that_differ(given) if name == KERNELS else _by_ranks(given):
            if name in may_differ:
                warnings[name] = values
            else:
                errors.append(f"  {name}: {values}")
    if errors:
        raise ConfigMismatchError(f"{SAME_SETTINGS}:\n" + "\n".join(errors))
    for name, values in warnings.items():
        log.warning("ranks of one group differ in %s: %s; %s", name, values, MAY_DIFFER.get(name, ""))


def _by_ranks(values: Sequence[object]) -> str:
    """Which ranks have which value; empty if all have the same."""
    return by_value(dict(enumerate(values)))


def _in_servers(name: str, given: Sequence[object], settings: Mapping[str, Any]) -> list[str]:
    """A line for each server whose ranks differ, of servers that a rank's settings name."""
    servers = Topology(tuple(settings[RANKS_PER_SERVER]))
    wrong = []
    for server in range(servers.num_servers):
        of_server = {rank: given[rank] for rank in servers.ranks_on(server) if rank < len(given)}
        if values := by_value(of_server):
            wrong.append(f"  {name}: {values}, of server {server}: {OF_SERVERS[name]}")
    return wrong


def _kernels_that_differ(given: Sequence[Any]) -> str:
    """The first kernels whose settings differ, with their ranks; empty if none does."""
    texts = [each if isinstance(each, dict) else {} for each in given]
    names = sorted({name for each in texts for name in each})
    said = [(name, _by_ranks([each.get(name, _OWN) for each in texts])) for name in names]
    differ = [f"{name}: {values}" for name, values in said if values]
    more = len(differ) - _MOST_KERNELS
    return "; ".join(differ[:_MOST_KERNELS] + ([f"and {more} more"] if more > 0 else []))


def raise_together(meeting: Meeting, failure: str, purpose: str = "windows") -> None:
    """Raises on every rank if any of them has failed.

    Args:
        meeting: the group.
        failure: of this rank; empty if it has not failed.
        purpose: for errors.

    Raises:
        WindowError: a rank has failed; it lists each failure with its rank.
        CommunicationTimeoutError: a rank did not come.
    """
    raise_failures(meeting, meeting.exchange({"failure": failure[:MAX_REASON]}, purpose))


def raise_failures(meeting: Meeting, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises what ranks have said of themselves under "failure", on every rank.

    Raises:
        WindowError: a rank has failed; it lists each failure with its rank.
    """
    failures = values_of(messages, "failure", str)
    if said := [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]:
        meeting.end()  # every rank sees this
        raise WindowError("; ".join(said))
