"""Independent models of the kernels, element by element or row by row in NumPy, from the specification."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from moe_triton.reference.arithmetic import sum_of_row

Float32 = npt.NDArray[np.float32]


def route_model(ids: list[int], num_experts: int) -> tuple[list[int], list[int]]:
    counts = [0] * num_experts
    index = []
    for e in ids:
        if 0 <= e < num_experts:
            index.append(counts[e])
            counts[e] += 1
        else:
            index.append(0)
    return index, counts


def replica_model(
    table: list[list[int]],
    expert: int,
    token: int,
    by: str,
    physical: int,
    own: tuple[int, int],
    rank: tuple[int, int],
    plain: bool = False,
) -> int:
    """The physical expert of a logical one, as the kernel's docstring has it; 2**24 if there is none."""
    turn = token if plain else token + rank[0] + expert
    if by == "row":
        chosen = table[token % len(table)][expert]
    else:
        count, *columns = table[expert]
        if not 0 < count <= len(columns):
            return 1 << 24
        replicas = columns[:count]
        of_server = [each for each in replicas if own[0] <= each < own[1]]
        if by == "rank":
            chosen = replicas[rank[0] // -(-rank[1] // count)]
        elif by == "server" and of_server:
            chosen = of_server[turn % len(of_server)]
        else:
            chosen = replicas[turn % count]
    return chosen if 0 <= chosen < physical else 1 << 24


def select_model(
    ids: list[list[int]], mask: list[bool] | list[list[bool]]
) -> tuple[list[list[int]], list[int]]:
    """Ids that a mask leaves, and each token's number among those that take part."""
    selected, active_index = [], []
    prefix, number = True, 0
    for row, entry in zip(ids, mask, strict=True):
        if isinstance(entry, list):
            chosen = entry
        else:
            prefix = prefix and entry
            chosen = [prefix] * len(row)
        selected.append([e if c else -1 for e, c in zip(row, chosen, strict=True)])
        active_index.append(number if any(chosen) else -1)
        number += any(chosen)
    return selected, active_index


def shared_piece_model(token: int, rank: int, num_tokens: int, num_shared_ranks: int) -> int:
    """The piece of a rank's tokens that a token lies in, by V1's formula as it was published."""
    tokens_per_rank = Fraction(num_tokens, num_shared_ranks)
    return math.ceil((token + 1 + math.floor(rank * tokens_per_rank)) / tokens_per_rank) - 1 - rank


def weighted_sum_model(
    values: Float32, ids: npt.NDArray[np.int32], weights: Float32 | None, topk: int
) -> Float32:
    """One token: values (K+S, H) in fp32, the sum before it is rounded to 16 bits."""
    acc = np.zeros(values.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for k in range(topk):
            if ids[k] >= 0:
                product = values[k] if weights is None else values[k] * weights[k]
                acc = acc + product
        for shared in values[topk:]:
            acc = acc + shared
    return acc


def entry_model(
    expert: int,
    slot: Float32,
    x: Float32,
    alphas: Float32,
    const_v: Float32,
    num_experts: int,
    num_zero: int,
    num_copy: int,
) -> Float32 | None:
    """What one entry's expert makes of a token, unweighted; None where it adds nothing."""
    first_copy = num_experts + num_zero
    first_const = first_copy + num_copy
    if 0 <= expert < num_experts:
        return slot
    if first_copy <= expert < first_const:
        return x
    if first_const <= expert < first_const + len(const_v):
        with np.errstate(all="ignore"):
            return alphas[0] * x + alphas[1] * const_v[expert - first_const]
    return None


def sum_of_entries_model(
    values: list[Float32 | None], weights: Float32 | None, unweighted: list[Float32], hidden: int
) -> Float32:
    """One token's sum, not rounded: entries in their order, then what has no weight."""
    acc = np.zeros(hidden, np.float32)
    with np.errstate(all="ignore"):
        for k, value in enumerate(values):
            if value is not None:
                acc = acc + (value if weights is None else value * weights[k])
        for value in unweighted:
            acc = acc + value
    return acc


def rms_norm_sum_model(acc: Float32, residual: Float32, eps: float) -> tuple[Float32, np.float32]:
    """One row: the sum with its residual, and the reciprocal of its root mean square."""
    with np.errstate(all="ignore"):
        xf = acc + residual
        reciprocal = np.float32(1) / np.float32(len(xf))
        root = np.sqrt(sum_of_row(xf * xf * reciprocal) + np.float32(eps))
        return xf, np.float32(1) / root


def starts_model(counts: list[list[int]], rank: int, num_shared_ranks: int, local: int) -> list[int]:
    """Where a rank's rows for each entry begin: every receiver's output laid out row by row."""
    entries = [[m] for m in range(num_shared_ranks)]
    routed = range(num_shared_ranks, len(counts[0]))
    entries += [list(routed[i : i + local]) for i in range(0, len(routed), local)]
    starts = [-1] * len(counts[0])
    for of_receiver in entries:
        output: list[tuple[int, int]] = []
        for entry in of_receiver:
            for source, row in enumerate(counts):
                if source == rank:
                    starts[entry] = len(output)
                output += [(entry, source)] * row[entry]
    return starts
