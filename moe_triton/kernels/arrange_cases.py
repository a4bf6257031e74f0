"""Inputs of `moe_triton.kernels.arrange` for the gate, benchmarks and tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Hole
from moe_triton.core.records import STATUS_ENTRY
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.kernels.arrange import OwnRows, arrange_kernel
from moe_triton.kernels.cases import F32, I32, Draw, Family, Features, Inputs, Shape, blank
from moe_triton.layout import ORIGIN, UB_ALIGN, WORD_BYTES, SlotLayout
from moe_triton.reference import expand_index


def _received(r: Draw, keeps_own: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows from each rank for each expert (E, W); of each result, its number within its expert (T * K)."""
    received = r.integers(0, r.most_rows + 1, r.num_local, r.num_ranks)
    if keeps_own:
        own = r.ids[r.ids >= 0].bincount(minlength=r.num_experts).view(r.num_ranks, r.num_local)
        received[:, r.rank] = own[r.rank]
    return received, expand_index(r.ids, r.num_experts)


def _table(s: Shape, r: Draw, received: torch.Tensor, keeps_own: bool) -> torch.Tensor:
    """The slot of each row; this rank's own are in none."""
    per_slot, found = s.slot_bytes // UB_ALIGN, []
    for expert, counts in enumerate(received.tolist()):
        for source, count in enumerate(counts):
            first = (source * r.num_local + expert) * r.most_rows
            is_kept = keeps_own and source == r.rank
            found += [-1 if is_kept else (first + i) * per_slot for i in range(count)]
    return torch.tensor(found, dtype=I32)


def _of_a_part(r: Draw, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(W, E) how many rows earlier parts have taken, and how many with this one."""
    taken = received.T.contiguous()
    before = torch.minimum(r.integers(0, r.most_rows + 1, *taken.shape), taken)
    return before, taken


def _inputs(s: Shape, r: Draw, keeps_own: bool) -> Inputs:
    received, expand_idx = _received(r, keeps_own)
    ends = received.flatten().cumsum(0, dtype=I32)
    rows, row_words, packed = int(ends[-1]), s.slot.row_bytes // WORD_BYTES, s.slot.packed_bytes // WORD_BYTES
    before, taken = _of_a_part(r, received)
    moved = 2 * (row_words + ORIGIN.num_words + s.slot.num_scales + s.has("weights")) + 1
    return {
        "slots": r.words(r.num_ranks * r.num_local * r.most_rows, s.slot_bytes // WORD_BYTES),
        "slot_scales": Hole("slots"),
        "row_slots": _table(s, r, received, keeps_own),
        "num_rows": torch.tensor([rows], dtype=I32),
        "rows_before": before,
        "rows_taken": taken,
        "entries": r.words(r.entries, STATUS_ENTRY.num_words),
        "rows": r.words(r.tokens * (s.topk + s.shared if s.has("smooth") else 1), packed),
        "scales": Hole("rows", s.slot.scale_offset),
        "topk_idx": r.ids,
        "topk_weights": r.uniform(r.tokens, s.topk),
        "expand_idx": expand_idx,
        "recv_offsets": ends,
        "out_rows": blank(rows, row_words),
        "out_scales": blank(rows, s.slot.num_scales, dtype=F32),
        "out_origins": blank(rows, ORIGIN.num_words),
        "out_weights": blank(rows, dtype=F32),
        "kept_zone": torch.ones(1, dtype=I32),
        "zone": blank(1),
        "capacity": rows,
        "num_entries": r.entries,
        "row_stride": packed,
        "first_expert": r.rank * r.num_local,
        "num_local_experts": r.num_local,
        "num_ranks": r.num_ranks,
        "rank": r.rank,
        "num_tokens": r.tokens,
        "bytes_moved": WORD_BYTES * (rows * moved + keeps_own * 2 * r.tokens * s.topk),
    }


def _build_own(s: Shape) -> TritonKernel:
    own = OwnRows(s.topk, s.topk + s.shared if s.has("smooth") else 1)
    return arrange_kernel(_slot(s), s.has("weights"), own)


def _slot(s: Shape) -> SlotLayout:
    return replace(s.slot, is_flagged=True)


def _as_launched(s: Shape) -> Shape:
    """There are rows for shared experts if they are smoothed only."""
    return s if s.has("smooth") else replace(s, shared=0)


def _of_window(name: str, *, parted: bool) -> Family:
    """The family of an arrange kernel that finds all rows in the window."""
    return Family(
        name,
        arrange_kernel,
        lambda s, r: _inputs(s, r, keeps_own=False),
        lambda s: arrange_kernel(_slot(s), s.has("weights"), zoned=s.zoned, parted=parted),
        axes=("hidden",),
        features=(*QUANTIZED, "weights"),
        window="entries",
        computes=False,
    )


_FEATURES = (*QUANTIZED, "weights", "smooth")
_SHOWN_OWN: tuple[Features, ...] = ((), ("weights",), ("int8", "weights"), ("int8", "weights", "smooth"))

FAMILIES = (
    _of_window("arrange", parted=False),
    _of_window("arrange_part", parted=True),
    Family(
        "arrange_own",
        arrange_kernel,
        lambda s, r: _inputs(s, r, keeps_own=True),
        _build_own,
        axes=("hidden", "topk", "shared"),
        features=_FEATURES,
        # of a CPU: on an NPU all rows go through the window
        variants=(*_SHOWN_OWN, ("int8_128", "weights", "smooth")),
        shown=_SHOWN_OWN,
        main=("int8", "weights", "smooth"),
        as_launched=_as_launched,
        computes=False,
    ),
)
