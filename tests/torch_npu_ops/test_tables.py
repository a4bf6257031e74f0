"""Tables of settings are read when a call needs them first, and not again inside later calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_triton import torch_npu_ops as ops
from moe_triton.core.cpu_family import cpu_family
from moe_triton.core.errors import ArgumentError
from moe_triton.processes import RankGroup
from tests.patience import seconds
from tests.torch_npu_ops.setting import fresh, make_round


def _dispatch(rank: int, num_ranks: int, tokens: int) -> None:
    r = make_round(rank, num_ranks, tokens=tokens)
    ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)


def _break_tables_between_calls(rank: int, num_ranks: int, folder: Path) -> None:
    with fresh(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_TRITON_TABLES", str(folder / str(rank)))
        _dispatch(rank, num_ranks, 16)
        for kind in ("kernels", "pipelines"):
            (folder / str(rank) / f"{kind}-cpu-{cpu_family()}.json").write_text("{")
        _dispatch(rank, num_ranks, 24)  # another shape, and another window
        ops.configure(relaxed=True, timeout_s=seconds(20.0))
        with pytest.raises(ArgumentError, match="it must be a table that can be read"):
            _dispatch(rank, num_ranks, 32)


def test_a_table_that_is_broken_while_a_process_serves_is_no_error(
    ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    ranks(2).run(_break_tables_between_calls, tmp_path)
