"""Calls of every operator with one argument changed, against what the table of arguments says of it.

A call is made whole: what goes before it, and what ends it. Its outcome is what it determines of its outputs,
or the error that refuses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, EPBuffer, Pending
from moe_triton import torch_npu_ops as ops
from moe_triton.core.hccl import SWITCHES
from moe_triton.schemes.scheme import CONST_ARGUMENTS
from moe_triton.tools.pages.arguments import TABLE, Function, Scheme, Standing
from tests.patience import seconds
from tests.torch_npu_ops.setting import HIDDEN, TOKENS, TOPK, experts_of, make_round

Arguments = dict[str, Any]
Changes = dict[str, "Value"]
Outcome = list[Any] | ArgumentError
Value = Callable[["Bench", Any], Any]

PREFIX = "npu_moe_distribute_"
PAIR = "two ranks of the tests of arguments"
# Anything of an argument's type, for one that nobody looks at.
ANYTHING: dict[str, Any] = {"group_tp": "nobody", "tp_rank_id": 7}
NO_TENSOR_LIKE_IT = torch.zeros(2, 1, 3, 1, 2, dtype=torch.complex64)


@dataclass(frozen=True)
class Try:
    """How an argument is tried. Each value is made of what a plain call has.

    Attributes:
        other: a value that may be, other than that, and other than none.
        bad: one that breaks a rule, where somebody looks at it.
        spoilt: one of another shape and dtype.
        beside: other arguments of calls with it and without it.
        beside_bad: those of calls with the bad one.
        named: other arguments that an error may be about.
    """

    other: Value | None = None
    bad: Value = lambda bench, good: NO_TENSOR_LIKE_IT
    spoilt: Value = lambda bench, good: NO_TENSOR_LIKE_IT
    beside: Changes = field(default_factory=dict)
    beside_bad: Changes = field(default_factory=dict)
    named: tuple[str, ...] = ()


def _is(value: Any) -> Value:
    return lambda bench, good: value


def _bad(value: Any) -> Try:
    return Try(bad=_is(value))


def _number(other: Any, bad: Any) -> Try:
    return Try(_is(other), _is(bad))


def _twice(bench: Bench, good: Any) -> Any:
    return good * 2


def _zeros(bench: Bench, good: Any) -> Any:
    return torch.zeros_like(good)


def _beyond(bench: Bench, good: torch.Tensor) -> torch.Tensor:
    return torch.full_like(good, 2**20)


def _other_ids(bench: Bench, good: Any) -> torch.Tensor:
    return bench.others.ids


def _other_weights(bench: Bench, good: Any) -> torch.Tensor:
    return bench.round.weights * 2


def _reversed_experts(bench: Bench, good: Any) -> torch.Tensor:
    experts = torch.arange(bench.experts)
    return torch.stack([torch.ones_like(experts), experts.flip(0)], 1).int()


def _smoothing(bench: Bench, good: Any) -> torch.Tensor:
    return torch.full((bench.experts, HIDDEN), 0.5).cumsum(0)


def _elastic(word: int) -> Value:
    return lambda bench, good: torch.full((4 + 2 * bench.num_ranks,), word, dtype=torch.int32)


_PAIR: Changes = {
    "tp_world_size": lambda bench, good: 2,
    "group_tp": lambda bench, good: PAIR,
    "tp_rank_id": lambda bench, good: bench.rank,
    "moe_expert_num": lambda bench, good: bench.num_ranks,
}
_ROWS = torch.ones(TOKENS, HIDDEN).bfloat16()
_CONST = {
    "const_expert_num": 1,
    "ori_x": _ROWS,
    "const_expert_alpha_1": torch.ones(1).bfloat16(),
    "const_expert_alpha_2": torch.ones(1).bfloat16(),
    "const_expert_v": torch.ones(1, HIDDEN).bfloat16(),
}
_FIRST_TWO = torch.arange(TOKENS) < 2
# What calls that belong together have alike.
ALIKE = (
    *("quant_mode", "comm_quant_mode", "global_bs", "shared_expert_num", "shared_expert_rank_num"),
    *("zero_expert_num", "copy_expert_num", "const_expert_num"),
)
# Of combine: with another value ranks would wait for what does not come, or sum what is not theirs.
UNSAFE = "expert_ids", "expand_idx", "assist_info_for_combine"

TRIES: dict[str, Try] = {
    "x": Try(_twice),
    "expand_x": Try(_twice),
    "y": Try(_zeros),
    "quant_expand_x": Try(_zeros),
    "expert_ids": Try(_other_ids, _beyond),
    "expert_scales": Try(_other_weights),
    "scales": Try(_smoothing, beside={"quant_mode": _is(2)}),
    "x_active_mask": Try(_is(_FIRST_TWO)),
    "elastic_info": Try(_elastic(0), _elastic(9)),
    "performance_info": Try(lambda bench, good: torch.full((bench.num_ranks,), -1)),
    "group_ep": _bad("nobody"),
    "group": _bad("nobody"),
    "ep_world_size": Try(bad=lambda bench, good: 2 * good),
    "world_size": _bad(-9),
    "ep_rank_id": Try(bad=lambda bench, good: (good + 1) % bench.num_ranks),
    "moe_expert_num": _bad(5),
    "group_tp": Try(bad=_is("nobody"), beside_bad=_PAIR),
    "tp_world_size": Try(_is(2), _is(3), beside={"group_tp": _is(PAIR)}, named=("group_tp",)),
    "tp_rank_id": Try(bad=_is(2), beside_bad=_PAIR),
    "tp_send_counts": Try(beside_bad=_PAIR),
    "expert_shard_type": _number(1, 1),
    "shared_expert_num": Try(_is(2), _is(5), named=("shared_expert_rank_num",)),
    "shared_expert_rank_num": Try(_is(1), _is(2), named=("shared_expert_num",)),
    "quant_mode": _number(2, 4),
    "comm_quant_mode": _number(2, 1),
    "global_bs": _number(4 * TOKENS, 7),
    "expert_token_nums_type": _number(0, 2),
    "comm_alg": _bad("ring"),
    "comm_type": _number(2, 2),
    **dict.fromkeys(("zero_expert_num", "copy_expert_num"), _number(1, -1)),
    # what computes with constant experts is told of what it computes from first
    "const_expert_num": Try(_is(1), _is(-1), named=("ori_x",)),
    **dict.fromkeys(("y_dtype", "x_dtype", "scales_dtype"), _number(15, 15)),
    **dict.fromkeys(("activation_scale", "weight_scale", "group_list"), Try(_is(torch.ones(1)))),
    **dict.fromkeys(("out_dtype", "group_list_type"), _number(1, 1)),
    "expand_idx": Try(_zeros),
    "assist_info_for_combine": Try(_zeros),
    "ep_send_counts": Try(bad=_beyond),
    "comm_cmd_info": Try(bad=_zeros),
    "shared_expert_x": Try(_is(_ROWS)),
    "ori_x": Try(_is(_ROWS), beside_bad={"copy_expert_num": _is(1)}),
    **{
        name: Try(_is(_CONST[name]), beside_bad={other: _is(_CONST[other]) for other in _CONST})
        for name in CONST_ARGUMENTS
    },
    "residual_x": Try(_twice),
    "gamma": Try(_twice),
    "norm_eps": _number(1.0, 0.0),
    "time_out": Try(bad=_is(torch.zeros(1, dtype=torch.int32))),
    "need_sync": _number(1, 2),
    # EPBuffer's own names
    "topk_idx": Try(_other_ids, _beyond),
    "topk_weights": Try(_other_weights),
    "cumulative_local_expert_recv_stats": Try(lambda bench, good: torch.full((2,), -99, dtype=torch.int32)),
    "quantize": _number("int8", "fp8"),
    "comm_quantize": _number("int8", "fp8"),
    "smooth_scales": Try(_smoothing, beside={"quantize": _is("int8")}),
    "active_mask": Try(_is(_FIRST_TWO)),
    "out": Try(lambda bench, good: bench.place_of_output()),
    "wait": _number(False, "no"),
    "do_expand": _number(False, "no"),
    "num_max_tokens_per_rank": _number(4 * TOKENS, -1),
    "num_recv_tokens": _number("exact", "all"),
    "layout": _number("padded", "blocks"),
    "expert_alignment": _number(8, 0),
    "do_zero_padding": _number(True, "yes"),
    "handle": _bad(7),
    "eplb_table": Try(_reversed_experts),
    "eplb_mode": Try(bad=_is("expert"), beside={"eplb_table": _reversed_experts}),
    # npu_moe_update_expert's
    "pruning_threshold": Try(_twice),
    "local_rank_id": _number(1, 7),
    "balance_mode": _number(1, 5),
}


class Bench:
    """The calls of one rank with one scheme.

    Args:
        scheme: product and name.
        rank: this one.
        num_ranks: of the group.

    Attributes:
        round: what calls are given.
        others: another one.
        experts: routed ones.
    """

    def __init__(self, scheme: Scheme, rank: int, num_ranks: int) -> None:
        self.scheme, self.rank, self.num_ranks = scheme, rank, num_ranks
        self.round, self.others = (make_round(rank, num_ranks, seed=seed) for seed in (1, 2))
        self.experts = self.round.group[-1]
        self.buffer: EPBuffer | None = None
        self.passed: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.function = ""

    def outcome(self, name: str, changes: Changes, alike: bool = True) -> Outcome:
        """What a call with some arguments changed comes to.

        Args:
            name: of the operator.
            changes: what is tried, and what else is not as in a plain call.
            alike: whether calls that go with it have the same, where they take it.
        """
        self.passed, self.function = None, name
        try:
            return self._call(name, changes, changes if alike else {})
        except ArgumentError as error:
            return error

    def _with(self, given: Arguments, changes: Changes, *, is_tried: bool = True) -> Arguments:
        """Arguments with changes, made of what they are."""
        changed = {name: make(self, given.get(name)) for name, make in changes.items()}
        if is_tried:
            self.passed = [
                (value, value.clone()) for value in changed.values() if isinstance(value, torch.Tensor)
            ]
        return given | changed

    def has_written(self) -> bool:
        """Whether the latest call has changed a tensor that was tried."""
        bits = [(a.nan_to_num(-5.0), b.nan_to_num(-5.0)) for a, b in self.passed or ()]
        return not all(torch.equal(now, before) for now, before in bits)

    def _call(self, name: str, changes: Changes, alike: Changes) -> list[Any]:
        short = name.removeprefix(PREFIX)
        if short.startswith("EPBuffer"):
            return self._of_buffer(short, changes)
        if short.startswith("dispatch"):
            return self._dispatched(short, changes, alike)
        if short.startswith("combine"):
            return self._combined(short, changes, alike)
        if short == "buffer_reset":
            everyone = torch.zeros(4 + 2 * self.num_ranks, dtype=torch.int32)
            group = {"group_ep": self.round.group[0], "ep_world_size": self.num_ranks}
            ops.npu_moe_distribute_buffer_reset(**self._with({"elastic_info": everyone, **group}, changes))
            return []
        if short == "npu_moe_update_expert":
            return list(ops.npu_moe_update_expert(**self._with(self._to_update(), changes)))
        group = {"group": self.round.group[0], "world_size": self.num_ranks}
        ops._npu_distribute_barrier(**self._with({"x_ref": self.round.x, **group}, changes))
        return []

    def _to_update(self) -> Arguments:
        """What npu_moe_update_expert takes where it does all that it can."""
        experts = torch.arange(self.experts)
        return {
            "expert_ids": self.round.ids,
            "eplb_table": torch.stack([torch.full_like(experts, 2), experts, experts + 1], 1).int(),
            "expert_scales": self.round.weights,
            "pruning_threshold": torch.full((TOPK,), 0.5 / TOPK),
            "active_mask": torch.arange(TOKENS) < 3,
            "local_rank_id": 0,
            "world_size": 2,
        }

    def _plain(self, short: str, alike: Changes | None = None, **more: Any) -> Arguments:
        """What a function takes in a plain call; with what another call has, where it takes the same."""
        r, names = self.round, inspect.signature(getattr(ops, PREFIX + short)).parameters
        place = dict(zip(("group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num"), r.group, strict=True))
        named = {"x": r.x, "expert_ids": r.ids, "expert_scales": r.weights, "comm_alg": self.scheme[1]}
        taken = {name: value for name, value in {**place, **named, **more}.items() if name in names}
        same = {
            name: make
            for name, make in (alike or {}).items()
            if name in names and name in (*ALIKE, "x_active_mask")
        }
        return self._with(taken, same, is_tried=False)

    def _dispatched(self, short: str, changes: Changes, alike: Changes) -> list[Any]:
        if short in ("dispatch", "dispatch_v2"):
            given = self._with(self._plain(short), changes)
            return self._front(getattr(ops, PREFIX + short)(**given), given)
        setup, teardown = ops.npu_moe_distribute_dispatch_setup, ops.npu_moe_distribute_dispatch_teardown
        is_setup = short.endswith("setup")
        plain = self._plain("dispatch_setup", None if is_setup else alike)
        y, index, ticket = setup(**(self._with(plain, changes) if is_setup else plain))
        sent = self._plain("dispatch_teardown", alike, y=y, comm_cmd_info=ticket)
        if is_setup:
            return [*self._front((*teardown(**sent), None, None, None), sent), index, y.shape]
        try:
            given = self._with(sent, changes)
            return self._front((*teardown(**given), None, None, None), given)
        except ArgumentError:
            teardown(**sent)
            raise

    def _front(self, out: tuple[Any, ...], given: Arguments) -> list[Any]:
        """What a dispatch determines of its outputs, and their shapes."""
        rows, scales, index, numbers, counts, _, weights = out
        shared = given.get("shared_expert_rank_num", 0)
        experts = 1 if self.rank < shared else self.experts // (self.num_ranks - shared)
        total = int(numbers[-1] if given.get("expert_token_nums_type", 1) == 0 else numbers.sum())
        found = [numbers, rows[:total], rows.shape, index.shape]
        if rows.dtype == torch.int8:
            found.append(scales[:total])
        if counts is not None:
            found.append(counts[: self.num_ranks * experts])
        if weights is not None and weights.numel():
            found.append(weights[:total])
        return found

    def _combined(self, short: str, changes: Changes, alike: Changes) -> list[Any]:
        dispatch = "dispatch" if short == "combine" else "dispatch_v2"
        given = self._plain(dispatch, alike)
        rows, scales, index, _, counts, _, _ = getattr(ops, PREFIX + dispatch)(**given)
        more = {
            "expand_x": experts_of(rows, scales if rows.dtype == torch.int8 else None).nan_to_num(),
            "expand_idx": index,
            "assist_info_for_combine": index,
            "ep_send_counts": counts,
            "residual_x": self.round.x[:, None],
            "gamma": torch.linspace(0.5, 2, HIDDEN).bfloat16(),
        }
        if not short.endswith(("setup", "teardown")):
            out = getattr(ops, PREFIX + short)(**self._with(self._plain(short, **more), changes))
            return list(out) if isinstance(out, tuple) else [out]
        setup, teardown = ops.npu_moe_distribute_combine_setup, ops.npu_moe_distribute_combine_teardown
        is_setup = short.endswith("setup")
        plain = self._plain("combine_setup", None if is_setup else alike, **more)
        packed, ticket = setup(**(self._with(plain, changes) if is_setup else plain))
        more |= {"quant_expand_x": packed, "comm_cmd_info": ticket}
        sent = self._plain("combine_teardown", alike, **more)
        if is_setup:
            return [teardown(**sent)]
        try:
            return [teardown(**self._with(sent, changes))]
        except ArgumentError:
            teardown(**sent)
            raise

    def place_of_output(self) -> torch.Tensor:
        """Memory for what the buffer's method under test returns."""
        assert self.buffer is not None
        rows = self.buffer.capacity if self.function == "EPBuffer.dispatch" else TOKENS
        return torch.full((rows, HIDDEN), float("nan")).bfloat16()

    def _of_buffer(self, short: str, changes: Changes) -> list[Any]:
        buffer, r = self.buffer, self.round
        assert buffer is not None
        given: Arguments = {"x": r.x, "topk_idx": r.ids, "topk_weights": r.weights}
        is_dispatch = short == "EPBuffer.dispatch"
        made = buffer.dispatch(**(self._with(given, changes) if is_dispatch else given))
        output = made.wait() if isinstance(made, Pending) else made
        total = int(output.tokens_per_expert.sum())
        if is_dispatch:
            found = [output.tokens_per_expert, output.tokens[:total].clone()]
            return found + [t[:total] for t in (output.scales, output.weights) if t is not None]
        y = experts_of(output.tokens).nan_to_num()
        summed = buffer.combine(
            **self._with({"y": y, "handle": output.handle, "topk_weights": r.weights}, changes)
        )
        return [summed.wait() if isinstance(summed, Pending) else summed]


@contextmanager
def benches(scheme: Scheme, rank: int, num_ranks: int) -> Iterator[Bench]:
    """The calls with a scheme; nothing of the group's is left behind."""
    product, name = scheme
    settings: Arguments = {
        "product": product,
        "relaxed": True,
        "kernels": "torch",
        "timeout_s": seconds(20.0),
        "ranks_per_server": 2 if name == "hierarchy" else None,
    }
    bench = Bench(scheme, rank, num_ranks)
    ops.register_group(PAIR, dist.new_group(range(num_ranks)))
    with pytest.MonkeyPatch.context() as patch:
        if name == "hierarchy":  # V1 has no comm_alg
            for switch, value in SWITCHES.items():
                patch.setenv(switch, value)
            patch.setenv("HCCL_BUFFSIZE", "405")  # what A3's needs, by its formula
        ops.configure(**settings)
        sizes = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": TOPK}
        try:
            with EPBuffer(num_experts=bench.experts, comm_alg=name, **sizes, **settings) as buffer:
                bench.buffer = buffer
                yield bench
        finally:
            ops.release(ops.group_name())
            ops.configure()


def wrong_of(function: str, of: Function, scheme: Scheme, bench: Bench) -> list[str]:
    """What the table says otherwise than the calls of a function."""
    wrong = []
    if of.standing(next(iter(of.rows)), scheme) == "-":
        return _wrong_of_none(function, bench)
    for argument in of.rows:
        standing = of.standing(argument, scheme)
        found = _WRONG[standing](function, argument, bench)
        wrong += [f"{function}({argument}) with {scheme[1]}, {standing}: {found}"] if found else []
    return wrong


def _wrong_of_none(function: str, bench: Bench) -> list[str]:
    """Of V1 with A3's second scheme, which it has no argument to ask for; and of halves on A2."""
    if function in ("npu_moe_distribute_dispatch", "npu_moe_distribute_combine"):
        return []
    refused = isinstance(bench.outcome(function, {}), ArgumentError)
    return [] if refused else [f"{function} is there with {bench.scheme[1]}"]


def _beside(function: str, argument: str) -> Changes:
    """What plain calls have where an argument is tried."""
    if function == "npu_moe_distribute_dispatch":
        return {}  # V1's scales quantise by themselves
    return TRIES[argument].beside


def _is_refused(function: str, argument: str, bench: Bench, changes: Changes) -> str:
    found = bench.outcome(function, changes, alike=False)
    if not isinstance(found, ArgumentError):
        return "not refused"
    names = argument, *TRIES[argument].named
    return "" if any(n in found.argument for n in names) else f"refused for something else: {found}"


def _wrong_where_ignored(function: str, argument: str, bench: Bench) -> str:
    anything = ANYTHING.get(argument, torch.full((3, 1), 7.0, dtype=torch.float64))
    base, found = bench.outcome(function, {}), bench.outcome(function, {argument: _is(anything)})
    return "" if _same(found, base) else f"looked at: {found}"


def _wrong_where_refused(function: str, argument: str, bench: Bench) -> str:
    other = TRIES[argument].other
    assert other is not None
    return _is_refused(function, argument, bench, {**_beside(function, argument), argument: other})


def _wrong_where_checked(function: str, argument: str, bench: Bench) -> str:
    tried = TRIES[argument]
    assert tried.other is not None
    base, found = (bench.outcome(function, each, alike=False) for each in ({}, {argument: tried.other}))
    if not _same(found, base):
        return f"what it holds matters: {found}"
    return _is_refused(function, argument, bench, {argument: tried.spoilt})


def _wrong_where_taken(function: str, argument: str, bench: Bench) -> str:
    """Another value gives something else, or is written to; or a bad one is refused.

    One that counts with another argument only is refused without it.
    """
    tried, beside = TRIES[argument], _beside(function, argument)
    if beside and tried.other is not None:
        alone = _is_refused(function, argument, bench, {argument: tried.other})
        if alone:
            return f"without {list(beside)} {alone}"
    if tried.other is not None and not ("combine" in function and argument in UNSAFE):
        base = bench.outcome(function, beside)
        if isinstance(base, ArgumentError):
            return f"a plain call is refused: {base}"
        found = bench.outcome(function, {**beside, argument: tried.other})
        if bench.has_written() or not (isinstance(found, ArgumentError) or _same(found, base)):
            return ""
    beside_bad = tried.beside_bad if tried.beside_bad.keys() <= TABLE[function].rows.keys() else {}
    return _is_refused(function, argument, bench, {**beside, **beside_bad, argument: tried.bad})


_WRONG: dict[Standing, Callable[[str, str, Bench], str]] = {
    "ignored": _wrong_where_ignored,
    "refused": _wrong_where_refused,
    "checked": _wrong_where_checked,
    "taken": _wrong_where_taken,
}


def _same(found: Outcome, base: Outcome) -> bool:
    if isinstance(found, ArgumentError) or isinstance(base, ArgumentError) or len(found) != len(base):
        return False
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(found, base, strict=True)
    )


def walk(rank: int, num_ranks: int, scheme: Scheme) -> list[str]:
    """What the table says otherwise than calls with a scheme."""
    with benches(scheme, rank, num_ranks) as bench:
        return [
            text
            for name, function in TABLE.items()
            if scheme in function.schemes
            for text in wrong_of(name, function, scheme, bench)
        ]
