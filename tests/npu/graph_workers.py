"""What ranks run where calls are captured. Each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

import torch

from moe_triton import DispatchOutput, EPBuffer, reference
from moe_triton.core.errors import BufferStateError, CommunicationTimeoutError
from moe_triton.core.tuning import Tuning
from tests.distributed.cases import Case, Inputs, inputs_of
from tests.npu.workers import start
from tests.patience import seconds


def expected_sums(case: Case, number: int) -> list[torch.Tensor]:
    """What combine gives each rank if every expert returns what it gets."""
    everyone = [inputs_of(case, rank, number) for rank in range(case.config.num_ranks)]
    ids, weights = [i.topk_idx for i in everyone], [i.topk_weights for i in everyone]
    received = reference.dispatch(case.config, [i.x for i in everyone], ids, weights, quantize=None)
    return reference.combine(case.config, [r.tokens for r in received], received, ids, weights)


class Captured:
    """One layer after the other in a graph, with inputs that stay where they are.

    Args:
        buffer: whose calls are captured.
        case: of the inputs' shapes.
        layers: each is how many combines follow its dispatch.
        given: what each dispatch writes over, whose sums then go to tensors that are there, too.
    """

    def __init__(
        self, buffer: EPBuffer, case: Case, layers: Sequence[int], given: DispatchOutput | None = None
    ) -> None:
        self._inputs, self._given = inputs_of(case, buffer.rank, 0), given
        self._buffer = buffer
        self.outputs: list[torch.Tensor] = []
        self._kept: list[object] = []
        self.graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        with torch.npu.graph(self.graph):  # type: ignore[attr-defined]
            for combines in layers:
                self.layer(combines)

    def layer(self, combines: int) -> None:
        """A dispatch, and combines of what came."""
        inputs = self._inputs
        output = self._buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, out=self._given)
        self._kept.append(output)
        for _ in range(combines):
            out = None if self._given is None else torch.empty_like(inputs.x)
            self.outputs.append(
                self._buffer.combine(output.tokens, output.handle, inputs.topk_weights, out=out)
            )

    def replay(self, inputs: Inputs) -> None:
        """Runs it on other inputs of the same shape."""
        for mine, other in zip(
            (self._inputs.x, self._inputs.topk_idx, self._inputs.topk_weights),
            (inputs.x, inputs.topk_idx, inputs.topk_weights),
            strict=True,
        ):
            mine.copy_(other)
        self.graph.replay()


def eager(buffer: EPBuffer, case: Case, number: int) -> bool:
    """A round outside of graphs. Whether it gave the right bits."""
    inputs = inputs_of(case, buffer.rank, number)
    output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
    sums = buffer.combine(output.tokens, output.handle, inputs.topk_weights)
    buffer.synchronize()
    return torch.equal(sums, expected_sums(case, number)[buffer.rank])


def replay_graphs(
    rank: int,
    num_ranks: int,
    case: Case,
    policy: str,
    layers: Sequence[int],
    tuning: Tuning | None = None,
    written_over: bool = False,
) -> list[str]:
    """Graphs and eager rounds in turn; names what is not bit-equal to the reference."""
    wrong = []
    _, buffer = start(case, policy, rank, tuning=tuning)
    with buffer:
        if not eager(buffer, case, 1):
            wrong.append("first eager round")
        given = None
        if written_over:
            inputs = inputs_of(case, rank, 1)
            given = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
            buffer.combine(given.tokens, given.handle)
        graphs = [Captured(buffer, case, layers, given), Captured(buffer, case, [1], given)]
        # Every pair of neighbours: a graph after itself, after the other one and after an eager round.
        for step, which in enumerate("0010110e0e1e00e11"):
            number = 2 + step
            if which == "e":
                if not eager(buffer, case, number):
                    wrong.append(f"step {step}: eager")
                continue
            graph = graphs[int(which)]
            graph.replay(inputs_of(case, rank, number))
            buffer.synchronize()
            want = expected_sums(case, number)[rank]
            wrong += [f"step {step}: graph" for got in graph.outputs if not torch.equal(got, want)]
        # Without waiting in between: replays of one graph on the same inputs.
        for _ in range(3):
            graphs[0].graph.replay()
        buffer.synchronize()
    return wrong


def replay_without_a_peer(
    rank: int, num_ranks: int, case: Case, tuning: Tuning | None
) -> tuple[str, list[int]]:
    """Rank 1 runs the graph once less."""
    _, buffer = start(case, "random", rank, timeout_s=seconds(4.0), tuning=tuning)
    eager(buffer, case, 1)
    captured = Captured(buffer, case, [1])
    inputs = inputs_of(case, rank, 2)
    captured.replay(inputs)
    buffer.synchronize()
    if rank == 1:
        return "", []
    captured.replay(inputs)
    try:
        buffer.synchronize()
    except CommunicationTimeoutError as error:
        return error.operator, list(error.missing_ranks)
    return "nothing was raised", []


def refusals(rank: int, num_ranks: int, case: Case) -> list[str]:
    """What is refused inside a graph."""
    said = []
    _, buffer = start(case, "random", rank)
    with buffer:
        for warm in (False, True):
            try:
                if warm:
                    eager(buffer, case, 1)
                Captured(buffer, case, [1])
            except BufferStateError as error:
                said.append(str(error))
        eager(buffer, case, 2)
    return said


def late_failure(rank: int, num_ranks: int, case: Case, wait: str) -> tuple[str, list[int], str]:
    """Rank 1 leaves after a round. How rank 0 hears of it, and what it can do afterwards."""
    _, buffer = start(case, "random", rank, timeout_s=seconds(4.0))
    eager(buffer, case, 1)
    if rank == 1:
        return "", [], ""
    inputs = inputs_of(case, rank, 2)
    keep = [buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)]  # returns at once
    try:
        if wait == "synchronize":
            buffer.synchronize()
        else:
            torch.npu.synchronize()  # type: ignore[attr-defined]
            keep.append(buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights))
    except CommunicationTimeoutError as error:
        first = f"{error.operator} {error.number}", list(error.missing_ranks)
    else:
        return "nothing was raised", [], ""
    try:
        buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
    except BufferStateError as error:
        return *first, str(error)
    return *first, "it could be used again"


def many_late(rank: int, num_ranks: int, case: Case, rounds: int) -> bool:
    """Rank 1 leaves; rank 0 has many calls under way already, each with a long deadline."""
    _, buffer = start(case, "random", rank, timeout_s=seconds(4.0))
    eager(buffer, case, 1)
    if rank == 1:
        return True
    inputs = inputs_of(case, rank, 2)
    keep = [buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights) for _ in range(rounds)]
    begin = time.monotonic()
    try:
        buffer.synchronize()
    except CommunicationTimeoutError:
        return len(keep) == rounds and time.monotonic() - begin < seconds(4.0) * rounds
    return False


def interrupted(rank: int, num_ranks: int, case: Case) -> tuple[str, bool, str]:
    """Rank 0 gets Ctrl-C while it waits for its device, and that for rank 1."""
    _, buffer = start(case, "random", rank, timeout_s=60.0)
    eager(buffer, case, 1)
    inputs = inputs_of(case, rank, 2)
    if rank == 1:
        torch.distributed.barrier()
        buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        buffer.close()
        return "", False, ""
    keep = [buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)]
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    try:
        buffer.synchronize()
    except KeyboardInterrupt:
        at_once = time.monotonic() - begin < 20.0
    said = "it could be used again"
    try:
        keep.append(buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights))
    except BufferStateError as error:
        said = str(error)
    torch.distributed.barrier()
    for thread in threading.enumerate():  # the device has only one that may drive it at a time
        if thread.name == "moe_triton synchronize":
            thread.join()
    buffer.close()
    return "interrupted", at_once, said


def replay_with_tables(rank: int, num_ranks: int, case: Case) -> list[str]:
    """A graph whose table of replicas is written over between its runs, beside rounds of mapped ids."""
    _, buffer = start(case, "random", rank)
    inputs, experts = inputs_of(case, rank, 1), torch.arange(case.config.num_experts).int()
    x, weights = inputs.x, inputs.topk_weights
    table = torch.stack([torch.ones_like(experts), experts], 1)
    wrong = []

    def a_round(ids: torch.Tensor, eplb_table: torch.Tensor | None) -> list[torch.Tensor]:
        output = buffer.dispatch(x, ids, weights, eplb_table=eplb_table)
        out = buffer.combine(output.tokens, output.handle, weights)
        return [output.tokens_per_expert, output.handle.topk_idx, output.handle.recv_offsets, out]

    with buffer:
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        a_round(inputs.topk_idx, None)
        try:
            with torch.npu.graph(torch.npu.NPUGraph()):  # type: ignore[attr-defined]
                a_round(inputs.topk_idx, table)
        except BufferStateError as error:
            if "map_experts of this kind has not run before" not in str(error):
                wrong.append(str(error))
        else:
            wrong.append("a kernel was compiled inside a graph")
        a_round(inputs.topk_idx, table)
        with torch.npu.graph(graph):  # type: ignore[attr-defined]
            captured = a_round(inputs.topk_idx, table)
        for shift in (0, 3, 1):
            moved = (experts + shift) % len(experts)
            table[:, 1] = moved
            graph.replay()
            buffer.synchronize()
            got = [each.clone() for each in captured]
            ids = inputs.topk_idx
            want = a_round(torch.where(ids < 0, ids, moved[ids.clamp(min=0).long()]), None)
            buffer.synchronize()
            wrong += [
                f"shift {shift}: {n}"
                for n, pair in enumerate(zip(got, want, strict=True))
                if not torch.equal(*pair)
            ]
    return wrong
