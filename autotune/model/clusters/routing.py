"""Sampled routing: which experts every token of a group goes to.

T tokens on each of EP ranks, K experts for each, of M experts; expert e lies on rank e // (M // EP).
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from moe_triton.core.errors import ArgumentError

Routing = Literal["uniform", "node-limited", "zipf"]
KINDS: tuple[Routing, ...] = get_args(Routing)

# DeepSeek-V3 (technical report, 2.1.2): 8 groups of experts, a token's experts lie in 4 of them at most.
GROUPS, TOP_GROUPS = 8, 4
# Of a group's experts, the scores of this many best are its own score.
BEST_OF_GROUP = 2
# Popularities are counted in parts of this: sums of them are exact, and none is lost.
_PARTS = 1 << 40


def draw_ids(
    kind: str,
    ranks: int,
    tokens: int,
    topk: int,
    experts: int,
    seed: int,
    *,
    groups: int = GROUPS,
    top_groups: int = TOP_GROUPS,
    exponent: float = 1.0,
) -> np.ndarray:
    """Draws the experts of every token of a group.

    Args:
        kind: "uniform": any experts, all alike. "node-limited": all experts alike have random scores, the
            groups with the best scores are taken first, then the best experts in them. "zipf": experts
            differ in popularity, the n-th has n ** -exponent; which expert is the n-th follows from the seed.
        ranks: EP.
        tokens: T, of each rank.
        topk: K.
        experts: M.
        seed: of the draw; the same gives the same ids.
        groups: node-limited: into how many equal groups experts are cut, by their ids.
        top_groups: node-limited: groups that a token's experts lie in at most.
        exponent: zipf: 0 is uniform.

    Returns:
        (EP, T, K) int32, K distinct experts for each token.

    Raises:
        ArgumentError: another kind, a size below 1, more experts for a token than there are, groups that
            do not fit, or an exponent below 0.
    """
    if kind not in KINDS:
        raise ArgumentError("routing", repr(kind), f"it must be one of {list(KINDS)}", "Name one of them.")
    for name, value in (("ranks", ranks), ("tokens", tokens), ("topk", topk), ("experts", experts)):
        if value < 1:
            raise ArgumentError(name, value, "it must be at least 1", "Pass a size that exists.")
    if topk > experts:
        rule = f"a token goes to distinct experts, and there are {experts}"
        raise ArgumentError("topk", topk, rule, "Pass fewer, or more experts.")
    rng = np.random.default_rng(seed)
    if kind == "node-limited":
        ids = _node_limited(rng, ranks * tokens, topk, experts, groups, top_groups)
    else:
        ids = _draw_distinct(rng, ranks * tokens, topk, _popularity(rng, kind, experts, exponent))
    return ids.astype(np.int32).reshape(ranks, tokens, topk)


def _popularity(rng: np.random.Generator, kind: str, experts: int, exponent: float) -> np.ndarray:
    """(M,) int64, how often each expert is chosen, against the others."""
    if kind == "uniform":
        return np.ones(experts, np.int64)
    if not exponent >= 0 or not np.isfinite(exponent):
        rule = "popularity falls as n ** -exponent, so it must be a finite number of at least 0"
        raise ArgumentError("exponent", exponent, rule, "Pass 0 for uniform routing, 1 for Zipf's law.")
    by_place = np.arange(1, experts + 1, dtype=float) ** -exponent
    return np.maximum(np.rint(by_place * _PARTS), 1).astype(np.int64)[rng.permutation(experts)]


def _draw_distinct(rng: np.random.Generator, rows: int, count: int, weights: np.ndarray) -> np.ndarray:
    """Draws without replacement, one after the other, each in proportion to its weight.

    A draw is a point on the line of all weights from which those drawn before are cut out: the inverse of
    the remaining distribution, so nothing has to be drawn again.

    Args:
        rng: of random numbers.
        rows: draws that are independent of each other.
        count: how many each row draws.
        weights: (M,) int64.

    Returns:
        (rows, count) int64, in the order in which they were drawn.
    """
    ends = weights.cumsum()
    starts = ends - weights
    drawn = np.empty((rows, count), np.int64)
    remaining = np.full(rows, ends[-1])
    for step in range(count):
        point = (rng.random(rows) * remaining).astype(np.int64)
        for earlier in np.sort(drawn[:, :step], axis=1).T:
            point += np.where(point >= starts[earlier], weights[earlier], 0)
        chosen = np.searchsorted(ends, point, side="right")
        drawn[:, step] = chosen
        remaining -= weights[chosen]
    return drawn


def _node_limited(
    rng: np.random.Generator, rows: int, topk: int, experts: int, groups: int, top_groups: int
) -> np.ndarray:
    """(rows, K) experts by group-limited top-k (DeepSeek-V3, technical report, 2.1.2).

    Every expert has a score, independent and of the exponential distribution. A group's score is the sum of
    its two best experts'; the best groups are taken, and the best experts in them. Only the K best scores of
    a group can matter, and of n uniform numbers the best is u ** (1 / n), the next one that times
    u ** (1 / (n - 1)), and so on: no score is drawn for the other experts.
    """
    _check_groups(topk, experts, groups, top_groups)
    size = experts // groups
    candidates = min(topk, size)
    falls = rng.standard_exponential((rows, groups, candidates), dtype=np.float32)
    np.maximum(falls, np.finfo(np.float32).tiny, out=falls)  # 0 would be an infinite score
    falls /= np.arange(size, size - candidates, -1, dtype=np.float32)
    # -log(1 - u) has the exponential distribution where u is uniform.
    scores = -np.log(-np.expm1(-falls.cumsum(axis=2)))
    of_group = scores[:, :, :BEST_OF_GROUP].sum(axis=2)
    best = np.argpartition(-of_group, top_groups - 1, axis=1)[:, :top_groups]
    of_candidate = np.take_along_axis(scores, best[:, :, None], axis=1).reshape(rows, -1)
    members = _draw_distinct(rng, rows * top_groups, candidates, np.ones(size, np.int64))
    ids = members.reshape(rows, top_groups, candidates) + size * best[:, :, None]
    chosen = np.argpartition(-of_candidate, topk - 1, axis=1)[:, :topk]
    return np.take_along_axis(ids.reshape(rows, -1), chosen, axis=1)


def _check_groups(topk: int, experts: int, groups: int, top_groups: int) -> None:
    if groups < 1 or experts % groups:
        rule = f"it must divide the {experts} experts into equal groups"
        raise ArgumentError("groups", groups, rule, "Pass a divisor of the number of experts.")
    if not 1 <= top_groups <= groups:
        rule = f"a token's experts lie in 1 to {groups} groups"
        raise ArgumentError("top_groups", top_groups, rule, "Pass a number of groups that exist.")
    if topk > top_groups * (experts // groups):
        rule = f"{top_groups} groups of {experts // groups} experts have fewer"
        raise ArgumentError("topk", topk, rule, "Pass fewer, or more groups.")
