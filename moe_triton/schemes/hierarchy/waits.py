"""Whom a wait is for where rows and results have two hops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_triton.core.ascendc import DISPATCH_WAIT, POST_STATUS, REPORT_BAD_ROW, REPORT_MISMATCH
from moe_triton.core.records import LOST_COUNT, RAIL_END, REPORT, STATUS_ENTRY
from moe_triton.core.region import Region
from moe_triton.layout import FLAG_BITS
from moe_triton.schemes.common.waits import (
    POSTS,
    Finder,
    GaveUp,
    counts_of,
    int32_at,
    round_of,
    running_round,
)
from moe_triton.schemes.hierarchy.ascendc import PARTIALS_SEND, RAIL_RELAY, RAIL_SEND, RAIL_WAIT, RETURNS_LOST
from moe_triton.schemes.site import Site

_NUMBER, _CALL = RAIL_END.word("number"), RAIL_END.word("call")
_LOST, _LOST_CALL = RAIL_END.word("lost"), RAIL_END.word("lost_call")


def _rank_on(site: Site, server: int) -> int:
    """The one of this rank's rail."""
    ranks = site.config.topology.sizes[0]
    return server * ranks + site.rank % ranks


def _neighbour(site: Site, number: int) -> int:
    """A rank of this server by its number in it."""
    ranks = site.config.topology.sizes[0]
    return site.rank // ranks * ranks + number


def _is_relayed(site: Site, status: Region) -> bool:
    """Whether entries come from relays. Those of a barrier do not."""
    return status.base == site.layout.region("token_counts").base


def _is_of_server(site: Site, status: Region) -> bool:
    """Whether entries are those of a server's ranks, and not of all."""
    return status.extent("source") < site.config.num_ranks


def _entries_gave_up(wait: GaveUp) -> list[int]:
    """A source that is lost, as its relay says; a relay that says nothing is missing itself."""
    site, status = wait.site, wait.arguments["status"]
    counts = counts_of(wait.arguments, wait.memory)
    counts = counts[:, : status.extent("source")]  # behind those of a server is what a barrier left
    sources = (counts < 0).any(dim=0).nonzero().flatten().tolist()
    if not _is_relayed(site, status):
        return [_neighbour(site, source) if _is_of_server(site, status) else source for source in sources]
    missing = set()
    for source in sources:
        missing.add(source if _is_told(counts, source) else _relay_of(site, source))
    return sorted(missing)


def _entries_told(wait: GaveUp) -> dict[int, list[int]]:
    """The sources that are lost as their relays say, by relay."""
    site, counts = wait.site, counts_of(wait.arguments, wait.memory)
    told: dict[int, list[int]] = {}
    if _is_relayed(site, wait.arguments["status"]):
        for source in range(counts.shape[1]):
            if _is_told(counts, source):
                told.setdefault(_relay_of(site, source), []).append(source)
    return told


def _is_told(counts: torch.Tensor, source: int) -> bool:
    return bool((counts[:, source] == LOST_COUNT).any())


def _relay_of(site: Site, source: int) -> int:
    return _neighbour(site, source % site.config.topology.sizes[0])


def _entries_go_on(site: Site, arguments: dict[str, Any], places: range) -> Iterator[int]:
    """In the order in which they lie in the window: by source, then by expert."""
    status: Region = arguments["status"]
    is_of_server, is_relayed = _is_of_server(site, status), _is_relayed(site, status)
    for place in places:
        source, expert = divmod(place, status.extent("expert"))
        offset = status.offset(zone=arguments["zone"], expert=expert, source=source)
        if int32_at(arguments["window"] + offset) == FLAG_BITS:
            continue
        if is_relayed:
            yield _relay_of(site, source)
        else:
            yield _neighbour(site, source) if is_of_server else source


def _rank_of_entry(wait: GaveUp, number: int) -> int:
    """Whose it is, numbered by expert and then by source."""
    status: Region = wait.arguments["status"]
    source = number % status.extent("source")
    return _neighbour(wait.site, source) if _is_of_server(wait.site, status) else source


def _entry_refused(wait: GaveUp) -> str:
    """An entry whose count cannot be: of whom, what it says, and what it may say."""
    status: Region = wait.arguments["status"]
    refused = wait.report[wait.report[:, 0] == REPORT_BAD_ROW]
    number = int(refused[0, REPORT.word("first")])
    count = int(counts_of(wait.arguments, wait.memory).view(-1)[number])
    rank, most = _rank_of_entry(wait, number), wait.arguments["count_end"] - 1
    if _is_of_server(wait.site, status):
        return f"a flag of rank {rank} that counts {count} rows: it must be {most}"
    return (
        f"a count of {count} rows of rank {rank}, which rank {_relay_of(wait.site, rank)} passes on here: "
        f"it must be 0 to {most}; nothing was read beyond"
    )


def _rank_itself(wait: GaveUp, number: int) -> int:
    return number


def _entry_words(wait: GaveUp) -> Iterator[tuple[int, int]]:
    """Yields (rank, call word) of the entries that have come; the wait has cleared those that it expected."""
    status, window = wait.arguments["status"], wait.tensor("window")
    is_of_server = _is_of_server(wait.site, status)
    if not is_of_server:
        expected = int(wait.report[wait.report[:, 0] == REPORT_MISMATCH][0, REPORT.word("expected_call")])
        came = (counts_of(wait.arguments, wait.memory) >= 0).any(dim=0)
        yield from ((source, expected) for source in came.nonzero().flatten().tolist())
    for source in range(status.extent("source")):
        first = status.offset(zone=wait.zone, source=source)
        entry = _words(window, first, STATUS_ENTRY.num_bytes)
        if entry[STATUS_ENTRY.word("flag")] == FLAG_BITS:
            rank = _neighbour(wait.site, source) if is_of_server else source
            yield rank, entry[STATUS_ENTRY.word("call")]


def _words(window: torch.Tensor, first: int, num_bytes: int) -> list[int]:
    words: list[int] = window[first : first + num_bytes].view(torch.int32).tolist()
    return words


def _rails_gave_up(wait: GaveUp) -> list[int]:
    """Sources of which the relay has said that they are lost."""
    counts = wait.tensor("rail_counts").view(-1)
    return [
        _rank_on(wait.site, s) for s in range(wait.site.config.topology.num_servers) if int(counts[s]) < 0
    ]


def _rails_go_on(site: Site, arguments: dict[str, Any], servers: range) -> Iterator[int]:
    ends: Region = arguments["ends"]
    number = running_round(arguments)
    for server in servers:
        at = arguments["window"] + ends.offset(zone=arguments["zone"], server=server)
        if int32_at(at, _NUMBER) != number:
            yield _rank_on(site, server)


def _rail_words(wait: GaveUp) -> Iterator[tuple[int, int]]:
    """Yields (rank, call word) of the end flags there are, and of ranks that they say made another call."""
    ends, window = wait.arguments["ends"], wait.tensor("window")
    number = round_of(wait)
    for server in range(ends.extent("server")):
        end = _words(window, ends.offset(zone=wait.zone, server=server), RAIL_END.num_bytes)
        if end[_NUMBER] == number:
            yield _rank_on(wait.site, server), end[_CALL]
            if end[_LOST_CALL] != 0 and end[_LOST] - 1 in wait.site.config.topology.ranks_on(server):
                yield end[_LOST] - 1, end[_LOST_CALL]


def _partials_gave_up(wait: GaveUp) -> list[int]:
    """Ranks of the rail without an end flag, and those without which others had nothing to send."""
    seen = wait.tensor("rail_seen").view(-1)
    missing = set()
    for server in range(wait.site.config.topology.num_servers):
        count = int(seen[server])
        if count < 0:
            missing.add(_rank_on(wait.site, server) if count == -1 else -2 - count)
    return sorted(missing)


def _partials_told(wait: GaveUp) -> dict[int, list[int]]:
    """Ranks without which others of their servers had nothing to send, by who said it."""
    seen = wait.tensor("rail_seen").view(-1)
    servers = range(wait.site.config.topology.num_servers)
    return {_rank_on(wait.site, s): [-2 - int(seen[s])] for s in servers if int(seen[s]) < -1}


FINDERS = {
    DISPATCH_WAIT.name: Finder(
        _entries_gave_up,
        _entries_go_on,
        _entry_words,
        told=_entries_told,
        refused=_entry_refused,
        rank_of=_rank_of_entry,
    ),
    RAIL_SEND.name: POSTS,
    RAIL_RELAY.name: Finder(_rails_gave_up, _rails_go_on, _rail_words, rank_of=_rank_itself),
    RETURNS_LOST.name: POSTS,
    PARTIALS_SEND.name: POSTS,
    RAIL_WAIT.name: Finder(
        _partials_gave_up, _rails_go_on, _rail_words, told=_partials_told, rank_of=_rank_itself
    ),
    POST_STATUS.name: POSTS,
}
