"""Ways to let go of a group, and to end a process; called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moe_triton import EPBuffer
from moe_triton import torch_npu_ops as ops
from moe_triton.core.threads import in_thread
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.workers import make_buffer, one_round
from tests.torch_npu_ops.setting import make_round

ENDINGS = {
    "destroy": ("destroy",),
    "exit": (),
    "close, then destroy": ("close", "destroy"),
    "close": ("close",),
}
_kept: list[object] = []  # as in a program's global variables


def use(rank: int, num_ranks: int, group: dist.ProcessGroup | None, timeout_s: float) -> tuple[EPBuffer, str]:
    """A round of a buffer, and a call of torch_npu's with a plan that somebody keeps."""
    case = small_case(num_ranks)
    buffer = make_buffer(case, group=group, timeout_s=timeout_s)
    one_round(buffer, case, inputs_of(case, rank, 0), None)
    ops.configure(relaxed=True, timeout_s=timeout_s)
    name = ops.group_name(group)
    ops.register_group("experts", ops.process_group(name))
    r = make_round(rank, num_ranks)
    call = r.x, r.ids, name, *r.group[1:]
    _kept.extend([buffer, ops.npu_moe_distribute_dispatch_v2.plan(*call)])
    ops.npu_moe_distribute_dispatch_v2(*call)
    return buffer, name


def holders_of_a_group(rank: int, num_ranks: int, closes: bool, timeout_s: float) -> list[str]:
    """Types of the objects that hold a group which was destroyed; empty where it is gone."""
    group = dist.new_group(range(num_ranks))
    buffer, name = use(rank, num_ranks, group, timeout_s)
    if closes:
        buffer.close()
        ops.release(name)
    seen = weakref.ref(group)
    del buffer
    gc.collect()  # what is left of other tests
    gc.disable()
    try:
        dist.destroy_process_group(group)
        del group
        left = seen()
        return [] if left is None else [type(holder).__name__ for holder in gc.get_referrers(left)]
    finally:
        gc.enable()
        if not closes:
            ops.release(name)
        _kept.clear()
        ops.configure()


class Slow:
    """What takes long to go when Python ends, as large models do."""

    def __init__(self, pause_s: float) -> None:
        self._pause, self._pause_s = time.sleep, pause_s

    def __del__(self) -> None:
        self._pause(self._pause_s)


def end(rank: int, num_ranks: int, ending: str, timeout_s: float) -> Any:
    """Ends the process as Python ends, after the steps of an ending. Returns only where something raises."""
    buffer, name = use(rank, num_ranks, None, timeout_s)
    for step in ENDINGS[ending]:
        if step == "close":
            buffer.close()
            ops.release(name)
        else:
            dist.destroy_process_group()
    end_python()


def end_in_a_thread(rank: int, num_ranks: int, for_s: float) -> Any:
    """Ends the process while a thread is in a store, which would come back while Python ends."""
    store, span = dist.HashStore(), timedelta(seconds=for_s)  # type: ignore[attr-defined]
    in_thread(lambda: store.wait(["never there"], span), "test")
    _kept.append(Slow(3 * for_s))
    end_python()


def end_python() -> None:
    """What Python does at the end of a script; processes of multiprocessing leave that out."""
    ctypes.pythonapi.Py_Exit(0)
