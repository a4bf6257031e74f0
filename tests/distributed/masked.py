"""Groups of which some ranks are masked: what the others do, and what the reference says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import DispatchOutput, EPBuffer, RankMaskedError, reference
from moe_triton.runtime.masks import Paths
from moe_triton.tools.selftest.cases import (
    combined,
    difference,
    dispatched,
    expected_dispatch,
    wrong_received,
)
from tests.distributed.cases import Case, Inputs, experts_of, inputs_of, smooth_scales_of
from tests.distributed.workers import make_buffer


@dataclass(frozen=True)
class Masked:
    """A case of which ranks drop out.

    Attributes:
        case: with its rounds.
        gone: ranks that take part in no more rounds.
        before: rounds in which they do.
        in_between: whether they still dispatch in the first of the others, and are masked before its combine.
        by_itself: whether nobody masks them, but the buffer itself when they do not come.
        dies: whether they are killed when they would begin the first round without them.
        while_waiting: seconds for which the others wait for them before they are masked; 0: it is done
            before.
    """

    case: Case
    gone: tuple[int, ...]
    before: int = 1
    in_between: bool = False
    while_waiting: float = 0.0
    by_itself: bool = False
    dies: bool = False

    def lost(self, rank: int, ids: torch.Tensor) -> torch.Tensor:
        """(T, K) which entries of a rank reach nobody."""
        config, gone = self.case.config, frozenset(self.gone)
        paths = Paths(config, rank, config.scheme == "hierarchy" and config.topology.num_servers > 1)
        lost = [paths.is_lost(config.rank_of_expert(e), gone) for e in range(config.num_experts)]
        return torch.tensor(lost)[ids.clamp(0).long()] & (ids >= 0)

    def everyone(self, number: int, *, dispatching: bool) -> list[Inputs]:
        """What counts of each rank's inputs."""
        masked = number >= self.before
        made = []
        for rank in range(self.case.config.num_ranks):
            inputs = inputs_of(self.case, rank, number)
            ids = inputs.topk_idx
            if masked and not (dispatching and self.in_between and number == self.before):
                if rank in self.gone:
                    inputs = Inputs(inputs.x[:0], ids[:0], inputs.topk_weights[:0])
                else:
                    inputs = replace(inputs, topk_idx=torch.where(self.lost(rank, ids), -1, ids))
            made.append(inputs)
        return made

    def expected(self, number: int) -> tuple[list[reference.Received], list[torch.Tensor]]:
        """What each rank receives, and its sums."""
        case = self.case
        received = expected_dispatch(case, self.everyone(number, dispatching=True))
        rest = self.everyone(number, dispatching=False)
        weights = [i.topk_weights for i in rest] if case.weights else None
        of_rest = expected_dispatch(case, rest)
        y = [experts_of(case, rank, each.tokens) for rank, each in enumerate(of_rest)]
        return received, reference.combine(case.config, y, of_rest, [i.topk_idx for i in rest], weights)


def mask(buffer: EPBuffer, ranks: Collection[int]) -> None:
    """Masks ranks."""
    for rank in ranks:
        buffer.update_mask(rank, True)


def mask_soon(buffer: EPBuffer, of: Masked) -> None:
    """Masks the ranks that are gone now, or from another thread once this one waits for them."""
    if of.by_itself:
        return
    if not of.while_waiting:
        mask(buffer, of.gone)
        return
    communicator = buffer._communicator

    def when_waiting() -> None:
        while not communicator.is_busy:
            time.sleep(0.001)
        time.sleep(of.while_waiting)
        mask(buffer, of.gone)

    threading.Thread(target=when_waiting, daemon=True).start()


def rounds_with_masks(rank: int, num_ranks: int, of: Masked, options: dict[str, Any]) -> list[str]:
    """Runs a case on every rank, as long as it takes part, and names what differs from the reference."""
    case, wrong = of.case, []
    smooth = smooth_scales_of(case)
    with make_buffer(case, **options) as buffer:
        for number in range(case.rounds):
            # The round before is over on all ranks, and whole: who is masked while it still reads raises.
            if number == of.before:
                dist.barrier()
            is_over = rank in of.gone and number >= of.before
            if is_over and not (of.in_between and number == of.before):
                if of.dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                break
            is_first = number == of.before
            if is_first and not of.in_between:
                mask_soon(buffer, of)
            inputs = inputs_of(case, rank, number)
            received, sums = of.expected(number)
            output = dispatched(buffer, case, inputs, smooth)
            # Entries that were sent in vain have been numbered.
            is_late = (of.while_waiting > 0 or of.by_itself) and number >= of.before
            texts = [t for t in wrong_received(output, received[rank]) if not (is_late and "expand_idx" in t)]
            wrong += [f"round {number}: {text}" for text in texts]
            if is_first and of.in_between:
                if rank in of.gone:
                    break
                mask_soon(buffer, of)
            sum_ = combined(buffer, case, inputs, output)
            text = difference("combined", sum_, sums[rank])
            wrong += [f"round {number}: {text}"] if text else []
            lost = (
                of.lost(rank, inputs.topk_idx)
                if number >= of.before
                else torch.zeros_like(inputs.topk_idx) > 0
            )
            if not torch.equal(output.handle.lost[:, : lost.shape[1]], lost):
                wrong.append(f"round {number}: lost")
        if not of.dies:  # nobody gives its memory back while others still go on
            dist.barrier()
    return wrong


def plain(buffer: EPBuffer, inputs: Inputs, *, is_long: bool) -> list[torch.Tensor]:
    """What a rank gets of one dispatch and its combine, in a few forms of each."""
    got: list[torch.Tensor] = []

    def note(output: DispatchOutput, **options: Any) -> None:
        rows = output.handle.num_received()
        weights = inputs.topk_weights if output.handle.results_idx is None else None
        tokens = output.tokens.float() if output.scales is not None else output.tokens
        y = tokens.to(output.handle.dtype)
        sums = buffer.combine(y, output.handle, weights, **options)
        got.extend(
            [tokens[:rows].float() if tokens.dim() == 2 else tokens[:, :0], sums, output.tokens_per_expert]
        )

    x, ids = inputs.x, inputs.topk_idx
    note(
        buffer.dispatch(x, ids, quantize="int8"),
        comm_quantize="int8" if buffer.config.scheme.startswith("fullmesh_") else None,
    )
    note(buffer.dispatch(x, ids))
    if buffer.config.scheme != "direct":
        note(buffer.dispatch(x, ids, active_mask=torch.arange(len(x)) < len(x) - 1))
        note(buffer.dispatch(x, ids, do_expand=False))
        note(buffer.dispatch(x, ids, expert_alignment=4, do_zero_padding=True))
        if not is_long:
            note(buffer.dispatch(x, ids, wait=False).wait())
    buffer.barrier()
    return got


def rounds_of_each_kind(
    rank: int, num_ranks: int, case: Case, gone: tuple[int, ...], tokens: int
) -> list[int]:
    """Which results differ where some are masked from those where these bring nothing, and get nothing."""
    of = Masked(case, gone)
    inputs = inputs_of(replace(case, tokens=(tokens,) * num_ranks), rank, 0)
    without = replace(inputs, topk_idx=torch.where(of.lost(rank, inputs.topk_idx), -1, inputs.topk_idx))
    if rank in gone:
        without = Inputs(inputs.x[:0], inputs.topk_idx[:0], inputs.topk_weights[:0])
    with make_buffer(case) as buffer:
        is_long = tokens > case.config.num_max_tokens_per_rank
        expected = plain(buffer, without, is_long=is_long)
        if rank not in gone:
            mask(buffer, gone)
            got = plain(buffer, inputs, is_long=is_long)
            expected_there = [not torch.equal(one, other) for one, other in zip(got, expected, strict=True)]
        else:
            expected_there = []
        dist.barrier()
    return [number for number, differs in enumerate(expected_there) if differs]


ROUNDS_AFTER, MOST_ROUNDS = 4, 20_000


@dataclass(frozen=True)
class Chaos:
    """A group in which one rank is killed or stopped at some moment.

    Attributes:
        case: whose rounds the others run.
        victim: the rank.
        after_s: seconds of rounds before it happens.
        stopped_s: for how long it is stopped; None for killed.
        timeout_s: of the buffer.
    """

    case: Case
    victim: int
    after_s: float
    stopped_s: float | None
    timeout_s: float


def strike(of: Chaos) -> None:
    """Has this process killed, or stopped for a while, from outside."""
    me = os.getpid()
    steps = (
        f"kill -KILL {me}"
        if of.stopped_s is None
        else f"kill -STOP {me}; sleep {of.stopped_s}; kill -CONT {me}"
    )
    subprocess.Popen(["sh", "-c", f"sleep {of.after_s}; {steps}"], start_new_session=True)


Combining = Callable[[EPBuffer, Case, Inputs, DispatchOutput], torch.Tensor]


def wrong_in_chaos(
    buffer: EPBuffer, case: Case, rank: int, number: int, combining: Combining = combined
) -> list[str]:
    """Runs a round, and names what is not the reference's without what is lost."""
    return round_in_chaos(buffer, case, rank, number, combining)[0]


def round_in_chaos(
    buffer: EPBuffer, case: Case, rank: int, number: int, combining: Combining = combined
) -> tuple[list[str], torch.Tensor]:
    """The same, and the ids (n,) of the entries that are lost."""
    everyone = [inputs_of(case, each, number) for each in range(case.config.num_ranks)]
    inputs = everyone[rank]
    output = dispatched(buffer, case, inputs)
    ranks = case.config.num_ranks
    counts = output.handle.recv_offsets.diff(prepend=torch.zeros(1, dtype=torch.int32)).view(-1, ranks)
    said: list[str] = []
    empty = [
        each
        if (counts[:, source] > 0).any() or source == rank
        else Inputs(each.x[:0], each.topk_idx[:0], each.topk_weights[:0])
        for source, each in enumerate(everyone)
    ]
    texts = wrong_received(output, expected_dispatch(case, empty)[rank])
    said += [f"round {number}: {text}" for text in texts if "expand_idx" not in text]
    sums = combining(buffer, case, inputs, output)
    lost = output.handle.lost[:, : case.config.num_topk]
    everyone[rank] = replace(inputs, topk_idx=torch.where(lost, -1, inputs.topk_idx))
    received = expected_dispatch(case, everyone)
    y = [experts_of(case, each, rows.tokens) for each, rows in enumerate(received)]
    weights = [i.topk_weights for i in everyone] if case.weights else None
    expected = reference.combine(case.config, y, received, [i.topk_idx for i in everyone], weights)[rank]
    if text := difference("combined", sums, expected):
        said.append(f"round {number}: {text}")
    return said, inputs.topk_idx[lost]


def is_over(buffer: EPBuffer, number: int) -> bool:
    """Whether all who go on have done so for some rounds, of which none has more than the others.

    Who finds a rank masked says up to which round it goes. All see that before their next round is over.
    """
    masked = buffer.query_mask().tolist()
    if not any(masked):
        return number > MOST_ROUNDS
    if not buffer.left("end")[buffer.rank]:
        buffer.leave("end", str(number + ROUNDS_AFTER))
    ends = [end for end, is_masked in zip(buffer.left("end"), masked, strict=True) if not is_masked]
    return all(ends) and number >= max(map(int, ends))


def rounds_in_chaos(rank: int, num_ranks: int, of: Chaos) -> tuple[list[str], list[int], str]:
    """Runs rounds until all others have gone on for some: what is wrong, who is masked, what was raised."""
    wrong, raised = [], ""
    with make_buffer(of.case, on_lost="mask", timeout_s=of.timeout_s) as buffer:
        wrong += wrong_in_chaos(buffer, of.case, rank, 0)
        if rank == of.victim:
            strike(of)
        number = 1
        try:
            while not is_over(buffer, number):
                wrong += wrong_in_chaos(buffer, of.case, rank, number % of.case.rounds)
                number += 1
        except RankMaskedError as error:
            raised = str(error)
        masked = buffer.query_mask().nonzero().flatten().tolist()
    return wrong[:5], masked, raised
