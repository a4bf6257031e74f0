"""What peers have posted in this rank's window: calls that differ, and calls in place of a missing one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from moe_triton.core.ascendc import REPORT_MISMATCH
from moe_triton.core.plan import Launch
from moe_triton.core.records import REPORT
from moe_triton.core.region import Region
from moe_triton.layout import CALL_WORD, FLAG_BITS, WORD_BYTES
from moe_triton.layout.call_word import differences, operator_of
from moe_triton.schemes import scheme_type
from moe_triton.schemes.common.waits import GaveUp, counts_of
from moe_triton.schemes.site import Site

REPORTED_EXPECTED, REPORTED_FOUND = REPORT.word("expected_call"), REPORT.word("found_call")


def group_of(site: Site, launch: Launch) -> str:
    """The group's name as messages put it before ranks; empty for the expert-parallel group."""
    return "tensor-parallel " if site.scheme.peers_of(launch).group == "tensor" else ""


def in_words(site: Site, launch: Launch, ranks: Sequence[int]) -> str:
    """Ranks that a launch waits for as messages name them, with their group where it is the other one."""
    group = group_of(site, launch)
    return f"{group}rank(s) {list(ranks)}" if group else site.config.topology.in_words(ranks)


def differing_fields(wait: GaveUp) -> list[str]:
    """Each field in which calls differ, with its values and their ranks.

    Args:
        wait: one that reported a mismatch.
    """
    mismatches = wait.report[wait.report[:, 0] == REPORT_MISMATCH].tolist()
    expected = mismatches[0][REPORTED_EXPECTED]
    finder = scheme_type(wait.site.config).finders[wait.launch.kernel.name]
    own = {wait.site.scheme.peers_of(wait.launch).rank: expected}
    if finder.rank_of is not None and finder.words is not None:
        found = {finder.rank_of(wait, row[1]): row[REPORTED_FOUND] for row in mismatches}
        return differences({**dict(finder.words(wait)), **found, **own})
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


def posted_instead(wait: GaveUp, operator: str, missing: Sequence[int], in_flight: Collection[str]) -> str:
    """What missing ranks have posted for other operators, as sentences; empty if nothing.

    Args:
        wait: one that reported a timeout.
        operator: whose flags are missing.
        missing: ranks whose flags are missing.
        in_flight: pending operators, whose flags are expected.
    """
    scheme, status = wait.site.scheme, wait.arguments.get("status")
    if group_of(wait.site, wait.launch):
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
    found = [f"rank(s) {sorted(ranks)} posted flags of a {name}" for name, ranks in said.items() if ranks]
    if "combine" not in (operator, *in_flight):
        senders = scheme.wordless_flags(lambda region: _flags(region, window), wait.memory)
        found += _wordless(senders, missing)
    rule = "every rank has to make the same calls in the same order"
    return f"Instead, {' and '.join(found)}: {rule}. " if found else ""


def _wordless(senders: Sequence[Collection[int]], missing: Sequence[int]) -> list[str]:
    """Sentences about flags without a call word: they identify a rank only if no other rank sends them."""
    groups = {tuple(rank for rank in ranks if rank in missing) for ranks in senders}
    known = sorted({ranks[0] for ranks in groups if len(ranks) == 1})
    unknown = [ranks for ranks in groups if len(ranks) > 1 and not set(ranks) & set(known)]
    said = [f"rank(s) {known} posted flags of a combine"] if known else []
    return said + [f"one of ranks {list(ranks)} posted flags of a combine" for ranks in sorted(unknown)]


def _window(wait: GaveUp) -> torch.Tensor:
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
