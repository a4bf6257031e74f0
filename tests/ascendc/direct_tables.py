"""What follows from the counts of all ranks in the direct scheme: places of rows, tables for later steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_triton.core.config import Config
from tests.kernels.models import starts_model

from .case import Routing, WrongResultError
from .memory import Guarded

ELEMENT_BYTES = 2


@dataclass
class Places:
    """Where a rank's rows belong in its receivers' outputs: (T, K) and (T, S), -1 for nowhere."""

    routed: np.ndarray
    shared: np.ndarray


def places_of(config: Config, counts: np.ndarray, routing: Routing, rank: int) -> Places:
    """From (W, R + M) counts of all ranks, each no more than a rank can have."""
    shared_ranks, local = config.num_shared_ranks, config.num_local_experts
    starts = np.array(starts_model(counts.tolist(), rank, shared_ranks, local), dtype=np.int32)
    is_routed = (routing.sent_ids >= 0) & (routing.sent_ids < config.num_experts)
    routed = starts[shared_ranks + np.where(is_routed, routing.sent_ids, 0)] + routing.expand_idx
    shared = starts[routing.shared_ranks] + routing.shared_slots[:, None]
    return Places(
        np.where(is_routed, routed, -1).astype(np.int32),
        np.where(routing.shared_ranks >= 0, shared, -1).astype(np.int32),
    )


def counts_of(config: Config, counts: np.ndarray, rank: int) -> np.ndarray:
    """(E, W) of a rank, from the counts of all."""
    shared = config.num_shared_ranks
    first = rank if rank < shared else shared + (rank - shared) * config.num_local_experts
    return counts[:, first : first + config.experts_on(rank)].T


def offsets_of(
    config: Config, routing: Routing, places: Places, windows: np.ndarray, result_bytes: int
) -> np.ndarray:
    """(T, K + S) elements from this rank's first result to each; 0 where nothing was sent.

    Args:
        config: of the group.
        routing: of this rank.
        places: of its rows.
        windows: (W,) bytes from this rank's window to each.
        result_bytes: of a result.
    """
    routed = config.num_shared_ranks + np.maximum(routing.sent_ids, 0) // config.num_local_experts
    ranks = np.concatenate([routed, routing.shared_ranks], axis=1)
    places_of_all = np.concatenate([places.routed, places.shared], axis=1).astype(np.int64)
    sent = places_of_all >= 0
    offsets = windows[np.where(sent, ranks, 0)] + places_of_all * result_bytes
    return np.where(sent, offsets, 0) // ELEMENT_BYTES


class Tables:
    """What a dispatch leaves on its rank: counts (E, W), and offsets (T, K + S) of results."""

    def __init__(self, config: Config, rank: int, tokens: int) -> None:
        self._counts = Guarded((config.experts_on(rank), config.num_ranks), np.int32, align=4)
        self._offsets = Guarded((tokens, config.num_results_per_token), np.int64, align=8)
        self.recv_counts, self.result_offsets = self._counts.array, self._offsets.array

    def check(self, counts: np.ndarray, offsets: np.ndarray) -> None:
        """Raises unless they hold these, and nothing else was written."""
        for guarded, want in ((self._counts, counts), (self._offsets, offsets)):
            guarded.check_guards()
            if not np.array_equal(guarded.array, want):
                raise WrongResultError(f"{guarded.array.tolist()} instead of {want.tolist()}")
