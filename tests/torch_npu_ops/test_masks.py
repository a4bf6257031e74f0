"""Masks of a group by its name: every function goes on without masked ranks; what cannot be is refused."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, BufferStateError, ConfigMismatchError
from moe_triton import torch_npu_ops as ops
from moe_triton.core.config import Product
from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from moe_triton.rendezvous.meeting import shared_store_of
from moe_triton.runtime import communicator
from moe_triton.torch_npu_ops import registry
from moe_triton.torch_npu_ops.tallies import Tallies
from tests.distributed.failures import not_refused
from tests.distributed.test_whole_calls import pythons_runs
from tests.headers import HAS_HEADERS
from tests.patience import seconds
from tests.torch_npu_ops.setting import HIDDEN, LOCAL_EXPERTS, TOKENS, Round, experts_of, make_round
from tests.torch_npu_ops.test_group import table

Groups = Callable[[int], RankGroup]
RANKS, CARDS = 4, 2
ACTIVE = TOKENS - 1  # tokens that a mask leaves


@contextmanager
def settings(product: Product = "A3", ranks_per_server: int | None = None) -> Iterator[str]:
    """Settings for small sizes, and the group's name. Nobody gives windows back while others go on."""
    ops.configure(product=product, relaxed=True, timeout_s=seconds(20.0), ranks_per_server=ranks_per_server)
    try:
        yield ops.group_name()
        dist.barrier()
    finally:
        ops.release(ops.group_name())
        ops.configure()


class Layer:
    """Dispatch and combine of one rank, by the functions of one kind.

    Args:
        kind: of them.
        r: the rank's inputs.
    """

    def __init__(self, kind: str, r: Round) -> None:
        self.kind, self.r = kind, r
        self.common: dict[str, Any] = {"global_bs": TOKENS * r.group[1]}
        if kind == "V1":
            self.dispatch_function = ops.npu_moe_distribute_dispatch
            self.combine_function = ops.npu_moe_distribute_combine
        else:
            self.dispatch_function = ops.npu_moe_distribute_dispatch_v2
            self.combine_function = ops.npu_moe_distribute_combine_v2
        if kind == "active":
            self.common["x_active_mask"] = torch.arange(TOKENS) < ACTIVE
        if kind in ("fullmesh_v2", "hierarchy"):
            self.common["comm_alg"] = kind
        if kind == "waited":
            self.common["performance_info"] = torch.zeros(r.group[1], dtype=torch.int64)
        self.quant_mode = 2 * (kind == "int8")

    def dispatch(self, ids: torch.Tensor, tokens: int = TOKENS) -> Any:
        """What a dispatch returns; of halves the number for each entry behind it."""
        r, x = self.r, self.r.x[:tokens]
        if self.kind == "halves":
            y, expand_idx, ticket = ops.npu_moe_distribute_dispatch_setup(x, ids, *r.group, **self.common)
            if not ops.query_mask(r.group[0]).any():
                with pytest.raises(BufferStateError, match=r"dispatch of .* set up .* dispatch_teardown"):
                    ops.update_mask(r.group[0], (r.group[2] + 1) % r.group[1], True)
            out = ops.npu_moe_distribute_dispatch_teardown(x, y, ids, ticket, *r.group, **self.common)
            return *out, expand_idx
        weights = {"expert_scales": r.weights[:tokens]} if self.kind == "hierarchy" else {}
        return self.dispatch_function(x, ids, *r.group, quant_mode=self.quant_mode, **weights, **self.common)

    def combine(self, ids: torch.Tensor, out: Any) -> torch.Tensor:
        """The sums."""
        r, weights = self.r, self.r.weights[: len(ids)]
        rows = experts_of(out[0], out[1] if self.quant_mode else None)
        if self.kind == "halves":
            quant, ticket = ops.npu_moe_distribute_combine_setup(rows, ids, out[2], *r.group, **self.common)
            at = rows, quant, ids, out[-1], weights, ticket
            return ops.npu_moe_distribute_combine_teardown(*at, *r.group, **self.common)
        found = rows, ids, out[2], out[4], weights
        if self.kind == "norm":
            more = r.x[: len(ids), None], torch.ones(HIDDEN).bfloat16()
            normed = ops.npu_moe_distribute_combine_add_rms_norm(*found, *more, *r.group, **self.common)
            return torch.cat([each.flatten(1).float() for each in normed], 1)
        return self.combine_function(*found, *r.group, **self.common)

    def both(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """What a rank gets of both: rows, where they are from, how many, and sums."""
        out = self.dispatch(ids)
        total = int(out[3].sum())
        entries = LOCAL_EXPERTS * self.r.group[1]
        got = [out[0][:total].clone(), out[3].clone(), out[4][:entries].clone()]
        if self.quant_mode:  # of A3, where the third output has a row's source, token and k
            got += [out[1][:total].clone(), out[2][: 3 * total].clone()]
        return [*got, self.combine(ids, out)]


def lost_of(kind: str, r: Round, gone: tuple[int, ...]) -> torch.Tensor:
    """(BS, K) which entries reach nobody: what a hierarchy's rank passes on is lost with it."""
    rank, to = r.group[2], r.ids // LOCAL_EXPERTS
    relay = to // CARDS * CARDS + rank % CARDS if kind == "hierarchy" else to
    return torch.isin(to, torch.tensor(gone)) | torch.isin(relay, torch.tensor(gone))


def rounds(
    rank: int, num_ranks: int, product: Product, kinds: tuple[str, ...], gone: tuple[int, ...]
) -> list[str]:
    """What differs where ranks are masked from rounds in which they send nothing, nobody sends to them."""
    servers = CARDS if "hierarchy" in kinds else None
    r, wrong = make_round(rank, num_ranks), []
    layers = {kind: Layer(kind, r) for kind in kinds}
    lost = {kind: lost_of(kind, r, gone) for kind in kinds}
    with settings(product, servers) as name:
        expected = {}
        for kind, layer in layers.items():
            nowhere = lost[kind] | (rank in gone)
            for _ in range(3):  # both zones, and where there is one a native call
                expected[kind] = layer.both(torch.where(nowhere, -1, r.ids))
        begun = {kind: layer.dispatch(r.ids) for kind, layer in layers.items()}
        if rank in gone:
            return wrong
        for each in gone:
            ops.update_mask(name, each, True)
        assert ops.query_mask(name).tolist() == [int(each in gone) for each in range(num_ranks)]
        for kind, layer in layers.items():
            if not torch.equal(layer.combine(r.ids, begun[kind]), expected[kind][-1]):
                wrong.append(f"{kind}, masked before its combine")
        for kind, layer in layers.items():
            for number in range(3):
                same = map(torch.equal, layer.both(r.ids), expected[kind])
                wrong += [f"{kind}, round {number}: {i}" for i, is_same in enumerate(same) if not is_same]
            # A plan that is made now.
            tokens = ACTIVE if kind == "active" else TOKENS - 1
            if kind not in ("active", "waited"):
                ids = r.ids[:tokens]
                if not torch.equal(
                    layer.combine(ids, layer.dispatch(ids, tokens)), expected[kind][-1][:tokens]
                ):
                    wrong.append(f"{kind}, of another shape")
            if kind != "V1" and len({kind in ("hierarchy",) for kind in kinds}) == 1:
                active = layer.common.get("x_active_mask")
                missing = lost[kind] if active is None else lost[kind] & active[:, None]
                if not torch.equal(ops.lost(name, r.ids, active), missing):
                    wrong.append(f"{kind}: lost")
        # It has no window of its own, and takes another's.
        ops._npu_distribute_barrier(torch.ones(1), name, num_ranks)
    return wrong


@pytest.mark.parametrize(
    ("product", "kinds", "gone"),
    [
        ("A3", ("V1", "V2", "int8", "active", "norm", "waited", "halves", "fullmesh_v2"), (2,)),
        ("A3", ("V2", "norm"), (0, 1, 3)),
        ("A2", ("V1", "V2"), (1,)),
        ("A2", ("hierarchy",), (2,)),
    ],
)
def test_every_function_goes_on_without_masked_ranks(
    ranks: Groups, product: Product, kinds: tuple[str, ...], gone: tuple[int, ...]
) -> None:
    assert ranks(RANKS).run(rounds, product, kinds, gone) == [[]] * RANKS


def masked_while_waiting(
    rank: int, num_ranks: int, product: Product, kind: str, gone: int, dispatches: bool
) -> list[str]:
    """What differs where a rank is masked in a call that waits for it: its dispatch, or its combine."""
    r, wrong = make_round(rank, num_ranks), []
    layer, lost = Layer(kind, r), lost_of(kind, r, (gone,))
    with settings(product) as name:
        nowhere = lost | (rank == gone)
        for _ in range(3):
            expected = layer.both(torch.where(nowhere, -1, r.ids))
        out = layer.dispatch(r.ids) if dispatches else None
        if rank == gone:
            return wrong

        def mask() -> None:
            while not any(made.is_busy for _, made in registry.windows(name)):
                time.sleep(0.001)
            time.sleep(0.05)  # as a rule it waits by then, and masked it is in any case
            while not ops.query_mask(name).any():
                with contextlib.suppress(BufferStateError):  # between setup and teardown
                    ops.update_mask(name, gone, True)

        thread = threading.Thread(target=mask, daemon=True)
        thread.start()
        first = [layer.combine(r.ids, out)] if dispatches else layer.both(r.ids)
        thread.join()
        if not all(map(torch.equal, first, expected[-len(first) :])):
            wrong.append("the call in which it was masked")
        with pytest.raises(BufferStateError, match=r"have missed calls"):
            ops.clean_mask(name)
        for number in range(3):
            same = list(map(torch.equal, layer.both(r.ids), expected))
            wrong += [] if all(same) else [f"round {number} behind it: {same}"]
        if not torch.equal(ops.lost(name, r.ids), lost):
            wrong.append("lost")
    return wrong


@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize(
    ("product", "kind"),
    [*(("A3", kind) for kind in ("V1", "int8", "norm", "waited", "halves", "fullmesh_v2")), ("A2", "V2")],
)
def test_a_wait_goes_on_without_who_is_masked(
    ranks: Groups, product: Product, kind: str, dispatches: bool
) -> None:
    assert ranks(3).run(masked_while_waiting, product, kind, 1, dispatches) == [[]] * 3


def masked_when_dead(rank: int, num_ranks: int) -> list[str]:
    """What differs where rank 2 has died between two rounds, and is masked when that is known."""
    r = make_round(rank, num_ranks)
    layer, gone = Layer("V2", r), r.ids >= 2 * LOCAL_EXPERTS
    ops.configure(relaxed=True, timeout_s=seconds(20.0))
    for _ in range(3):
        expected = layer.both(torch.where(gone | (rank == 2), -1, r.ids))
    layer.both(r.ids)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    name = r.group[0]
    while all(made.is_usable for _, made in registry.windows(name)):
        time.sleep(0.001)
    assert not ops.lost(name, r.ids).any()
    ops.update_mask(name, 2, True)
    same = [all(map(torch.equal, layer.both(r.ids), expected)) for _ in range(3)]
    wrong = [] if all(same) else [f"rounds without it: {same}"]
    if not torch.equal(ops.lost(name, r.ids), gone):
        wrong.append("lost")
    ops.release(name)
    return wrong


def test_who_has_died_can_be_masked() -> None:
    results = run_ranks(masked_when_dead, 3, timeout_s=seconds(60.0), allow_failures=True)
    assert isinstance(results.pop(2), RankFailedError)
    assert results == [[]] * 2


def masked_while_made(rank: int, num_ranks: int) -> bool:
    """Whether a window is without a rank that is masked while the window is made with it."""
    r = make_round(rank, num_ranks)
    layer = Layer("V2", r)
    with pytest.MonkeyPatch.context() as patch, settings() as name:
        if rank == 1:
            return ops.npu_moe_distribute_dispatch_v2.plan(r.x, r.ids, *r.group).communicator.is_usable

        def make(*given: Any) -> communicator.Communicator:
            made = communicator.Communicator(*given)
            ops.update_mask(name, 1, True)
            return made

        patch.setattr(registry, "Communicator", make)
        sums = layer.both(r.ids)[-1]
        here = torch.where(r.ids < LOCAL_EXPERTS, r.weights, 0)
        expected = sum(experts_of(r.x).float() * here[:, k : k + 1] for k in range(here.shape[1]))
        return torch.equal(sums, expected.bfloat16()) and torch.equal(ops.lost(name, r.ids), here == 0)


def test_masks_hold_for_a_window_that_is_made_meanwhile(ranks: Groups) -> None:
    assert ranks(2).run(masked_while_made) == [True, True]


def unmasked(rank: int, num_ranks: int) -> tuple[list[str], int]:
    """What differs once a rank takes part again that has missed nothing, and Python's runs then."""
    r = make_round(rank, num_ranks)
    layer, wrong = Layer("V2", r), []
    with settings() as name:
        for _ in range(3):
            expected = layer.both(r.ids)
        other = (rank + 1) % num_ranks
        assert not ops.query_fault(name)[0]
        ops.update_mask(name, other, True)
        ops.update_mask(name, other, True)
        faults = [ops.query_fault(name)[0] for _ in range(2)]
        assert faults == [True, False]
        out = torch.empty(num_ranks, dtype=torch.int32)
        assert ops.query_mask(name, out) is out
        assert out.tolist() == [int(each == other) for each in range(num_ranks)]
        ops.update_mask(name, other, False)
        ops.update_mask(name, other, False)
        ops.update_mask(name, other, True)
        ops.clean_mask(name)
        has_fault, mask = ops.query_fault(name)
        assert has_fault
        assert not mask.any()
        with pythons_runs() as seen:
            for _ in range(3):
                same = list(map(torch.equal, layer.both(r.ids), expected))
                wrong += [] if all(same) else [str(same)]
    return wrong, len(seen)


def test_who_missed_nothing_takes_part_again(ranks: Groups) -> None:
    wrong, runs = zip(*ranks(2).run(unmasked), strict=True)
    assert wrong == ([], [])
    if HAS_HEADERS:
        assert runs == (0, 0)


def refused(rank: int, num_ranks: int) -> list[str]:
    """What is not refused, of a group in which rank 2 is masked; and what goes on."""
    r = make_round(rank, num_ranks)
    name, layer = r.group[0], Layer("V2", r)
    argument = [
        ("name is 'nobody'", lambda: ops.update_mask("nobody", 1, True)),
        ("name is 7", lambda: ops.query_mask(7)),
        ("name is 'nobody'", lambda: ops.clean_mask("nobody")),
        ("name is 'nobody'", lambda: ops.lost("nobody", r.ids)),
        ("name is 'nobody'", lambda: ops.query_fault("nobody")),
        (f"rank is {rank}, but it is this rank itself", lambda: ops.update_mask(name, rank, True)),
        ("rank is 3", lambda: ops.update_mask(name, num_ranks, True)),
        ("rank is -1", lambda: ops.update_mask(name, -1, True)),
        ("rank is", lambda: ops.update_mask(name, "2", True)),
        ("masked is 1", lambda: ops.update_mask(name, (rank + 1) % num_ranks, 1)),
        ("out is of shape", lambda: ops.query_mask(name, torch.zeros(2, dtype=torch.int32))),
        ("out is of dtype", lambda: ops.query_mask(name, torch.zeros(num_ranks))),
    ]
    wrong = []
    with settings():
        wrong += not_refused(argument)
        with pytest.raises(BufferStateError, match="nobody knows which ranks"):
            ops.lost(name, r.ids)
        layer.both(r.ids)
        wide = make_round(rank, num_ranks, num_experts=3 * num_ranks)
        Layer("V2", wide).both(wide.ids)
        assert not ops.query_mask(name).any()
        wrong += not_refused(
            [
                (
                    f"moe_expert_num is None, but calls of the group {name!r} have had [6, 9]",
                    lambda: ops.lost(name, r.ids),
                ),
                ("expert_ids is of dtype", lambda: ops.lost(name, r.weights, moe_expert_num=6)),
                (
                    "x_active_mask is of shape",
                    lambda: ops.lost(name, r.ids, torch.ones(3) > 0, moe_expert_num=6),
                ),
                (
                    "elastic_info is of shape",
                    lambda: ops.lost(name, r.ids, elastic_info=torch.zeros(3).int()),
                ),
                ("elastic_info is a list", lambda: ops.lost(name, r.ids, elastic_info=[0])),
                ("moe_expert_num is 7, but", lambda: ops.lost(name, r.ids, moe_expert_num=7)),
                ("expert_ids is of 1 columns", lambda: ops.lost(name, r.ids[:, :1], moe_expert_num=6)),
            ]
        )
        if rank != 2:
            ops.update_mask(name, 2, True)
            assert torch.equal(ops.lost(name, r.ids, moe_expert_num=6), r.ids >= 4)
            small = make_round(rank, num_ranks, tokens=1)
            left = table(num_ranks, [0, 1])
            with pytest.raises(BufferStateError, match=r"without rank\(s\) \[2\], which are masked"):
                ops.npu_moe_distribute_dispatch_v2(small.x, small.ids, *small.group)
            layer.both(r.ids)
            # A window of those that are left, in which rank 2 has no number; the mask stands beside it.
            ids = torch.tensor([[0, 3]], dtype=torch.int32)
            rows, _, at, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(
                small.x, ids, *small.group, elastic_info=left
            )
            ops.npu_moe_distribute_combine_v2(
                experts_of(rows), ids, at, counts, small.weights, *small.group, elastic_info=left
            )
            assert not ops.lost(name, ids, elastic_info=left).any()
            for undo in (lambda: ops.update_mask(name, 2, False), lambda: ops.clean_mask(name)):
                with pytest.raises(BufferStateError, match=r"rank\(s\) \[2\] have missed calls .* release"):
                    undo()
            assert ops.query_mask(name).tolist() == [0, 0, 1]
            assert ops.query_fault(name)[0]
        dist.barrier()
        # With the windows the masks go, and all ranks meet again.
        ops.release(name)
        assert not ops.query_fault(name)[0]
        assert not ops.query_mask(name).any()
        layer.both(r.ids)
        # Of a shared expert nobody can do without.
        shared = {"shared_expert_num": 1, "shared_expert_rank_num": 1}
        ids = torch.zeros(TOKENS, 1, dtype=torch.int32)
        ops.npu_moe_distribute_dispatch_v2(r.x, ids, name, num_ranks, rank, num_ranks - 1, **shared)
        if rank != 0:
            with pytest.raises(ArgumentError, match=r"rank is 0, .* shared expert.* elastic_info"):
                ops.update_mask(name, 0, True)
            # Nor is it masked in the window before that one, which has none.
            assert not any(made.masks.masked for _, made in registry.windows(name))
            assert not ops.query_mask(name).any()
    return wrong


def test_what_cannot_be_is_refused_at_once(ranks: Groups) -> None:
    assert ranks(3).run(refused) == [[]] * 3


def with_rank_masked_in_elastic_calls(rank: int, num_ranks: int) -> list[bool]:
    """Whether calls with elastic_info go on without one more rank, by its number in the group."""
    r = make_round(rank, num_ranks, num_experts=LOCAL_EXPERTS * 3)
    if rank == 0:
        with settings():
            return []
    info = table(num_ranks, [3, 1, 2])
    group = (*r.group[:3], LOCAL_EXPERTS * num_ranks)
    same = []

    def both(ids: torch.Tensor) -> torch.Tensor:
        rows, _, at, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(r.x, ids, *group, elastic_info=info)
        return ops.npu_moe_distribute_combine_v2(
            experts_of(rows), ids, at, counts, r.weights, *group, elastic_info=info
        )

    with settings() as name:
        # Rank 3 has number 0 there, and so the first experts.
        missing = r.ids < LOCAL_EXPERTS
        expected = both(torch.where(missing | (rank == 3), -1, r.ids))
        if rank != 3:
            ops.update_mask(name, 3, True)
            same = [torch.equal(both(r.ids), expected) for _ in range(3)]
            same.append(torch.equal(ops.lost(name, r.ids, elastic_info=info), missing))
    return same


def test_masks_hold_among_the_ranks_that_are_left(ranks: Groups) -> None:
    assert ranks(RANKS).run(with_rank_masked_in_elastic_calls) == [[], [True] * 4, [True] * 4, []]


def of_pairs(process: int, num_processes: int) -> None:
    """A rank of two expert-parallel groups of two, which are tensor-parallel to each other."""
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][process % 2]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][process // 2]
    name, tp_name = ops.group_name(across), ops.group_name(pair)
    ops.configure(relaxed=True, timeout_s=seconds(20.0))
    try:
        x, ids = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, 1, dtype=torch.int32)
        options = {"group_tp": tp_name, "tp_world_size": 2, "tp_rank_id": process % 2}
        ops.npu_moe_distribute_dispatch_v2(x, ids, name, 2, process // 2, 2, shared_expert_num=0, **options)
        for each, other in ((name, 1 - process // 2), (tp_name, 1 - process % 2)):
            with pytest.raises(ArgumentError, match=r"name is .* tensor-parallel"):
                ops.update_mask(each, other, True)
    finally:
        ops.release(name)
        ops.configure()


def test_ranks_of_tensor_parallel_groups_are_not_masked(ranks: Groups) -> None:
    ranks(4).run(of_pairs)


def beside_a_call_of_the_masked(rank: int, num_ranks: int) -> str:
    """The last rank is in a call that goes elsewhere; the others mask it, and one of them waits."""
    r, store = make_round(rank, num_ranks), shared_store_of(dist.group.WORLD)
    look, own = Tallies._differing, {"global_bs": TOKENS * num_ranks}
    others = {"global_bs": 2 * TOKENS * num_ranks}

    def look_and_say(self: Tallies, *given: Any) -> str:
        found = look(self, *given)
        store.set(f"looked/{rank}", "1")
        return found

    def dispatch(how: dict[str, int]) -> None:
        ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group, **how)

    with pytest.MonkeyPatch.context() as patch, settings() as name:
        patch.setattr(communicator, "patience_s", lambda timeout_s: 0.2)
        for how in (own, others):
            dispatch(how)
        patch.setattr(Tallies, "_differing", look_and_say)
        if rank == 2:
            with pytest.raises(ConfigMismatchError) as caught:
                dispatch(others)
            return str(caught.value)
        store.wait(["looked/2"], timedelta(seconds=seconds(20.0)))
        ops.update_mask(name, 2, True)
        if rank == 1:
            store.wait(["looked/0"], timedelta(seconds=seconds(20.0)))
        dispatch(own)
    return ""


def test_calls_of_masked_ranks_are_their_own(ranks: Groups) -> None:
    *others, masked = ranks(3).run(beside_a_call_of_the_masked)
    assert others == ["", ""]
    assert "ranks made different calls" in masked
