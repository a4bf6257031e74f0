"""Map experts: which replica of its logical expert each entry of a token goes to.

Shape symbols:
    T   tokens of this rank
    K   experts per token
    E   logical experts
    F   columns of the table: how many replicas an expert has, and their physical ids
    P   physical experts of all ranks

One source serves two machines, as in `moe_triton.kernels.numbering`: ``SCALAR`` chooses. An AI core takes
several hundred cycles to load an element from an address that it computes. So it holds the table in tiles,
and compares: for each token, which column of a row counts, and then which row each of its entries names.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from moe_triton.core.checks import check_choice, check_positive
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import Arg, TritonKernel, alike, chosen_args, numbers
from moe_triton.core.replicas import NO_EXPERT, REPLICA_BY, ReplicaBy
from moe_triton.kernels.cases import I8, Draw, Family, Inputs, Shape, blank
from moe_triton.kernels.fallbacks import Arguments, fallback
from moe_triton.kernels.language import tl, triton
from moe_triton.kernels.numbering import ID_LIMIT, far_ids, load_id, narrowed, taken_ids
from moe_triton.kernels.programs import part_of

_RANK, _TOKEN, _SERVER, _ROW = range(len(REPLICA_BY))

UNMAPPED = NO_EXPERT  # under which device code has it

MOST_TILED = 4096  # elements of a tile of the table
EIGHT = 8  # columns that a tile has at least: 32 bytes, or the compiler takes several times the memory


@triton.jit
def _is_own(physical, own_first, own_end):
    return (physical >= own_first) & (physical < own_end)


@triton.jit
def _whole(a):
    """What is before the point of fp32 numbers that are not negative."""
    return a.to(tl.int32).to(tl.float32)


@triton.jit
def _replica(
    table, expert, token, num_columns, rank, world_size, own_first, own_end,
    BY: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The physical id of a logical expert for a token; -1 if the table has none."""
    row = table + expert * num_columns
    count = tl.load(row)
    is_count = (count > 0) & (count < num_columns)
    count = tl.where(is_count, count, 1)
    if SPREAD:
        token += expert + rank
    column = token % count + 1
    if BY == 0:
        column = rank // tl.cdiv(world_size, count) + 1
    if BY == 2:
        num_own = 0
        for c in range(1, count + 1):
            num_own += _is_own(tl.load(row + c), own_first, own_end).to(tl.int32)
        wanted = token % tl.maximum(num_own, 1)
        seen = 0
        for c in range(1, count + 1):
            is_own = _is_own(tl.load(row + c), own_first, own_end)
            column = tl.where(is_own & (seen == wanted), c, column)
            seen += is_own.to(tl.int32)
    return tl.where(is_count, tl.load(row + column), -1)


@triton.jit
def _names(experts, num_logical):
    """The experts of a tile; behind the last one what no id is."""
    return tl.where(experts < num_logical, experts.to(tl.float32), -0.5)


@triton.jit
def _tile_of(table, experts, cols, num_logical, num_columns):
    """Some columns of some rows of the table, -1 behind its end."""
    places = experts[:, None] * num_columns + cols[None, :]
    is_there = (experts < num_logical)[:, None] & (cols < num_columns)[None, :]
    return tl.load(table + places, mask=is_there, other=-1)


@triton.jit
def _or_unmapped(physical, num_physical, UNMAPPED: tl.constexpr):
    return tl.where((physical >= 0) & (physical < num_physical), physical, UNMAPPED)


@triton.jit
def _digits(place):
    """Weights by which the own replicas in 8 columns are counted with one sum of each row.

    The sum is a number to the base 8. Digit i is how many of columns 0 to i are own ones; digit 7 is how many
    of the 8 are not, each of which adds 8**7. So it is 2**24 at most, and exact in fp32.

    Args:
        place: (COLS,) int32, each column's place among the 8.

    Returns:
        What an own replica adds to its row's sum, and what the sum is multiplied by for its last digit to be
        how many own ones come before a column.
    """
    half, fours = place >> 1, place >> 2
    twos, ones = half - fours * 2, place - half * 2
    power = (ones * 7 + 1) * (twos * 63 + 1) * (fours * 4095 + 1)  # 8**place
    power_of_rest = (8 - ones * 7) * (64 - twos * 63) * (4096 - fours * 4095)  # 8**(7 - place)
    # one in each digit from that place to 6: (8**7 - power) / 7, which has no rest
    later = _whole(power.to(tl.float32) * (-1 / 7) + (2**21 / 7 + 0.5))
    return later, power_of_rest.to(tl.float32) * 2.0**-18


@triton.jit
def _own_before(is_own, of_own, of_other, scale):
    """How many of 8 columns are own ones: before each of them, and in all."""
    digits = tl.sum(tl.where(is_own, of_own, of_other), 1)
    before = ((digits[:, None] * scale).to(tl.int32) & 7).to(tl.float32)
    return before, 8 - _whole(digits * 2.0**-21)


@triton.jit
def _choices(
    table, experts, names, num_logical, num_columns, num_physical, rank, world_size, own_first, own_end,
    BY: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNMAPPED: tl.constexpr,
):  # fmt: skip
    """What is known of a tile whatever the token: the replicas of each row; the number of each, by which a
    token asks for it; among how many tokens are dealt; at which number they begin, or by "rank" the number
    that all tokens ask for; and what is to be added to a row's replica.

    Numbers are a fraction more than whole ones, which keeps quotients that are rounded from the next whole
    one, up to 2**21 tokens. Those of own replicas have another fraction, so that no other is asked for.
    """
    few, cols = tl.arange(0, 8), 1 + tl.arange(0, COLS)  # few: for the sake of the first one
    is_first = (1 - tl.minimum(few, 1)).to(tl.float32)  # as a factor: few columns are compared row by row
    counts = _tile_of(table, experts, few, num_logical, num_columns)
    loaded = _tile_of(table, experts, cols, num_logical, num_columns)
    if BY == 2 and COLS == 8:
        of_own, scale = _digits(cols - 1)  # here, while the table is being loaded
    said = tl.sum(counts.to(tl.float32) * is_first[None, :], 1)
    is_count = (said > 0) & (said < num_columns)
    # of an eighth nothing is left over, and no replica has the number 0
    dealt = tl.where(is_count, said, 0.125)
    shift = tl.where(is_count, 0.0, UNMAPPED) - names
    numbers = tl.zeros((ROWS, COLS), tl.float32) + (cols.to(tl.float32) - 0.625)[None, :]
    first = tl.zeros((ROWS,), tl.float32) + 0.375
    if SPREAD:
        first = names + (rank + 0.375)
    if BY == 0:
        per_replica = _whole((world_size - 0.5) / dealt + 1)  # rounded up
        first = tl.where(is_count, _whole((rank + 0.5) / per_replica) + 0.375, 0.0)
    if BY == 2:
        has_any = tl.minimum(tl.maximum(own_end - own_first, 0), 1).to(tl.float32)
        is_own = numbers < (dealt * has_any)[:, None]
        is_own &= loaded == tl.minimum(tl.maximum(loaded, own_first), own_end - 1)
        if COLS == 8:
            before, num_own = _own_before(is_own, of_own[None, :], 2.0**21, scale[None, :])
        else:
            before, num_own = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS,), tl.float32)
            for eight in range(1, num_columns, 8):
                place = tl.minimum(tl.maximum(cols - eight, 0), 7)
                outside = tl.minimum(tl.abs(cols - eight - place), 1)
                inside = (1 - outside).to(tl.float32)[None, :]
                of_own, scale = _digits(place)
                of_eight, num_of_eight = _own_before(
                    is_own, of_own[None, :] * inside, inside * 2.0**21, scale[None, :] * inside
                )
                is_later = tl.minimum(tl.maximum(cols - (eight + 7), 0), 1).to(tl.float32)
                before += of_eight + num_of_eight[:, None] * is_later[None, :]
                num_own += num_of_eight
        numbers = tl.where(is_own, before + 0.5, numbers)
        first = tl.where(num_own > 0, first + 0.125, first)
        dealt = tl.where(num_own > 0, num_own, dealt)
    is_there = loaded == tl.minimum(tl.maximum(loaded, 0), num_physical - 1)
    return tl.where(is_there, loaded.to(tl.float32), UNMAPPED), numbers, dealt, first, shift


@triton.jit
def _offsets(held, numbers, dealt, first, shift, token, BY: tl.constexpr):
    """How much further than its logical expert the physical one of each row is, for a token."""
    number = first
    if BY != 0:
        turn = first + token
        number = turn - _whole(turn / dealt) * dealt
    return tl.sum(tl.where(numbers == number[:, None], held, 0.0), 1) + shift


@triton.jit
def _map_experts_kernel(
    given, table, scales, threshold, mask, topk_idx, kept,
    num_tokens, num_logical, num_columns, num_physical, rank, world_size, own_first, own_end,
    TOPK: tl.constexpr, BY: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ONE_TILE: tl.constexpr, PADDED: tl.constexpr, SCALAR: tl.constexpr,
    UNMAPPED: tl.constexpr, ID_LIMIT: tl.constexpr,
):  # fmt: skip
    begin, end = part_of(num_tokens)
    if SCALAR:
        for token in range(begin, end):
            total = 0.0
            if kept is not None:
                for k in range(0, TOPK):
                    total += tl.load(scales + token * TOPK + k)
            for k in range(0, TOPK):
                expert = load_id(given, token * TOPK + k, ID_LIMIT)
                # special experts come behind the physical ones as they came behind the logical ones
                behind = tl.minimum(expert, ID_LIMIT) - num_logical + num_physical
                mapped = tl.where(expert < 0, -1, behind)
                if (expert >= 0) & (expert < num_logical):
                    if BY == 3:
                        physical = tl.load(table + token % num_columns * num_logical + expert)
                    else:
                        physical = _replica(
                            table,
                            expert,
                            token,
                            num_columns,
                            rank,
                            world_size,
                            own_first,
                            own_end,
                            BY,
                            SPREAD,
                        )
                    is_expert = (physical >= 0) & (physical < num_physical)
                    mapped = tl.where(is_expert, physical, UNMAPPED)
                tl.store(topk_idx + token * TOPK + k, mapped)
                if kept is not None:
                    least = total * tl.load(threshold + k)
                    is_kept = (tl.load(scales + token * TOPK + k) >= least).to(tl.int8)
                    if mask is not None:
                        is_kept = tl.where(tl.load(mask + token) != 0, is_kept, 0)
                    tl.store(kept + token * TOPK + k, is_kept)
    else:
        rows, ks = tl.arange(0, ROWS), tl.arange(0, PADDED)
        num_tiles = tl.cdiv(num_logical, ROWS)
        if ONE_TILE:
            num_tiles = 1
            if BY != 3:
                names = _names(rows, num_logical)
                held, numbers, dealt, first, shift = _choices(
                    table, rows, names, num_logical, num_columns, num_physical, rank, world_size, own_first,
                    own_end, BY, SPREAD, ROWS, COLS, UNMAPPED,
                )  # fmt: skip
        for token in range(begin, end):
            at, inside = token * TOPK + ks, ks < TOPK
            ids = narrowed(tl.load(given + at, mask=inside, other=-1), ID_LIMIT)
            # what becomes of them has to fit 32 bits; and floats: to compare integers takes four instructions
            ids = tl.minimum(tl.maximum(ids, -1), ID_LIMIT).to(tl.float32)
            # from 0: what a loop carries starts as a constant, or the CPU's compiler never frees its buffer
            change = tl.zeros((PADDED,), tl.float32)
            for tile in range(0, num_tiles):
                experts = tile * ROWS + rows
                names = _names(experts, num_logical)
                if BY == 3:
                    row = table + token % num_columns * num_logical
                    physical = tl.load(row + experts, mask=experts < num_logical, other=-1).to(tl.float32)
                    offsets = _or_unmapped(physical, num_physical, UNMAPPED) - names
                else:
                    if not ONE_TILE:
                        held, numbers, dealt, first, shift = _choices(
                            table, experts, names, num_logical, num_columns, num_physical, rank, world_size,
                            own_first, own_end, BY, SPREAD, ROWS, COLS, UNMAPPED,
                        )  # fmt: skip
                    offsets = _offsets(held, numbers, dealt, first, shift, token, BY)
                change += tl.sum(tl.where(ids[:, None] == names[None, :], offsets[None, :], 0.0), 1)
            mapped = ids + tl.where(ids < num_logical, change, num_physical - num_logical)
            tl.store(topk_idx + at, mapped.to(tl.int32), mask=inside)
            if kept is not None:
                weights = tl.load(scales + at, mask=inside, other=0.0)
                total = 0.0
                for k in range(0, TOPK):  # ascending, as the other form adds them
                    total += tl.sum(tl.where(ks == k, weights, 0.0), 0)
                least = total * tl.load(threshold + ks, mask=inside, other=0.0)
                is_kept = (weights >= least).to(tl.int32)
                if mask is not None:
                    is_kept = is_kept * (tl.load(mask + token) != 0).to(tl.int32)
                tl.store(kept + at, is_kept.to(tl.int8), mask=inside)


@fallback
def _map_experts_fallback(a: Arguments) -> None:
    size = a.num_tokens * a.TOPK
    ids = taken_ids(a.given[:size]).long().view(a.num_tokens, a.TOPK)
    tokens = torch.arange(a.num_tokens)[:, None]
    is_logical = (ids >= 0) & (ids < a.num_logical)
    experts = torch.where(is_logical, ids, 0)
    if a.BY == _ROW:
        rows = a.table[: a.num_columns * a.num_logical].view(a.num_columns, a.num_logical)
        physical = rows[tokens % a.num_columns, experts]
    else:
        physical = _found(a, a.table[: a.num_logical * a.num_columns].view(-1, a.num_columns), experts)
    physical = torch.where((physical >= 0) & (physical < a.num_physical), physical, a.UNMAPPED)
    others = torch.where(ids < 0, -1, ids.clamp(max=a.ID_LIMIT) - a.num_logical + a.num_physical)
    a.topk_idx[:size] = torch.where(is_logical, physical, others).view(-1).int()
    if a.kept is None:
        return
    scales = a.scales[:size].view(a.num_tokens, a.TOPK)
    total = torch.zeros(a.num_tokens)
    for k in range(a.TOPK):
        total = total + scales[:, k]
    kept = scales >= total[:, None] * a.threshold[: a.TOPK]
    if a.mask is not None:
        kept &= a.mask[: a.num_tokens, None] != 0
    a.kept[:size] = kept.view(-1).to(I8)


def _found(a: Arguments, table: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """(T, K) what the table has for each entry, -1 for rows whose count cannot be."""
    tokens = torch.arange(len(experts))[:, None]
    held, count = table[experts].long(), table[experts][..., 0].long()
    is_count = (count > 0) & (count < a.num_columns)
    count = torch.where(is_count, count, 1)
    turn = tokens + experts + a.rank if a.SPREAD else tokens
    column = turn % count + 1
    if a.BY == _RANK:
        column = a.rank // -(-a.world_size // count) + 1
    if a.BY == _SERVER:
        columns = torch.arange(a.num_columns)
        own = (held >= a.own_first) & (held < a.own_end) & (columns > 0) & (columns <= count[..., None])
        num_own = own.sum(-1)
        wanted = (own.cumsum(-1) == (turn % num_own.clamp(min=1) + 1)[..., None]) & own
        column = torch.where(num_own > 0, wanted.int().argmax(-1), column)
    return torch.where(is_count, held.gather(-1, column[..., None])[..., 0], -1)


def _padded(size: int) -> int:
    """The power of two that a tile has for so many elements, 1 at least."""
    return 1 << max(size - 1, 0).bit_length()


@functools.cache
def map_experts_kernel(
    topk: int,
    by: ReplicaBy = "token",
    num_logical: int = 1,
    num_columns: int = 2,
    target: str = "cpu",
    int64: bool = False,
    prunes: bool = False,
    masked: bool = False,
    plain: bool = False,
) -> TritonKernel:
    """Physical experts for logical ones, (T, K), by a table of each one's replicas.

    ``table`` is (E, F): column 0 of a row is the number of replicas, columns 1 to that number their ids.
    Token t of a rank goes to the replica in column::

        rank // ceil(world_size / count) + 1   by "rank", of world_size of them
        (t + rank + e) % count + 1             by "token"

    so that ranks, and experts of a token, do not all begin with the first one; ``plain``, it is
    ``t % count + 1``. By "server" it is number ``(t + rank + e) % n`` of the n replicas in [own_first,
    own_end), in the order of their columns; where there are none, as by "token". By "row" the table is
    (num_columns, E), and an entry goes to ``table[t % num_columns, e]``. Ids below 0 become -1; ids of E and
    more, of special experts, become as much more as P is more than E. An entry for which the table has no
    replica in [0, P), or a count outside 1 to F - 1, becomes `UNMAPPED`.

    With ``prunes``, ``kept`` says of each entry whether ``scales[t, k] >= sum(scales[t]) * threshold[k]``, in
    fp32, the sum with k ascending, and with ``masked`` whether ``mask[t]`` as well.

    A CPU has one kernel for all sizes of tables. An AI core's has tiles of as many columns as the next power
    of two has, 8 at least: tables with F 2 to 9 are all read by the same one, and those with 10 to 17.

    Args:
        topk: K.
        by: what chooses among replicas.
        num_logical: E, which decides on an AI core's tiles.
        num_columns: F, likewise.
        target: back end that it is specialised for.
        int64: whether ids are int64; those of `ID_LIMIT` or more, of either sign, become -1.
        prunes: see above.
        masked: see above.
        plain: by "token", by its number alone, as torch_npu has it.

    Raises:
        ArgumentError: a size that is not positive, an unknown ``by``, ``masked`` without ``prunes``, or
            ``plain`` by something else.

    Example, with K 2, by "token"::

        given = [0, 1, 0, -1, 0, 2]
        table = [2, 0, 3, 1, 1, -1]
        num_tokens = 3
        num_logical = 2
        num_columns = 3
        num_physical = 4
        rank = 1
        topk_idx = [3, 1, 0, -1, 3, 4]
    """
    check_positive("topk", topk)
    check_positive("num_logical", num_logical)
    check_positive("num_columns", num_columns)
    check_choice("by", by, REPLICA_BY)
    if masked and not prunes:
        raise ArgumentError("masked", masked, "a mask is for what is pruned", "Pass prunes as well.")
    if plain and by != "token":
        raise ArgumentError("plain", plain, "it is about tokens", "Pass by='token' as well.")
    if target == "cpu":
        return _with_tiles(topk, by, None, int64, prunes, masked, plain)
    cols = max(_padded(num_columns - 1), EIGHT) if by != "row" else 1
    rows = min(_padded(num_logical), max(MOST_TILED // cols, 1))
    return _with_tiles(topk, by, _Tiles(rows, cols, rows >= num_logical), int64, prunes, masked, plain)


class _Tiles(NamedTuple):
    """How an AI core holds a table.

    Attributes:
        rows, cols: of a tile.
        are_one: whether one has all rows.
    """

    rows: int
    cols: int
    are_one: bool


@functools.cache
def _with_tiles(
    topk: int, by: ReplicaBy, tiles: _Tiles | None, int64: bool, prunes: bool, masked: bool, plain: bool
) -> TritonKernel:
    """The kernel of all tables that have the same tiles; of a CPU's there are none."""
    rows, cols, are_one = tiles or _Tiles(1, 1, False)
    spread = by == "server" or (by == "token" and not plain)
    args, absent = chosen_args(
        (True, Arg("given", "*i64" if int64 else "*i32", "in")),
        (True, Arg("table", "*i32", "in")),
        (prunes, alike("*fp32", "scales threshold", "in")),
        (masked, Arg("mask", "*i8", "in")),
        (True, Arg("topk_idx", "*i32", "out")),
        (prunes, Arg("kept", "*i8", "out")),
        (True, numbers("i32", "num_tokens num_logical num_columns num_physical")),
        (by == "rank" or spread, numbers("i32", "rank")),
        (by == "rank", numbers("i32", "world_size")),
        (by == "server", numbers("i32", "own_first own_end")),
    )
    entry_bytes = (8 if int64 else 4) + 4 + 5 * prunes

    def bytes_moved(*, num_tokens: int, num_logical: int, num_columns: int, **_: int) -> int:
        return num_tokens * (topk * entry_bytes + masked) + 4 * num_logical * num_columns

    return TritonKernel(
        name="map_experts",
        fn=_map_experts_kernel,
        args=args,
        constants={
            **absent,
            "TOPK": topk,
            "BY": REPLICA_BY.index(by),
            "SPREAD": spread,
            "ROWS": rows,
            "COLS": cols,
            "ONE_TILE": are_one,
            "PADDED": _padded(topk),
            "SCALAR": tiles is None,
            "UNMAPPED": UNMAPPED,
            "ID_LIMIT": ID_LIMIT,
        },
        fallback=_map_experts_fallback,
        bytes_moved=bytes_moved,
    )


# Of the cases' tables: an AI core holds them in one tile.
LOGICAL, COLUMNS = 256, 9
FEATURES = (*REPLICA_BY, "int64", "prunes", "masked", "plain")


def _build(s: Shape) -> TritonKernel:
    by = next((each for each in REPLICA_BY if s.has(each)), "token")
    return map_experts_kernel(
        s.topk, by, LOGICAL, COLUMNS, s.target, *map(s.has, ("int64", "prunes", "masked", "plain"))
    )


def _inputs(s: Shape, r: Draw) -> Inputs:
    """Some rows of the table have a count that cannot be, or replicas that are not there."""
    num_logical = r.num_experts
    table = r.integers(-1, 2 * num_logical + 1, num_logical, COLUMNS)
    table[:, 0] = r.integers(1, COLUMNS, num_logical)
    table[0, 0], table[-1, 0] = 0, COLUMNS
    return {
        "given": far_ids(s, r),
        "table": table.T.contiguous() if s.has("row") else table,
        "scales": r.uniform(r.tokens, s.topk),
        "threshold": r.uniform(s.topk) * 2 / s.topk,
        "mask": (torch.arange(r.tokens) < r.tokens * 3 // 4).to(I8),
        "topk_idx": blank(r.tokens, s.topk),
        "kept": blank(r.tokens, s.topk, dtype=I8),
        "num_logical": num_logical,
        "num_columns": COLUMNS,
        "num_physical": 2 * num_logical,
        "world_size": r.num_ranks,
        "rank": r.num_ranks - 1,
        "own_first": num_logical // 2,
        "own_end": num_logical,
    }


_OF_BUFFERS = tuple((by, *wide) for by in REPLICA_BY for wide in ((), ("int64",)))
_OF_TORCH_NPU = tuple(
    (*by, *wide, *prunes)
    for by in (("rank",), ("token", "plain"))
    for wide in ((), ("int64",))
    for prunes in ((), ("prunes",), ("prunes", "masked"))
)

FAMILIES = (
    Family(
        "map_experts",
        map_experts_kernel,
        _inputs,
        _build,
        axes=("topk",),
        features=FEATURES,
        variants=tuple(dict.fromkeys((*_OF_BUFFERS, *_OF_TORCH_NPU))),
        shown=(("token",), ("rank",), ("server",), ("row",), ("rank", "prunes", "masked")),
        main=("token",),
    ),
)
