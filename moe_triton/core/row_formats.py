"""Row formats: the dtype of a dispatched row's elements, and its fp32 scales.

A format is a record here, and its arithmetic, once in `moe_triton.kernels.pack` and once in
`moe_triton.reference.arithmetic`. Everything else follows from the record: how rows are packed and received,
the outputs' dtypes and shapes, what peers must agree on, and the names that callers choose from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_triton.core.checks import check_choice


@dataclass(frozen=True)
class RowFormat:
    """How dispatched rows travel.

    Attributes:
        name: what `EPBuffer.dispatch` takes as ``quantize``; None for rows as they are.
        dtype: of the elements; None for that of the tokens.
        elements_per_scale: how many share one, the last of a row may be fewer; None for the whole row.
        quant_mode: torch_npu's number; None where its functions do not have the format.
    """

    name: str | None
    dtype: torch.dtype | None = None
    elements_per_scale: int | None = None
    quant_mode: int | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether rows are packed, with scales, before they are sent."""
        return self.dtype is not None

    def num_scales(self, hidden: int) -> int:
        """Number of scales of a row of ``hidden`` elements."""
        if not self.is_quantized:
            return 0
        return 1 if self.elements_per_scale is None else -(-hidden // self.elements_per_scale)

    def scales_shape(self, num_rows: int, hidden: int) -> tuple[int, ...]:
        """Shape of the scales of ``num_rows`` rows, as a dispatch returns them."""
        return (num_rows,) if self.elements_per_scale is None else (num_rows, self.num_scales(hidden))


AS_THEY_ARE = RowFormat(None, quant_mode=0)
INT8 = RowFormat("int8", torch.int8, quant_mode=2)
INT8_128 = RowFormat("int8_128", torch.int8, elements_per_scale=128)
ROW_FORMATS = {row_format.name: row_format for row_format in (AS_THEY_ARE, INT8, INT8_128)}
QUANTIZED = {name: row_format for name, row_format in ROW_FORMATS.items() if name is not None}
_REMEDY = (
    "Pass 'int8' (a scale for each row) or 'int8_128' (one for every 128 elements): A2 and A3 have no fp8."
)
BY_QUANT_MODE = {r.quant_mode: r for r in ROW_FORMATS.values() if r.quant_mode is not None}


def row_format_of(quantize: object) -> RowFormat:
    """The format that a caller chose.

    Raises:
        ArgumentError: there is no such format.
    """
    return ROW_FORMATS[check_choice("quantize", quantize, tuple(ROW_FORMATS), _REMEDY)]
