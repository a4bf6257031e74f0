"""A rank's events in the JSON that Chrome and Perfetto read: a process per rank, a thread per core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_triton import ascendc
from moe_triton.backends.base import TraceEvent
from moe_triton.config import Config
from moe_triton.plan import Hole, Launch, Part, Plan

STEPS = {
    ascendc.TRACE_WRITE: "write",
    ascendc.TRACE_SYNC: "sync",
    ascendc.TRACE_FLAG: "flag",
    ascendc.TRACE_WRITE_AND_FLAG: "write + flag",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where events come from, and what their numbers of peers mean.

    Attributes:
        config: the group's.
        rank: this rank in the group.
        num_blocks: blocks per kernel.
        ranks: the number in torch.distributed's world of each rank of the group.
        exchange_ranks: the same of the two tensor-parallel ranks, where there are two.
    """

    config: Config
    rank: int
    num_blocks: int
    ranks: tuple[int, ...]
    exchange_ranks: tuple[int, ...] = ()

    @property
    def num_entries(self) -> int:
        """Status entries that a dispatch waits for; as many are the sums of rows."""
        return self.config.experts_on(self.rank) * self.config.num_ranks

    @property
    def pid(self) -> int:
        """This rank's number in torch.distributed's world."""
        return self.ranks[self.rank]

    def rank_of_peer(self, launch: Launch, peer: int) -> int:
        """The rank, in the world, that a wait names by its number in a kernel."""
        if ":" in launch.step:  # an exchange between two
            return self.exchange_ranks[peer]
        if launch.kernel is not ascendc.COMBINE_WAIT:
            return self.ranks[peer]
        c = self.config
        if peer < c.num_experts:
            return self.ranks[c.rank_of_expert(peer)]
        return self.ranks[c.rank_of_shared_expert(peer - c.num_experts, self.rank)]


@dataclass(slots=True)
class Call:
    """One run of a plan.

    Attributes:
        plan: what ran.
        number: which dispatch, combine or barrier of its buffer, from 0.
        integers: what the call brought for the plan's integer holes.
        rows: rows that were received (dispatch) or sent back (combine), where they are known.
        failed: the launch that reported something, or None.
    """

    plan: Plan
    number: int
    integers: Mapping[str, int]
    rows: int | None = None
    failed: Launch | None = None

    @property
    def name(self) -> str:
        """As in "dispatch #3", or "dispatch #3 setup" of a half."""
        steps = {launch.step for launch in self.plan.launches}
        half = " setup" if "wait" not in steps else " teardown" if not steps & {"send", "flag"} else ""
        return f"{self.plan.operator} #{self.number}{half}"


def metadata(place: Place, num_dropped: int) -> Iterator[Json]:
    """Names of the process and its threads, and how many calls were dropped."""
    yield _meta(place.pid, 0, "process_name", name=f"rank {place.pid}")
    yield _meta(place.pid, 0, "process_sort_index", sort_index=place.pid)
    if num_dropped:
        labels = f"{num_dropped} oldest calls dropped"
        yield _meta(place.pid, 0, "process_labels", labels=labels, dropped_calls=num_dropped)
    for block in range(place.num_blocks):
        yield _meta(place.pid, block, "thread_name", name=f"core {block}")


def spans(place: Place, calls: Mapping[int, Call], events: Sequence[TraceEvent]) -> list[Json]:
    """One span for each event, and one for each rank that a block waited for in a launch."""
    made = [_span(place, calls[e.call], e) for e in events if e.kind != ascendc.TRACE_WAIT]
    made += _waits(place, calls, (e for e in events if e.kind == ascendc.TRACE_WAIT))
    # A span before those inside it.
    return sorted(made, key=lambda span: (span["ts"], -span["dur"]))


def _span(place: Place, call: Call, event: TraceEvent) -> Json:
    if event.kind == ascendc.TRACE_CALL:
        return _complete(place, event, call.name, "operator", _call_arguments(call))
    launch = call.plan.launches[event.launch]
    if event.kind == ascendc.TRACE_BLOCK:
        arguments = {"of": call.name, "kernel": launch.kernel.name, **_bytes_moved(launch, call.integers)}
        return _complete(place, event, launch.step, launch.stream, arguments)
    return _complete(place, event, STEPS[event.kind], "step", {"of": call.name})


def _waits(place: Place, calls: Mapping[int, Call], events: Iterable[TraceEvent]) -> list[Json]:
    """Combine waits by expert: of the waits for one rank, the longest."""
    longest: dict[tuple[int, int, int, int], TraceEvent] = {}
    for event in events:
        launch = calls[event.call].plan.launches[event.launch]
        rank = place.rank_of_peer(launch, event.peer)
        key = (event.call, event.launch, event.block, rank)
        if key not in longest or longest[key].end_ns < event.end_ns:
            longest[key] = event
    return [
        _complete(place, event, f"wait for rank {rank}", "wait", {"of": calls[call].name, "rank": rank})
        for (call, _, _, rank), event in longest.items()
    ]


def _call_arguments(call: Call) -> Json:
    found: Json = {"number": call.number, "zone": call.plan.zone}
    if "num_tokens" in call.integers:
        found["tokens"] = call.integers["num_tokens"]
    if call.rows is not None:
        found["rows"] = call.rows
    if call.failed:
        found["failed"] = call.failed.step
    return found


def _bytes_moved(launch: Launch, integers: Mapping[str, int]) -> Json:
    """Bytes that all blocks of a launch move, where its kernel knows."""
    count = getattr(launch.kernel, "bytes_moved", None)
    if count is None:
        return {}
    known: dict[str, int] = {}
    for arg, value in zip(launch.kernel.args, launch.values, strict=True):
        if isinstance(value, int):
            known[arg.name] = value
        elif isinstance(value, Hole) and value.name in integers:
            total = integers[value.name]
            known[arg.name] = value.of(total) if isinstance(value, Part) else total
    return {"launch_bytes": count(**known)}


def _complete(place: Place, event: TraceEvent, name: str, category: str, arguments: Json) -> Json:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": event.begin_ns / 1e3,  # microseconds
        "dur": (event.end_ns - event.begin_ns) / 1e3,
        "pid": place.pid,
        "tid": event.block,
        "args": arguments,
    }


def _meta(pid: int, tid: int, kind: str, **arguments: object) -> Json:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
