"""What ranks run of layers on the stand-in: steady calls, and graphs; each as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.torch_npu_ops import registry
from tests.npu import host_reads
from tests.npu.layers import Layer, eager, is_right, on_npu, v2
from tests.torch_npu_ops.setting import LOCAL_EXPERTS, make_round


def steady(rank: int, num_ranks: int, layer: Layer) -> list[str]:
    """Calls after a warm-up: what of them waits, reads, or is wrong."""
    wrong = []
    keep: list[Any] = []
    with on_npu(rank) as device:
        if not eager(layer, rank, num_ranks, 1):
            wrong.append("warm-up")
        registry.plans.clear()
        with host_reads.refused(prepares=True):  # new plans, on buffers that are there
            outputs = [layer(make_round(rank, num_ranks, seed=1), keep)]
        rounds = [make_round(rank, num_ranks, seed=seed) for seed in range(2, 6)]
        since = len(device.log)
        with host_reads.refused():
            outputs = [layer(r, keep) for r in rounds]
        if "synchronize" in device.log[since:]:
            wrong.append("the host waited")
        ops.synchronize(ops.group_name())
        good = [is_right(layer, r, out) for r, out in zip(rounds, outputs, strict=True)]
        wrong += [f"round {number}" for number, is_good in enumerate(good) if not is_good]
    return wrong


def without_the_last(rank: int, num_ranks: int, layers: list[Layer]) -> list[str]:
    """Layers in which the last rank is masked: what of them waits, reads, or is wrong."""
    wrong, last = [], num_ranks - 1
    keep: list[Any] = []
    with on_npu(rank) as device:
        wrong += [
            f"warm-up {layer}" for layer in layers for _ in range(2) if not eager(layer, rank, num_ranks, 1)
        ]
        if rank == last:
            return wrong
        name = ops.group_name()
        ops.update_mask(name, last, True)
        rounds = [make_round(rank, num_ranks, seed=seed) for seed in range(2, 6)]
        for layer in layers:
            since = len(device.log)
            with host_reads.refused():
                outputs = [layer(r, keep) for r in rounds]
            if "synchronize" in device.log[since:]:
                wrong.append(f"{layer}: the host waited")
            ops.synchronize(name)
            for number, (r, out) in enumerate(zip(rounds, outputs, strict=True)):
                lost = ops.lost(name, r.ids)
                if not torch.equal(lost, r.ids // LOCAL_EXPERTS == last):
                    wrong.append(f"{layer}, round {number}: lost")
                if not is_right(layer, replace(r, weights=r.weights.masked_fill(lost, 0)), out):
                    wrong.append(f"{layer}, round {number}")
    return wrong


def elastic_waits(rank: int, num_ranks: int) -> list[int]:
    """How often the host waits in each of two steady calls with elastic_info."""
    with on_npu(rank) as device:
        r, keep = make_round(rank, num_ranks), []  # type: ignore[var-annotated]
        elastic = torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)
        waits = []
        for _ in range(3):
            v2(r, keep, elastic_info=elastic)
            ops.synchronize(ops.group_name())
        for _ in range(2):
            since = len(device.log)
            keep.append(ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group, elastic_info=elastic))
            waits.append(device.log[since:].count("synchronize"))
        ops.synchronize(ops.group_name())
    return waits


def replay(rank: int, num_ranks: int, layers: list[Layer], policy: str) -> list[str]:
    """Graphs of several layers, on other inputs each time, in turn with eager ones."""
    wrong = []
    with on_npu(rank, policy) as device:
        wrong += [f"warm-up {layer}" for layer in layers if not eager(layer, rank, num_ranks, 1)]
        held = make_round(rank, num_ranks, seed=1)
        keep: list[Any] = []
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]
        since = len(device.log) + 1  # a capture begins with a wait
        with torch.npu.graph(graph), host_reads.refused():  # type: ignore[attr-defined]
            outputs = [layer(held, keep) for layer in layers]
        if "synchronize" in device.log[since:]:
            wrong.append("the host waited")
        for step, which in enumerate("ggeggge"):
            if which == "e":
                wrong += [f"{step}: eager" for layer in layers if not eager(layer, rank, num_ranks, step)]
                continue
            r = make_round(rank, num_ranks, seed=10 + step)
            for mine, other in ((held.x, r.x), (held.ids, r.ids), (held.weights, r.weights)):
                mine.copy_(other)
            graph.replay()
            ops.synchronize(ops.group_name())
            good = [is_right(layer, r, out) for layer, out in zip(layers, outputs, strict=True)]
            wrong += [f"{step}: layer {number}" for number, is_good in enumerate(good) if not is_good]
    return wrong
