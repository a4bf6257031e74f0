"""What launches take on the CPU back end, where ranks are processes that share the cores.

Triton kernels are native code, Ascend C kernels run on an emulation. Each takes a start, and then so long for
each byte, row, entry or id, at rates that a selftest measures on all cores at once. Nothing travels: what is
sent has been copied by the core that sends it, so `Cost.sent` is 0.

It is a second machine for `autotune.model.timelines.timeline`, whose walk and waits it checks against
measured times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.model.constants import Machine
from autotune.model.cost import Body, Cost, Table, UnknownWorkError, Work
from autotune.model.timelines.streams import cpu_walk
from autotune.model.timelines.timeline import Timeline, walk_ranks
from autotune.model.traffic import Tier, Traffic
from moe_triton.core import ascendc
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Plan
from moe_triton.layout import ORIGIN, WORD_BYTES
from moe_triton.schemes.common.ascendc import DISPATCH_OFFSETS
from moe_triton.schemes.direct.ascendc import COUNTS_SEND, DIRECT_SEND
from moe_triton.schemes.fullmesh.ascendc import (
    COMBINE_READY,
    COMBINE_SEND,
    COMBINE_WAIT,
    DISPATCH_RECEIVE,
    DISPATCH_ROWS,
    DISPATCH_SEND,
    DISPATCH_TAKE,
)

TIMES = (
    "launch_stream_us",
    "cpu_start_us",
    "cpu_entry_ns",
    "cpu_id_ns",
)
RATES = ("cpu_send_gb_per_s", "cpu_gather_gb_per_s", "cpu_pack_gb_per_s", "cpu_sum_gb_per_s")


def shared(machine: Machine, ranks: int) -> Machine:
    """A CPU as one of several ranks has it.

    Where they are more than its cores, each takes turns with others, and all that it does takes ranks / cores
    times as long. How long a flag takes to be seen is measured among as many ranks, so it stays.

    Args:
        machine: the CPU.
        ranks: processes on it.
    """
    turns = max(1.0, ranks / machine.cores)
    times = {name: getattr(machine, name) * turns for name in TIMES}
    return machine.replaced({**times, **{name: getattr(machine, name) / turns for name in RATES}})


def tiers(ranks: int, rank: int) -> tuple[Tier, ...]:
    """(EP,) every other rank is as far: in the same memory."""
    return tuple("self" if peer == rank else "sibling" for peer in range(ranks))


def timelines(
    plan: Plan, traffics: Sequence[Traffic], machine: Machine, begins_us: Sequence[float] | None = None
) -> list[Timeline]:
    """The timelines of all ranks of a group on a CPU.

    Args:
        plan: of one of the ranks.
        traffics: of all ranks, by rank.
        machine: the CPU.
        begins_us: when the call begins on each rank; 0 on all if not given.

    Raises:
        LookupError: a launch of a kernel that is not known here.
    """
    return walk_ranks(
        plan,
        traffics,
        # A rank's blocks are threads that meet: not as cores do, and no time of it has been measured.
        shared(machine, len(traffics)).replaced({"sync_all_us": 0.0}),
        mode="stream",
        bodies=body_of,
        streams=cpu_walk,
        begins_us=begins_us,
    )


def body_of(kernel: AscendCKernel | TritonKernel) -> Body:
    """The body of a kernel on a CPU.

    Raises:
        LookupError: there is none.
    """
    known = _TRITON if isinstance(kernel, TritonKernel) else _ASCENDC
    if kernel.name not in known:
        raise LookupError(f"nobody has said how long {kernel.name} takes on a CPU")
    return known[kernel.name]


def _copied(work: Work, num_bytes: float, gb_per_s: float) -> Cost:
    """Bytes by all blocks."""
    return Cost({"bytes": num_bytes / work.blocks / gb_per_s / 1e3})


def _of_ids(work: Work, machine: Machine, ids: float) -> Cost:
    """Loops over tables, on one block."""
    return Cost({"ids": ids * machine.cpu_id_ns / 1e3})


def _route_pack(work: Work, machine: Machine) -> Cost:
    ids = work.number("num_entries")
    packed = _copied(work, _moved(work) - 2 * WORD_BYTES * ids, machine.cpu_pack_gb_per_s)
    return Cost({**packed.parts, **_of_ids(work, machine, ids).parts})


def _moved(work: Work) -> int:
    """Bytes that a kernel reads and writes, as it knows itself."""
    moved = work.kernel.bytes_moved if isinstance(work.kernel, TritonKernel) else None
    if moved is None:
        raise LookupError(f"{work.kernel.name} does not know what it moves")
    return moved(**{name: value for name, value in work.arguments.items() if isinstance(value, int)})


def _row_bytes(work: Work) -> int:
    assert isinstance(work.kernel, TritonKernel)
    return int(work.kernel.constants["ROW_WORDS"]) * WORD_BYTES


def _own(work: Work) -> int:
    """Rows of a rank for itself."""
    return int(work.traffic.received[work.traffic.rank])


def _kept(work: Work) -> int:
    """Of these, those that are not sent."""
    return _own(work) if work.number("kept_rank") >= 0 else 0


def _table(work: Work, name: str, size: int) -> np.ndarray:
    """The first integers that an argument points to.

    Raises:
        UnknownWorkError: the model does not know them.
    """
    value = work.arguments[name]
    if not isinstance(value, Table) or value.values is None or value.values.size < size:
        raise UnknownWorkError(f"the model does not know what {name} of {work.kernel.name} points to")
    return value.values[:size]


def _sent_in_part(work: Work) -> np.ndarray:
    """(A,) whether a combine_send sends the result of each received row: those of a part's tokens."""
    rows, part, parts = work.traffic.num_rows, work.number("part"), work.number("num_parts")
    if parts <= 1:
        return np.ones(rows, bool)
    origins = _table(work, "origins", ORIGIN.num_words * rows).reshape(-1, ORIGIN.num_words)
    tokens, each = origins[:, ORIGIN.word("token")], work.number("part_tokens")
    return np.asarray((tokens >= part * each) & ((part + 1 == parts) | (tokens < (part + 1) * each)))


def _arrange(work: Work, machine: Machine) -> Cost:
    return _copied(work, 2 * work.traffic.num_rows * _row_bytes(work), machine.cpu_gather_gb_per_s)


def _arrange_part(work: Work, machine: Machine) -> Cost:
    share = work.number("num_tokens") / max(1, len(work.traffic.topk_idx)) if "rows" in work.arguments else 0
    entries = work.traffic.recv_counts.size
    taken = _table(work, "rows_taken", entries) - _table(work, "rows_before", entries)
    rows = taken.sum() + share * _own(work)
    return _copied(work, 2 * float(rows) * _row_bytes(work), machine.cpu_gather_gb_per_s)


_TRITON: dict[str, Body] = {
    "route": lambda work, machine: _of_ids(work, machine, work.number("num_entries")),
    "stamps": lambda work, machine: _of_ids(work, machine, work.traffic.num_rows),
    "route_pack": _route_pack,
    "pack": lambda work, machine: _copied(work, _moved(work), machine.cpu_pack_gb_per_s),
    "weighted_sum": lambda work, machine: _copied(work, _moved(work), machine.cpu_sum_gb_per_s),
    "arrange": _arrange,
    "arrange_own": _arrange,
    "arrange_part": _arrange_part,
    "arrange_own_part": _arrange_part,
}


def _emulated(work: Work, machine: Machine, entries: float, num_bytes: float = 0) -> Cost:
    """A start, so much for each row or entry, and bytes of rows."""
    return Cost(
        {
            "start": machine.cpu_start_us,
            "entries": entries / work.blocks * machine.cpu_entry_ns / 1e3,
            "bytes": num_bytes / work.blocks / machine.cpu_send_gb_per_s / 1e3,
        }
    )


def _rows_sent(work: Work, machine: Machine) -> Cost:
    """Of a dispatch: the rows of a launch's tokens, and status entries with the last of them."""
    traffic = work.traffic
    leaving = int(traffic.sent.sum())
    if "kept_rank" in work.arguments and work.number("kept_rank") >= 0:
        leaving -= int(traffic.sent[traffic.rank])
    tokens = traffic.topk_idx.shape[0]
    rows = leaving * work.number("num_tokens") / tokens if tokens else 0.0
    entries = work.number("num_experts") if work.arguments.get("post_status") else 0
    return _emulated(work, machine, rows + entries, rows * work.number("row_bytes"))


def _rows_placed(work: Work, machine: Machine) -> Cost:
    """The same, after all ranks' counts; results' offsets, and own counts, follow."""
    counts = work.traffic.config.num_experts * work.traffic.config.num_ranks
    ids = counts + work.traffic.topk_idx.size + work.traffic.recv_counts.size
    sent = _rows_sent(work, machine)
    return Cost({**sent.parts, "ids": ids / work.blocks * machine.cpu_id_ns / 1e3})


def _results_sent(work: Work, machine: Machine) -> Cost:
    share = _sent_in_part(work).mean() if work.traffic.num_rows else 0.0
    rows = share * work.traffic.num_rows
    kept = share * _own(work) if work.number("kept_rank") >= 0 else 0
    entries = rows * (1 + work.number("flag_rows"))
    return _emulated(work, machine, entries, (rows - kept) * work.number("row_bytes"))


def _every_rank(work: Work, machine: Machine) -> Cost:
    return _emulated(work, machine, work.number("num_ranks"))


def _entries_awaited(work: Work, machine: Machine) -> Cost:
    return _emulated(work, machine, work.number("num_local_experts") * work.traffic.config.num_ranks)


def _rows_awaited(work: Work, machine: Machine) -> Cost:
    return _emulated(work, machine, work.traffic.num_rows - _kept(work))


def _rows_taken(work: Work, machine: Machine) -> Cost:
    return _emulated(work, machine, (work.traffic.num_rows - _kept(work)) / work.number("num_parts"))


def _rows_received(work: Work, machine: Machine) -> Cost:
    rows = work.traffic.num_rows
    copied = _copied(work, 2 * rows * work.number("row_bytes"), machine.cpu_gather_gb_per_s)
    return Cost({**_emulated(work, machine, 2 * rows).parts, **copied.parts})


def _offsets(work: Work, machine: Machine) -> Cost:
    ids = work.number("num_local_experts") * work.number("num_ranks")
    ids += work.traffic.num_rows * work.has("row_slots")
    return Cost({"start": machine.cpu_start_us, "ids": ids / work.blocks * machine.cpu_id_ns / 1e3})


def _results_awaited(work: Work, machine: Machine) -> Cost:
    return _emulated(work, machine, work.number("num_tokens") * work.number("topk"))


def _ready_awaited(work: Work, machine: Machine) -> Cost:
    tokens = work.number("num_tokens") / work.number("num_parts")
    return _emulated(work, machine, tokens * work.number("topk"))


_ASCENDC: dict[str, Body] = {
    DISPATCH_SEND.name: _rows_sent,
    DIRECT_SEND.name: _rows_placed,
    COMBINE_SEND.name: _results_sent,
    COUNTS_SEND.name: _every_rank,
    ascendc.POST_STATUS.name: _every_rank,
    ascendc.DISPATCH_WAIT.name: _entries_awaited,
    DISPATCH_OFFSETS.name: _offsets,
    DISPATCH_ROWS.name: _rows_awaited,
    DISPATCH_TAKE.name: _rows_taken,
    DISPATCH_RECEIVE.name: _rows_received,
    COMBINE_WAIT.name: _results_awaited,
    COMBINE_READY.name: _ready_awaited,
}
