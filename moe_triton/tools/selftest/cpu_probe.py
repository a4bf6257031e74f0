"""Measures by itself what a CPU does in dispatch and combine: the constants of
`autotune.model.timelines.cpu`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from moe_triton.backends.base import Backend, Executable
from moe_triton.kernels import Case, Shape, Sizes, families
from moe_triton.layout import STAMP_BYTES, WORD_BYTES
from moe_triton.tools.selftest.check import HIDDEN
from moe_triton.tools.selftest.kernel_cases import MANY_LAUNCHES, prepare, tiny_plan
from moe_triton.tools.selftest.wires import Wires

# of one rank's call
SIZES = Sizes(tokens=64, num_experts=16, num_ranks=4, unrouted=0.0, first_token=0)
ENTRY_BYTES = 32  # of the smallest row
TURNS = 5
CONSTANTS = (
    *("launch_stream_us", "flag_latency_us", "cpu_start_us", "cpu_entry_ns", "cpu_id_ns"),
    *("cpu_send_gb_per_s", "cpu_gather_gb_per_s", "cpu_pack_gb_per_s", "cpu_sum_gb_per_s"),
)


class CpuProbe:
    """Kernels and windows to measure, on as many ranks as there are cores, and flags of all. Collective.

    Args:
        backend: the CPU's.
        rank: this one of the default group.
        num_ranks: of that group.
        wait_s: timeout of a wait, in seconds.

    Attributes:
        works: whether this rank measures: there is one for each core at most, and the others wait.
    """

    def __init__(self, backend: Backend, rank: int, num_ranks: int, wait_s: float) -> None:
        self._rank, self._active = rank, min(num_ranks, backend.num_blocks(1))
        self._group = dist.new_group(range(self._active))
        self._flags = Wires(backend, ENTRY_BYTES, 1, wait_s)
        self.works = rank < self._active
        if not self.works:
            return
        self._blocks = backend.num_blocks(self._active)
        shape = Shape(hidden=HIDDEN, target=backend.name, zoned=False)
        int8 = replace(shape, features=frozenset({"int8"}))
        gather = Case(families()["arrange"], shape, SIZES)
        self._cases = {
            "pack": Case(families()["pack"], int8, SIZES),
            "sum": Case(families()["weighted_sum"], shape, SIZES),
            "route": Case(families()["route"], shape, SIZES),
            "gather": gather,
        }
        self._ready = {name: prepare(case, backend, self._blocks) for name, case in self._cases.items()}
        self._num_rows = n = int(gather.memory["num_rows"][0])
        self._rows, self._smallest = (
            torch.ones(n, size, dtype=torch.uint8) for size in (2 * HIDDEN + STAMP_BYTES, ENTRY_BYTES)
        )
        self._number, self._none = torch.tensor([n], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        slots = gather.memory["slots"].numel()
        capacity = slots * WORD_BYTES // shape.slot_bytes
        options = {"wait_s": wait_s, "blocks": self._blocks, "group": self._group}
        self._wires = Wires(backend, self._rows.shape[1], capacity, **options)
        self._entries = Wires(backend, ENTRY_BYTES, n, **options)
        self._launches = {number: tiny_plan(backend, number) for number in (1, MANY_LAUNCHES)}
        # What arrives in the window is what is gathered.
        self._ready["gather"].bindings["slots"] = self._wires.zone_of(0).view(torch.int32)[:slots]

    def measure(self) -> dict[str, float]:
        """One pass: figures by constant; none of a rank that does not measure."""
        taken: list[dict[str, float]] = []
        for _ in range(TURNS + 1):
            dist.barrier()
            if self.works:
                taken.append(self._turn())
            dist.barrier()
            flags_us = self._flag_us()
            if self.works:
                taken[-1]["flags"] = flags_us
        if not taken:
            return {}
        warm = taken[1:]
        try:
            return self._constants({name: statistics.median(us[name] for us in warm) for name in warm[0]})
        except ValueError:  # others had the core half of the time: whatever disturbs makes it longer
            return self._constants({name: min(us[name] for us in warm) for name in warm[0]})

    def close(self) -> None:
        """Gives the windows back. Collective."""
        dist.barrier()
        self._flags.close()
        if self.works:
            self._wires.close()
            self._entries.close()
            dist.destroy_process_group(self._group)

    def _turn(self) -> dict[str, float]:
        """us of each, once. In the order of an operator, so that each finds the caches as it would there."""
        us = {"pack": self._kernel("pack"), "route": self._kernel("route")}
        us["send"] = self._sent(self._wires, self._rows, self._number)
        us["nothing"] = self._sent(self._entries, self._smallest, self._none)
        us["entries"] = self._sent(self._entries, self._smallest, self._number)
        us |= {f"{number} launches": _wall_us(run) for number, run in self._launches.items()}
        us["gather"] = self._kernel("gather")
        us["sum"] = self._kernel("sum")
        return us

    def _constants(self, us: dict[str, float]) -> dict[str, float]:
        per_block = self._num_rows / self._blocks
        entries_us, rows_us = us["entries"] - us["nothing"], us["send"] - us["entries"]
        if rows_us <= 0:
            raise ValueError(f"rows took no longer than entries: {us} (us)")
        route = self._cases["route"].memory["topk_idx"].numel()
        row_bytes = 2 * HIDDEN
        gathered = 2 * self._num_rows * row_bytes
        launches_us = us[f"{MANY_LAUNCHES} launches"] - us["1 launches"]
        return {
            "launch_stream_us": max(0.0, launches_us / (MANY_LAUNCHES - 1)),
            "flag_latency_us": max(0.0, us["flags"] - 2 * us["nothing"]),
            "cpu_start_us": us["nothing"],
            "cpu_entry_ns": max(0.0, entries_us) / per_block * 1e3,
            "cpu_id_ns": us["route"] * 1e3 / route,
            "cpu_send_gb_per_s": per_block * row_bytes / rows_us / 1e3,
            "cpu_gather_gb_per_s": gathered / self._blocks / us["gather"] / 1e3,
            "cpu_pack_gb_per_s": self._rate("pack", us),
            "cpu_sum_gb_per_s": self._rate("sum", us),
        }

    def _rate(self, name: str, us: dict[str, float]) -> float:
        moved = self._cases[name].bytes_moved
        assert moved is not None
        return moved / self._blocks / us[name] / 1e3

    def _kernel(self, name: str) -> float:
        ready = self._ready[name]
        ready.executable.run(ready.bindings)
        return _last_us(ready.executable)

    def _sent(self, wires: Wires, rows: torch.Tensor, number: torch.Tensor) -> float:
        wires.send((self._rank + 1) % self._active, rows, number=number)
        return _last_us(wires.last)

    def _flag_us(self) -> float:
        """A barrier of all ranks, right after one that has brought them together."""
        self._flags.post_and_wait()
        self._flags.post_and_wait()
        return _last_us(self._flags.last)


def _last_us(executable: Executable) -> float:
    return sum(executable.durations_us().values())


def _wall_us(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
