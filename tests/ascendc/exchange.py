"""Two ranks that exchange rows: exchange_send, post_status, dispatch_wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_triton.core.region import Dim, Region
from moe_triton.layout import NUM_ZONES, STATUS_ENTRY_BYTES, UB_ALIGN, align

from .call_words import NOT_POSTING, expecting, posting
from .case import PATIENT_US, WrongResultError, check_reports
from .library import Library, address
from .memory import GARBAGE, Guarded, across_lines
from .ranks import Ranks

STATUS_BYTES = 1024


@dataclass(frozen=True)
class ExchangeCase:
    """What the two ranks exchange.

    Attributes:
        rows: rows that each of them sends.
        first_row: the first of them; None passes no pointer.
        row_bytes: a multiple of 32.
        num_scales: of each row.
        header_words: words that go along.
        spare: rows behind those that are sent, and slots behind those that are filled.
    """

    rows: tuple[int, int] = (5, 3)
    first_row: int | None = 2
    row_bytes: int = 160
    num_scales: int = 1
    header_words: int = 5
    spare: int = 2
    blocks: int = 2
    rounds: int = 2
    timeout_us: int = PATIENT_US

    @property
    def capacity(self) -> int:
        """Rows that each rank has, and slots."""
        return max(self.rows) + (self.first_row or 0) + self.spare

    @property
    def scale_stride(self) -> int:
        return align(4 * self.num_scales, UB_ALIGN)

    @property
    def headers(self) -> Region:
        stride = -(-4 * self.header_words // 32) * 32 + 32
        return Region(
            "exchange_headers",
            STATUS_BYTES,
            4,
            (Dim("zone", NUM_ZONES, stride), Dim("word", max(self.header_words, 1), 4)),
        )

    @property
    def slots(self) -> Region:
        base = -(-(STATUS_BYTES + NUM_ZONES * self.headers.stride("zone")) // 512) * 512
        stride = self.row_bytes + self.scale_stride + 64
        return Region(
            "indexed_slots",
            base,
            stride,
            (Dim("zone", NUM_ZONES, self.capacity * stride), Dim("index", self.capacity, stride)),
        )

    @property
    def status(self) -> Region:
        entry = STATUS_ENTRY_BYTES
        return Region(
            "dispatch_status",
            0,
            entry,
            (Dim("zone", NUM_ZONES, 4 * entry), Dim("expert", 1, 2 * entry), Dim("source", 2, entry)),
        )


@dataclass
class Load:
    """What one rank sends in one round."""

    rows: np.ndarray
    scales: np.ndarray
    header: np.ndarray
    first: np.ndarray
    number: np.ndarray


class Exchange:
    """Both ranks of a case."""

    def __init__(self, library: Library, case: ExchangeCase, seed: int = 0) -> None:
        self.library, self.case, self.seed = library, case, seed
        self.windows = [Guarded((case.slots.end,), align=512) for _ in range(2)]
        for window in self.windows:
            window.array[:STATUS_BYTES] = 0
        self.peers = across_lines([address(w.array) for w in self.windows])
        self._ranks = Ranks(library, seed, 2)

    def run(self) -> None:
        """Every round on both ranks."""
        self._ranks.run(self._rounds)
        for window in self.windows:
            window.check_guards()
            if window.array[:STATUS_BYTES].any():
                raise WrongResultError("a flag was left behind")
        for rank in range(2):
            self._check_untouched(rank)

    def _check_untouched(self, rank: int) -> None:
        """Bytes that belong to no row, scale or header."""
        case = self.case
        window = self.windows[rank].array.copy()
        window[:STATUS_BYTES] = GARBAGE
        for zone, index in np.ndindex(NUM_ZONES, case.rows[1 - rank]):
            at = case.slots.offset(zone=zone, index=index)
            window[at : at + case.row_bytes + case.scale_stride] = GARBAGE
        for zone in range(NUM_ZONES):
            at = case.headers.offset(zone=zone)
            window[at : at + 4 * case.header_words] = GARBAGE
        if (window != GARBAGE).any():
            raise WrongResultError(f"byte {np.flatnonzero(window != GARBAGE)[0]} of rank {rank} was written")

    def _rounds(self, rank: int) -> None:
        for number in range(self.case.rounds):
            zone = number % NUM_ZONES
            load = self.load(rank, number)
            check_reports(self.send(rank, load, zone))
            check_reports(self.post(rank, load, zone, number))
            counts, report = self.wait(rank, zone, number)
            check_reports(report)
            self.check(rank, number, zone, counts)

    def load(self, rank: int, number: int) -> Load:
        case = self.case
        rng = np.random.default_rng((self.seed, number, rank))
        return Load(
            rows=rng.integers(0, 256, (case.capacity, case.row_bytes), dtype=np.uint8),
            scales=rng.random((case.capacity, case.num_scales), dtype=np.float32),
            header=rng.integers(0, 1 << 30, case.header_words, dtype=np.int32),
            first=np.array([case.first_row or 0], dtype=np.int32),
            number=np.array([case.rows[rank]], dtype=np.int32),
        )

    def send(self, rank: int, load: Load, zone: int, **changes: object) -> np.ndarray:
        case = self.case
        arguments: dict[str, object] = {
            "rows": load.rows,
            "row_bytes": case.row_bytes,
            "scales": load.scales if case.num_scales else 0,
            "scale_offset": case.row_bytes,
            "scale_bytes": 4 * case.num_scales,
            "first_row": 0 if case.first_row is None else load.first,
            "num_rows": load.number,
            "capacity": case.capacity,
            "header": load.header if case.header_words else 0,
            "header_words": case.header_words,
            "peers": self.peers,
            "peer": 1 - rank,
            "zone": zone,
            "slots": case.slots,
            "headers": case.headers,
        }
        return self.library.launch("exchange_send", case.blocks, **{**arguments, **changes})

    def post(self, rank: int, load: Load, zone: int, number: int = 0) -> np.ndarray:
        return self.library.launch(
            "post_status",
            1,
            peers=self.peers,
            num_ranks=2,
            count=load.number,
            rank=rank,
            zone=zone,
            **posting("E", number),
            **NOT_POSTING,
            status=self.case.status,
        )

    def wait(self, rank: int, zone: int, number: int = 0) -> tuple[list[int], np.ndarray]:
        counts = np.zeros(2, dtype=np.int32)
        report = self.library.launch(
            "dispatch_wait",
            1,
            window=self.windows[rank].array,
            recv_counts=counts,
            waited_us=0,
            num_local_experts=1,
            zone=zone,
            timeout_us=self.case.timeout_us,
            status=self.case.status,
            **expecting("E", number),
        )
        return counts.tolist(), report

    def check(self, rank: int, number: int, zone: int, counts: list[int]) -> None:
        if counts != list(self.case.rows):
            raise WrongResultError(f"counts {counts} instead of {self.case.rows}")
        got = self.windows[rank].array.copy()
        want = got.copy()
        self.lay(want, self.load(1 - rank, number), zone, counts[1 - rank])
        if not np.array_equal(got, want):
            raise WrongResultError(f"byte {np.flatnonzero(got != want)[0]} of rank {rank} differs")

    def lay(self, window: np.ndarray, load: Load, zone: int, number: int) -> None:
        """Puts a load where it belongs in a window."""
        case = self.case
        first = int(load.first[0])
        for i in range(number):
            at = case.slots.offset(zone=zone, index=i)
            window[at : at + case.row_bytes] = load.rows[first + i]
            at += case.row_bytes
            window[at : at + 4 * case.num_scales] = load.scales[first + i].reshape(-1).view(np.uint8)
        at = case.headers.offset(zone=zone)
        window[at : at + 4 * case.header_words] = load.header.view(np.uint8)
