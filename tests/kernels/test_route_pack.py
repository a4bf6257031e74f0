from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.backends.cpu.triton.loader import load
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.numbering import ID_LIMIT, taken_ids
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.route import route_kernel
from moe_triton.kernels.route_pack import route_pack_kernel
from tests.kernels.models import route_model
from tests.kernels.routes import FORMS, Guarded, Launch, kernel_settings

HIDDEN, TOPK, STRIDE = 96, 8, 512
PROGRAMS = [1, 2, 3, 48]
TAKES = [None, torch.int32, torch.int64]
FAR = [-1, -2, 2**31 - 1, -(2**31)]
FARTHER = [2**63 - 1, -(2**63), 2**32, 2**32 + 1, -(2**32) + 1, ID_LIMIT, -ID_LIMIT]


@dataclass
class Call:
    """One call, its outputs full of canaries."""

    ids: torch.Tensor
    num_experts: int
    takes: bool = False
    smooth: bool = False
    num_shared: int = 0
    first_token: int = 0
    packs: bool = True

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        (tokens, topk), shared = self.ids.shape, self.num_shared
        self.rows_per_token = topk + shared if self.smooth else 1
        self.x = torch.randn((tokens, HIDDEN), generator=generator).bfloat16()
        self.smooth_scales = torch.rand((shared + self.num_experts, HIDDEN), generator=generator) + 0.5
        self.slots = Guarded((tokens * self.rows_per_token, STRIDE), torch.int8)
        self.taken = Guarded(self.ids.shape, torch.int32)
        self.expand_idx = Guarded((self.ids.numel(),), torch.int32)
        self.counts = Guarded((self.num_experts,), torch.int32)
        self.outputs = [self.slots, self.expand_idx, self.counts] + ([self.taken] if self.takes else [])

    def kernel(self, target: str) -> TritonKernel:
        how = {"takes": self.takes, "int64": self.ids.dtype == torch.int64}
        if not self.packs:
            return route_kernel(target, **how)
        topk, shared = self.ids.shape[1], self.num_shared
        return route_pack_kernel(torch.bfloat16, HIDDEN, topk, self.smooth, target, shared, **how)

    def arguments(self, kernel: TritonKernel) -> list[torch.Tensor | int]:
        slots = self.slots.tensor
        values = {
            "given": self.ids,
            "topk_idx": self.taken.tensor if self.takes else self.ids,
            "expand_idx": self.expand_idx.tensor,
            "counts": self.counts.tensor,
            "x": self.x,
            "smooth_scales": self.smooth_scales,
            "rows": slots,
            "scales": slots.view(-1).view(torch.float32)[HIDDEN // 4 :],
            "num_entries": self.ids.numel(),
            "num_experts": self.num_experts,
            "first_token": self.first_token,
            "num_tokens": len(self.ids) - self.first_token,
            "scale_row_offset": self.num_shared,
            "num_scale_rows": len(self.smooth_scales),
            "row_stride": STRIDE,
            "scale_stride": STRIDE // 4,
        }
        return [values[arg.name] for arg in kernel.args]

    def run(self, launch: Launch, target: str, programs: int) -> None:
        kernel = self.kernel(target)
        launch(kernel, self.arguments(kernel), programs)

    def check(self) -> None:
        """What came out is what models and `pack` say, and nothing else was written."""
        ids = taken_ids(self.ids)
        index, counts = route_model(ids.flatten().tolist(), self.num_experts)
        assert self.expand_idx.check().tolist() == index
        assert self.counts.check().tolist() == counts
        if self.takes:
            assert torch.equal(self.taken.check(), ids)
        assert torch.equal(self.slots.check(), self._packed(ids))

    def _packed(self, ids: torch.Tensor) -> torch.Tensor:
        expected = self.slots.untouched().clone()
        if not self.packs or not len(ids):
            return expected
        kernel = pack_kernel(torch.bfloat16, HIDDEN, ids.shape[1], self.smooth, num_shared=self.num_shared)
        whole = replace(self, ids=ids, takes=False)
        whole.slots.tensor.copy_(expected)
        launch(kernel, whole.arguments(kernel), 1)
        return whole.slots.check()


def ids_of(data: st.DataObject, tokens: int, topk: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """All alike, all different, or mixed with ids of no expert."""
    far = FAR + (FARTHER if dtype == torch.int64 else [])
    pool = data.draw(
        st.sampled_from([[-1], [num_experts - 1], range(num_experts), [*range(num_experts), *far]])
    )
    ids = data.draw(st.lists(st.sampled_from(pool), min_size=tokens * topk, max_size=tokens * topk))
    return torch.tensor(ids, dtype=dtype).view(tokens, topk)


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("takes", TAKES, ids=str)
@pytest.mark.parametrize("packs", ["plain", "int8", "smooth"])
@kernel_settings
@given(
    data=st.data(),
    tokens=st.integers(0, 40),
    num_experts=st.integers(1, 130),
    programs=st.sampled_from(PROGRAMS),
)
def test_route_and_pack(
    launch: Launch,
    target: str,
    takes: torch.dtype | None,
    packs: str,
    data: st.DataObject,
    tokens: int,
    num_experts: int,
    programs: int,
) -> None:
    ids = ids_of(data, tokens, TOPK, num_experts, takes or torch.int32)
    first = data.draw(st.integers(0, tokens))
    is_smooth = packs == "smooth"
    call = Call(ids, num_experts, takes is not None, is_smooth, 0, first, packs != "plain")
    call.run(launch, target, programs)
    call.check()


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("takes", TAKES, ids=str)
@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 63, 128, 300])
def test_every_size_is_shared_out(
    launch: Launch, target: str, takes: torch.dtype | None, programs: int, tokens: int
) -> None:
    """Tiles that are full and not, fewer of them than programs and many more."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, 203, (tokens, TOPK), generator=generator, dtype=takes or torch.int32)
    for packs in (True, False):
        call = Call(ids, 200, takes is not None, packs=packs)
        call.run(launch, target, programs)
        call.check()


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("programs", [1, 5])
def test_rows_for_shared_experts(launch: Launch, target: str, programs: int) -> None:
    ids = torch.randint(-1, 6, (5, 3), dtype=torch.int32)
    call = Call(ids, 6, smooth=True, num_shared=2)
    call.run(launch, target, programs)
    call.check()


@pytest.mark.parametrize("target", ["cpu", "npu"])
@pytest.mark.parametrize("takes", TAKES, ids=str)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("programs", PROGRAMS)
def test_no_program_needs_another(
    target: str, takes: torch.dtype | None, smooth: bool, programs: int
) -> None:
    """Each by itself writes its part of the result: on an NPU they begin in any order."""
    ids = torch.randint(-1, 100, (33, TOPK), dtype=takes or torch.int32)
    whole = Call(ids, 100, takes is not None, smooth)
    whole.run(launch, target, programs)
    results = [output.check().view(-1).view(torch.uint8) for output in whole.outputs]
    written = [torch.zeros_like(result, dtype=torch.bool) for result in results]
    for program in range(programs):
        alone = Call(ids, 100, takes is not None, smooth)
        _run_one(alone, target, programs, program)
        for output, result, seen in zip(alone.outputs, results, written, strict=True):
            found = output.check().view(-1).view(torch.uint8)
            changed = found != output.untouched().contiguous().view(-1).view(torch.uint8)
            assert torch.equal(found[changed], result[changed])
            seen |= changed
    for output, result, seen in zip(whole.outputs, results, written, strict=True):
        canaries = output.untouched().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(torch.where(seen, result, canaries), result)


def _run_one(call: Call, target: str, programs: int, program: int) -> None:
    kernel = call.kernel(target)
    words = [
        value.data_ptr() if isinstance(value, torch.Tensor) else value for value in call.arguments(kernel)
    ]
    load(kernel).function((ctypes.c_uint64 * len(words))(*words), programs, program)


@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_programs_share_the_work(target: str) -> None:
    """Those that only route or route first come first; on the CPU it is one, and it packs the fewest."""
    ids = torch.randint(0, 100, (256, TOPK), dtype=torch.int32)
    routes, packs = [], []
    for program in range(8):
        call = Call(ids, 100)
        _run_one(call, target, 8, program)
        packs.append(int((call.slots.check() != call.slots.untouched()).any(1).sum()))
        routes.append(not torch.equal(call.expand_idx.check(), call.expand_idx.untouched()))
    assert routes == sorted(routes, reverse=True)
    assert routes[0]
    assert sum(packs) == len(ids)
    assert packs[0] == min(packs) < max(packs)
    if target == "npu":
        assert [routed != (packed > 0) for routed, packed in zip(routes, packs, strict=True)] == [True] * 8
    else:
        assert sum(routes) == 1


def test_ids_far_outside_are_taken_as_no_expert() -> None:
    ids = torch.tensor([FAR + FARTHER + [ID_LIMIT - 1, 1 - ID_LIMIT, 3]])
    call = Call(ids, 4, takes=True)
    call.run(launch, "npu", 2)
    found = call.taken.check().flatten().tolist()
    assert found == [-1, -2, *[-1] * (len(FAR + FARTHER) - 2), ID_LIMIT - 1, 1 - ID_LIMIT, 3]
    assert call.counts.check().tolist() == [0, 0, 0, 1]


def test_a_copy_that_is_given_is_int32() -> None:
    with pytest.raises(ArgumentError, match="int64"):
        route_kernel(int64=True)
    with pytest.raises(ArgumentError, match="int64"):
        route_pack_kernel(torch.bfloat16, HIDDEN, int64=True)
