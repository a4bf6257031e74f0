"""Shapes and dtypes of what the operators return (docs/operators.md, "Outputs"), for calls and fakes alike.

Sizes may be symbolic: nothing here branches on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Output = tuple[tuple[Any, ...], torch.dtype]
TRIPLE_ROOM = 128  # int32 of assist_info per row


@dataclass(frozen=True)
class DispatchShapes:
    """What a dispatch is asked for, as far as it decides shapes. Sizes: docs/operators.md, "Symbols"."""

    version: int
    batch: Any
    hidden: Any
    topk: Any
    dtype: torch.dtype
    num_ranks: int
    rank: int
    num_experts: int
    num_shared_experts: int
    num_shared_ranks: int
    global_bs: int
    tp: int
    quantize: bool
    weights: bool
    elastic: bool

    @classmethod
    def of_call(
        cls,
        version: int,
        sizes: tuple[Any, Any, Any],
        dtype: torch.dtype,
        place: tuple[int, int],
        num_experts: int,
        shared: tuple[int, int],
        global_bs: Any,
        *,
        tp: int,
        quantize: bool,
        weights: bool,
        elastic: bool,
    ) -> DispatchShapes:
        """From what a call has: sizes (BS, H, K), place (EP, rank), shared (S, R) where (1, 0) is none."""
        none_shared = tuple(shared) == (1, 0)
        return cls(
            version,
            *sizes,
            dtype,
            *place,
            num_experts,
            0 if none_shared else shared[0],
            shared[1],
            global_bs,
            tp,
            quantize,
            weights,
            elastic,
        )

    @property
    def num_local_experts(self) -> int:
        """Routed experts of a rank that holds any (localE)."""
        return self.num_experts // (self.num_ranks - self.num_shared_ranks)

    @property
    def total_tokens(self) -> Any:
        """global_bs, or BS * EP where it is 0 (G)."""
        return self.global_bs if self.global_bs else self.batch * self.num_ranks

    @property
    def capacity(self) -> Any:
        """Rows that this rank can receive (A)."""
        if self.elastic and self.num_shared_ranks:
            return _larger(self._shared_capacity, self._routed_capacity)
        return self._shared_capacity if self.rank < self.num_shared_ranks else self._routed_capacity

    @property
    def _routed_capacity(self) -> Any:
        return self.total_tokens * _smaller(self.num_local_experts, self.topk)

    @property
    def _shared_capacity(self) -> Any:
        if self.version == 1:
            return self.total_tokens // self.num_shared_ranks
        replicas = self.num_shared_ranks // self.num_shared_experts
        return self.total_tokens // self.num_ranks * (-(-self.num_ranks // replicas))

    @property
    def num_reported_experts(self) -> int:
        """Experts whose counts are returned."""
        if self.elastic:
            return max(1, self.num_local_experts)
        return 1 if self.rank < self.num_shared_ranks else self.num_local_experts

    @property
    def num_counts(self) -> Any:
        """Elements of ep_recv_counts."""
        plain = self.num_ranks * self.num_reported_experts
        with_tp = plain * max(self.tp, 1)
        if not self.weights:
            return with_tp
        return _larger(plain + 2 * self.total_tokens * self.topk * (self.num_ranks // 8), with_tp)

    def outputs(self) -> tuple[Output, ...]:
        """The seven outputs in order."""
        rows = self.capacity * max(self.tp, 1)
        index = self.batch * self.topk
        if self.version != 1:
            index = _larger(index, self.capacity * TRIPLE_ROOM)
        return (
            ((rows, self.hidden), torch.int8 if self.quantize else self.dtype),
            ((rows,), torch.float32),
            ((index,), torch.int32),
            ((self.num_reported_experts,), torch.int64),
            ((self.num_counts,), torch.int32),
            ((self.tp,), torch.int32),
            ((self.capacity if self.weights else 0,), torch.float32),
        )


def _larger(a: Any, b: Any) -> Any:
    return torch.sym_max(a, b)  # type: ignore[no-untyped-call]


def _smaller(a: Any, b: Any) -> Any:
    return torch.sym_min(a, b)  # type: ignore[no-untyped-call]
