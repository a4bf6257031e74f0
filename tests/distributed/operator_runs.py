"""Runs cases of torch_npu's operators on real processes, and checks every process's outputs.

`run_rank` runs on each process of a group, `check` where the answers are collected. What an output leaves
undefined must not have been written either: outputs are made of canaries.
"""

from __future__ import annotations

import functools
import io
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_triton import Tuning, reference, torch_npu_ops
from moe_triton.backends.cpu import output_pool
from tests.distributed.operator_cases import SPECIAL, OperatorCase, Tensors, experts_of, tensors_of
from tests.patience import seconds
from tests.reference_helpers import dispatch_shapes

DISPATCH_TENSORS = ("scales", "x_active_mask", "expert_scales")
COMBINE_TENSORS = (
    "x_active_mask",
    "shared_expert_x",
    "ori_x",
    "const_expert_alpha_1",
    "const_expert_alpha_2",
    "const_expert_v",
)
DISPATCH_OUTPUTS = (
    "expand_x",
    "dynamic_scales",
    "index",
    "expert_token_nums",
    "ep_recv_counts",
    "tp_recv_counts",
    "expand_scales",
)
FUNCTIONS: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {
    1: (torch_npu_ops.npu_moe_distribute_dispatch, torch_npu_ops.npu_moe_distribute_combine),
    2: (torch_npu_ops.npu_moe_distribute_dispatch_v2, torch_npu_ops.npu_moe_distribute_combine_v2),
}
ADD_RMS_NORM: Callable[..., Any] = torch_npu_ops.npu_moe_distribute_combine_add_rms_norm
# What is said of outputs that leave something undefined.
UNDEFINED = ("behind the rows",)
# Longer than any wait, to see that performance_info keeps the maximum.
LONG_AGO_US = 10**12
MOST_LATE_S = 0.02


def run_rank(
    process: int,
    num_processes: int,
    case: OperatorCase,
    delays: int = 0,
    poison: float | None = None,
    backend: str = "cpu",
    canaries: bool = True,
    relaxed: bool = True,
) -> bytes:
    """What one process gets in each round: tensors by name, saved. Nothing where its rank is lost.

    Args:
        process: this one.
        num_processes: of the group.
        case: what to run.
        delays: another number makes other stragglers.
        poison: stands in one element of process 0's token 1.
        backend: what it runs on.
        canaries: outputs are made of them; otherwise of recycled memory, as users' are, in native calls too.
        relaxed: whether sizes may be below the product's minimum.
    """
    rounds: list[Tensors] = []
    group_ep, group_tp = _groups(case.ranks, max(case.tp, 1))
    if process not in case.lost:
        torch_npu_ops.configure(
            relaxed=relaxed,
            product=case.product,
            ranks_per_server=case.servers or None,
            timeout_s=seconds(30.0),
            num_blocks=case.num_blocks,
            tuning=Tuning(receiving_blocks=case.receiving_blocks),
            kernels=case.kernels,
            backend=backend,
        )
        late = random.Random(f"{case.seed} {process} {delays}")
        with _canaries() if canaries else nullcontext():
            for number in range(case.rounds):
                tensors = tensors_of(case, process, number)
                if poison is not None and process == 0:
                    tensors["x"][1, 3] = poison
                rounds.append(_one_round(case, process, tensors, group_ep, group_tp, late))
    torch_npu_ops.release(group_ep)
    file = io.BytesIO()
    torch.save(rounds, file)
    return file.getvalue()


def check(
    case: OperatorCase,
    results: Sequence[bytes],
    canaries: bool = True,
    given: Callable[[OperatorCase, int, int], Tensors] = tensors_of,
    of_buffer: bool = False,
) -> list[str]:
    """Names of everything that differs from the reference in any bit, or was written and must not be.

    Args:
        case: what was run.
        results: what `run_rank` returned, by process.
        canaries: as it was told.
        given: what a process passed in a round.
        of_buffer: whether `EPBuffer` ran it, whose outputs have other shapes.
    """
    outputs = [torch.load(io.BytesIO(saved)) for saved in results]
    wrong = []
    for number in range(case.rounds):
        tensors = [
            None if process in case.lost else given(case, process, number)
            for process in range(case.num_processes)
        ]
        for process, found in _check_round(case, number, tensors, outputs, of_buffer):
            wrong += [f"round {number}, process {process}: {text}" for text in found]
    return wrong if canaries else [text for text in wrong if not text.endswith(UNDEFINED)]


@contextmanager
def _canaries() -> Iterator[None]:
    """New tensors are full of NaN, or of the largest integer; outputs are new, however large."""
    # Its other name, use_deterministic_algorithms, imports torch's compiler: a second in each rank.
    torch.set_deterministic_debug_mode("warn")
    try:
        with mock.patch.object(output_pool, "ENABLED", False):
            yield
    finally:
        torch.set_deterministic_debug_mode("default")


@functools.cache
def _groups(ranks: int, tp: int) -> tuple[str, str]:
    """Names of this process's groups; tensor-parallel peers are neighbours. Collective, the first time."""
    if tp == 1:
        # As serving frameworks do: the name of group_ep, where there is no peer.
        return torch_npu_ops.group_name(), torch_npu_ops.group_name()
    process = dist.get_rank()
    across = [dist.new_group(range(tp_rank, ranks * tp, tp)) for tp_rank in range(tp)]
    pairs = [dist.new_group(range(rank * tp, (rank + 1) * tp)) for rank in range(ranks)]
    names = across[process % tp], pairs[process // tp]
    return torch_npu_ops.group_name(names[0]), torch_npu_ops.group_name(names[1])


def _attributes(case: OperatorCase, process: int, group_tp: str) -> dict[str, Any]:
    """Keyword arguments of dispatch and combine alike."""
    attributes: dict[str, Any] = {
        "group_tp": group_tp,
        "tp_world_size": case.tp,
        "tp_rank_id": process % max(case.tp, 1),
        "shared_expert_num": case.shared[0],
        "shared_expert_rank_num": case.shared[1],
        "global_bs": case.global_bs,
    }
    if case.version == 2:
        names = ("zero_expert_num", "copy_expert_num", "const_expert_num")
        attributes.update(zip(names, SPECIAL[case.special], strict=True), comm_alg=case.comm_alg)
        if case.elastic != "none":
            words = case.deployment().elastic_info
            attributes["elastic_info"] = torch.tensor(words, dtype=torch.int32)
    return attributes


def _dispatch_tensors(case: OperatorCase, tensors: Tensors) -> Tensors:
    given = {
        "scales": case.quantize in ("smooth", "scales only"),
        "x_active_mask": case.mask != "none",
        "expert_scales": case.dispatch_weights,
    }
    return {name: tensors[name] for name in DISPATCH_TENSORS if given[name]}


def _combine_tensors(case: OperatorCase, tensors: Tensors) -> Tensors:
    _, num_copy, num_const = SPECIAL[case.special]
    given = {
        "x_active_mask": case.mask != "none",
        "shared_expert_x": case.shared_expert_x != "none",
        "ori_x": num_copy + num_const > 0,
    }
    return {name: tensors[name] for name in COMBINE_TENSORS if given.get(name, num_const > 0)}


def _performance_info(case: OperatorCase) -> torch.Tensor:
    return torch.arange(case.ranks) % 2 * LONG_AGO_US


def _one_round(
    case: OperatorCase, process: int, tensors: Tensors, group_ep: str, group_tp: str, late: random.Random
) -> Tensors:
    """Dispatch, experts, combine of one process."""
    weights = tensors["expert_scales"] if case.combine_weights else None
    ids = tensors["expert_ids"].long() if case.long_ids else tensors["expert_ids"]
    place: tuple[Any, ...] = (group_ep, case.ranks, process // max(case.tp, 1), case.num_experts)
    attributes = _attributes(case, process, group_tp)
    out: Tensors = {}

    def performance(operator: str) -> Tensors:
        if not case.performance_info:
            return {}
        out[f"{operator} performance_info"] = _performance_info(case)
        return {"performance_info": out[f"{operator} performance_info"]}

    def straggle() -> None:
        if case.stragglers:
            time.sleep(late.choice((0, 0, MOST_LATE_S)) * late.random())

    dispatch, combine = FUNCTIONS[case.version]
    straggle()
    received = dispatch(
        tensors["x"],
        ids,
        *place,
        quant_mode=case.quant_mode,
        expert_token_nums_type=case.nums_type,
        **_dispatch_tensors(case, tensors),
        **performance("dispatch"),
        **attributes,
    )
    out.update(zip(DISPATCH_OUTPUTS, received, strict=True))
    scales = out["dynamic_scales"] if out["expand_x"].dtype == torch.int8 else None
    torch_npu_ops.synchronize(group_ep)
    y = experts_of(case, process, out["expand_x"], scales)
    # Without a peer nobody looks at it: frameworks pass dispatch's output, or anything.
    attributes["tp_send_counts"] = out["tp_recv_counts"] if case.tp else torch.full((1,), -1).int()
    attributes.update(comm_quant_mode=case.comm_quant_mode, **_combine_tensors(case, tensors))
    if case.shared_expert_x == "3-D":
        batch = len(tensors["x"])
        split = (2, batch // 2) if batch % 2 == 0 else (batch, 1)
        attributes["shared_expert_x"] = tensors["shared_expert_x"].view(*split, case.hidden)
    back: tuple[Any, ...] = (y, ids, out["index"], out["ep_recv_counts"], weights)
    straggle()
    if case.norm:
        normed = ADD_RMS_NORM(*back, tensors["residual_x"], tensors["gamma"], *place, **attributes)
        out.update(zip(("y", "rstd", "x"), normed, strict=True))
    else:
        out["x"] = combine(*back, *place, **performance("combine"), **attributes)
    torch_npu_ops.synchronize(group_ep)
    return out


def _check_round(
    case: OperatorCase,
    number: int,
    tensors: Sequence[Tensors | None],
    outputs: Sequence[Any],
    of_buffer: bool,
) -> Iterator[tuple[int, list[str]]]:
    """What is wrong in a round, by process."""
    deployment = case.deployment()
    dispatched = reference.dispatch_all(
        deployment,
        [None if given is None else _dispatch_inputs(case, given) for given in tensors],
        row_format=case.row_format,
        expert_token_nums_type=case.nums_type,
    )
    given_back = [
        None if given is None or own is None else _combine_inputs(case, process, given, own)
        for process, (given, own) in enumerate(zip(tensors, dispatched, strict=True))
    ]
    combine: Any = reference.combine_add_rms_norm_all if case.norm else reference.combine_all
    combined = combine(deployment, dispatched, given_back, comm_quant_mode=case.comm_quant_mode)
    for process, (given, own, end) in enumerate(zip(tensors, dispatched, combined, strict=True)):
        if given is not None and own is not None and end is not None:
            out = outputs[process][number]
            rank = process // max(case.tp, 1)
            wrong = _wrong_rows(case, own, out, of_buffer) + _wrong_sums(case, end, out)
            if not of_buffer:
                wrong += _wrong_shapes(case, rank, given, out)
            for operator, expected in (("dispatch", own), ("combine", end)):
                if f"{operator} performance_info" in out:
                    # A block comes from every rank, whether or not there is anything in it.
                    ranks = expected.performance_ranks if case.product == "A3" else range(case.ranks)
                    wrong += _wrong_waits(case, operator, ranks, out)
            yield process, wrong


def _dispatch_inputs(case: OperatorCase, given: Tensors) -> reference.DispatchInputs:
    return reference.DispatchInputs(
        x=given["x"], expert_ids=given["expert_ids"], **_dispatch_tensors(case, given)
    )


def _combine_inputs(
    case: OperatorCase, process: int, given: Tensors, own: reference.DispatchReference
) -> reference.CombineInputs:
    return reference.CombineInputs(
        expand_x=experts_of(case, process, own.expand_x, own.dynamic_scales),
        expert_ids=given["expert_ids"],
        expert_scales=given["expert_scales"] if case.combine_weights else None,
        residual_x=given["residual_x"],
        gamma=given["gamma"],
        **_combine_tensors(case, given),
    )


def _wrong_shapes(case: OperatorCase, rank: int, given: Tensors, out: Tensors) -> list[str]:
    batch, hidden = given["x"].shape
    expected = dispatch_shapes(
        case.deployment(),
        rank,
        batch=batch,
        hidden=hidden,
        topk=case.topk,
        global_bs=case.global_bs,
        has_expert_scales=case.dispatch_weights,
        num_servers=_num_servers(case),
    )
    found = [tuple(out[name].shape) for name in DISPATCH_OUTPUTS]
    wanted = list(expected.values())
    return [f"shape of {n} {f}, not {w}" for n, f, w in zip(expected, found, wanted, strict=True) if f != w]


def _num_servers(case: OperatorCase) -> int:
    """By which counts have room behind them: on A3 the whole 8 ranks, whoever shares a server."""
    if case.product == "A3":
        return case.ranks // 8
    return len(case.servers) or -(-case.ranks // 8)


def _wrong_rows(
    case: OperatorCase, own: reference.DispatchReference, out: Tensors, of_buffer: bool
) -> list[str]:
    """Dispatch's outputs: the determined front, and behind it canaries, or zeros where counts go on."""
    is_index = case.version == 1 or (case.product == "A2" and not of_buffer)
    index = own.expand_idx if is_index else own.assist_info.flatten()
    fronts: list[tuple[str, torch.Tensor | None]] = [
        ("expand_x", own.expand_x),
        ("dynamic_scales", own.dynamic_scales),
        ("expand_scales", own.expand_scales),
    ]
    wrong = [] if _same(out["index"][: len(index)], index) else ["index"]  # behind it the library keeps notes
    wrong += [name for name, want in fronts if want is not None and not _same(out[name][: len(want)], want)]
    rests = {name: out[name][0 if want is None else len(want) :] for name, want in fronts}
    if case.version == 2:  # two words there are the library's own, for combine_setup
        rows = len(out["expand_x"]) // max(case.tp, 1)
        out["index"][3 * rows : 3 * rows + 2] = torch.iinfo(torch.int32).max
    wrong += [f"{name} behind the rows" for name, rest in rests.items() if not _is_untouched(rest)]
    for name in ("expert_token_nums", "ep_recv_counts", "tp_recv_counts"):
        want = getattr(own, name)
        front = 0 if want is None else len(want)
        if want is not None and not _same(out[name][:front], want):
            wrong.append(name)
        if out[name][front:].any():
            wrong.append(f"{name} behind the counts")
    return wrong


def _wrong_sums(case: OperatorCase, end: Any, out: Tensors) -> list[str]:
    """Combine's outputs: rows of the tokens that take part, and zeros for the others."""
    wrong = []
    for name in ("y", "rstd", "x") if case.norm else ("x",):
        have, want = out[name].flatten(1), getattr(end, name)
        if not _same(have[end.written], want.reshape(len(want), have.shape[1])):
            wrong.append(f"combined {name}")
        if not _is_zeros(have[~end.written]):
            wrong.append(f"combined {name} of inactive tokens")
    return wrong


def _wrong_waits(case: OperatorCase, operator: str, raised: Sequence[int], out: Tensors) -> list[str]:
    start, have = _performance_info(case), out[f"{operator} performance_info"]
    may_rise = torch.zeros(case.ranks, dtype=torch.bool)
    may_rise[list(raised)] = True
    may_rise &= start < LONG_AGO_US
    # also of the rank that comes last, and finds everything there
    good = torch.where(may_rise, have >= 1, have == start) & (have <= LONG_AGO_US)
    return [] if good.all() else [f"{operator} performance_info"]


def _same(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; one NaN is as good as another."""
    if have.dtype != want.dtype or have.shape != want.shape:
        return False
    if not want.dtype.is_floating_point:
        return torch.equal(have, want)
    integers = {2: torch.int16, 4: torch.int32}[want.dtype.itemsize]
    same = have.contiguous().view(integers) == want.contiguous().view(integers)
    return bool((same | (have.isnan() & want.isnan())).all())


def _is_zeros(tensor: torch.Tensor) -> bool:
    """Whether every bit is."""
    return not tensor.contiguous().view(torch.uint8).any()


def _is_untouched(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())
