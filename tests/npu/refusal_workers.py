"""What ranks run where torch_npu's operators refuse something; each as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import ArgumentError, BufferStateError, CommunicationTimeoutError, MoeTritonError
from moe_triton.torch_npu_ops import registry
from tests.npu import layers
from tests.npu.device import Work
from tests.npu.layers import Layer, eager, on_npu
from tests.patience import seconds
from tests.torch_npu_ops.setting import make_round
from tests.torch_npu_ops.test_refusals import bad_combines, bad_dispatches, failures

# What begins these messages stands in the contents of tensors, which the host does not read.
BY_CONTENTS = (" at token ", "ep_send_counts is one with a total")


def bad_arguments(rank: int, num_ranks: int) -> list[str]:
    """Every bad argument that shapes, dtypes and attributes tell; then a round."""
    with on_npu(rank) as device:
        r = make_round(rank, num_ranks)
        wrong = []
        for number in range(2):  # the second time with plans that are cached
            sent = len(device.launches())
            cases = bad_dispatches(rank, num_ranks)
            wrong += failures([c for c in cases if not any(text in c[0] for text in BY_CONTENTS)])
            if len(device.launches()) != sent:
                wrong.append(f"{number}: something was sent")
            out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
            ops.synchronize(ops.group_name())
            sent = len(device.launches())
            cases = bad_combines(rank, num_ranks, out, out[0].clone())
            wrong += failures([c for c in cases if not any(text in c[0] for text in BY_CONTENTS)])
            if len(device.launches()) != sent:
                wrong.append(f"{number}: something was sent")
        return wrong if eager(layers.v2, rank, num_ranks, 3) else [*wrong, "the round after it"]


def refused(call: Callable[[], Any], kind: type[MoeTritonError], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def in_graphs(rank: int, num_ranks: int) -> list[bool]:
    """What a graph cannot hold; each time, nothing was sent, and a round afterwards is right."""
    with on_npu(rank) as device:
        r, keep = make_round(rank, num_ranks), []  # type: ignore[var-annotated]
        elastic = torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)
        soon = torch.tensor([1000], dtype=torch.int32)

        def captured(call: Callable[[], Any], kind: type[MoeTritonError], text: str) -> bool:
            sent = len(device.launches())
            with torch.npu.graph(torch.npu.NPUGraph()):  # type: ignore[attr-defined]
                refused(call, kind, text)
            return len(device.launches()) == sent

        def v2(**options: Any) -> torch.Tensor:
            return layers.v2(r, keep, **options)

        def barrier(**options: Any) -> torch.Tensor:
            return ops._npu_distribute_barrier(r.x, r.group[0], num_ranks, **options)

        again = "has not run before"
        good = [captured(v2, BufferStateError, "no buffer for these shapes")]
        good.append(eager(layers.v2, rank, num_ranks, 1))
        good.append(captured(lambda: v2(comm_alg="fullmesh_v2"), BufferStateError, "no buffer for these"))
        good.append(captured(lambda: layers.masked(r, keep), BufferStateError, again))
        good.append(captured(lambda: v2(elastic_info=elastic), ArgumentError, "elastic_info is given inside"))
        good.append(captured(lambda: barrier(time_out=soon), ArgumentError, "time_out is given inside"))
        good.append(eager(layers.norm, rank, num_ranks, 2))
        # another epsilon: the dispatch before it goes into the graph, the combine is refused
        dispatched = len(device.log)
        refusal = captured(lambda: layers.norm(r, keep, 1e-5), BufferStateError, again)
        steps = {work.name for work in device.log[dispatched:] if isinstance(work, Work)}
        good.append(not refusal and "combine_send" not in steps)
        good.append(eager(layers.v2, rank, num_ranks, 3))
    return good


def split_halves(rank: int, num_ranks: int) -> list[bool]:
    """A half inside a graph and the other one outside."""
    with on_npu(rank):
        good = [eager(layers.halves, rank, num_ranks, 1)]
        r = make_round(rank, num_ranks)
        y, _, ticket = ops.npu_moe_distribute_dispatch_setup(r.x, r.ids, *r.group)
        teardown = lambda: ops.npu_moe_distribute_dispatch_teardown(r.x, y, r.ids, ticket, *r.group)  # noqa: E731
        with torch.npu.graph(torch.npu.NPUGraph()):  # type: ignore[attr-defined]
            refused(teardown, BufferStateError, "set up outside of the graph")
        keep = teardown()
        ops.synchronize(ops.group_name())
        good.append(len(keep) == 4)
        refused(teardown, BufferStateError, "no dispatch of this group and shape is set up")
        good.append(eager(layers.halves, rank, num_ranks, 2))
        with torch.npu.graph(torch.npu.NPUGraph()):  # type: ignore[attr-defined]
            y, _, ticket = ops.npu_moe_distribute_dispatch_setup(r.x, r.ids, *r.group)
        refused(teardown, BufferStateError, "set up inside a graph")
        ops.release(ops.group_name())
        dist.barrier()
        good.append(eager(layers.halves, rank, num_ranks, 3))
    return good


def graphs_keep_windows(rank: int, num_ranks: int) -> list[bool]:
    """A window whose addresses are in a graph is not given up for another shape."""
    with on_npu(rank), mock.patch.object(registry, "KEPT_PER_GROUP", 1):
        good = [eager(layers.v2, rank, num_ranks, 1)]
        r, keep = make_round(rank, num_ranks), []  # type: ignore[var-annotated]
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        with torch.npu.graph(graph):  # type: ignore[attr-defined]
            out = layers.v2(r, keep)
        other = make_round(rank, num_ranks, tokens=2)
        refused(lambda: layers.v2(other, keep), BufferStateError, "or in a graph")
        graph.replay()
        ops.synchronize(ops.group_name())
        good.append(layers.is_right(layers.v2, r, out))
    return good


def late_errors(rank: int, num_ranks: int) -> list[str]:
    """Errors that kernels find: a total beyond all rows, and a rank that does not come."""
    said = []
    with on_npu(rank, timeout_s=seconds(4.0)):
        r, keep = make_round(rank, num_ranks), []  # type: ignore[var-annotated]

        def reset() -> None:
            everyone = torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)
            ops.npu_moe_distribute_buffer_reset(everyone, *r.group[:2], need_sync=1)

        def dispatch() -> Any:
            return ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)

        out = dispatch()
        ops.synchronize(ops.group_name())
        many = out[4].clone()
        many[-1] = len(out[0]) + 1
        keep.append(ops.npu_moe_distribute_combine_v2(out[0], r.ids, out[2], many, r.weights, *r.group))
        torch.npu.synchronize()  # type: ignore[attr-defined]
        for _ in range(2):
            try:
                keep.append(dispatch())
            except BufferStateError as error:
                said.append(str(error))
        dist.barrier()
        reset()
        said.append(str(eager(layers.v2, rank, num_ranks, 1)))
        if rank == 0:
            keep.append(dispatch())
            try:
                ops.synchronize(ops.group_name())
            except CommunicationTimeoutError as error:
                said.append(f"{error.operator} waits for {list(error.missing_ranks)}")
        dist.barrier()
        reset()
        said.append(str(eager(layers.v2, rank, num_ranks, 2)))
    return said


def exchange_rows(process: int, num_processes: int) -> str:
    """Fewer rows than can have been received, where two tensor-parallel ranks exchange them."""
    from tests.distributed.operator_runs import _groups

    group_ep, group_tp = _groups(num_processes // 2, 2)
    with on_npu(process):
        ops._npu_distribute_barrier(torch.zeros(1), ops.group_name(), num_processes)
        r = make_round(process // 2, num_processes // 2, num_experts=num_processes // 2)
        tp = {"group_tp": group_tp, "tp_world_size": 2, "tp_rank_id": process % 2}
        group = (group_ep, *r.group[1:])
        ids = r.ids % (num_processes // 2)
        out = ops.npu_moe_distribute_dispatch_v2(r.x, ids, *group, **tp)
        tp["tp_send_counts"] = out[5]

        def combine(rows: int) -> torch.Tensor:
            return ops.npu_moe_distribute_combine_v2(
                out[0][:rows], ids, out[2], out[4], r.weights, *group, **tp
            )

        said = ""
        try:
            combine(len(out[0]) // 2 - 1)
        except ArgumentError as error:
            said = str(error)
        keep = combine(len(out[0]) // 2 * 2)
        ops.synchronize(group_ep)
        ops.release(group_ep)
    return said if keep.shape == r.x.shape else "no sum"


def settings_refused(rank: int, num_ranks: int, layer: Layer, trace: str) -> list[bool]:
    """Settings that the npu back end does not have, and a back end that there is not."""
    settings: list[tuple[dict[str, Any], str]] = [
        ({"kernels": "torch"}, "the npu back end has Triton kernels only"),
        ({"trace": trace}, "traces are of the CPU back end"),
    ]
    good = []
    with on_npu(rank):
        for options, text in settings:
            ops.configure(relaxed=True, backend="npu", timeout_s=10.0, **options)
            refused(lambda: layer(make_round(rank, num_ranks), []), ArgumentError, text)
        refused(
            lambda: ops.configure(backend="gpu"), ArgumentError, "backend is 'gpu', but it must be one of"
        )
        ops.configure(relaxed=True, backend="npu", timeout_s=10.0)
        good.append(eager(layer, rank, num_ranks, 1))
    return good
