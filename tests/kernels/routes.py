"""Both ways to run a kernel, and comparison to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings

from moe_triton.backends.cpu.triton import launch, launch_fallback
from moe_triton.core.kernel import TritonKernel

Launch = Callable[[TritonKernel, Sequence[torch.Tensor | int], int], None]

LAUNCHES = [pytest.param(launch, id="triton"), pytest.param(launch_fallback, id="torch")]

# the compiled kernel in both forms, and the fallback
FORMS = [
    pytest.param(launch, "cpu", id="triton-cpu"),
    pytest.param(launch, "npu", id="triton-npu"),
    pytest.param(launch_fallback, "cpu", id="torch"),
]

# few sizes, so that few kernels are compiled; data and everything that is a run-time argument vary
kernel_settings = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

DTYPES = [torch.bfloat16, torch.float16]


CANARY = 0x5A


class Guarded:
    """Memory for an output, with canaries on both sides.

    Attributes:
        tensor: where the output goes; filled with canaries, too.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, canary: int = CANARY) -> None:
        self._canary = canary
        margin = 128 // dtype.itemsize
        elements = torch.Size(shape).numel()
        self._memory = torch.full(((elements + 2 * margin) * dtype.itemsize,), canary, dtype=torch.uint8)
        self.tensor = self._memory.view(dtype)[margin : margin + elements].view(*shape)

    def check(self) -> torch.Tensor:
        """The tensor, once nothing outside it has changed."""
        assert (self._memory[:128] == self._canary).all()
        assert (self._memory[-128:] == self._canary).all()
        return self.tensor

    def untouched(self) -> torch.Tensor:
        """A tensor of the same shape that holds canaries."""
        dtype = self.tensor.dtype
        return (
            torch.full((dtype.itemsize,), self._canary, dtype=torch.uint8)
            .view(dtype)
            .expand(self.tensor.shape)
        )


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to the bit, any NaN being equal to any other."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if got.dtype.is_floating_point:
        integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
        nan = got.isnan()
        assert torch.equal(nan, want.isnan())
        zero = torch.zeros((), dtype=integer)
        got = torch.where(nan, zero, got.contiguous().view(integer))
        want = torch.where(nan, zero, want.contiguous().view(integer))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
