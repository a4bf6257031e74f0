"""Ids as native code takes them: verdict, position and rule are those of a look at one after the other."""

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
