"""Who a rank waits for: in warnings while a wait lasts, and in errors for runs that have failed.

It is read from the flags that a launch polls, from what a timed-out wait left behind, and from what peers
have posted in this rank's window: calls that differ, and calls in place of a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_triton.backends.waits import Waiting
from moe_triton.core import abi
from moe_triton.core.ascendc import REPORT_MASKED, REPORT_MISMATCH, REPORT_STRAY, REPORT_TIMEOUT
from moe_triton.core.errors import (
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    MoeTritonError,
)
from moe_triton.core.logs import log_of
from moe_triton.core.plan import Launch
from moe_triton.core.records import REPORT
from moe_triton.core.region import REGION_DIMS, Region, region_in
from moe_triton.layout import CALL_WORD, FLAG_BITS, WORD_BYTES
from moe_triton.layout.call_word import differences, operator_of
from moe_triton.rendezvous.notes import Culprits, Notes
from moe_triton.schemes import scheme_type
from moe_triton.schemes.common.waits import POSTS, TimedOut, counts_of, int32_at
from moe_triton.schemes.rank_context import RankContext

REPORTED_EXPECTED, REPORTED_FOUND = REPORT.word("expected_call"), REPORT.word("found_call")


def group_of(context: RankContext, launch: Launch) -> str:
    """The group's name as messages put it before ranks; empty for the expert-parallel group."""
    return "tensor-parallel " if context.scheme.peers_of(launch).group == "tensor" else ""


def in_words(context: RankContext, launch: Launch, ranks: Sequence[int]) -> str:
    """Ranks that a launch waits for as messages name them, with their group where it is the other one."""
    group = group_of(context, launch)
    return f"{group}rank(s) {list(ranks)}" if group else context.config.topology.in_words(ranks)


def differing_fields(wait: TimedOut) -> list[str]:
    """Each field in which calls differ, with its values and their ranks.

    Args:
        wait: one that reported a mismatch.
    """
    mismatches = wait.report[wait.report[:, 0] == REPORT_MISMATCH].tolist()
    expected = mismatches[0][REPORTED_EXPECTED]
    finder = scheme_type(wait.context.config).finders[wait.launch.kernel.name]
    own = {wait.context.scheme.peers_of(wait.launch).rank: expected}
    if finder.rank_of is not None and finder.words is not None:
        reported = {finder.rank_of(wait, row[1]): row[REPORTED_FOUND] for row in mismatches}
        return differences({**dict(finder.words(wait)), **reported, **own})
    # Entries like this rank's own may have been cleared already.
    came = counts_of(wait.arguments, wait.memory) >= 0
    words = dict.fromkeys(came.any(dim=0).nonzero().flatten().tolist(), expected)
    # The report still has one rank's word if later calls have overwritten its entry.
    words |= {row[1] % came.shape[1]: row[REPORTED_FOUND] for row in mismatches}
    if finder.words is None:
        words |= dict(_words_in(wait.arguments["status"], wait.zone, _window(wait)))
    else:
        words |= dict(finder.words(wait))
    return differences({**words, **own})


def posted_instead(wait: TimedOut, operator: str, missing: Sequence[int], in_flight: Collection[str]) -> str:
    """What missing ranks have posted for other operators, as sentences; empty if nothing.

    Args:
        wait: one that reported a timeout.
        operator: whose flags are missing.
        missing: ranks whose flags are missing.
        in_flight: pending operators, whose flags are expected.
    """
    scheme, status = wait.context.scheme, wait.arguments.get("status")
    if group_of(wait.context, wait.launch):
        return ""
    window = _window(wait)
    if status and status.kind == "dispatch_status":  # a rank that has arrived since then was only late
        late = dict(_words_in(status, wait.zone, window))
        missing = [rank for rank in missing if rank not in late]
    said: dict[str, list[int]] = {}
    for other, region in scheme.statuses:
        if other not in (operator, *in_flight):
            for zone in range(region.dims[0].extent):
                for rank, word in _words_in(region, zone, window):
                    ranks = said.setdefault(operator_of(word), [])
                    if rank in missing and rank not in ranks:
                        ranks.append(rank)
    statements = [
        f"rank(s) {sorted(ranks)} posted flags of a {name}" for name, ranks in said.items() if ranks
    ]
    if "combine" not in (operator, *in_flight):
        senders = scheme.wordless_flags(lambda region: _flags(region, window), wait.memory)
        statements += _wordless(senders, missing)
    rule = "every rank has to make the same calls in the same order"
    return f"Instead, {' and '.join(statements)}: {rule}. " if statements else ""


def _wordless(senders: Sequence[Collection[int]], missing: Sequence[int]) -> list[str]:
    """Sentences about flags without a call word: they identify a rank only if no other rank sends them."""
    groups = {tuple(rank for rank in ranks if rank in missing) for ranks in senders}
    known = sorted({ranks[0] for ranks in groups if len(ranks) == 1})
    unknown = [ranks for ranks in groups if len(ranks) > 1 and not set(ranks) & set(known)]
    said = [f"rank(s) {known} posted flags of a combine"] if known else []
    return said + [f"one of ranks {list(ranks)} posted flags of a combine" for ranks in sorted(unknown)]


def _window(wait: TimedOut) -> torch.Tensor:
    """The window of this rank that a wait looks at, as int32 words."""
    window = wait.tensor("window")
    return window[: len(window) // WORD_BYTES * WORD_BYTES].view(torch.int32)


def _flags(region: Region, window: torch.Tensor) -> torch.Tensor:
    """The first word of each entry of a region: int32, of the region's extents."""
    extents = [dim.extent for dim in region.dims]
    strides = [dim.stride // WORD_BYTES for dim in region.dims]
    first = window.storage_offset() + region.base // WORD_BYTES
    return window.as_strided(extents, strides, first).cpu()


def _words_in(region: Region, zone: int, window: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(rank, call word) of each rank whose entry for the first expert is there; all have the same word."""
    for rank in (_flags(region, window)[zone, 0] == FLAG_BITS).nonzero().flatten().tolist():
        yield rank, int(window[region.offset(zone=zone, source=rank) // WORD_BYTES + CALL_WORD])


REPORTED_ZONE = REPORT.word("zone")


@dataclass(frozen=True)
class Run:
    """One run of an operator.

    Attributes:
        operator: "dispatch", "combine" or "barrier".
        number: index of the run among those of its operator, from 0.
        memory: contents of its plan's placeholders, at least of those that `missing_ranks` reads.
    """

    operator: str
    number: int
    memory: Mapping[str, torch.Tensor | int]


def failure(
    context: RankContext,
    run: Run,
    launch: Launch,
    code: int,
    report: torch.Tensor,
    fixed: Mapping[str, torch.Tensor],
    in_flight: Collection[str],
    culprits: Callable[[str, Sequence[int]], Culprits] = lambda call, missing: Culprits(tuple(missing)),
) -> tuple[str, MoeTritonError]:
    """Why a communicator is broken, and what to raise.

    Args:
        context: where it ran.
        run: the failed run.
        launch: the launch that reported.
        code: the first code that it reported.
        report: (blocks, words) int32, on the host.
        fixed: contents of the placeholders that are the same in every call.
        in_flight: pending operators.
        culprits: returns who holds up the missing ranks (`moe_triton.rendezvous.notes.Notes.culprits`).
    """
    name = f"{run.operator} number {run.number}"
    memory = {**fixed, **run.memory}
    if code == REPORT_MISMATCH:
        return _mismatch(context, name, launch, memory, report)
    zone = int(report[report[:, 0] != 0][0, REPORTED_ZONE])
    wait = TimedOut(context, launch, zone, memory, report)
    if code != REPORT_TIMEOUT:
        why = f"{name} met {_refused(wait, code)}"
        return why, BufferStateError(f"{why}. Rebuild the buffer on every rank.")
    missing = missing_ranks(wait)
    instead = posted_instead(wait, run.operator, missing, in_flight)
    if group_of(context, launch):
        suspects = Culprits.unknown(missing, "what they wait for in their other group is not seen here")
    else:
        suspects = culprits(name, missing)
    named = in_words(context, launch, suspects.ranks)
    why = f"{name} timed out waiting for {named}"
    return why, CommunicationTimeoutError(
        run.operator,
        run.number,
        zone,
        suspects.ranks,
        f"{_how(wait, missing)} {instead}{suspects.said}Rebuild the buffer once they are back.",
        named,
        uncertain_ranks=suspects.uncertain,
        uncertainty=suspects.why,
    )


def _how(wait: TimedOut, missing: Sequence[int]) -> str:
    """What is known of the missing ranks: relays have given them up, or their flags did not come in time."""
    finder = scheme_type(wait.context.config).finders[wait.launch.kernel.name]
    told = finder.told(wait) if finder.told else {}
    said = [
        f"rank {relay}, which relays for rank(s) {list(ranks)}, got nothing more of them"
        for relay, ranks in sorted(told.items())
    ]
    in_vain = f"{finder.said} {wait.timeout_us / 1e6:g} s"
    if not said:
        return f"{in_vain}."
    if not {rank for ranks in told.values() for rank in ranks}.issuperset(missing):
        said.append(f"of others {in_vain}")
    return f"{'; '.join(said)}."


def _refused(wait: TimedOut, code: int) -> str:
    if code == REPORT_STRAY:
        stray = wait.report[wait.report[:, 0] == REPORT_STRAY]
        first, number = int(stray[:, REPORT.word("first")].min()), int(stray[:, REPORT.word("number")].sum())
        return (
            f"{number} result(s) that its ids and mask do not ask for, the first of token {first}: they are "
            "not those that its dispatch had"
        )
    if code == REPORT_MASKED:
        return "ranks that have masked others than this one has"
    finder = scheme_type(wait.context.config).finders.get(wait.launch.kernel.name)
    if finder is not None and finder.refused is not None:
        return finder.refused(wait)
    sent_by = ""
    if finder is not None and finder.rank_of is not None:
        refused = wait.report[wait.report[:, 0] == code]
        ranks = sorted({finder.rank_of(wait, first) for first in refused[:, 1].tolist()})
        sent_by = f", from {in_words(wait.context, wait.launch, ranks)}"
    return f"a row that names no place in this group{sent_by}; it was not sent"


def _mismatch(
    context: RankContext,
    name: str,
    launch: Launch,
    memory: Mapping[str, torch.Tensor | int],
    report: torch.Tensor,
) -> tuple[str, MoeTritonError]:
    zone = int(report[report[:, 0] == REPORT_MISMATCH][0, REPORTED_ZONE])
    why = f"{name}: {group_of(context, launch)}ranks made different calls"
    wait = TimedOut(context, launch, zone, memory, report)
    lines = "".join(f"\n  {line}" for line in differing_fields(wait))
    return why, ConfigMismatchError(
        f"{why}:{lines}\nMake the same calls on every rank, and rebuild the buffer on every rank."
    )


def missing_ranks(wait: TimedOut) -> list[int]:
    """The ranks that a launch waited for until its deadline, as numbered in the group of its window."""
    peers = wait.context.scheme.peers_of(wait.launch)
    if peers.group == "tensor":
        return [1 - peers.rank]
    return scheme_type(wait.context.config).finders[wait.launch.kernel.name].timed_out(wait)


MAX_PATIENCE_S = 5.0


def patience_s(timeout_s: float) -> float:
    """Seconds before a wait is reported."""
    return min(MAX_PATIENCE_S, timeout_s / 2)


def note_of(context: RankContext, waiting: Waiting, counts: Mapping[str, int], notes: Notes) -> None:
    """Leaves a note of a wait for peers; none of a launch that does not wait for them.

    Args:
        context: where it waits.
        waiting: the launch.
        counts: runs of each operator that have ended.
        notes: of this rank, read by ranks that wait for it.
    """
    ranks = awaited_ranks(context, waiting)
    if ranks is None:
        return
    call = f"{waiting.plan.operator} number {counts[waiting.plan.operator]}"
    if group := group_of(context, waiting.launch):  # whose numbers are others
        call, ranks = f"{call}, for its {group}peer", []
    notes.leave(call, ranks, waiting.pending)


def tell_of(
    context: RankContext,
    waiting: Waiting,
    counts: Mapping[str, int],
    group: str = "",
    masked: Collection[int] = (),
) -> None:
    """Logs a warning about a long wait: operator, number, zone, time and ranks.

    Args:
        context: where it waits.
        waiting: the launch; nothing is logged if it does not wait for peers.
        counts: runs of each operator that have ended.
        group: its short name in lines.
        masked: ranks whose flags are missing, and which nobody waits for.
    """
    ranks = awaited_ranks(context, waiting)
    if ranks is None:
        return
    if masked and not group_of(context, waiting.launch):  # whose numbers are others
        ranks = [rank for rank in ranks if rank not in masked]
        if not ranks:
            return
    operator, zone = waiting.plan.operator, waiting.plan.zone
    log = log_of("waits", rank=context.rank, num_ranks=context.config.num_ranks, group=group)
    log.of_call(operator, counts[operator]).warning(
        "%s number %d (zone %d) has waited %.1f s for %s",
        operator,
        counts[operator],
        zone,
        waiting.seconds,
        in_words(context, waiting.launch, ranks),
    )


def awaited_ranks(context: RankContext, waiting: Waiting) -> list[int] | None:
    """Ranks whose flags have not arrived yet, or None for a launch that does not wait for peers.

    Where a launch posts, none of its blocks may have anything to wait for: queues have room. Blocks may be in
    several phases of a launch, each of which waits for others.

    Args:
        context: where it waits.
        waiting: the launch, which is still running.
    """
    phases = (waiting.launch, waiting.words, waiting.awaited), *waiting.beside
    found = [ranks for phase in phases if (ranks := _awaited_in(context, *phase)) is not None]
    return sorted({rank for ranks in found for rank in ranks}) if found else None


def _awaited_in(
    context: RankContext, launch: Launch, words: Sequence[int], awaited: Mapping[int, tuple[int, int]]
) -> Collection[int] | None:
    """The same of one phase."""
    finder = scheme_type(context.config).finders.get(launch.kernel.name)
    if finder is None or (finder is POSTS and not awaited):
        return None
    peers = context.scheme.peers_of(launch)
    if peers.group == "tensor":
        return [1 - peers.rank]
    arguments = _arguments(launch, words)
    if arguments["zone_at"]:
        arguments["zone"] = int32_at(arguments["zone_at"])
    missing: set[int] = set()
    for first, count in awaited.values():
        missing |= set(finder.pending(context, arguments, range(first, first + count)))
    return missing


def _arguments(launch: Launch, words: Sequence[int]) -> dict[str, Any]:
    """A launch's arguments by name: numbers, addresses and regions."""
    arguments: dict[str, Any] = {}
    for arg, first in abi.word_offsets(launch.kernel.args):
        of_arg = words[first : first + abi.words_of(arg)]
        arguments[arg.name] = region_in(arg.type, of_arg) if arg.type in REGION_DIMS else of_arg[0]
    return arguments
