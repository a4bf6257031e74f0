"""Argument rules that the host functions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_triton.errors import ArgumentError
from moe_triton.kernel import TritonKernel

Launch = Callable[[TritonKernel, Sequence[torch.Tensor | int], int], None]
"""Runs a kernel: ``launch(kernel, arguments in the kernel's order, number of programs)``."""

TRITON_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]
) -> None:
    """Refuse a tensor of another dtype, shape (None: any size) or layout than the kernel reads."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ArgumentError(f"{name}.dtype", tensor.dtype, f"must be {expected}", f"Convert {name} first.")
    matches = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not matches:
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ArgumentError(
            f"{name}.shape", tuple(tensor.shape), f"must be ({expected})", f"Reshape {name} first."
        )
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"{name}.stride()", tensor.stride(), "must be contiguous", f"Pass {name}.contiguous()."
        )


def check_hidden(hidden: int) -> None:
    """Refuse hidden sizes that leave part of a 32-byte unit."""
    if hidden < 32 or hidden % 32:
        raise ArgumentError(
            "hidden", hidden, "must be a positive multiple of 32", "Pad the hidden size to the next multiple."
        )


def check_float_dtype(dtype: torch.dtype) -> None:
    """Refuse what tokens are not made of."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ArgumentError(
            "dtype", dtype, "must be torch.bfloat16 or torch.float16", "Convert the tokens first."
        )


def check_positive(name: str, value: int) -> None:
    """Refuse zero and less."""
    if value < 1:
        raise ArgumentError(name, value, "must be at least 1", f"Pass a positive {name}.")


def split_evenly(num_items: int, programs: int) -> list[range]:
    """The contiguous slice of each program: the same split as the kernels compute."""
    per_program = -(-num_items // programs)
    return [
        range(min(p * per_program, num_items), min((p + 1) * per_program, num_items)) for p in range(programs)
    ]
