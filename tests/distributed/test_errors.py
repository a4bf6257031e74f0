"""Bad input: arguments, settings, groups, what a machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_triton import (
    ArgumentError,
    BufferStateError,
    ConfigMismatchError,
    EPBuffer,
    ToolchainError,
    WindowError,
)
from moe_triton.backends.cpu.triton import toolchain
from moe_triton.core.config import Config
from moe_triton.core.installing import install
from moe_triton.processes import RankGroup, run_ranks
from moe_triton.schemes.fullmesh.layout import WindowLayout
from tests.distributed.cases import experts_of, inputs_of, small_case
from tests.distributed.failures import leftovers, message_of, new_prefix, prefixed
from tests.distributed.workers import compare_rounds, expected_round, make_buffer, one_round
from tests.patience import seconds

Groups = Callable[[int], RankGroup]


# Each bad argument of dispatch: what it is, and what the message must name.
def bad_dispatches(
    buffer: EPBuffer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> dict[str, Any]:
    bad_id, twice = ids.clone(), ids.clone()
    bad_id[1, 0] = 99
    twice[2] = 3
    wide = torch.zeros(4, 128, dtype=torch.bfloat16)
    many = torch.zeros(5, 64, dtype=torch.bfloat16)
    many_ids = torch.tensor([[0, 1]] * 5, dtype=torch.int32)
    beyond = ids.long()
    beyond[0, 1] = 2**32
    d = buffer.dispatch
    # Others take any number of tokens, in rounds.
    limited = {"x is of 5 tokens": lambda: d(many, many_ids)} if buffer.config.scheme == "direct" else {}
    return {
        **limited,
        "x is of dtype torch.float32": lambda: d(x.float(), ids),
        "x is of shape (4, 128)": lambda: d(wide, ids),
        "x is strided": lambda: d(wide[:, ::2], ids),
        "x is on meta": lambda: d(x.to("meta"), ids),
        "x is a list": lambda: d([1], ids),
        "topk_idx is of dtype torch.float32": lambda: d(x, ids.float()),
        "topk_idx is of shape (3, 2)": lambda: d(x, ids[:3]),
        "topk_idx is 99 at token 1, k 0": lambda: d(x, bad_id),
        "topk_idx is -2 at token 0, k 0": lambda: d(x, ids - ids - 2),
        "topk_idx is 3 at token 2, k 1": lambda: d(x, twice),
        "topk_idx is 4294967296 at token 0, k 1": lambda: d(x, beyond),
        "topk_weights is of dtype torch.float64": lambda: d(x, ids, weights.double()),
        "topk_weights is of shape (4, 1)": lambda: d(x, ids, weights[:, :1].contiguous()),
        "quantize is 'fp8'": lambda: d(x, ids, quantize="fp8"),
        "smooth_scales is given": lambda: d(x, ids, smooth_scales=torch.ones(4, 64)),
    }


def refuse_everything(rank: int, num_ranks: int, scheme: str, before: int) -> list[str]:
    case = small_case(num_ranks, scheme)
    wrong = []
    with make_buffer(case) as buffer, make_buffer(case) as other:
        inputs = inputs_of(case, rank, 0)
        x, ids, weights = inputs.x, inputs.topk_idx, inputs.topk_weights
        for _ in range(before):
            one_round(buffer, case, inputs, None)
        for start, call in bad_dispatches(buffer, x, ids, weights).items():
            message = message_of(call)
            if not message.startswith(start):
                wrong.append(f"expected {start!r}, got {message!r}")
        foreign, _ = one_round(other, case, inputs, None)
        old, _ = one_round(buffer, case, inputs, None)
        output = buffer.dispatch(x, ids, weights)
        y = experts_of(case, rank, output.tokens)
        rows = output.handle.num_received()
        bad_combines = {
            "handle is a int": lambda: buffer.combine(y, 7, weights),  # type: ignore[arg-type]
            "handle is a Tensor, but it must come from dispatch. Pass output.handle, the last of": (
                lambda: buffer.combine(y, weights, output.handle)  # type: ignore[arg-type]
            ),
            "handle is of another buffer": lambda: buffer.combine(y, foreign.handle, weights),
            "y is of dtype torch.float16": lambda: buffer.combine(y.half(), output.handle, weights),
            "y is of shape": lambda: buffer.combine(y[:, :32].contiguous(), output.handle, weights),
            "y is strided": lambda: buffer.combine(y.t().contiguous().t(), output.handle, weights),
            f"y is of {rows - 1} rows": lambda: buffer.combine(y[: rows - 1], output.handle, weights),
            "topk_weights is of shape": lambda: buffer.combine(y, output.handle, weights[:1]),
        }
        if scheme == "direct":  # whose later dispatches write over its outputs
            bad_combines[f"handle is of dispatch {before}"] = lambda: buffer.combine(y, old.handle, weights)
        for start, call in bad_combines.items():
            message = message_of(call)
            if not message.startswith(start):
                wrong.append(f"expected {start!r}, got {message!r}")
        # Nothing of all that left a trace: the round that was begun ends well.
        combined = buffer.combine(y[:rows].clone(), output.handle, weights)
        if not torch.equal(combined, expected_round(case, 0)[1][rank]):
            wrong.append("the buffer gave other numbers after bad input")
        # More combines than there are zones: the buffer itself keeps them apart.
        for _ in range(3):
            if not torch.equal(buffer.combine(y, output.handle, weights), combined):
                wrong.append("a handle that is combined again gave other numbers")
        one_round(buffer, case, inputs, None)
    for call in (lambda: buffer.dispatch(x, ids), lambda: buffer.combine(y, output.handle, weights)):
        if "closed" not in message_of(call, BufferStateError):
            wrong.append("a closed buffer took a call")
    buffer.close()
    return wrong


# At first a buffer's calls go through Python; once its plans are there, through native code.
@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "direct", "fullmesh"])
def test_bad_arguments_are_named_and_the_buffer_still_works(ranks: Groups, scheme: str, before: int) -> None:
    assert ranks(2).run(refuse_everything, scheme, before) == [[], []]


def construct_differently(rank: int, num_ranks: int, changes: dict[str, Any]) -> str:
    options: dict[str, Any] = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 8}
    if rank == num_ranks - 1:
        options |= changes
    return message_of(lambda: EPBuffer(relaxed=True, timeout_s=seconds(20), **options), ConfigMismatchError)


def test_disagreement_names_field_and_ranks(ranks: Groups) -> None:
    for message in ranks(4).run(construct_differently, {"hidden": 63, "num_topk": 3}):
        assert "hidden: 64 on rank(s) [0, 1, 2], 63 on rank(s) [3]" in message
        assert "num_topk: 2 on rank(s) [0, 1, 2], 3 on rank(s) [3]" in message
        assert "num_experts" not in message


def construct_badly(rank: int, num_ranks: int, options: dict[str, Any]) -> str:
    good: dict[str, Any] = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 8}
    return message_of(lambda: EPBuffer(**{"relaxed": True, "timeout_s": 20, **good, **options}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": 8193}, "hidden is 8193"),
        ({"num_topk": 33, "num_experts": 64}, "num_topk is 33"),
        ({"num_experts": 2050}, "num_experts is 2050"),
        ({"num_experts": 7}, "num_experts is 7"),
        ({"comm_alg": "fullmesh"}, "comm_alg is 'fullmesh'"),
        ({"product": "A2", "num_shared_experts": 1, "num_shared_ranks": 1}, "num_shared_experts is 1"),
        ({"num_bytes": 1000}, "num_bytes is 1000"),
        ({"num_blocks": 99}, "num_blocks is 99"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"relaxed": False, "product": "A2", "ranks_per_server": 1}, "ranks_per_server is 1,"),
        ({"backend": "gpu"}, "backend is 'gpu'"),
        ({"kernels": "numpy"}, "kernels is 'numpy'"),
    ],
)
def test_bad_settings_are_named(ranks: Groups, options: dict[str, Any], said: str) -> None:
    for message in ranks(2).run(construct_badly, options):
        assert message.startswith(said)


def one_rank_cannot(rank: int, num_ranks: int) -> str:
    options = {"backend": "gpu"} if rank == 1 else {}
    kind = ArgumentError if rank == 1 else ConfigMismatchError
    case = small_case(num_ranks)
    return message_of(lambda: make_buffer(case, **options), kind)


def test_a_rank_that_cannot_start_tells_the_others(ranks: Groups) -> None:
    messages = ranks(3).run(one_rank_cannot)
    assert messages[0] == messages[2]
    assert "rank 1 cannot be constructed: backend is 'gpu'" in messages[0]


def without_toolchain(rank: int, num_ranks: int) -> tuple[str, list[str]]:
    case = small_case(num_ranks, quantize="int8")
    real = toolchain.find_program
    toolchain.find_program = lambda package, relative: None
    toolchain.find_toolchain.cache_clear()
    try:
        message = message_of(lambda: make_buffer(case), ToolchainError)
        return message, compare_rounds(rank, num_ranks, replace(case, kernels="torch"))
    finally:
        toolchain.find_program = real
        toolchain.find_toolchain.cache_clear()


def test_without_the_toolchain_torch_is_offered_by_name(ranks: Groups) -> None:
    for message, wrong in ranks(2).run(without_toolchain):
        assert install("cpu") in message
        assert 'kernels="torch"' in message
        assert wrong == []


ALONE = """
import torch
from moe_triton import EPBuffer
with EPBuffer(num_max_tokens_per_rank=4, hidden=1024, num_topk=2, num_experts=8) as buffer:
    x = torch.arange(4 * 1024).view(4, 1024).bfloat16()
    for _ in range(4):
        out = buffer.dispatch(x, torch.tensor([[0, 3], [7, 1], [2, -1], [-1, -1]]))
        sums = buffer.combine(out.tokens, out.handle, torch.full((4, 2), 0.5))
    assert out.tokens_per_expert.tolist() == [1, 1, 1, 1, 0, 0, 0, 1], out.tokens_per_expert
    assert torch.equal(sums, x * torch.tensor([[1.0], [1.0], [0.5], [0.0]]).bfloat16())
print(buffer.num_ranks, buffer.num_local_experts, buffer.capacity, buffer.group is None)
"""


def alone(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds(120),
        env=os.environ | environment,
        check=False,
    )


def test_one_process_needs_no_group() -> None:
    done = alone()
    assert done.stdout == "1 8 8 True\n", done.stderr


def test_one_process_of_several_needs_a_group() -> None:
    done = alone(WORLD_SIZE="2")
    assert "torch.distributed must be initialised" in done.stderr


def group_of_one(rank: int, num_ranks: int) -> bool:
    case = small_case(1)
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, 0, 0)
        return torch.equal(one_round(buffer, case, inputs, None)[1], expected_round(case, 0)[1][0])


def test_a_group_of_one_is_a_group() -> None:
    assert run_ranks(group_of_one, 1) == [True]


def window_too_large(rank: int, num_ranks: int, prefix: str) -> tuple[str, int]:
    """On a machine whose shared memory has room for one rank's window, and not for two."""
    case = small_case(num_ranks, config=Config(num_ranks, 512, 8192, 16, 1024))
    window_bytes = WindowLayout(case.config).window_bytes
    usage = SimpleNamespace(f_frsize=1, f_bavail=num_ranks * window_bytes - 1)
    with prefixed(prefix), mock.patch("os.statvfs", return_value=usage):
        return message_of(lambda: make_buffer(case), WindowError), window_bytes


def test_a_window_beyond_free_shared_memory(ranks: Groups) -> None:
    prefix = new_prefix()
    for message, window_bytes in ranks(2).run(window_too_large, prefix):
        assert f"/dev/shm has {2 * window_bytes - 1} free" in message
        assert "num_max_tokens_per_rank" in message
    assert not leftovers(prefix)
