"""What a plan is specialised for: the choices of a call that change which kernels run."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Literal

import torch

from moe_triton.core.dtypes import NAMES
from moe_triton.core.row_formats import AS_THEY_ARE, RowFormat
from moe_triton.layout.call_word import Kind

BLOCK_QUANTIZE_MODE = 2  # the comm_quant_mode of results that travel as int8
Mask = Literal["none", "tokens", "entries"]


@dataclass(frozen=True)
class DispatchVariant:
    """What a dispatch is specialised for.

    Attributes:
        dtype: of x.
        row_format: how rows travel.
        smooth: whether x is multiplied by its expert's smooth scales first: one packed row per result.
        weights: whether routing weights travel along.
        mask: what active_mask names, if there is one.
        cumulative: tokens_per_expert as running totals.
        exchange: rows and counts of the tensor-parallel peer follow.
        waits: how long each source rank was waited for is recorded.
        recv_stats: whether counts of rows are added to the caller's.
        local_bypass: routed rows for this rank's own experts do not go through the window.
        elastic: whether there is an elastic_info.
        keeps_tables: of a buffer: tables are kept for combine (`moe_triton.operators.buffer.TABLES`).
        routed: which expert's how manieth row each entry is, and how many rows each expert has, is known: no
            launch finds it out.
        placed: rows go to the places that are found for them (`moe_triton.kernels.places`); it is routed.
        announced: of `moe_triton.layout.call_word.Kind`.
        given_ids: dtype of the caller's ids, where the first kernel that reads them makes the int32 copy that
            all others read; None where they are int32 and no kernel writes them.
        per_rank: of a buffer: a token is sent once to each rank of its experts, and with it go all of its ids
            and weights.
    """

    dtype: torch.dtype
    row_format: RowFormat = AS_THEY_ARE
    smooth: bool = False
    weights: bool = False
    mask: Mask = "none"
    cumulative: bool = False
    exchange: bool = False
    waits: bool = False
    recv_stats: bool = False
    local_bypass: bool = False
    elastic: bool = False
    keeps_tables: bool = False
    routed: bool = False
    placed: bool = False
    announced: int = 0
    given_ids: torch.dtype | None = None
    per_rank: bool = False

    def __post_init__(self) -> None:
        """Refuses what no kernel makes rows of: those for single experts come with quantisation only.

        Raises:
            ValueError: rows are to be smoothed, and travel as they are.
        """
        if self.smooth and not self.row_format.is_quantized:
            raise ValueError("only quantised rows are smoothed")

    @cached_property
    def row_dtype(self) -> torch.dtype:
        """The dtype of the rows that travel: the row format's, or `dtype` if rows travel as they are."""
        return self.row_format.dtype or self.dtype

    @property
    def row_weights(self) -> bool:
        """Whether each row has a weight of its own."""
        return self.weights and not self.per_rank

    @property
    def local_weights(self) -> bool:
        """Whether each row has a weight for each of its experts."""
        return self.weights and self.per_rank

    @property
    def kind(self) -> Kind:
        """What peers must have the same of."""
        name = self.row_format.name or NAMES[self.dtype]
        return Kind(
            name,
            weights=self.weights,
            elastic=self.elastic,
            announced=self.announced,
            per_rank=self.per_rank,
        )

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    def __hash__(self) -> int:
        """Computed once: every call looks its plan up by its variant."""
        return self._hash


@dataclass(frozen=True)
class CombineVariant:
    """What a combine is specialised for.

    Attributes:
        dtype: of the results.
        weights: whether results are weighted.
        mask: what active_mask names, if there is one.
        shared_x: whether a shared expert's result is brought by the caller.
        special: numbers of zero, copy and constant experts.
        const_per_element: constant experts' alphas are (C, H) instead of (C,).
        block_quantize: results travel as int8, quantised in blocks of 8.
        exchange: results are first added with the tensor-parallel peer's.
        norm: the sum is added to a residual and normalised.
        waits: how long each source rank was waited for is recorded.
        in_place: direct: the results are in this rank's window already.
        local_bypass: results of this rank's own experts for its own tokens do not go through the window.
        elastic: whether there is an elastic_info.
        placed: results are at the places that rows of the dispatch had.
        adds_traffic: what it posts is added to what a round before it in the same call has posted.
    """

    dtype: torch.dtype
    weights: bool = False
    mask: Mask = "none"
    shared_x: bool = False
    special: tuple[int, int, int] = (0, 0, 0)
    const_per_element: bool = False
    block_quantize: bool = False
    exchange: bool = False
    norm: bool = False
    waits: bool = False
    in_place: bool = False
    local_bypass: bool = False
    elastic: bool = False
    placed: bool = False
    adds_traffic: bool = False

    @property
    def kind(self) -> Kind:
        """What peers must have the same of."""
        return Kind(NAMES[self.dtype], BLOCK_QUANTIZE_MODE * self.block_quantize, elastic=self.elastic)

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    def __hash__(self) -> int:
        """Returns the hash, computed once: every call looks its plan up by its variant."""
        return self._hash


Variant = DispatchVariant | CombineVariant
