"""What buffers and what they give back print as: a line, in any state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_triton import BufferStateError, CommunicationTimeoutError, EPBuffer
from moe_triton.processes import RankGroup
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.workers import make_buffer, one_round, patient_buffer

Groups = Callable[[int], RankGroup]
HANDLE = "DispatchHandle(buffer_id={}, number={}, dtype=torch.bfloat16)"


def open_and_closed(rank: int, num_ranks: int, scheme: str) -> list[str]:
    with make_buffer(small_case(num_ranks, scheme)) as buffer:
        said = [repr(buffer)]
    return [*said, repr(buffer)]


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
def test_a_buffer_says_what_it_is_for_and_whether_it_can_be_used(ranks: Groups, scheme: str) -> None:
    for rank, (before, after) in enumerate(ranks(2).run(open_and_closed, scheme)):
        begin = f"EPBuffer(rank {rank} of 2, hidden=64, num_topk=2, num_experts=4, comm_alg='{scheme}', "
        assert before.startswith(f"{begin}backend='cpu', window of ")
        assert before.endswith(" MB, open)")
        assert after == before.replace(", open)", ", closed)")
        assert "\n" not in before


def broken(rank: int, num_ranks: int) -> str:
    """A buffer whose peer does not come."""
    buffer = patient_buffer(small_case(num_ranks), timeout_s=0.2)
    inputs = inputs_of(small_case(num_ranks), rank, 0)
    if rank == 0:
        with pytest.raises(CommunicationTimeoutError):
            buffer.dispatch(inputs.x, inputs.topk_idx)
    said = repr(buffer)
    buffer.close()
    return said


def test_a_buffer_that_failed_says_so(ranks: Groups) -> None:
    said = ranks(2).run(broken)
    assert said[0].endswith(" MB, broken)")
    assert said[1].endswith(" MB, open)")


def test_half_a_buffer_has_a_representation() -> None:
    assert repr(EPBuffer.__new__(EPBuffer)) == "EPBuffer(not constructed)"


def outputs(rank: int, num_ranks: int) -> list[str]:
    case = small_case(num_ranks, quantize="int8")
    said = []
    with make_buffer(case) as buffer:
        for number in range(4):  # native code makes the last ones
            output, _ = one_round(buffer, case, inputs_of(case, rank, number), None)
            said.append(repr(output).replace(str(output.handle), ""))
            assert str(output.handle) == HANDLE.format(output.handle.buffer_id, number)
        inputs = inputs_of(case, rank, 0)
        pending = buffer.dispatch(inputs.x, inputs.topk_idx, wait=False)
        said.append(repr(pending))
        pending.wait()
        said.append(repr(pending))
        # What is printed lives on where the buffer does not.
        output = pending.wait()
    with pytest.raises(BufferStateError):
        buffer.expert_output(torch.bfloat16)
    assert repr(output).startswith("DispatchOutput(tokens=bfloat16 (")
    return said


def test_outputs_print_their_shapes_and_no_tensors(ranks: Groups) -> None:
    for *given, sent, done in ranks(2).run(outputs):
        tensors = "tokens=int8 (16, 64), scales=float32 (16,), tokens_per_expert=int64 (2,)"
        assert set(given) == {f"DispatchOutput({tensors}, weights=float32 (16,), handle=)"}
        assert (sent, done) == ("Pending(sent)", "Pending(done)")
