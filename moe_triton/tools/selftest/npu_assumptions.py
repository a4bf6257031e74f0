"""What the npu back end takes from documentation, not yet confirmed on a machine.

``moe-triton selftest --backend npu`` checks these first, in this order. Each is as small as possible, so that
the first failure says where to look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from moe_triton import layout
from moe_triton.backends.npu import library, memfabric, triton_kernels
from moe_triton.backends.npu.executable import NpuExecutable
from moe_triton.backends.npu.runtime import Runtime
from moe_triton.backends.npu.window import MEMFABRIC, window_library
from moe_triton.core import ascendc
from moe_triton.core.errors import WindowError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Launch, Placeholder, Plan, Stream, launch
from moe_triton.core.records import ORIGIN
from moe_triton.core.region import Region, packed, region_of
from moe_triton.core.soc import soc_of
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.schemes.fullmesh.ascendc import INBAND_RECEIVE, INBAND_SEND
from moe_triton.tools.selftest.check import Assumption
from moe_triton.tools.selftest.wires import launch_of_zeros, placeholders, post_entry, wait_for_entries

Trial = Callable[[], str | None]

NUMBER = 4242
WAIT_US = 100_000
MEET_S = 30.0
HIDDEN = 32
TORCH_NPU = "torch_npu 2.14.0"

# Of the exchange of rows with flags in band.
ROUNDS = 32
ROWS = 8
SLOT = layout.SlotLayout(hidden=7168, itemsize=2)
SLOT_BYTES = -(-SLOT.packed_bytes // layout.BLOCK_DATA_BYTES) * layout.BLOCK_BYTES
# Enough for kernels on two streams to overlap. If they do not, a second receive takes the rows.
RECEIVE_US = 5_000


ASSUMPTIONS: list[Assumption] = []
"""In the order in which they are checked."""


def _assumed(name: str, page: str) -> Callable[[Trial], Trial]:
    """Adds a trial to `ASSUMPTIONS`: see `Assumption`."""

    def add(check: Trial) -> Trial:
        ASSUMPTIONS.append(Assumption(name, page, check))
        return check

    return add


class Bench:
    """One device, memory in place of a window, and the launches that are tried on it."""

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.communication = self.runtime.make_stream()
        self.status: Region = region_of(
            "dispatch_status",
            0,
            layout.STATUS_ENTRY_BYTES,
            *packed(layout.STATUS_ENTRY_BYTES, layout.NUM_ZONES, 1, 2),
        )
        self.window = self.tensor(self.status.end // 4)
        self.peers = torch.tensor([self.window.data_ptr()] * 2, dtype=torch.int64, device=self.runtime.device)
        self.count = self.tensor(1)
        self.zone = self.tensor(1)
        self.none = self.tensor(1)

    def tensor(self, elements: int) -> torch.Tensor:
        """Zeros, int32."""
        return torch.zeros(elements, dtype=torch.int32, device=self.runtime.device)

    def run(self, *launches: Launch, two_streams: bool = False) -> int:
        """Launches a plan, waits for it, and returns what it reported."""
        executable = self.executable(*launches, two_streams=two_streams)
        executable.run({})
        code = executable.outcome(wait=True)
        assert code is not None
        return code

    def executable(self, *launches: Launch, two_streams: bool = False) -> NpuExecutable:
        """A compiled plan."""
        fixed = {
            "window": self.window,
            "peers": self.peers,
            "count": self.count,
            "zone": self.zone,
            "none": self.none,
            "received": self.tensor(2),
        }
        plan = Plan("assumption", 0, launches, two_streams)
        return NpuExecutable(plan, fixed, self.runtime, self.communication, two_streams)

    def post(self, rank: int = 0) -> Launch:
        """An entry {1.0, count} to the zone that the cell names, by an Ascend C kernel."""
        return post_entry(self.status, "count", num_ranks=1, rank=rank, zone_at=Placeholder("zone"))

    def wait(self, us: int) -> Launch:
        """For both ranks' entries in that zone."""
        return wait_for_entries(self.status, us, zone_at=Placeholder("zone"))

    def turn(self) -> Launch:
        """The other zone, by the Triton kernel that ends a dispatch; here, one without any row.

        A single program may read the cell that it turns.
        """
        kernel = arrange_kernel(layout.SlotLayout(HIDDEN, 2), has_weight=False, zoned=True)
        values: dict[str, Placeholder | int] = {
            a.name: Placeholder("none") if a.is_pointer else 0 for a in kernel.args
        }
        values |= {"kept_zone": Placeholder("zone"), "zone": Placeholder("zone")}
        return launch("turn", kernel, "compute", 1, **values)

    def entry(self, zone: int, rank: int = 0) -> list[int]:
        """The first two words of a posted entry: the flag's bits, and the number."""
        first = self.status.offset(zone=zone, source=rank) // 4
        words: list[int] = self.window[first : first + 2].cpu().tolist()
        return words


def _differs(actual: object, expected: object) -> str | None:
    return None if actual == expected else f"{actual} instead of {expected}"


@_assumed("the device's name is a SoC of the table", "CANN: Common Compilation Options, --npu-soc")
def _soc() -> str | None:
    return _differs(soc_of(Runtime().soc_name()).arch, "dav-2201")


@_assumed("a tensor over device memory that is not torch's", f"{TORCH_NPU}: torchair utils.py")
def _tensor_at() -> str | None:
    runtime = Runtime()
    memory = torch.arange(64, dtype=torch.int32, device=runtime.device)
    view = runtime.tensor_at(memory.data_ptr(), 256).view(torch.int32)
    view[3] = NUMBER
    runtime.synchronize()
    return _differs((memory[3].item(), int(view.sum())), (NUMBER, int(memory.sum())))


@_assumed("the window library's functions", "memfabric_hybrid, shmem: their Python API references")
def _windows() -> str | None:
    """The window library has the functions that are used."""
    name = window_library()
    if name == "memfabric_hybrid":
        import memfabric_hybrid

        shm: object = memfabric_hybrid.shm
        wanted = ["initialize", "create", "ShmConfig", "ShmDataOpType"]
    else:
        from shmem import core

        shm = core
        wanted = ["get_unique_id", "init", "align", "free", "get_peer_buffer", "multi_instance", "finalize"]
    missing = [each for each in wanted if not hasattr(shm, each)]
    return f"{name} lacks {missing}" if missing else None


# Its pages name A2 alone; A3 posts by it too, where a group has several servers.
@_assumed(
    "memfabric makes windows that are posted from, on A2 and A3",
    "memfabric_hybrid 1.3.0: smem_shm_def.h, SMEMS_DATA_OP_RDMA; smem_shm_aicore_base_rdma.h",
)
def _posting_windows() -> str | None:
    """An object of the type RDMA is there on this product, if kernels post at all.

    That a post arrives is seen where ranks post to each other: the operators' checks that are posted.
    """
    if window_library() != MEMFABRIC or not library.has_posts():
        return None
    try:
        memfabric.allocate(memfabric.GRANULE, Meeting(None, MEET_S), Runtime(), posts=True).free()
    except WindowError as error:
        return str(error)
    return None


@_assumed("a compiled Triton kernel takes addresses", "triton-ascend 3.2.0: backends/ascend/driver.py")
def _triton() -> str | None:
    bench = Bench()
    stream = bench.runtime.handle(bench.runtime.current_stream())
    turn, cells = bench.turn(), {Placeholder("zone"): bench.zone, Placeholder("none"): bench.none}
    assert isinstance(turn.kernel, TritonKernel)
    words = [cells[value].data_ptr() if isinstance(value, Placeholder) else 0 for value in turn.values]
    triton_kernels.launcher(turn.kernel)(1, stream, words)
    bench.runtime.synchronize()
    return _differs(int(bench.zone[0]), 1)


@_assumed("a kernel is launched through ctypes", "CANN: Ascend C, kernel launch by <<<>>>")
def _ascend_c() -> str | None:
    library.library()
    bench = Bench()
    bench.count.fill_(NUMBER)
    bench.run(bench.post())
    return _differs(bench.entry(0), [layout.FLAG_BITS, NUMBER])


@_assumed("npu_stream empties torch_npu's queue", f"{TORCH_NPU}: NPUStream.h, stream(need_empty)")
def _queue() -> str | None:
    """A kernel that bypasses torch_npu's queue sees the effects of earlier work in the queue."""
    bench = Bench()
    for _ in range(200):
        bench.count.add_(1)
    bench.run(*[bench.turn()] * 7, bench.post())
    return _differs(bench.entry(1), [layout.FLAG_BITS, 200])


@_assumed(
    "scalars are read anew in every kernel",
    "CANN: Ascend C, GlobalTensor.GetValue and DataCacheCleanAndInvalid",
)
def _scalar_cache() -> str | None:
    """A scalar that a kernel has read before is read from memory again, also if a Triton kernel wrote it."""
    bench = Bench()
    entries = []
    for number in range(8):
        bench.count.fill_(number)
        bench.run(bench.post(), bench.turn())
        entries.append(bench.entry(number % layout.NUM_ZONES)[1])
    return _differs(entries, list(range(8)))


@_assumed("events order two streams", f"{TORCH_NPU}: npu/streams.py, Event and Stream.wait_event")
def _streams() -> str | None:
    """Events keep two streams in order: turn, post in zone 1, turn, post in zone 0."""
    bench = Bench()
    bench.count.fill_(NUMBER)
    bench.run(bench.turn(), bench.post(0), bench.turn(), bench.post(1), two_streams=True)
    entries = [bench.entry(zone, rank)[1] for zone, rank in ((1, 0), (0, 1), (0, 0), (1, 1))]
    return _differs(entries, [NUMBER, NUMBER, 0, 0])


class InbandExchange:
    """One device that sends rows with flags in band to itself and receives them at the same time.

    Row i goes to expert i, and a block of the receiving kernel waits for each, so that a row is read as soon
    as its flags are seen.
    """

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.communication = self.runtime.make_stream()
        self.window = self._words(ROWS * SLOT_BYTES // 4 + layout.BLOCK_BYTES // 4)
        self.slots: Region = region_of(
            "dispatch_slots",
            -self.window.data_ptr() % layout.BLOCK_BYTES,
            SLOT_BYTES,
            *packed(SLOT_BYTES, 1, 1, ROWS, 1),
        )
        one = (1, layout.STATUS_ENTRY_BYTES)
        self.status = region_of("dispatch_status", 0, layout.STATUS_ENTRY_BYTES, one, one, one)
        self.rows = self._words(ROWS, SLOT.row_bytes // 4)
        self.received = self._words(ROWS, SLOT.row_bytes // 4)
        experts = torch.arange(ROWS, dtype=torch.int32, device=self.runtime.device)
        self._fixed = {
            "window": self.window,
            "peers": torch.tensor([self.window.data_ptr()], dtype=torch.int64, device=self.runtime.device),
            "rows": self.rows,
            "experts": experts,
            "places": self._words(ROWS),
            "offsets": experts + 1,
            "received": self.received,
            "origins": self._words(ROWS, ORIGIN.num_words),
        }

    def run(self, number: int) -> bool:
        """A round with numbers of its own: whether all rows came as they were sent."""
        words = torch.arange(self.rows.numel(), dtype=torch.int32, device=self.runtime.device)
        self.rows.copy_(words.view_as(self.rows) + number * words.numel())
        beside = replace(self._receive("communication", RECEIVE_US), alongside=True)
        launches = (self._send(), beside, self._receive("compute", 0))
        # A new executable for each round: a receive that has timed out once does not wait again.
        plan = Plan("assumption", 0, launches, overlap=True)
        NpuExecutable(plan, self._fixed, self.runtime, self.communication, two_streams=True).run({})
        self.runtime.synchronize()
        return bool((self.received == self.rows).all())

    def _words(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.runtime.device)

    def _send(self) -> Launch:
        return launch_of_zeros(
            "send",
            INBAND_SEND,
            "compute",
            1,
            **placeholders("rows", "peers", "report"),
            row_stride=SLOT.row_bytes,
            row_bytes=SLOT.row_bytes,
            stamp_offset=SLOT.stamp_offset,
            rows_per_token=1,
            topk_idx=Placeholder("experts"),
            expand_idx=Placeholder("places"),
            num_tokens=ROWS,
            topk=1,
            num_experts=ROWS,
            kept_rank=-1,
            slots=self.slots.words(),
            status=self.status.words(),
        )

    def _receive(self, stream: Stream, us: int) -> Launch:
        return launch_of_zeros(
            "receive",
            INBAND_RECEIVE,
            stream,
            ROWS,
            **placeholders("window", "report"),
            recv_offsets=Placeholder("offsets"),
            num_entries=ROWS,
            num_ranks=1,
            capacity=ROWS,
            row_bytes=SLOT.row_bytes,
            scale_offset=SLOT.scale_offset,
            scale_bytes=SLOT.scale_bytes,
            stamp_offset=SLOT.stamp_offset,
            out_rows=Placeholder("received"),
            out_origins=Placeholder("origins"),
            timeout_us=us,
            slots=self.slots.words(),
        )


# No page of the API states it. CANN's own operator is built on it.
@_assumed(
    "512 aligned bytes of a copy arrive with their last 32 last",
    "CANN: ops-transformer, mc2/moe_distribute_dispatch_v2, moe_distribute_dispatch_v2_full_mesh.h",
)
def blocks_arrive_in_order() -> str | None:
    """None if every row was complete when its flags were set, else what was found."""
    exchange = InbandExchange()
    wrong = [number for number in range(ROUNDS) if not exchange.run(number)]
    return f"flags were there before their data in {len(wrong)} of {ROUNDS} rounds" if wrong else None


@_assumed("GetSystemCycle counts 50 a microsecond", "CANN: Ascend C, GetSystemCycle")
def _deadline() -> str | None:
    """A wait for missing flags ends at its deadline, by the core's clock of 50 ticks a microsecond."""
    bench = Bench()
    bench.run(bench.wait(0))
    begin = time.monotonic()
    code = bench.run(bench.wait(WAIT_US))
    seconds = time.monotonic() - begin
    if code != ascendc.REPORT_TIMEOUT:
        return f"report {code} instead of {ascendc.REPORT_TIMEOUT}"
    # It has been compiled and launched once: everything beside the wait takes far less.
    low, high = 0.5e-6 * WAIT_US, 20e-6 * WAIT_US
    return None if low < seconds < high else f"{seconds:.3f} s instead of {WAIT_US / 1e6:g} s"


@_assumed("a copy to pinned memory does not wait", f"{TORCH_NPU}: Tensor.pin_memory, copy_")
def _report_copy() -> str | None:
    """Reports reach the host without a wait."""
    bench = Bench()
    executable = bench.executable(bench.wait(0))
    executable.run({})
    bench.runtime.synchronize()
    return _differs(executable.outcome(wait=False), ascendc.REPORT_TIMEOUT)


@_assumed("launches through ctypes are captured", f"{TORCH_NPU}: npu/graphs.py, class graph")
def _graph() -> str | None:
    """Launches on a captured stream run each time that the graph is replayed."""
    bench = Bench()
    executable = bench.executable(bench.post(), bench.turn())
    executable.run({})
    bench.runtime.synchronize()
    bench.count.fill_(NUMBER)
    replay = bench.runtime.captured(lambda: executable.run({}))
    bench.runtime.synchronize()
    before = int(bench.zone[0])
    for _ in range(3):
        replay()
    bench.runtime.synchronize()
    return _differs((before, int(bench.zone[0]), bench.entry(1)[1]), (1, 0, NUMBER))
