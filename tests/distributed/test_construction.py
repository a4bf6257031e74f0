"""Ranks that cannot be constructed, at any stage: who is told, how fast, and what is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import (
    ArgumentError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    EPBuffer,
    Tuning,
    WindowError,
    buffer,
)
from moe_triton import torch_npu_ops as ops
from moe_triton.backends import make_backend
from moe_triton.backends.cpu import window
from moe_triton.core.config import Config
from moe_triton.core.errors import ThreadError
from moe_triton.processes import RankGroup, run_ranks
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.runtime import communicator, construction
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.construction import Order
from moe_triton.torch_npu_ops import settings
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.failures import SHM, new_prefix
from tests.distributed.interrupted import messages
from tests.distributed.workers import compare_rounds, make_buffer, one_round
from tests.patience import seconds
from tests.torch_npu_ops.setting import fresh, make_round

Groups = Callable[[int], RankGroup]
SIZES = ("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts")
PATIENCE_S = 60.0  # that every rank would wait for the others
AT_ONCE_S = 20.0  # far less, on a busy machine too

# What one rank passes, and what its error and that of all others say.
BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "hidden is '64'": {"hidden": "64"},
    "hidden is 0": {"hidden": 0},
    "num_experts is True (a bool)": {"num_experts": True},
    "num_topk is 2.0 (a float)": {"num_topk": 2.0},
    "timeout_s is nan": {"timeout_s": float("nan")},
    "timeout_s is '1'": {"timeout_s": "1"},
    "num_bytes is 10,": {"num_bytes": 10},
    "num_blocks is 2.5": {"num_blocks": 2.5},
    "num_blocks is 99": {"num_blocks": 99},
    "tuning is a dict": {"tuning": {}},
    "tuning.communication_blocks is 7": {
        "tuning": Tuning(communication_blocks=7),
        "num_blocks": 2,
    },
    "backend is 'gpu'": {"backend": "gpu"},
    "kernels is 'numpy'": {"kernels": "numpy"},
    "relaxed is 1 (a int)": {"relaxed": 1},
    "explicitly_destroy is None": {"explicitly_destroy": None},
    "comm_alg is 'fullmesh'": {"comm_alg": "fullmesh"},
    "ranks_per_server is True (a bool)": {"ranks_per_server": True},
    "outputs is 'mine'": {"outputs": "mine"},
    "trace is '/dev/null/trace.json'": {"trace": "/dev/null/trace.json"},
}


def make(num_ranks: int, **options: Any) -> EPBuffer:
    config = small_case(num_ranks).config
    usual = {name: getattr(config, name) for name in SIZES}
    return EPBuffer(**{**usual, "relaxed": True, "timeout_s": PATIENCE_S, **options})


def at_once(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """What a call raises, which it has to do long before its time-out."""
    began = time.monotonic()
    with pytest.raises(kinds) as caught:
        call()
    assert time.monotonic() - began < AT_ONCE_S
    return str(caught.value)


def works(num_ranks: int, rank: int) -> bool:
    case = small_case(num_ranks)
    with make(num_ranks) as made:
        one_round(made, case, inputs_of(case, rank, 0), None)
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total) == num_ranks


def refuse_in_turn(rank: int, num_ranks: int, refusing: int) -> list[str]:
    wrong = []
    for number, (said, options) in enumerate(BAD_OPTIONS.items()):
        if rank == refusing:
            message = at_once(lambda o=options: make(num_ranks, **o), ArgumentError)  # type: ignore[misc]
            expected = said
        else:
            time.sleep(0.02 * ((number + rank) % 3))  # some are there before it refuses, others come late
            message = at_once(lambda: make(num_ranks), ConfigMismatchError)
            expected = f"rank {refusing} cannot be constructed: {said}"
        if not message.startswith(expected):
            wrong.append(f"expected {expected!r}, got {message!r}")
    assert works(num_ranks, rank)
    return wrong


@pytest.mark.parametrize("refusing", [0, 2])
def test_a_rank_that_is_refused_tells_the_others_at_once(ranks: Groups, refusing: int) -> None:
    assert ranks(3).run(refuse_in_turn, refusing) == [[], [], []]


class OddError(Exception):
    pass


def fail_with(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise error

    return fail


# Where rank 1 fails: a name in a module or class that construction passes.
STAGES: dict[str, tuple[object, str]] = {
    "preparation": (buffer, "make_backend"),
    "scheme": (construction, "make_scheme"),
    "trace": (communicator.Trace, "__init__"),
    "window": (window.SharedWindow, "__init__"),
    "stale windows": (window, "remove_stale"),
    "room": (window, "_shortage"),
    "file": (window, "_create"),
    "mapping": (window, "_map"),
    "memory": (communicator, "PlanMemory"),
    "plans": (communicator, "Executables"),
}


def fail_at(rank: int, num_ranks: int, stage: str, kind: type[BaseException], folder: str) -> str:
    where, name = STAGES[stage]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(where, name, fail_with(kind("for once")))
        kinds = (ConfigMismatchError, WindowError, *([kind] if rank == 1 else []))
        return at_once(lambda: make(num_ranks, trace=f"{folder}/trace.json"), *kinds)


def fail_at_every_stage(rank: int, num_ranks: int, kind: type[BaseException], folder: str) -> dict[str, str]:
    said = {stage: fail_at(rank, num_ranks, stage, kind, folder) for stage in STAGES}
    assert works(num_ranks, rank)
    return said


@pytest.mark.parametrize("kind", [OddError, MemoryError, KeyboardInterrupt])
def test_a_rank_that_fails_at_any_stage_tells_the_others(
    ranks: Groups, kind: type[BaseException], tmp_path: Path
) -> None:
    results = ranks(3).run(fail_at_every_stage, kind, str(tmp_path))
    for rank in (0, 2):
        for stage, said in results[rank].items():
            assert "rank 1" in said, stage
            assert "for once" in said, stage
            assert kind.__name__ in said, stage


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started meanwhile: no address space holds the stack of one."""
    usual = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(usual)


def fail_to_start_threads(rank: int, num_ranks: int, stage: str) -> str:
    meet = getattr(communicator, stage)

    def without_threads(*arguments: Any) -> Any:
        made.enter_context(no_threads())
        return meet(*arguments)

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as made:
        if rank == 1:
            patch.setattr(communicator, stage, without_threads)
        said = at_once(lambda: make(num_ranks), ConfigMismatchError, *([ThreadError] if rank == 1 else []))
    assert works(num_ranks, rank)
    return said


@pytest.mark.parametrize("stage", ["prepare", "Executables"])
def test_a_rank_that_can_start_no_thread_says_so_and_tells_the_others(ranks: Groups, stage: str) -> None:
    first, failed, last = ranks(3).run(fail_to_start_threads, stage)
    assert failed.startswith("this process can start no thread: can't start new thread. Raise its limits")
    assert first == last == f"rank 1 cannot be constructed: {failed}"


def resources() -> dict[str, int]:
    gc.collect()
    mapped = Path("/proc/self/maps").read_text()
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "windows": mapped.count(window.PREFIX),
        "threads": threading.active_count(),
    }


def fail_often(rank: int, num_ranks: int, prefix: str, folder: str) -> list[str]:
    left = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "PREFIX", prefix)
        works(num_ranks, rank)
        before = resources()
        for _ in range(3):
            for stage in STAGES:
                fail_at(rank, num_ranks, stage, OddError, folder)
        deadline = time.monotonic() + AT_ONCE_S
        while (after := resources()) != before and time.monotonic() < deadline:
            time.sleep(0.02)  # a thread that tells others ends a moment later
        left += [
            f"{name}: {before[name]}, then {after[name]}" for name in before if after[name] > before[name]
        ]
        dist.barrier()
        left += [path.name for path in SHM.glob(f"{prefix}*")]
    return left


def test_constructions_that_fail_leave_nothing_behind(ranks: Groups, tmp_path: Path) -> None:
    assert ranks(2).run(fail_often, new_prefix(), str(tmp_path)) == [[], []]
    assert [path.name for path in tmp_path.iterdir()] in ([], ["trace.json"])


# What rank 1 has otherwise than rank 0, and the line about it.
MAY_DIFFER: dict[str, dict[str, Any]] = {
    "num_blocks: 2 on rank(s) [0], 3 on rank(s) [1]": {"num_blocks": 3},
    "timeout_s: 60.0 on rank(s) [0], 90.5 on rank(s) [1]": {"timeout_s": 90.5},
    "kernels: 'triton' on rank(s) [0], 'torch' on rank(s) [1]": {"kernels": "torch"},
    "tuning.dispatch_tokens: 64 on rank(s) [0], 1 on rank(s) [1]": {"tuning": Tuning(dispatch_tokens=1)},
    "tuning.combine_tokens: 64 on rank(s) [0], 2 on rank(s) [1]": {"tuning": Tuning(combine_tokens=2)},
    "tuning.communication_blocks: 0 on rank(s) [0], 1 on rank(s) [1]": {
        "tuning": Tuning(communication_blocks=1)
    },
    "tuning.cached_bytes: None on rank(s) [0], 0 on rank(s) [1]": {"tuning": Tuning(cached_bytes=0)},
    "tuning.spins: None on rank(s) [0], 3 on rank(s) [1]": {"tuning": Tuning(spins=3)},
    "tuning.yields: None on rank(s) [0], 4 on rank(s) [1]": {"tuning": Tuning(yields=4)},
}


def differ(rank: int, num_ranks: int, scheme: str) -> list[str]:
    wrong = []
    case = small_case(num_ranks, scheme, rounds=2)
    for line, options in MAY_DIFFER.items():
        usual = {"num_blocks": 2, "timeout_s": PATIENCE_S}
        mine = usual | (options if rank == 1 else {})
        with messages() as said, pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "tests.distributed.workers.make_buffer",
                lambda case, tuning, mine=mine: make_buffer(case, **mine),
            )
            wrong += [f"{line}: {text}" for text in compare_rounds(rank, num_ranks, case)]
        if len(said) != 1 or line not in said[0]:
            wrong.append(f"expected {line!r}, got {said}")
    return wrong


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
def test_what_changes_speed_only_may_differ_and_is_warned_of(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(differ, scheme) == [[], []]


MUST_NOT_DIFFER: dict[str, dict[str, Any]] = {
    "hidden": {"hidden": 96},
    "num_max_tokens_per_rank": {"num_max_tokens_per_rank": 5},
    "scheme": {"comm_alg": "direct"},
    "relaxed": {"relaxed": False, "hidden": 1024},
    "trace": {"trace": "elsewhere.json"},
}


def differ_too_much(rank: int, num_ranks: int, folder: str) -> list[str]:
    wrong = []
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 8, "relaxed": True}
    for name, options in MUST_NOT_DIFFER.items():
        mine: dict[str, Any] = sizes | (options if rank == 1 else {})
        if "trace" in mine:
            mine["trace"] = f"{folder}/{mine['trace']}"
        said = at_once(lambda mine=mine: EPBuffer(timeout_s=PATIENCE_S, **mine), ConfigMismatchError)  # type: ignore[misc]
        if f"  {name}: " not in said:
            wrong.append(f"{name}: {said}")
    return wrong


def test_what_changes_results_must_not_differ(ranks: Groups, tmp_path: Path) -> None:
    assert ranks(2).run(differ_too_much, str(tmp_path)) == [[], []]


def without(rank: int, num_ranks: int, lost: list[list[int]]) -> list[str]:
    """What each rank is told that is constructed without others; twice, and all meet in between."""
    said = []
    for _ in range(2):
        call = lambda: make(num_ranks, lost_ranks=lost[rank]).close()  # noqa: E731
        are_there = [lost[each] == lost[rank] for each in range(num_ranks) if each not in lost[rank]]
        said.append((call() or "") if all(are_there) else at_once(call, ConfigMismatchError))
        dist.barrier()
        assert works(num_ranks, rank)
    return said


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        # What each rank leaves out, and what it says of whom; empty where all whom it meets agree with it.
        (
            [[], [2], []],
            [
                "[] on rank(s) [0], [2] on rank(s) [1]",
                "[] on rank(s) [0], [2] on rank(s) [1]",
                "[2] on rank(s) [1], [] on rank(s) [2]",
            ],
        ),
    ],
)
def test_ranks_that_leave_out_others_are_told_so(
    ranks: Groups, lost: list[list[int]], expected: list[str]
) -> None:
    for said, differ in zip(ranks(3).run(without, lost), expected, strict=True):
        title = "ranks of one group must be constructed with the same settings, but these differ"
        assert said == [f"{title}:\n  lost_ranks: {differ}" if differ else ""] * 2


def follow(rank: int, num_ranks: int) -> list[str]:
    """Rank 2 does not come. Rank 0 goes on without it, and rank 1 will, but is late."""
    if rank == 2:
        dist.barrier()
        return []
    late, said = torch.zeros(1), []
    if rank == 1:
        dist.recv(late, src=0)
    with pytest.raises((CommunicationTimeoutError, ConfigMismatchError)) as caught:
        make(num_ranks, timeout_s=seconds(2.0))
    said.append(str(caught.value))
    if rank == 0:
        dist.send(late, dst=1)
    make(num_ranks, lost_ranks=[2]).close()
    dist.barrier()
    return said


def test_a_late_rank_may_follow_one_that_goes_on_without_others(ranks: Groups) -> None:
    """Rank 0 waits for it though it is in a construction with other members."""
    first, late, _ = ranks(3).run(follow)
    assert "timed out waiting for rank(s) [1, 2]" in first[0]
    assert "lost_ranks: [2] on rank(s) [0], [] on rank(s) [1]" in late[0]


def in_pairs(rank: int, num_ranks: int, stage: str) -> str:
    """Two expert-parallel groups, {0, 1} and {2, 3}, with pairs {0, 2} and {1, 3} across; rank 0 fails."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    own, pair = groups[rank // 2], groups[2 + rank % 2]
    # In another group other ranks have the numbers of these.
    order = Order(lambda: Config(2, 4, 64, 1, 2, relaxed=True), lambda: make_backend("cpu", "torch"))
    make_both = lambda: Communicator(Meeting(own, PATIENCE_S), order, Meeting(pair, PATIENCE_S))  # noqa: E731
    where, name = STAGES[stage] if stage != "preparation" else (communicator, "prepare")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(where, name, fail_with(OddError("for once")))
        said = at_once(make_both, OddError, ConfigMismatchError, WindowError)
    make_both().close()
    return said


@pytest.mark.parametrize("stage", ["preparation", "file", "memory"])
def test_tensor_parallel_pairs_tell_each_other_too(stage: str) -> None:
    for said in run_ranks(in_pairs, 4, (stage,)):
        assert "for once" in said


def through_torch_npu(rank: int, num_ranks: int) -> str:
    with fresh(timeout_s=PATIENCE_S):
        inputs = make_round(rank, num_ranks)
        dispatch = lambda: ops.npu_moe_distribute_dispatch_v2(inputs.x, inputs.ids, *inputs.group)  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                # Refused before anything is made: nobody is told, and the call may be made again.
                with pytest.raises(ArgumentError):
                    ops.npu_moe_distribute_dispatch_v2(inputs.x, inputs.ids, *inputs.group, quant_mode=1)
                patch.setattr(settings.Settings, "make_backend", fail_with(OddError("for once")))
            said = at_once(dispatch, OddError, ConfigMismatchError)
        dispatch()
        return said


def test_a_rank_that_fails_inside_torch_npus_functions_tells_the_others(ranks: Groups) -> None:
    assert ranks(2).run(through_torch_npu) == [
        "rank 1 cannot be constructed: OddError: for once",
        "for once",
    ]


def forked(rank: int, num_ranks: int) -> list[str]:
    """What a forked child is told, before and after this process has met others."""
    said = []
    for _ in range(2):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            message = "nothing"
            with contextlib.suppress(BaseException):
                try:
                    make(num_ranks)
                except ArgumentError as error:
                    message = str(error)
                os.write(write, pickle.dumps(message))
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said.append(pickle.loads(pipe.read()))
        os.waitpid(child, 0)
        assert works(num_ranks, rank)
    return said


def test_a_forked_process_is_told_that_the_group_is_not_its_own() -> None:
    for told in run_ranks(forked, 2):
        for said in told:
            assert said.startswith("group is of the process that this one was forked from")


def odd_groups(rank: int, num_ranks: int) -> list[str]:
    destroyed = dist.new_group([0, 1])
    dist.destroy_process_group(destroyed)
    others = dist.new_group([1 - rank])
    odd = [7, "world", object(), [0, 1], torch.ones(2), True, destroyed, others]
    return [at_once(lambda group=group: make(num_ranks, group=group), ArgumentError) for group in odd]  # type: ignore[misc]


def test_what_is_no_group_is_refused() -> None:
    for told in run_ranks(odd_groups, 2):
        for said in told:
            assert said.startswith("group is ")
