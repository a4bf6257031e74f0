"""Independent models of the kernels, element by element or row by row in NumPy, from the specification."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

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


def select_model(
    ids: list[list[int]], mask: list[bool] | list[list[bool]]
) -> tuple[list[list[int]], list[int]]:
    """Ids that a mask leaves, and each token's number among those that take part."""
    selected, active = [], []
    prefix, number = True, 0
    for row, entry in zip(ids, mask, strict=True):
        if isinstance(entry, list):
            chosen = entry
        else:
            prefix = prefix and entry
            chosen = [prefix] * len(row)
        selected.append([e if c else -1 for e, c in zip(row, chosen, strict=True)])
        active.append(number if any(chosen) else -1)
        number += any(chosen)
    return selected, active


def shared_piece_model(token: int, rank: int, num_tokens: int, num_shared_ranks: int) -> int:
    """The piece of a rank's tokens that a token lies in, by V1's formula as it was published."""
    tokens_per_rank = Fraction(num_tokens, num_shared_ranks)
    return math.ceil((token + 1 + math.floor(rank * tokens_per_rank)) / tokens_per_rank) - 1 - rank


def quantize_model(row: Float32) -> tuple[npt.NDArray[np.int8], np.float32]:
    """One fp32 row: int8 payload and scale."""
    zeros = np.zeros(row.shape, np.int8)
    with np.errstate(all="ignore"):
        if np.isnan(row).any():
            return zeros, np.float32(np.nan)
        peak = np.abs(row).max()
        if np.isinf(peak):
            return zeros, np.float32(np.inf)
        s = np.float32(127.0) / peak
        if np.isinf(s):
            return zeros, np.float32(0)
        return np.rint(row * s).astype(np.int8), np.float32(1.0) / s


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
