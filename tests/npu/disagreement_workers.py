"""Ranks that make different calls on the stand-in. Each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from typing import Any

import torch

from moe_triton import BufferStateError, ConfigMismatchError, EPBuffer
from tests.distributed.cases import Case, inputs_of
from tests.npu.workers import start
from tests.patience import seconds

Said = tuple[str, str]


def _round(buffer: EPBuffer, case: Case, dtype: torch.dtype, *, int8: bool, weights: bool) -> list[Any]:
    """A dispatch and a combine of what came, as rows of the results' dtype. What must live until they end."""
    inputs = inputs_of(case, buffer.rank, 0)
    x = inputs.x.to(dtype)
    given = inputs.topk_weights if weights else None
    output = buffer.dispatch(x, inputs.topk_idx, given, quantize="int8" if int8 else None)
    y = torch.ones(output.tokens.shape, dtype=dtype)
    return [output, x, y, buffer.combine(y, output.handle)]


def _what_comes_of_it(buffer: EPBuffer) -> Said:
    """What `synchronize` raises, and the next call after it."""
    try:
        buffer.synchronize()
    except ConfigMismatchError as error:
        said = str(error)
    else:
        return "nothing was raised", ""
    try:
        buffer.synchronize()
    except BufferStateError as error:
        return said, str(error)
    return said, "it could be used again"


def differ(rank: int, num_ranks: int, case: Case, change: dict[str, bool]) -> Said:
    """The last rank's second round is another one; nobody waits before it has all been started."""
    _, buffer = start(case, "random", rank, timeout_s=seconds(4.0))
    usual = {"int8": False, "weights": False}
    keep = [_round(buffer, case, torch.bfloat16, **usual)]
    buffer.synchronize()
    how = {**usual, **change} if rank == num_ranks - 1 else usual
    keep.append(_round(buffer, case, torch.bfloat16, **how))
    return _what_comes_of_it(buffer)


def differ_in_graphs(rank: int, num_ranks: int, case: Case) -> Said:
    """Combines in graphs return results of another dtype; the host does nothing between two replays."""
    _, buffer = start(case, "random", rank, timeout_s=seconds(4.0))
    keep = []
    for dtype in (torch.float16, torch.bfloat16):
        keep.append(_round(buffer, case, dtype, int8=True, weights=False))
        buffer.synchronize()
    mine = torch.float16 if rank == num_ranks - 1 else torch.bfloat16
    graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
    with torch.npu.graph(graph):  # type: ignore[attr-defined]
        keep.append(_round(buffer, case, mine, int8=True, weights=False))
    graph.replay()
    buffer.synchronize()  # so far nobody can tell: combine's flags say nothing
    graph.replay()
    return _what_comes_of_it(buffer)


def recorded(rank: int, num_ranks: int, case: Case, change: dict[str, bool]) -> Any:
    """What the flight recorder has before anybody looks at the device, then, and of calls that differ."""
    device, buffer = start(case, "random", rank, timeout_s=seconds(4.0))
    usual = {"int8": False, "weights": False}
    keep = [_round(buffer, case, torch.bfloat16, **usual)]
    device.log.clear()
    before = [run.ended for run in buffer.flight().runs if run.operator != "barrier"]
    is_quiet = "synchronize" not in device.log
    buffer.synchronize()
    behind = [(run.name, run.tokens, run.ended) for run in buffer.flight().runs if run.operator != "barrier"]
    how = {**usual, **change} if rank == num_ranks - 1 else usual
    keep.append(_round(buffer, case, torch.bfloat16, **how))
    said, _ = _what_comes_of_it(buffer)
    flight = buffer.flight()
    last = [(run.name, run.ended) for run in flight.runs][-2:]
    return before, is_quiet, behind, last, flight.why.startswith(f"ConfigMismatchError: {said[:40]}")


def recorded_waits(rank: int, num_ranks: int, case: Case) -> Any:
    """What the flight recorder has of calls' waits, and what calls raised themselves; then without."""
    device, buffer = start(case, "random", rank)
    inputs = inputs_of(case, rank, 0)
    device.log.clear()
    seen, keep = [], []
    for _ in range(3):
        infos = [torch.zeros(num_ranks, dtype=torch.int64) for _ in range(2)]
        output = buffer.dispatch(inputs.x, inputs.topk_idx, performance_info=infos[0])
        y = torch.ones(output.tokens.shape, dtype=torch.bfloat16)
        keep.append([output, y, buffer.combine(y, output.handle, performance_info=infos[1])])
        is_quiet = "synchronize" not in device.log
        buffer.synchronize()
        device.log.clear()
        runs = [run for run in buffer.flight().runs if run.operator != "barrier"]
        seen.append((is_quiet, [run.awaited for run in runs[-2:]], [info.tolist() for info in infos]))
    sums = [round(1e6 * seconds) for seconds in buffer.metrics().waited_s]
    keep.append(_round(buffer, case, torch.bfloat16, int8=False, weights=False))
    buffer.synchronize()
    after = [run.awaited for run in buffer.flight().runs if run.operator != "barrier"][-2:]
    return seen, sums, after
