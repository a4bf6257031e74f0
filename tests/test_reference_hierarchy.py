"""The model of combine by way of servers: examples by hand, a plain loop, and what dispatch delivers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton import reference
from moe_triton.core.config import Config
from moe_triton.reference.arithmetic import through_blocks
from moe_triton.reference.buffer import OWN_SUMS
from moe_triton.reference.hierarchy import servers_of, tables
from moe_triton.schemes import SCHEMES, scheme_type
from moe_triton.tools.selftest.cases import Case, Inputs, experts_of, inputs_of

HIDDEN = 32
# Two servers of two ranks, one expert each: experts 0 and 1 on server 0, 2 and 3 on server 1.
FOUR = Config(4, 4, HIDDEN, 4, 4, product="A2", scheme="hierarchy", relaxed=True, ranks_per_server=2)


def row(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of one value each."""
    return torch.tensor(values)[:, None].expand(len(values), HIDDEN).to(dtype)


def summed(
    answers: dict[int, float],
    ids: list[int],
    weights: list[float] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    comm_quant_mode: int = 0,
) -> float:
    """Rank 0's only token, where expert e answers with a row of ``answers[e]``; other ranks have none."""
    topk_idx = [torch.tensor([ids], dtype=torch.int32)] + [torch.empty(0, len(ids), dtype=torch.int32)] * 3
    given = [torch.tensor([weights or [1.0] * len(ids)])] + [torch.empty(0, len(ids))] * 3
    x = [torch.zeros(len(i), HIDDEN, dtype=dtype) for i in topk_idx]
    received = reference.dispatch(FOUR, x, topk_idx, given)
    y = [row(*[answers.get(rank, 0.0)] * len(own.tokens), dtype=dtype) for rank, own in enumerate(received)]
    sums = reference.combine(FOUR, y, received, topk_idx, given, comm_quant_mode=comm_quant_mode)
    assert (sums[0] == sums[0][:, :1]).all()
    return sums[0][0, 0].item()


def test_the_sum_of_a_server_is_rounded_before_servers_are_added() -> None:
    # 256 + 1 is no bf16 number: the neighbour is 256. Without the rounding the sum would be 258.
    assert summed({0: 256.0, 1: 1.0, 2: 1.0}, [0, 1, 2]) == 256.0
    assert summed({0: 256.0, 1: 1.0, 2: 1.0}, [0, 2, -1]) == 256.0  # 257, a tie, to the even one
    assert summed({0: 256.0, 1: 2.0, 2: 2.0}, [0, 1, 2]) == 260.0


def test_the_own_servers_sum_is_rounded_like_the_others() -> None:
    # Server 0 is the token's own, server 1 is not: the same numbers the other way round give the same.
    assert summed({2: 256.0, 3: 1.0, 0: 1.0}, [2, 3, 0]) == summed({0: 256.0, 1: 1.0, 2: 1.0}, [0, 1, 2])


def test_experts_ascend_inside_a_server_whatever_k_they_have() -> None:
    large = 2.0**25  # 2^25 + 1 is 2^25 in fp32
    answers = {0: 1.0, 1: large, 2: 0.0, 3: -large}
    for ids in ([0, 1, 3, 2], [3, 1, 0, 2], [1, 3, 2, 0]):
        assert summed(answers, ids) == 0.0
    # Inside server 1: 1 comes after the large ones have gone, or before.
    few = replace(FOUR, num_experts=8)
    assert few.num_local_experts == 2
    for first, last, expected in ((1.0, -large, 0.0), (-large, 1.0, 1.0)):
        ids = [torch.tensor([[6, 5, 4]], dtype=torch.int32)] + [torch.empty(0, 3, dtype=torch.int32)] * 3
        weights = [torch.ones(1, 3)] + [torch.empty(0, 3)] * 3
        received = reference.dispatch(few, [torch.zeros(len(i), HIDDEN) for i in ids], ids, weights)
        of_expert = {4: large, 5: first, 6: last}
        y = [row(), row(), row(of_expert[4], of_expert[5]), row(of_expert[6])]
        assert reference.combine(few, y, received, ids, weights)[0][0, 0].item() == expected


def test_weights_multiply_inside_the_server() -> None:
    assert summed({0: 2.0, 1: 3.0, 2: 5.0, 3: 7.0}, [3, 0, 2, 1], [0.5, 1.0, 2.0, 4.0]) == 27.5


def test_entries_without_an_expert_add_nothing_whatever_their_weight() -> None:
    assert summed({0: 4.0}, [-1, 0], [float("nan"), 2.0]) == 8.0
    assert summed({}, [-1, -1]) == 0.0


def test_servers_sums_travel_as_int8_in_blocks_of_the_dtype() -> None:
    rows = torch.zeros(1, HIDDEN)
    rows[0, :2], rows[0, 8] = torch.tensor([127.0, 3.5]), 1.0
    eight, sixteen = through_blocks(rows.bfloat16(), 8)[0], through_blocks(rows.half(), 16)[0]
    assert eight[:2].tolist() == sixteen[:2].tolist() == [127.0, 4.0]  # ties go to the even code
    assert sixteen[8] == 1.0  # of the first block
    assert eight[8] == through_blocks(rows[:, 8:].bfloat16(), 8)[0, 0]  # a block of its own
    # 254 and 1.5 on server 0 sum to 256 in bf16, as int8 127 * bf16(256/127) = 256; zeros stay zeros.
    assert summed({0: 254.0, 1: 1.5, 2: 0.0}, [0, 1, 2], comm_quant_mode=2) == 256.0
    assert summed({0: 0.0, 2: 0.0}, [0, 2], comm_quant_mode=2, dtype=torch.float16) == 0.0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Groups of equal servers."""
    servers, cards = draw(st.sampled_from([(2, 1), (2, 2), (4, 2), (2, 4), (3, 2), (4, 1)]))
    ranks = servers * cards
    experts = ranks * draw(st.integers(1, 3))
    config = Config(
        ranks,
        draw(st.integers(1, 6)),
        HIDDEN,
        draw(st.integers(1, min(experts, 8))),
        experts,
        product="A2",
        scheme="hierarchy",
        relaxed=True,
        ranks_per_server=cards,
    )
    return Case(
        config,
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from(["uniform", "skewed", "one expert set", "sparse", "none"])),
        tuple(draw(st.integers(0, config.num_max_tokens_per_rank)) for _ in range(ranks)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
    )


def everyone(case: Case) -> list[Inputs]:
    return [inputs_of(case, rank, 0) for rank in range(case.config.num_ranks)]


def dispatched(case: Case, given: list[Inputs]) -> list[reference.Received]:
    x, ids, weights = zip(*((i.x, i.topk_idx, i.topk_weights) for i in given), strict=True)
    return reference.dispatch(case.config, x, ids, weights)


def looped(
    c: Config, ids: list[int], weights: list[np.float32], results: dict[int, torch.Tensor], mode: int
) -> torch.Tensor:
    """One token's sum, a sentence of the rule at a time; ``results`` by expert."""
    dtype = next(iter(results.values())).dtype
    total = np.zeros(HIDDEN, dtype=np.float32)
    weight_of = dict(zip(ids, weights, strict=True))
    per_server = c.num_experts // c.topology.num_servers
    for server in range(c.topology.num_servers):
        here = sorted(e for e in results if e // per_server == server)
        if not here:
            continue
        partial = np.zeros(HIDDEN, dtype=np.float32)
        for expert in here:
            partial = partial + results[expert].float().numpy() * weight_of[expert]
        sent = torch.from_numpy(partial).to(dtype)
        if mode == 2:
            sent = through_blocks(sent[None], 8 if dtype == torch.bfloat16 else 16)[0]
        total = total + sent.float().numpy()
    return torch.from_numpy(total).to(dtype)


@given(cases(), st.sampled_from([0, 2]))
def test_combine_is_what_a_plain_loop_says(case: Case, mode: int) -> None:
    c, given_ = case.config, everyone(case)
    received = dispatched(case, given_)
    y = [experts_of(case, rank, own.tokens) for rank, own in enumerate(received)]
    ids, weights = [i.topk_idx for i in given_], [i.topk_weights for i in given_]
    sums = reference.combine(c, y, received, ids, weights, comm_quant_mode=mode)
    answers = {
        (source, token, int(ids[source][token, k])): y[rank][at]
        for rank, own in enumerate(received)
        for at, (source, token, k) in enumerate(own.origins.tolist())
    }
    for rank, of_rank in enumerate(ids):
        for token, chosen in enumerate(of_rank.tolist()):
            results = {e: answers[rank, token, e] for e in chosen if e >= 0}
            if not results:
                assert not sums[rank][token].any()
                continue
            expected = looped(c, chosen, list(weights[rank][token].numpy()), results, mode)
            assert torch.equal(sums[rank][token], expected)


@given(cases())
def test_the_order_of_experts_in_a_row_does_not_matter(case: Case) -> None:
    turned = [Inputs(i.x, i.topk_idx.flip(1), i.topk_weights.flip(1)) for i in everyone(case)]
    bits = []
    for given_ in (everyone(case), turned):
        received = dispatched(case, given_)
        y = [experts_of(case, rank, own.tokens) for rank, own in enumerate(received)]
        ids, weights = [i.topk_idx for i in given_], [i.topk_weights for i in given_]
        bits.append(torch.cat(reference.combine(case.config, y, received, ids, weights)))
    assert torch.equal(*bits)


def test_every_scheme_that_sums_otherwise_has_its_sums_specified() -> None:
    configs = [replace(FOUR, product=product, scheme=name) for product, of in SCHEMES.items() for name in of]
    assert set(OWN_SUMS) == {c.scheme for c in configs if not scheme_type(c).sums_alike}


@given(cases())
def test_tables_lead_from_a_token_to_its_rows_and_back(case: Case) -> None:
    c, given_ = case.config, everyone(case)
    received = dispatched(case, given_)
    kept = tables(c, [i.topk_idx for i in given_], [i.topk_weights for i in given_])
    experts_per_server = c.num_experts // c.topology.num_servers
    for rank, own in enumerate(kept):
        ids = given_[rank].topk_idx
        assert own.outer_ids.ge(0).equal(servers_of(c, ids))
        found = 0
        for server, relay in enumerate(c.topology.rail(rank)):
            relayed = kept[relay].inner[c.topology.servers[rank]]
            goes = own.outer_ids[:, server] >= 0
            assert own.outer_ids[goes, server].eq(server).all()
            assert own.sent_to[server] == kept[relay].received_from[c.topology.servers[rank]] == goes.sum()
            # A token's row at its relay is the one that the outer table names.
            assert relayed.tokens.tolist() == goes.nonzero().flatten().tolist()
            assert own.outer_rows[goes, server].tolist() == list(range(int(goes.sum())))
            for row_, token in enumerate(relayed.tokens.tolist()):
                experts = [e for e in relayed.inner_ids[row_].tolist() if e >= 0]
                assert experts == sorted(experts)
                for k, expert in enumerate(experts):
                    id_ = server * experts_per_server + expert
                    holder = c.rank_of_expert(id_)
                    entry = id_ % c.num_local_experts * c.num_ranks + rank
                    offsets = received[holder].recv_offsets
                    begin = int(offsets[entry - 1]) if entry else 0
                    at = begin + int(relayed.inner_positions[row_, k])
                    assert at < offsets[entry]
                    source, origin_token, origin_k = received[holder].origins[at].tolist()
                    assert (source, origin_token, int(ids[token, origin_k])) == (rank, token, id_)
                    assert relayed.inner_weights[row_, k] == given_[rank].topk_weights[token, origin_k]
                    found += 1
        assert found == int((ids >= 0).sum())


def test_tables_by_hand() -> None:
    ids = [[[0, 3], [1, 0]], [[2, -1], [-1, -1]], [[3, 2], [2, 3]], [[0, 1], [3, 2]]]
    topk_idx = [torch.tensor(of_rank, dtype=torch.int32) for of_rank in ids]
    weights = [torch.tensor([[10.0, 20.0], [30.0, 40.0]]) + rank for rank in range(4)]
    kept = tables(FOUR, topk_idx, weights)
    assert kept[0].outer_ids.tolist() == [[0, 1], [0, -1]]
    assert kept[0].outer_rows.tolist() == [[0, 0], [1, 1]]
    assert kept[1].outer_ids.tolist() == [[-1, 1], [-1, -1]]
    assert kept[3].outer_ids.tolist() == [[0, -1], [-1, 1]]
    own, other = kept[0].inner
    assert own.tokens.tolist() == [0, 1]
    assert own.inner_ids.tolist() == [[0, -1], [0, 1]]
    assert own.inner_positions[0, 0] == 0
    assert own.inner_positions[1].tolist() == [1, 0]
    assert own.inner_weights[1].tolist() == [40.0, 30.0]
    assert other.tokens.tolist() == []
    assert kept[2].inner[1].inner_ids.tolist() == [[0, 1], [0, 1]]
    assert kept[2].inner[1].inner_positions.tolist() == [[0, 0], [1, 1]]
    assert kept[2].inner[0].inner_ids.tolist() == [[1, -1]]


@pytest.mark.parametrize(("servers", "limit"), [(8, 4), (8, 8)])
def test_a_token_goes_to_as_many_servers_as_it_has_experts_on(servers: int, limit: int) -> None:
    c = Config(64, 16, HIDDEN, 8, 256, product="A2", scheme="hierarchy")
    generator = torch.Generator().manual_seed(servers + limit)
    groups = torch.rand(16, servers, generator=generator).topk(limit, dim=1).indices
    inside = torch.rand(16, limit, 32, generator=generator).topk(8 // limit, dim=2).indices
    ids = (groups[:, :, None] * 32 + inside).flatten(1).int()
    assert servers_of(c, ids).sum(1).tolist() == [limit] * 16
