"""Windows that peers can address: made, refused with the reason, given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_triton.backends.npu.window import NpuWindow
from moe_triton.core.errors import WindowError
from moe_triton.processes import RankGroup
from tests.distributed.cases import Case
from tests.npu import window_workers
from tests.npu.test_dispatch_combine import config

Ranks = Callable[[int], RankGroup]
CASE = Case(config(), 13, "uniform", (8, 8), num_blocks=2)


def test_several_buffers_have_windows_of_their_own(ranks: Ranks) -> None:
    for good, left in ranks(2).run(window_workers.several, CASE):
        assert good == [True] * 6
        assert left == []


def test_cann_shmem_is_the_second_choice(ranks: Ranks) -> None:
    for good in ranks(2).run(window_workers.over_shmem, CASE):
        assert good == [True] * 3


def test_a_window_begins_where_a_block_may() -> None:
    memory = SimpleNamespace(peers=(0x200000, 0x400020, 0x600000))
    refused = r"rank\(s\) \[1\] begin at \['0x400020'\], but a window must begin at a multiple of 512 bytes"
    with pytest.raises(WindowError, match=refused):
        NpuWindow(memory, 4096, SimpleNamespace(rank=0), SimpleNamespace())  # type: ignore[arg-type]


def test_without_both_the_message_names_both(ranks: Ranks) -> None:
    for said in ranks(2).run(window_workers.without_libraries, CASE):
        assert said.startswith("ToolchainError: the npu back end needs memory that peers can address")
        assert "pip install memfabric-hybrid==1.3.0" in said
        assert "CANN SHMEM" in said


def test_a_peer_out_of_reach_is_named_on_every_rank(ranks: Ranks) -> None:
    for said in ranks(2).run(window_workers.unreachable, CASE):
        assert said == "WindowError: rank 0: memfabric cannot reach rank(s) [1] from rank 0"


@pytest.mark.parametrize(("soc", "is_refused"), [("Ascend910B3", True), ("Ascend910_9391", False)])
def test_ranks_of_two_servers(ranks: Ranks, soc: str, is_refused: bool, tmp_path: Path) -> None:
    """A2's vector cores write to their own server only; A3's to the whole super node."""
    all_said = ranks(2).run(window_workers.servers, CASE, soc, ["one", "two"], str(tmp_path))
    for rank, said in enumerate(all_said):
        if is_refused:
            assert f"WindowError: rank(s) [{1 - rank}] are on another server than rank {rank}" in said
        else:
            assert said == ""


def test_ranks_of_one_a2_server(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(2).run(window_workers.servers, CASE, "Ascend910B3", ["one", "one"], str(tmp_path))
    assert said == ["", ""]


def test_hccl_buffsize_bounds_the_window(ranks: Ranks) -> None:
    large = Case(config(num_max_tokens_per_rank=128, hidden=7168, num_experts=16), 1, "none", (0, 0))
    for said in ranks(2).run(window_workers.limited, large, "16"):
        assert "HCCL_BUFFSIZE" in said
        assert "these sizes need" in said
        assert "or more on every rank" in said
    for said in ranks(2).run(window_workers.limited, CASE, "many"):
        assert "it must be a positive number of megabytes" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "torch"}, "the npu back end has Triton kernels only"),
        ({"num_blocks": 49}, "it must be 1 to 48"),
    ],
    ids=["kernels", "num_blocks"],
)
def test_options_that_it_does_not_have_are_refused(
    ranks: Ranks, options: dict[str, object], message: str
) -> None:
    for said in ranks(2).run(window_workers.construct, CASE, options):
        assert said.startswith("ArgumentError")
        assert message in said


def test_a_trace_is_refused_and_no_file_left(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(window_workers.construct, CASE, {"trace": str(tmp_path / "refused.json")}):
        assert said.startswith("ArgumentError")
        assert "traces are of the CPU back end" in said
    assert not list(tmp_path.iterdir())


def test_the_stand_in_notices_what_overtakes_torch_npu(ranks: Ranks) -> None:
    """Without emptying torch_npu's queue, kernels that route have not run when rows are sent."""
    good = [str([0, 0])]
    for said in ranks(2).run(window_workers.past_the_queue, CASE):
        assert said != good
        assert said[0] in ("BufferStateError", "CommunicationTimeoutError") or "[" in said[0]
