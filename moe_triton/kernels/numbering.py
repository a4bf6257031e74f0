"""Numbering: what `route` and `route_pack` share, to number the entries of each expert and to count them.

Shape symbols:
    N   ids: T*K, flat
    M   experts of all ranks (num_experts)
    P   programs that take part, each of which is told its number among them

One source serves two machines. Scalar code takes about 1 ns per id on a CPU and a few hundred on an
AI core, where a comparison of a tile of ids is a few vector instructions: ``SCALAR`` chooses.
The compare form needs no exchange between programs: each recomputes what precedes its own rows.
"""

from __future__ import annotations

import torch

from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import Arg
from moe_triton.core.space import Settings
from moe_triton.kernels.cases import I32, I64, Draw, Features, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton

ID_LIMIT = 1 << 24
"""More than there are experts. fp32 tells all integers below it apart: AI cores compare floats, and
convert a tile of int64 to them in one instruction, but compare int64 element by element."""

# one tile of comparisons, by rows and columns
TILE = {"ROWS": 64, "COLS": 64}
WIDE_TILE = {"ROWS": 32, "COLS": 128}
TILES = {"ROWS": (32, 64, 128), "COLS": (32, 64, 128, 256)}
MOST_COMPARED = 64 * 128  # elements of a tile


def tile_fits(values: Settings) -> bool:
    """Whether a tile of comparisons is as wide as high, or a multiple of that, and suits a core."""
    rows, cols = values["ROWS"], values["COLS"]
    return cols % rows == 0 and MOST_COMPARED // 4 <= rows * cols <= MOST_COMPARED


@triton.jit
def load_id(ids, at, ID_LIMIT: tl.constexpr):
    """One id as `taken_ids` has it."""
    one_id = tl.load(ids + at)
    if ids.dtype.element_ty == tl.int64:
        one_id = tl.where((one_id > -ID_LIMIT) & (one_id < ID_LIMIT), one_id, -1).to(tl.int32)
    return one_id


@triton.jit
def number_scalar(ids, taken, expand_idx, counts, num_entries, num_experts, ID_LIMIT: tl.constexpr):
    """The running counts are one chain of dependences, so one program walks it."""
    for e in range(0, num_experts):
        tl.store(counts + e, 0)
    for i in range(0, num_entries):
        e = load_id(ids, i, ID_LIMIT)
        if taken is not None:
            tl.store(taken + i, e)
        index = 0
        if (e >= 0) & (e < num_experts):
            index = tl.load(counts + e)
            tl.store(counts + e, index + 1)
        tl.store(expand_idx + i, index)


@triton.jit
def number_by_comparing(
    ids, taken, expand_idx, counts, num_entries, num_experts, worker, num_workers,
    ROWS: tl.constexpr, COLS: tl.constexpr, ID_LIMIT: tl.constexpr,
):  # fmt: skip
    """Rows of ids, each compared with all ids before it; and rows of experts, each with all ids.

    Experts and late ids have the most to compare with. They come first, and workers take turns in one
    order and then in the other, so that all have about the same.
    """
    lanes, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    num_groups = tl.cdiv(num_experts, ROWS)
    num_items = num_groups + tl.cdiv(num_entries, ROWS)
    for turn in range(0, tl.cdiv(num_items, num_workers)):
        place = turn * num_workers + tl.where(turn % 2 == 0, worker, num_workers - 1 - worker)
        if place < num_items:
            is_count = place < num_groups
            first = tl.where(is_count, place, num_items - 1 - place) * ROWS
            # the last tile of those to compare with, loaded before all others so that none is waited for
            end = tl.where(is_count, num_entries, first + ROWS)
            last_at = tl.maximum(end - 1, 0) // COLS * COLS + cols
            last = tl.load(ids + last_at, mask=last_at < num_entries)
            at = first + lanes
            is_id = at < tl.where(is_count, 0, num_entries)
            tile_ids = _load_ids(ids, at, is_id, ID_LIMIT)
            if taken is not None:
                tl.store(taken + at, tile_ids, mask=is_id)
            row = tl.where(is_id, tile_ids, at)
            # floats: to compare integers takes four instructions
            wanted = row.to(tl.float32)[:, None]
            limit = tl.where(is_id, at, num_entries).to(tl.float32)[:, None]
            equal = tl.zeros((ROWS, COLS), tl.float32)
            for c in range(0, tl.maximum(end - 1, 0) // COLS):
                equal += (wanted == tl.load(ids + c * COLS + cols).to(tl.float32)[None, :]).to(tl.float32)
            same = wanted == last.to(tl.float32)[None, :]
            equal += (same & (last_at.to(tl.float32)[None, :] < limit)).to(tl.float32)
            number = tl.sum(equal, 1).to(tl.int32)
            if is_count:
                tl.store(counts + at, number, mask=at < num_experts)
            else:
                is_expert = row == tl.minimum(tl.maximum(row, 0), num_experts - 1)
                tl.store(expand_idx + at, tl.where(is_expert, number, 0), mask=is_id)


@triton.jit
def _load_ids(ids, at, is_id, ID_LIMIT: tl.constexpr):
    return narrowed(tl.load(ids + at, mask=is_id), ID_LIMIT)


@triton.jit
def narrowed(tile, ID_LIMIT: tl.constexpr):
    """A tile of ids as `taken_ids` has them."""
    if tile.dtype == tl.int64:
        near = tile.to(tl.float32)
        tile = tl.where((near > -ID_LIMIT) & (near < ID_LIMIT), near, -1.0).to(tl.int32)
    return tile


@fallback
def number_fallback(a: Arguments) -> None:
    """All that `route` does."""
    if a.given is not None:
        a.topk_idx[: a.num_entries] = taken_ids(a.given[: a.num_entries])
    ids = a.topk_idx[: a.num_entries].long()
    valid = (ids >= 0) & (ids < a.num_experts)
    one_hot = torch.zeros((a.num_entries, a.num_experts), dtype=torch.int32)
    one_hot[valid] = torch.nn.functional.one_hot(ids[valid], a.num_experts).to(torch.int32)
    before = one_hot.cumsum(0, dtype=torch.int32) - one_hot
    index = before.gather(1, ids.clamp(0, a.num_experts - 1)[:, None])[:, 0]
    a.expand_idx[: a.num_entries] = torch.where(valid, index, 0)
    a.counts[: a.num_experts] = one_hot.sum(0, dtype=torch.int32)


def taken_ids(ids: torch.Tensor) -> torch.Tensor:
    """Ids as int32; of int64, those of `ID_LIMIT` and more, of either sign, become -1."""
    if ids.dtype == torch.int64:
        ids = torch.where((ids > -ID_LIMIT) & (ids < ID_LIMIT), ids, -1)
    return ids.to(torch.int32)


def id_arguments(takes: bool, int64: bool) -> tuple[tuple[bool, Arg], ...]:
    """Where ids come from, for `chosen_args`: ``given``, and the copy that is made of them; or the copy.

    Raises:
        ArgumentError: a copy that is given is int32.
    """
    if int64 and not takes:
        rule = "must be False for ids that are not taken: topk_idx is int32"
        raise ArgumentError("int64", int64, rule, "Pass takes as well.")
    given = Arg("given", "*i64" if int64 else "*i32", "in")
    return (takes, given), (True, Arg("topk_idx", "*i32", "out" if takes else "in"))


def numbering_bytes(num_entries: int, num_experts: int, takes: bool, int64: bool) -> int:
    """Ids, and their copy; indices and counts."""
    id_bytes = (4 + (8 if int64 else 4)) if takes else 4
    return num_entries * (id_bytes + 4) + 4 * num_experts


TAKING: tuple[Features, ...] = ((), ("takes",), ("takes", "int64"))


def given_ids(s: Shape, r: Draw) -> Inputs:
    """Inputs of ids, by the features of `TAKING`."""
    if not s.has("takes"):
        return {}
    given = far_ids(s, r)
    return {"given": given, "topk_idx": blank(*given.shape)}


def far_ids(s: Shape, r: Draw) -> torch.Tensor:
    """(T, K) int32, or int64 with that feature. No expert is as often far outside as it is -1."""
    given = r.ids.to(I64 if s.has("int64") else I32)
    far = (given < 0) & (r.uniform(*given.shape) < 0.5)
    given[far] = torch.iinfo(given.dtype).min + r.num_experts
    return given
