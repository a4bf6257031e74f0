"""What peers have posted in this rank's window: calls that differ, and calls in place of a missing one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from moe_triton.core.ascendc import DISPATCH_WAIT, REPORT_MISMATCH
from moe_triton.core.config import Config
from moe_triton.core.plan import Hole, Launch
from moe_triton.core.records import REPORT
from moe_triton.core.region import Region
from moe_triton.layout import CALL_WORD, FLAG_BITS, NUM_ZONES, WORD_BYTES, DirectLayout, WindowLayout
from moe_triton.layout.call_word import differences, operator_of
from moe_triton.schemes.site import Site

REPORTED_EXPECTED, REPORTED_FOUND = REPORT.word("expected_call"), REPORT.word("found_call")
Memory = Mapping[str, torch.Tensor | int]


def is_exchange(launch: Launch) -> bool:
    """Whether a launch belongs to an exchange between two tensor-parallel ranks."""
    return ":" in launch.step


def differing_fields(
    site: Site, launch: Launch, zone: int, memory: Memory, report: torch.Tensor
) -> list[str]:
    """Each field in which calls differ, with its values and their ranks.

    Args:
        site: where it ran.
        launch: the wait that reported it.
        zone: of its operator.
        memory: what its plan's holes held.
        report: (blocks, words) int32, what it reported.
    """
    mismatches = report[report[:, 0] == REPORT_MISMATCH].tolist()
    expected = mismatches[0][REPORTED_EXPECTED]
    # Entries like this rank's own may have been cleared already.
    came = _counts_of(launch, memory) >= 0
    words = dict.fromkeys(came.any(dim=0).nonzero().flatten().tolist(), expected)
    # The report tells as much of one rank, should later calls have written over its entry.
    words |= {row[1] % came.shape[1]: row[REPORTED_FOUND] for row in mismatches}
    words |= dict(_words_in(_status_of(site, launch), zone, _window(memory, launch)))
    return differences({**words, _own_rank(site, launch): expected})


def posted_instead(
    site: Site,
    operator: str,
    launch: Launch,
    zone: int,
    missing: Sequence[int],
    memory: Memory,
    in_flight: Collection[str],
) -> str:
    """What missing ranks have posted of other operators, as sentences; empty if nothing.

    Args:
        site: where it ran.
        operator: whose flags are missing.
        launch: the wait that reported it.
        zone: of its operator.
        missing: ranks whose flags are.
        memory: what its plan's holes held.
        in_flight: operators that are set up and not torn down: their flags are where they belong.
    """
    if is_exchange(launch) or launch.step == "arrange":
        return ""
    window = _window(memory, launch)
    if launch.kernel is DISPATCH_WAIT:  # who came since then was late, no more
        late = dict(_words_in(_status_of(site, launch), zone, window))
        missing = [rank for rank in missing if rank not in late]
    said: dict[str, list[int]] = {}
    for other, status in _entries(site):
        if other not in (operator, *in_flight):
            for either in range(NUM_ZONES):
                for rank, word in _words_in(status, either, window):
                    ranks = said.setdefault(operator_of(word), [])
                    if rank in missing and rank not in ranks:
                        ranks.append(rank)
    found = [f"rank(s) {sorted(ranks)} posted flags of a {name}" for name, ranks in said.items() if ranks]
    if not (site.combine_waits_for_all or "combine" in (operator, *in_flight)):
        found += _result_flags(site, missing, window)
    rule = "every rank has to make the same calls in the same order"
    return f"Instead, {' and '.join(found)}: {rule}. " if found else ""


def _result_flags(site: Site, missing: Sequence[int], window: torch.Tensor) -> list[str]:
    """The same of flags that stand for one result each: they name their rank only where no other sends it."""
    config, layout = site.config, site.slots_layout
    ks = _flagged(layout.combine_status, window).any(dim=0).any(dim=0).nonzero().flatten().tolist()
    groups = {tuple(r for r in _senders(config, site.rank, k) if r in missing) for k in ks}
    known = sorted({ranks[0] for ranks in groups if len(ranks) == 1})
    unknown = [ranks for ranks in groups if len(ranks) > 1 and not set(ranks) & set(known)]
    said = [f"rank(s) {known} posted flags of a combine"] if known else []
    return said + [f"one of ranks {list(ranks)} posted flags of a combine" for ranks in sorted(unknown)]


def _senders(config: Config, rank: int, k: int) -> Collection[int]:
    """Who may send result ``k`` of a token of ``rank``."""
    if k >= config.num_topk:
        return (config.rank_of_shared_expert(k - config.num_topk, rank),)
    return range(config.num_shared_ranks, config.num_ranks)


def _entries(site: Site) -> Iterator[tuple[str, Region]]:
    """Regions of one entry per rank, and whose they are."""
    layout = site.layout
    yield "barrier", layout.barrier_status
    if isinstance(layout, DirectLayout):
        yield from (("dispatch", layout.counts_status), ("dispatch", layout.rows_status))
        yield "combine", layout.results_status
    else:
        assert isinstance(layout, WindowLayout)
        yield "dispatch", layout.dispatch_status
        yield "combine", layout.peer_status


def _status_of(site: Site, launch: Launch) -> Region:
    """The entries that a wait looks at."""
    values = dict(zip((arg.name for arg in launch.kernel.args), launch.values, strict=True))
    if is_exchange(launch):
        known = [site.exchange.dispatch_status, site.exchange.combine_status]
    else:
        known = [region for _, region in _entries(site)]
    return next(region for region in known if region.words() == values["status"])


def _counts_of(launch: Launch, memory: Memory) -> torch.Tensor:
    """(experts, ranks) what came with the flags that a wait saw, -1 where none came."""
    values = dict(zip((arg.name for arg in launch.kernel.args), launch.values, strict=True))
    hole, experts = values["recv_counts"], values["num_local_experts"]
    assert isinstance(hole, Hole)
    assert isinstance(experts, int)
    counts = memory[hole.name]
    assert isinstance(counts, torch.Tensor)
    return counts.view(experts, -1)


def _own_rank(site: Site, launch: Launch) -> int:
    if not is_exchange(launch):
        return site.rank
    assert site.exchange_rank is not None
    return site.exchange_rank


def _window(memory: Memory, launch: Launch) -> torch.Tensor:
    """The window of this rank that a launch looks at, as int32 words."""
    window = memory["exchange_window" if is_exchange(launch) else "window"]
    assert isinstance(window, torch.Tensor)
    return window[: len(window) // WORD_BYTES * WORD_BYTES].view(torch.int32)


def _flagged(region: Region, window: torch.Tensor) -> torch.Tensor:
    """Which entries of a region have their flag: bool, of the region's extents."""
    extents = [dim.extent for dim in region.dims]
    strides = [dim.stride // WORD_BYTES for dim in region.dims]
    first = window.storage_offset() + region.base // WORD_BYTES
    return window.as_strided(extents, strides, first).cpu() == FLAG_BITS


def _words_in(region: Region, zone: int, window: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(rank, call word) of each rank whose entry for the first expert is there; all have the same word."""
    for rank in _flagged(region, window)[zone, 0].nonzero().flatten().tolist():
        yield rank, int(window[region.offset(zone=zone, source=rank) // WORD_BYTES + CALL_WORD])
