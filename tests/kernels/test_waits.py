from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.kernels.waits import waits_of_combine_kernel, waits_of_dispatch_kernel
from tests.kernels.calls import waits_of_combine, waits_of_dispatch
from tests.kernels.routes import FORMS, LAUNCHES, Guarded, Launch, kernel_settings

I32 = torch.int32


class Record:
    """A performance_info with canaries, a table that leads there, and what should come out."""

    def __init__(self, data: st.DataObject, ranks: int) -> None:
        entries = data.draw(st.integers(1, ranks + 2))
        places = data.draw(st.permutations(range(-2, ranks + 3)))[:ranks]
        if data.draw(st.booleans()):
            places[-1] = data.draw(st.sampled_from([2**31 - 1, -(2**31)]))
        old = data.draw(st.lists(st.integers(0, 2**40), min_size=entries, max_size=entries))
        self.places, self.want = places, old.copy()
        self.table = torch.tensor(places, dtype=I32)
        # negative numbers around it, which any wait would raise
        self._guarded = Guarded((entries,), torch.int64, canary=0x80)
        self.performance_info = self._guarded.tensor
        self.performance_info.copy_(torch.tensor(old))

    def expect(self, source: int, waited: int) -> None:
        place = self.places[source]
        if 0 <= place < len(self.want):
            self.want[place] = max(self.want[place], waited, 1)  # what was there at once counts as 1

    def check(self) -> None:
        assert self._guarded.check().tolist() == self.want


def draw_waits(data: st.DataObject, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    waited = torch.randint(0, 2**31, shape, generator=generator, dtype=torch.int64)
    waited >>= torch.randint(0, 31, shape, generator=generator)
    return waited.to(I32)


@pytest.mark.parametrize(("launch", "target"), FORMS)
@kernel_settings
@given(data=st.data(), ranks=st.integers(1, 9), experts=st.integers(1, 5), programs=st.integers(1, 4))
def test_dispatch_keeps_the_longest_wait_for_each_source(
    launch: Launch, target: str, data: st.DataObject, ranks: int, experts: int, programs: int
) -> None:
    record = Record(data, ranks)
    waited = draw_waits(data, experts, ranks)
    for row in waited.tolist():
        for source, us in enumerate(row):
            record.expect(source, us)
    sizes = [experts, ranks, record.performance_info.numel()]
    arguments = [waited, record.table, record.performance_info, *sizes]
    launch(waits_of_dispatch_kernel(target), arguments, programs)
    record.check()


@pytest.mark.parametrize(("launch", "target"), FORMS)
@kernel_settings
@given(
    data=st.data(),
    tokens=st.integers(0, 5) | st.sampled_from([63, 64, 65, 130]),
    topk=st.integers(1, 16),
    shared=st.integers(0, 4),
    replicas=st.integers(1, 3),
    moe_ranks=st.integers(1, 5),
    experts=st.integers(1, 4),
    programs=st.integers(1, 3),
)
def test_combine_keeps_the_longest_wait_for_each_source(
    launch: Launch,
    target: str,
    data: st.DataObject,
    tokens: int,
    topk: int,
    shared: int,
    replicas: int,
    moe_ranks: int,
    experts: int,
    programs: int,
) -> None:
    shared_ranks, num_experts = shared * replicas, moe_ranks * experts
    ranks = shared_ranks + moe_ranks
    rank = data.draw(st.integers(0, ranks - 1))
    record = Record(data, ranks)
    waited = draw_waits(data, tokens, topk + shared)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    ids = torch.randint(-2, num_experts + 3, (tokens, topk), generator=generator, dtype=I32)
    if tokens:
        ids[0, 0] = data.draw(st.sampled_from([2**31 - 1, -(2**31), 0]))
    for row, us in zip(ids.tolist(), waited.tolist(), strict=True):
        for k, expert in enumerate(row):
            if 0 <= expert < num_experts:
                record.expect(shared_ranks + expert // experts, us[k])
        for s in range(shared):
            record.expect(s * replicas + rank % replicas, us[topk + s])
    sizes = [tokens, num_experts, experts, shared, shared_ranks, ranks, rank]
    arguments = [waited, ids, record.table, record.performance_info, *sizes]
    kernel = waits_of_combine_kernel(topk, target)
    launch(kernel, [*arguments, record.performance_info.numel()], programs)
    record.check()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_host_functions(launch: Launch) -> None:
    performance_info = torch.tensor([5, 5, 5])
    table = torch.tensor([2, 0], dtype=I32)
    waits_of_dispatch(torch.tensor([1, 9, 7, 3], dtype=I32), table, performance_info, launch)
    assert performance_info.tolist() == [9, 5, 7]
    ids = torch.tensor([[0, 3], [-1, 1]], dtype=I32)
    waited = torch.tensor([[8, 6], [99, 10]], dtype=I32)
    waits_of_combine(waited, ids, table, performance_info, launch, num_experts=4, rank=0)
    assert performance_info.tolist() == [9, 5, 10]
    none_waited = torch.zeros(3, dtype=torch.int64)
    waits_of_dispatch(torch.zeros(4, dtype=I32), table, none_waited, launch)
    assert none_waited.tolist() == [1, 0, 1]  # of a rank that nothing comes from nothing is said
