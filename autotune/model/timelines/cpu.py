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
from autotune.model.cost import Cost, KernelCost, Table, UnknownWorkError, Work
from autotune.model.kernel_costs.counted.library import Did
from autotune.model.timelines.timeline import Timeline, cpu_walk, walk_ranks
from autotune.model.traffic import Tier, Traffic
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Plan
from moe_triton.layout import WORD_BYTES

TIMES = ("launch_stream_us", "cpu_start_us", "cpu_entry_ns", "cpu_id_ns")
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
        LookupError: a launch of a Triton kernel that is not known here.
    """
    return walk_ranks(
        plan,
        traffics,
        # A rank's blocks are threads that meet: not as cores do, and no time of it has been measured.
        shared(machine, len(traffics)).replaced({"sync_all_us": 0.0}),
        mode="stream",
        kernel_costs=kernel_cost_of,
        streams=cpu_walk,
        begins_us=begins_us,
    )


def kernel_cost_of(kernel: AscendCKernel | TritonKernel) -> KernelCost:
    """The cost of a kernel on a CPU.

    Raises:
        LookupError: there is none.
    """
    if isinstance(kernel, AscendCKernel):
        return _emulated
    if kernel.name not in _TRITON:
        raise LookupError(f"nobody has said how long {kernel.name} takes on a CPU")
    return _TRITON[kernel.name]


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


def _table(work: Work, name: str, size: int) -> np.ndarray:
    """The first integers that an argument points to.

    Raises:
        UnknownWorkError: the model does not know them.
    """
    value = work.arguments[name]
    if not isinstance(value, Table) or value.values is None or value.values.size < size:
        raise UnknownWorkError(f"the model does not know what {name} of {work.kernel.name} points to")
    return value.values[:size]


def _arrange(work: Work, machine: Machine) -> Cost:
    return _copied(work, 2 * work.traffic.num_rows * _row_bytes(work), machine.cpu_gather_gb_per_s)


def _arrange_part(work: Work, machine: Machine) -> Cost:
    share = work.number("num_tokens") / max(1, len(work.traffic.topk_idx)) if "rows" in work.arguments else 0
    entries = work.traffic.recv_counts.size
    taken = _table(work, "rows_taken", entries) - _table(work, "rows_before", entries)
    rows = taken.sum() + share * _own(work)
    return _copied(work, 2 * float(rows) * _row_bytes(work), machine.cpu_gather_gb_per_s)


_TRITON: dict[str, KernelCost] = {
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


def _emulated(work: Work, machine: Machine) -> Cost:
    """An Ascend C kernel, by what a run of it counts: its slowest block.

    Rows on their way through UB are copied once, and all other copies are entries.
    """
    if work.place is None:
        raise UnknownWorkError(f"{work.kernel.name} takes some time as a launch of a plan only")
    steps = work.place.run.ran(work.place.index)[work.place.number].steps
    did, amount = steps.records["did"], steps.records["amount"].astype(float)
    is_row = steps.is_copy & ~steps.is_short
    is_number = (did == Did.LOCAL) | (did == Did.GLOBAL)
    row_ns = np.where(steps.owner >= 0, 1 / machine.cpu_send_gb_per_s, 2 / machine.cpu_gather_gb_per_s)
    kinds = {
        "entries": (steps.is_copy & ~is_row, machine.cpu_entry_ns),
        "ids": (is_number, amount * machine.cpu_id_ns),
        "bytes": (is_row & (did == Did.STORE), amount * row_ns),
    }
    of_blocks = {
        name: np.bincount(steps.block, np.where(which, ns, 0.0), steps.blocks) / 1e3
        for name, (which, ns) in kinds.items()
    }
    slowest = int(sum(of_blocks.values(), np.zeros(steps.blocks)).argmax())
    return Cost(
        {"start": machine.cpu_start_us, **{name: float(us[slowest]) for name, us in of_blocks.items()}}
    )
