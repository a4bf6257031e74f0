"""A rank's events in the JSON that Chrome and Perfetto read: a process per rank, a thread per core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_triton.backends.base import TracedCall, TraceEvent
from moe_triton.core import ascendc
from moe_triton.core.config import Config
from moe_triton.core.plan import Hole, Launch, Part
from moe_triton.schemes.fullmesh.ascendc import COMBINE_READY, COMBINE_WAIT

STEPS = {
    ascendc.TRACE_WRITE: "write",
    ascendc.TRACE_SYNC: "sync",
    ascendc.TRACE_FLAG: "flag",
    ascendc.TRACE_WRITE_AND_FLAG: "write + flag",
    ascendc.TRACE_POLL: "poll",
    ascendc.TRACE_POST: "post",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class TracedRank:
    """The rank that events come from, and what their peer numbers mean.

    Attributes:
        config: the group's.
        rank: this rank in the group.
        num_blocks: blocks per kernel.
        ranks: each rank's number in torch.distributed's world.
        exchange_ranks: likewise of the two tensor-parallel ranks, if there are two.
    """

    config: Config
    rank: int
    num_blocks: int
    ranks: tuple[int, ...]
    exchange_ranks: tuple[int, ...] = ()

    @property
    def num_entries(self) -> int:
        """Status entries that a dispatch waits for, and prefix sums of rows."""
        return self.config.experts_on(self.rank) * self.config.num_ranks

    @property
    def pid(self) -> int:
        """This rank's number in torch.distributed's world."""
        return self.ranks[self.rank]

    def rank_of_peer(self, launch: Launch, peer: int) -> int:
        """The rank, as numbered in the world, of a peer number in a kernel."""
        if ":" in launch.step:  # an exchange between two
            return self.exchange_ranks[peer]
        if launch.kernel not in (COMBINE_WAIT, COMBINE_READY):
            return self.ranks[peer]
        c = self.config
        if peer < c.num_experts:
            return self.ranks[c.rank_of_expert(peer)]
        return self.ranks[c.rank_of_shared_expert(peer - c.num_experts, self.rank)]


def metadata(traced: TracedRank, num_dropped: int, *, has_link: bool = False) -> Iterator[Json]:
    """Names of the process and its threads, and the number of dropped calls."""
    yield _meta(traced.pid, 0, "process_name", name=f"rank {traced.pid}")
    yield _meta(traced.pid, 0, "process_sort_index", sort_index=traced.pid)
    if num_dropped:
        labels = f"{num_dropped} oldest calls dropped"
        yield _meta(traced.pid, 0, "process_labels", labels=labels, dropped_calls=num_dropped)
    for block in range(traced.num_blocks):
        yield _meta(traced.pid, block, "thread_name", name=f"core {block}")
    if has_link:
        yield _meta(traced.pid, traced.num_blocks, "thread_name", name="link")


def spans(
    traced: TracedRank, calls: Sequence[TracedCall], events: Iterable[TraceEvent], counts: Mapping[str, int]
) -> list[Json]:
    """Spans of calls, of the blocks of their launches, of their steps, of waits for ranks, and of the link.

    Args:
        traced: the rank that they come from.
        calls: all calls up to now, except the oldest.
        events: of these calls.
        counts: runs of each operator so far.
    """
    named = dict(zip((call.number for call in calls), _names(calls, counts), strict=True))
    by_number = {call.number: call for call in calls}
    made = [
        _complete(traced, 0, call, named[call.number], "operator", _call_arguments(call)) for call in calls
    ]
    waits: list[tuple[TraceEvent, Launch]] = []
    for event in events:
        call, name = by_number[event.call], named[event.call]
        if event.kind == ascendc.TRACE_LINK:
            made.append(_carried(traced, event, name))
            continue
        launch = call.plan.launches[event.launch]
        if event.kind == ascendc.TRACE_WAIT:
            waits.append((event, launch))
        elif event.kind == ascendc.TRACE_BLOCK:
            arguments = {
                "of": name,
                "kernel": launch.kernel.name,
                **_bytes_moved(traced, launch, call.tokens),
            }
            made.append(_complete(traced, event.block, event, launch.step, launch.stream, arguments))
        else:
            made.append(_complete(traced, event.block, event, STEPS[event.kind], "step", {"of": name}))
    made += _waits(traced, named, waits)
    # A span comes before those nested in it.
    return sorted(made, key=lambda span: (span["ts"], -span["dur"]))


def _names(calls: Sequence[TracedCall], counts: Mapping[str, int]) -> list[str]:
    """Like "dispatch #3", or "dispatch #3 setup". Counted from the end, since old calls may be dropped."""
    left, names = dict(counts), []
    for call in reversed(calls):
        operator, half = call.plan.operator, call.plan.half
        left[operator] -= half != " setup"  # as the communicator counts
        names.append(f"{operator} #{left[operator]}{half}")
    return names[::-1]


def _waits(
    traced: TracedRank, named: Mapping[int, str], waits: Iterable[tuple[TraceEvent, Launch]]
) -> list[Json]:
    """One span for each rank that a block waited for. Combine waits by expert: the longest counts."""
    longest: dict[tuple[int, int, int, int], TraceEvent] = {}
    for event, launch in waits:
        key = (event.call, event.launch, event.block, traced.rank_of_peer(launch, event.peer))
        if key not in longest or longest[key].end_ns < event.end_ns:
            longest[key] = event
    return [
        _complete(traced, block, event, f"wait for rank {rank}", "wait", {"of": named[call], "rank": rank})
        for (call, _, block, rank), event in longest.items()
    ]


def _carried(traced: TracedRank, event: TraceEvent, of: str) -> Json:
    """A message on the link, which is behind the cores."""
    rank = traced.ranks[event.peer]
    return _complete(traced, traced.num_blocks, event, f"to rank {rank}", "link", {"of": of, "rank": rank})


def _call_arguments(call: TracedCall) -> Json:
    found: Json = {"zone": call.plan.zone}
    if call.tokens >= 0:
        found["tokens"] = call.tokens
    if call.rows >= 0:
        found["rows"] = call.rows
    if call.traffic:
        for what, number in call.traffic._asdict().items():
            found |= {f"{what} {where}": count for where, count in number._asdict().items()}
    if call.failed:
        found["failed"] = call.failed.step
    return found


def _bytes_moved(traced: TracedRank, launch: Launch, tokens: int) -> Json:
    """Bytes that all blocks of a launch move, if its kernel can tell."""
    count = getattr(launch.kernel, "bytes_moved", None)
    if count is None:
        return {}
    brought = {"num_tokens": tokens, "num_ids": tokens * traced.config.num_topk}
    known: dict[str, int] = {}
    for arg, value in zip(launch.kernel.args, launch.values, strict=True):
        if isinstance(value, int):
            known[arg.name] = value
        elif isinstance(value, Hole) and value.name in brought:
            total = brought[value.name]
            known[arg.name] = value.of(total) if isinstance(value, Part) else total
    return {"launch_bytes": count(**known)}


def _complete(
    traced: TracedRank, block: int, span: TraceEvent | TracedCall, name: str, category: str, arguments: Json
) -> Json:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": span.begin_ns / 1e3,  # microseconds
        "dur": (span.end_ns - span.begin_ns) / 1e3,
        "pid": traced.pid,
        "tid": block,
        "args": arguments,
    }


def _meta(pid: int, tid: int, kind: str, **arguments: object) -> Json:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
