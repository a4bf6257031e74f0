"""What to say of a failed run: who is missing, read from what a timed-out wait left behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from moe_triton.core.ascendc import REPORT_MISMATCH, REPORT_TIMEOUT
from moe_triton.core.config import Config
from moe_triton.core.errors import (
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    MoeTritonError,
)
from moe_triton.core.plan import Launch, Part
from moe_triton.core.records import REPORT
from moe_triton.layout import WindowLayout
from moe_triton.runtime.disagreement import differing_fields, is_exchange, posted_instead
from moe_triton.schemes.site import Site

FLAG = 1.0
REPORTED_ZONE = REPORT.word("zone")


@dataclass(frozen=True)
class Call:
    """One run of an operator.

    Attributes:
        operator: "dispatch", "combine" or "barrier".
        number: the how many-th, from 0.
        memory: what holes of its plan held: those that `missing_ranks` looks at.
        timeout_us: deadline of its waits.
    """

    operator: str
    number: int
    memory: Mapping[str, torch.Tensor | int]
    timeout_us: int


def failure(
    site: Site,
    call: Call,
    launch: Launch,
    code: int,
    report: torch.Tensor,
    fixed: Mapping[str, torch.Tensor],
    in_flight: Collection[str],
    gone: Callable[[list[int]], tuple[list[int], str]] = lambda missing: (missing, ""),
) -> tuple[str, MoeTritonError]:
    """Why a communicator is broken, and what to raise.

    Args:
        site: where it ran.
        call: what ran.
        launch: what reported something.
        code: what it reported first.
        report: (blocks, words) int32, on the host.
        fixed: what the holes held that are the same in every call.
        in_flight: operators that are set up and not torn down.
        gone: of ranks that are missing, those who are not stuck themselves
            (`moe_triton.rendezvous.notes.Notes.gone`).
    """
    name = f"{call.operator} number {call.number}"
    memory = {**fixed, **call.memory}
    if code == REPORT_MISMATCH:
        return _mismatch(site, name, launch, memory, report)
    if code != REPORT_TIMEOUT:
        why = f"{name} met a row that names no place in this group"
        return why, BufferStateError(f"{why}; it was not sent. Rebuild the buffer on every rank.")
    zone = int(report[report[:, 0] != 0][0, REPORTED_ZONE])
    missing = missing_ranks(site, call.operator, zone, launch, memory, report)
    instead = posted_instead(site, call.operator, launch, zone, missing, memory, in_flight)
    group, stuck = "tensor-parallel ", ""
    if not is_exchange(launch):
        group, (missing, stuck) = "", gone(missing)
    why = f"{name} timed out waiting for {group}rank(s) {missing}"
    return why, CommunicationTimeoutError(
        call.operator,
        call.number,
        zone,
        missing,
        f"their flags did not come within {call.timeout_us / 1e6:g} s. {instead}{stuck}"
        f"Rebuild the buffer once they are back.",
    )


def _mismatch(
    site: Site, name: str, launch: Launch, memory: Mapping[str, torch.Tensor | int], report: torch.Tensor
) -> tuple[str, MoeTritonError]:
    zone = int(report[report[:, 0] == REPORT_MISMATCH][0, REPORTED_ZONE])
    group = "tensor-parallel " if is_exchange(launch) else ""
    why = f"{name}: {group}ranks made different calls"
    lines = "".join(f"\n  {line}" for line in differing_fields(site, launch, zone, memory, report))
    return why, ConfigMismatchError(
        f"{why}:{lines}\nMake the same calls on every rank, and rebuild the buffer on every rank."
    )


def missing_ranks(
    site: Site,
    operator: str,
    zone: int,
    launch: Launch,
    memory: Mapping[str, torch.Tensor | int],
    report: torch.Tensor,
) -> list[int]:
    """Whom a launch waited for in vain.

    Args:
        site: where it ran.
        operator: of which one.
        zone: of that run.
        launch: what reported that its deadline passed.
        memory: what its plan's holes held.
        report: (blocks, words) int32, what it reported.
    """
    if is_exchange(launch):
        assert site.exchange_rank is not None
        return [1 - site.exchange_rank]

    def table(name: str) -> torch.Tensor:
        held = memory[name]
        assert isinstance(held, torch.Tensor)
        return held

    config = site.config
    waits_for_ranks = site.combine_waits_for_all and operator == "combine"
    if operator == "barrier" or waits_for_ranks or config.scheme == "direct":
        return missing_in_dispatch(config, table("barrier_counts"))
    if launch.step == "arrange":
        return missing_in_inband(config, report, table("recv_counts"))
    if operator == "dispatch":
        return missing_in_dispatch(config, table("recv_counts"))
    tokens = memory["num_tokens"]
    assert isinstance(tokens, int)
    ids = table("masked_ids" if "mask" in memory else "topk_idx").view(-1, config.num_topk)[:tokens]
    # Of the parts that come after this one nothing has been taken yet.
    end = _end_of_part(launch, tokens)
    return missing_in_combine(site.slots_layout, site.rank, zone, table("window"), ids, report, end)


def _end_of_part(launch: Launch, total: int) -> int:
    """One past the last token of a launch that works on a part of them."""
    sizes = [value for value in launch.values if isinstance(value, Part)]
    return sum(value.of(total) for value in sizes) if sizes else total


def missing_in_dispatch(config: Config, recv_counts: torch.Tensor) -> list[int]:
    """Ranks whose status entries did not come.

    Args:
        config: the group's.
        recv_counts: (E * EP,) int32 as the wait left it: -1 where nothing came.
    """
    by_source = recv_counts.view(-1, config.num_ranks)
    return [int(rank) for rank in (by_source < 0).any(dim=0).nonzero().flatten()]


def missing_in_inband(config: Config, report: torch.Tensor, recv_counts: torch.Tensor) -> list[int]:
    """Ranks whose rows did not all come, where each row carries its flags.

    Args:
        config: the group's.
        report: (blocks, words) int32: code, first entry concerned, how many from there on.
        recv_counts: (E * EP,) int32, rows of each entry: one without rows waits for nobody.
    """
    missing: set[int] = set()
    for code, first, count in report[:, :3].tolist():
        if code == REPORT_TIMEOUT:
            entries = range(first, first + count)
            missing |= {n % config.num_ranks for n in entries if int(recv_counts[n]) > 0}
    return sorted(missing)


def missing_in_combine(
    layout: WindowLayout,
    rank: int,
    zone: int,
    window: torch.Tensor,
    topk_idx: torch.Tensor,
    report: torch.Tensor,
    end: int,
) -> list[int]:
    """Ranks whose results did not come, for the tokens that waits did not get past.

    Args:
        layout: of the window.
        rank: this rank.
        zone: of the combine.
        window: this rank's, flat uint8. Entries of a token that did not complete were not cleared.
        topk_idx: (T, K) int32.
        report: (blocks, words) int32: code, first token concerned, tokens from there to the block's end.
        end: tokens from this one on were not waited for.
    """
    config = layout.config
    region = layout.combine_status
    late = [range(first, first + n) for code, first, n in report[:, :3].tolist() if code == REPORT_TIMEOUT]
    missing: set[int] = set()
    for token in itertools.chain(*late, range(end, len(topk_idx))):
        for k, owner in owners(config, rank, topk_idx[token].tolist()):
            offset = region.offset(zone=zone, token=token, k=k)
            if float(window[offset : offset + 4].view(torch.float32)) != FLAG:
                missing.add(owner)
    return sorted(missing)


def owners(config: Config, rank: int, ids: list[int]) -> list[tuple[int, int]]:
    """(k, rank that computes it) of each result that a token waits for."""
    routed = [
        (k, config.rank_of_expert(expert)) for k, expert in enumerate(ids) if 0 <= expert < config.num_experts
    ]
    shared = [
        (config.num_topk + s, config.rank_of_shared_expert(s, rank)) for s in range(config.num_shared_experts)
    ]
    return routed + shared
