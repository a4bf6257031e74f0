"""Ids as native code takes them: verdict, position and rule are those of a look at one after the other."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.backend import CpuBackend


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend()


def first_bad(ids: torch.Tensor, num_experts: int) -> tuple[int, str] | None:
    for token, row in enumerate(ids.tolist()):
        for k, each in enumerate(row):
            position = token * len(row) + k
            if not -1 <= each < num_experts:
                return position, "range"
            if each >= 0 and each in row[:k]:
                return position, "duplicate"
    return None


# More than 32 is beyond what one vector loop takes.
@given(st.data(), st.integers(1, 35), st.sampled_from([1, 35, 2048, 2**31 - 1]), st.booleans())
def test_the_first_bad_id_is_found(
    backend: CpuBackend, data: st.DataObject, topk: int, num_experts: int, wide: bool
) -> None:
    num_tokens = data.draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    some = torch.rand(num_tokens, min(num_experts, 99), generator=generator).argsort(1)[:, :topk]
    ids = torch.full((num_tokens, topk), -1, dtype=torch.int64 if wide else torch.int32)
    ids[:, : some.shape[1]] = some
    if num_tokens:
        edges = [-2, -1, 0, num_experts - 1, num_experts, *ids[0].tolist(), -(2**31), 2**31 - 1]
        if wide:
            edges += [-(2**63), 2**63 - 1, 2**32]
        places = st.tuples(st.integers(0, num_tokens - 1), st.integers(0, topk - 1), st.sampled_from(edges))
        for token, k, value in data.draw(st.lists(places, max_size=3)):
            ids[token, k] = min(value, torch.iinfo(ids.dtype).max)
    taken, bad = backend.take_ids(ids, num_experts)
    assert bad == first_bad(ids, num_experts)
    assert torch.equal(taken, ids.clamp(-(2**31), 2**31 - 1).int())


@given(st.data(), st.integers(1, 35), st.booleans(), st.booleans())
def test_of_a_mask_only_active_entries_are_looked_at(
    backend: CpuBackend, data: st.DataObject, topk: int, by_token: bool, wide: bool
) -> None:
    num_tokens, num_experts = data.draw(st.integers(0, 4)), 40
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :topk].contiguous()
    size = num_tokens if by_token else num_tokens * topk
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
    if by_token and data.draw(st.booleans()):
        mask = mask.sort(descending=True).values
    if num_tokens:
        places = st.tuples(
            st.integers(0, num_tokens - 1),
            st.integers(0, topk - 1),
            st.sampled_from([-2, -1, 3, 40, 2**31 - 1]),
        )
        for token, k, value in data.draw(st.lists(places, max_size=3)):
            ids[token, k] = value
    ids = ids if wide else ids.int()
    flags = mask[:, None].expand(num_tokens, topk) if by_token else mask.view(num_tokens, topk)
    is_torn = by_token and bool((mask.int().diff() > 0).any())
    expected = first_bad(torch.where(flags, ids, -1), num_experts)
    rule, taken = ctypes.c_int32(0), torch.zeros(num_tokens, topk, dtype=torch.int32)
    sizes = (
        taken.data_ptr(),
        num_tokens,
        topk,
        num_experts,
        mask.data_ptr(),
        int(by_token),
        ctypes.byref(rule),
    )
    position = backend._library.moe_take_ids(ids.data_ptr(), ids.dtype.itemsize, *sizes)
    assert torch.equal(taken, ids.int())
    if size == 0:  # whose address is null
        return
    if is_torn:
        first_false = int(mask.int().argmin())
        again = first_false + int(mask[first_false:].int().argmax())
        assert (position, rule.value) == (again * topk, 3)
    elif expected is None:
        assert position < 0
    else:
        assert (position, {1: "range", 2: "duplicate"}[rule.value]) == expected
