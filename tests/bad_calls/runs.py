"""Bad calls on processes: on all ranks at once, and on one while the others make the good call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import MoeTritonError
from tests.bad_calls.cases import BadCall, bad_calls
from tests.bad_calls.chains import Arguments, Chain, Outputs, chains, new_buffer
from tests.bad_calls.locals import construction, steps
from tests.patience import seconds

# Bad calls between two good rounds.
BATCH = 20
# Rounds until native code takes over: it has a plan for either zone then.
WARM_UP = 4
# Far less than the time-outs of what is called, and more than a busy machine takes.
AT_ONCE_S = 10.0


class Outcome(NamedTuple):
    """What a rank found.

    Attributes:
        names: of the bad calls that it made.
        wrong: what was not as it must be.
    """

    names: list[str]
    wrong: list[str]


def run_chain(rank: int, num_ranks: int, name: str, alone: bool, stride: int = 1) -> Outcome:
    """Makes the bad calls of a chain, and good rounds between them.

    Args:
        rank: this one.
        num_ranks: of the group.
        name: of the chain.
        alone: one rank makes each bad call and then the good one, which the others make at once; otherwise
            all ranks make the bad calls.
        stride: only every ``stride``-th of the bad calls is made.
    """
    with _everything(rank, num_ranks) as known:
        chain = known[name]
        for _ in range(WARM_UP):
            expected = _finish(chain, [])
        outcome = Outcome([], [])
        for index in range(len(chain)):
            calls = _calls_of(chain, index, outcome, expected)[::stride]
            batch = 1 if alone else BATCH
            for first in range(0, len(calls), batch):
                outputs = _begin(chain, index)
                good = chain[index].arguments(outputs)
                if not alone or rank == first % num_ranks:
                    _make(calls[first : first + batch], good, outcome)
                result = _finish(chain, outputs, good)
                if not _same(result, expected):
                    outcome.wrong.append(f"after {calls[first].name}: other bits")
        return outcome


@contextmanager
def _everything(rank: int, num_ranks: int) -> Iterator[dict[str, Chain]]:
    ops.configure(relaxed=True, timeout_s=seconds(20.0))
    try:
        with new_buffer(num_ranks) as buffer:
            yield chains(rank, num_ranks, buffer)
    finally:
        ops.release(ops.group_name())
        ops.configure()


def run_locals(rank: int, num_ranks: int, folder: str) -> Outcome:
    """Makes the bad calls of functions that no other rank takes part in, and then good ones."""
    with _everything(rank, num_ranks) as known:
        expected = _finish(known["EPBuffer"], [])
        outcome = Outcome([], [])
        for step in steps(num_ranks, known["EPBuffer"][0].function.__self__, folder):  # type: ignore[attr-defined]
            good = step.arguments([])
            _make(bad_calls(step, good), good, outcome)
            step.function(**good)
        if not _same(_finish(known["EPBuffer"], []), expected):
            outcome.wrong.append("after local calls: other bits")
        return outcome


def run_constructions(rank: int, num_ranks: int, folder: str, alone: bool, stride: int = 1) -> Outcome:
    """Makes bad constructions on all ranks, or on one while the others make a good one; then good ones.

    What a rank refuses, its peers are told of; but for its group, without which nobody can be told.
    """
    step = construction(num_ranks, folder)
    good = step.arguments([])
    step.function(**good).close()
    outcome = Outcome([], [])
    calls = bad_calls(step, good)
    if alone:
        calls = [call for call in calls if call.declared.name != "group"]
    for number, call in enumerate(calls[::stride]):
        if not alone or rank == number % num_ranks:
            _make([call], good, outcome)
        else:
            outcome.wrong.extend(_wrong_of_peer(call, good))
    with new_buffer(num_ranks) as buffer:
        chain = chains(rank, num_ranks, buffer)["EPBuffer"]
        if not _same(_finish(chain, []), _finish(chain, [])):
            outcome.wrong.append("after constructions: other bits")
    return outcome


def _wrong_of_peer(call: BadCall, good: Arguments) -> list[str]:
    """What is wrong with what a rank is told when another refuses."""
    begin = time.monotonic()
    try:
        call.step.function(**good).close()
    except MoeTritonError:
        late = time.monotonic() - begin
        return [f"{call.name}: peers wait {late:.1f} s"] if late > AT_ONCE_S else []
    return [f"{call.name}: peers are not told"]


def _calls_of(chain: Chain, index: int, outcome: Outcome, expected: list[torch.Tensor]) -> list[BadCall]:
    outputs = _begin(chain, index)
    good = chain[index].arguments(outputs)
    if not _same(_finish(chain, outputs, good), expected):
        outcome.wrong.append(f"before {chain[index].name}: other bits")
    return bad_calls(chain[index], good)


def _begin(chain: Chain, index: int) -> Outputs:
    """What the steps before one return."""
    outputs: Outputs = []
    for step in chain[:index]:
        outputs.append(step.function(**step.arguments(outputs)))
    return outputs


def _finish(chain: Chain, outputs: Outputs, good: Arguments | None = None) -> list[torch.Tensor]:
    """Goes on to the end of a chain, and returns what its last step returned."""
    for step in chain[len(outputs) :]:
        given = step.arguments(outputs) if good is None else good
        outputs = [*outputs, step.function(**given)]
        good = None
    return _tensors_of(outputs[-1])


def _tensors_of(output: Any) -> list[torch.Tensor]:
    if output is None:
        return []
    return [output] if isinstance(output, torch.Tensor) else list(output)


def _same(have: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(have) == len(want) and all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def _make(calls: list[BadCall], good: Arguments, outcome: Outcome) -> None:
    for call in calls:
        outcome.names.append(call.name)
        wrong = call.wrong(good)
        if wrong:
            outcome.wrong.append(wrong)
