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
    TimedOut,
    counts_of,
    int32_at,
    round_of,
    running_round,
)
from moe_triton.schemes.hierarchy.ascendc import PARTIALS_SEND, RAIL_RELAY, RAIL_SEND, RAIL_WAIT, RETURNS_LOST
from moe_triton.schemes.rank_context import RankContext

_NUMBER, _CALL = RAIL_END.word("number"), RAIL_END.word("call")
_LOST, _LOST_CALL = RAIL_END.word("lost"), RAIL_END.word("lost_call")


def _rank_on(context: RankContext, server: int) -> int:
    """The one of this rank's rail."""
    ranks = context.config.topology.sizes[0]
    return server * ranks + context.rank % ranks


def _relay_on(context: RankContext, server: int) -> int:
    """Who sums for this rank there: the one of its rail, or who stands in for that one."""
    rank = _rank_on(context, server)
    return context.stand_ins.get(rank, rank)


def _neighbour(context: RankContext, number: int) -> int:
    """A rank of this server by its number in it."""
    ranks = context.config.topology.sizes[0]
    return context.rank // ranks * ranks + number


def _is_relayed(context: RankContext, status: Region) -> bool:
    """Whether entries come from relays. Those of a barrier do not."""
    return status.base == context.layout.region("token_counts").base


def _is_of_server(context: RankContext, status: Region) -> bool:
    """Whether entries are those of a server's ranks, and not of all."""
    return status.extent("source") < context.config.num_ranks


def _entries_timed_out(wait: TimedOut) -> list[int]:
    """A source that is lost, as its relay says; a relay that says nothing is missing itself."""
    context, status = wait.context, wait.arguments["status"]
    counts = counts_of(wait.arguments, wait.memory)
    counts = counts[:, : status.extent("source")]  # behind those of a server is what a barrier left
    sources = (counts < 0).any(dim=0).nonzero().flatten().tolist()
    if not _is_relayed(context, status):
        return [
            _neighbour(context, source) if _is_of_server(context, status) else source for source in sources
        ]
    return sorted({source if _is_told(counts, source) else _relay_of(context, source) for source in sources})


def _entries_told(wait: TimedOut) -> dict[int, list[int]]:
    """The sources that are lost as their relays say, by relay."""
    context, counts = wait.context, counts_of(wait.arguments, wait.memory)
    told: dict[int, list[int]] = {}
    if _is_relayed(context, wait.arguments["status"]):
        for source in range(counts.shape[1]):
            if _is_told(counts, source):
                told.setdefault(_relay_of(context, source), []).append(source)
    return told


def _is_told(counts: torch.Tensor, source: int) -> bool:
    return bool((counts[:, source] == LOST_COUNT).any())


def _relay_of(context: RankContext, source: int) -> int:
    """Who passes on what a source sends. A rank that stands in for that one waits for the source itself."""
    relay = _neighbour(context, source % context.config.topology.sizes[0])
    other = context.stand_ins.get(relay, relay)
    return source if other == context.rank != relay else other


def _entries_pending(context: RankContext, arguments: dict[str, Any], places: range) -> Iterator[int]:
    """In the order in which they lie in the window: by source, then by expert."""
    status: Region = arguments["status"]
    is_of_server, is_relayed = _is_of_server(context, status), _is_relayed(context, status)
    for place in places:
        source, expert = divmod(place, status.extent("expert"))
        offset = status.offset(zone=arguments["zone"], expert=expert, source=source)
        if int32_at(arguments["window"] + offset) == FLAG_BITS:
            continue
        if is_relayed:
            yield _relay_of(context, source)
        else:
            yield _neighbour(context, source) if is_of_server else source


def _rank_of_entry(wait: TimedOut, number: int) -> int:
    """Whose it is, numbered by expert and then by source."""
    status: Region = wait.arguments["status"]
    source = number % status.extent("source")
    return _neighbour(wait.context, source) if _is_of_server(wait.context, status) else source


def _entry_refused(wait: TimedOut) -> str:
    """An entry whose count cannot be: of whom, what it says, and what it may say."""
    status: Region = wait.arguments["status"]
    number = int(wait.report[wait.report[:, 0] == REPORT_BAD_ROW][0, REPORT.word("first")])
    count = int(counts_of(wait.arguments, wait.memory).view(-1)[number])
    rank, most = _rank_of_entry(wait, number), wait.arguments["count_end"] - 1
    if _is_of_server(wait.context, status):
        return f"a flag of rank {rank} that counts {count} rows: it must be {most}"
    return (
        f"a count of {count} rows of rank {rank}, which rank {_relay_of(wait.context, rank)} passes on here: "
        f"it must be 0 to {most}; nothing was read beyond"
    )


def _rank_itself(wait: TimedOut, number: int) -> int:
    return number


def _entry_words(wait: TimedOut) -> Iterator[tuple[int, int]]:
    """Yields (rank, call word) of the entries that have come; the wait has cleared those that it expected."""
    status, window = wait.arguments["status"], wait.tensor("window")
    is_of_server = _is_of_server(wait.context, status)
    if not is_of_server:
        expected = int(wait.report[wait.report[:, 0] == REPORT_MISMATCH][0, REPORT.word("expected_call")])
        came = (counts_of(wait.arguments, wait.memory) >= 0).any(dim=0)
        yield from ((source, expected) for source in came.nonzero().flatten().tolist())
    for source in range(status.extent("source")):
        entry = _words(window, status.offset(zone=wait.zone, source=source), STATUS_ENTRY.num_bytes)
        if entry[STATUS_ENTRY.word("flag")] == FLAG_BITS:
            rank = _neighbour(wait.context, source) if is_of_server else source
            yield rank, entry[STATUS_ENTRY.word("call")]


def _words(window: torch.Tensor, first: int, num_bytes: int) -> list[int]:
    words: list[int] = window[first : first + num_bytes].view(torch.int32).tolist()
    return words


def _rails_timed_out(wait: TimedOut) -> list[int]:
    """Sources of which the relay has said that they are lost."""
    counts, context = wait.tensor("rail_counts").view(-1), wait.context
    topology = context.config.topology
    own, servers = topology.servers[context.rank], topology.num_servers
    return sorted(
        _rank_on(context, (own + place) % servers) for place in range(servers) if int(counts[place]) < 0
    )


def _ends_pending(context: RankContext, arguments: dict[str, Any], servers: range) -> Iterator[int]:
    """The servers of which no end flag is there."""
    ends: Region = arguments["ends"]
    number = running_round(arguments)
    for server in servers:
        at = arguments["window"] + ends.offset(zone=arguments["zone"], server=server)
        if int32_at(at, _NUMBER) != number:
            yield server


def _rails_pending(context: RankContext, arguments: dict[str, Any], servers: range) -> Iterator[int]:
    return (_rank_on(context, server) for server in _ends_pending(context, arguments, servers))


def _partials_pending(context: RankContext, arguments: dict[str, Any], servers: range) -> Iterator[int]:
    return (_relay_on(context, server) for server in _ends_pending(context, arguments, servers))


def _rail_words(wait: TimedOut) -> Iterator[tuple[int, int]]:
    """Yields (rank, call word) of the end flags there are, and of ranks that they say made another call."""
    ends, window = wait.arguments["ends"], wait.tensor("window")
    number = round_of(wait)
    for server in range(ends.extent("server")):
        end = _words(window, ends.offset(zone=wait.zone, server=server), RAIL_END.num_bytes)
        if end[_NUMBER] == number:
            yield _rank_on(wait.context, server), end[_CALL]
            if end[_LOST_CALL] != 0 and end[_LOST] - 1 in wait.context.config.topology.ranks_on(server):
                yield end[_LOST] - 1, end[_LOST_CALL]


def _partials_timed_out(wait: TimedOut) -> list[int]:
    """Ranks of the rail without an end flag, and those without which others had nothing to send."""
    seen = wait.tensor("rail_seen").view(-1)
    counts = enumerate(seen[: wait.context.config.topology.num_servers].tolist())
    return sorted(
        {_relay_on(wait.context, s) if count == -1 else -2 - count for s, count in counts if count < 0}
    )


def _partials_told(wait: TimedOut) -> dict[int, list[int]]:
    """Ranks without which others of their servers had nothing to send, by who said it."""
    seen = wait.tensor("rail_seen").view(-1)
    servers = range(wait.context.config.topology.num_servers)
    return {_relay_on(wait.context, s): [-2 - int(seen[s])] for s in servers if int(seen[s]) < -1}


FINDERS = {
    DISPATCH_WAIT.name: Finder(
        _entries_timed_out,
        _entries_pending,
        _entry_words,
        told=_entries_told,
        refused=_entry_refused,
        rank_of=_rank_of_entry,
    ),
    RAIL_RELAY.name: Finder(_rails_timed_out, _rails_pending, _rail_words, rank_of=_rank_itself),
    RAIL_WAIT.name: Finder(
        _partials_timed_out, _partials_pending, _rail_words, told=_partials_told, rank_of=_rank_itself
    ),
    **{kernel.name: POSTS for kernel in (RAIL_SEND, RETURNS_LOST, PARTIALS_SEND, POST_STATUS)},
}
