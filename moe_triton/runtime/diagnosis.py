"""Errors for failed runs: who is missing, read from what a timed-out wait left behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from moe_triton.core.ascendc import REPORT_MISMATCH, REPORT_STRAY, REPORT_TIMEOUT
from moe_triton.core.errors import (
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    MoeTritonError,
)
from moe_triton.core.plan import Launch
from moe_triton.core.records import REPORT
from moe_triton.rendezvous.notes import Culprits
from moe_triton.runtime.disagreement import differing_fields, group_of, in_words, posted_instead
from moe_triton.schemes import scheme_type
from moe_triton.schemes.common.waits import GaveUp
from moe_triton.schemes.site import Site

REPORTED_ZONE = REPORT.word("zone")


@dataclass(frozen=True)
class Run:
    """One run of an operator.

    Attributes:
        operator: "dispatch", "combine" or "barrier".
        number: index of the run among those of its operator, from 0.
        memory: contents of its plan's holes, at least of those that `missing_ranks` reads.
    """

    operator: str
    number: int
    memory: Mapping[str, torch.Tensor | int]


def failure(
    site: Site,
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
        site: where it ran.
        run: the failed run.
        launch: the launch that reported.
        code: the first code that it reported.
        report: (blocks, words) int32, on the host.
        fixed: contents of the holes that are the same in every call.
        in_flight: pending operators.
        culprits: returns who holds up the missing ranks (`moe_triton.rendezvous.notes.Notes.culprits`).
    """
    name = f"{run.operator} number {run.number}"
    memory = {**fixed, **run.memory}
    if code == REPORT_MISMATCH:
        return _mismatch(site, name, launch, memory, report)
    zone = int(report[report[:, 0] != 0][0, REPORTED_ZONE])
    wait = GaveUp(site, launch, zone, memory, report)
    if code != REPORT_TIMEOUT:
        why = f"{name} met {_refused(wait, code)}"
        return why, BufferStateError(f"{why}. Rebuild the buffer on every rank.")
    missing = missing_ranks(wait)
    instead = posted_instead(wait, run.operator, missing, in_flight)
    if group_of(site, launch):
        found = Culprits.unknown(missing, "what they wait for in their other group is not seen here")
    else:
        found = culprits(name, missing)
    named = in_words(site, launch, found.ranks)
    why = f"{name} timed out waiting for {named}"
    return why, CommunicationTimeoutError(
        run.operator,
        run.number,
        zone,
        found.ranks,
        f"{_how(wait, missing)} {instead}{found.said}Rebuild the buffer once they are back.",
        named,
        uncertain_ranks=found.uncertain,
        uncertainty=found.why,
    )


def _how(wait: GaveUp, missing: Sequence[int]) -> str:
    """What is known of the missing ranks: relays have given them up, or their flags did not come in time."""
    finder = scheme_type(wait.site.config).finders[wait.launch.kernel.name]
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


def _refused(wait: GaveUp, code: int) -> str:
    if code == REPORT_STRAY:
        stray = wait.report[wait.report[:, 0] == REPORT_STRAY]
        first, number = int(stray[:, REPORT.word("first")].min()), int(stray[:, REPORT.word("number")].sum())
        return (
            f"{number} result(s) that its ids and mask do not ask for, the first of token {first}: they are "
            "not those that its dispatch had"
        )
    finder = scheme_type(wait.site.config).finders.get(wait.launch.kernel.name)
    if finder is not None and finder.refused is not None:
        return finder.refused(wait)
    sent_by = ""
    if finder is not None and finder.rank_of is not None:
        refused = wait.report[wait.report[:, 0] == code]
        ranks = sorted({finder.rank_of(wait, first) for first in refused[:, 1].tolist()})
        sent_by = f", from {in_words(wait.site, wait.launch, ranks)}"
    return f"a row that names no place in this group{sent_by}; it was not sent"


def _mismatch(
    site: Site, name: str, launch: Launch, memory: Mapping[str, torch.Tensor | int], report: torch.Tensor
) -> tuple[str, MoeTritonError]:
    zone = int(report[report[:, 0] == REPORT_MISMATCH][0, REPORTED_ZONE])
    why = f"{name}: {group_of(site, launch)}ranks made different calls"
    wait = GaveUp(site, launch, zone, memory, report)
    lines = "".join(f"\n  {line}" for line in differing_fields(wait))
    return why, ConfigMismatchError(
        f"{why}:{lines}\nMake the same calls on every rank, and rebuild the buffer on every rank."
    )


def missing_ranks(wait: GaveUp) -> list[int]:
    """The ranks that a launch waited for until its deadline, as numbered in the group of its window."""
    peers = wait.site.scheme.peers_of(wait.launch)
    if peers.group == "tensor":
        return [1 - peers.rank]
    return scheme_type(wait.site.config).finders[wait.launch.kernel.name].gave_up(wait)
