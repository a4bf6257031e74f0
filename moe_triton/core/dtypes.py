"""Element types by Triton's names for them."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
