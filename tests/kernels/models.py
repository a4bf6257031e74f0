"""Independent models of the kernels, element by element or row by row in NumPy, from the specification."""

from __future__ import annotations

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
