"""What is posted to queues is counted exactly: rows by the routing, all else by a formula of its own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_triton import EPBuffer
from moe_triton.backends.cpu.nic import NicSettings, emulated_nic
from moe_triton.core.traffic import ByReach, Traffic
from moe_triton.processes import RankGroup
from tests.distributed.cases import Case, experts_of, inputs_of, small_case
from tests.distributed.workers import make_buffer, one_round

Groups = Callable[[int], RankGroup]
Pair = tuple[Traffic | None, Traffic | None]
"""Of a dispatch and its combine."""

ROUNDS = 4  # Native code takes over from the third one on.
WAYS = ("whole", "in halves", "after a barrier")
# Bytes, as docs/protocol.md has them: flags and entries; the scale and the stamp of a row; what headers and
# slots are aligned to.
UNIT, ALIGN = 32, 512


def case_of(scheme: str, servers: tuple[int, ...], **changes: Any) -> Case:
    """A small case of a group of these servers."""
    case = small_case(sum(servers), scheme, rounds=ROUNDS, **changes)
    return replace(case, config=replace(case.config, ranks_per_server=servers))


# On real ranks.


def one_pair(buffer: EPBuffer, case: Case, number: int, way: str) -> Pair:
    """What a round counts, and that whoever is asked says the same."""
    inputs = inputs_of(case, buffer.rank, number)
    halves = way == "in halves"
    if way == "after a barrier":
        buffer._communicator.barrier()
    begun: Any = buffer.dispatch(
        inputs.x, inputs.topk_idx, inputs.topk_weights, quantize=case.quantize, wait=not halves
    )
    output = begun.wait() if halves else begun
    sent = buffer.traffic("dispatch")
    y = experts_of(case, buffer.rank, output.tokens)
    if way == "after a barrier":
        buffer._communicator.barrier()
    ending: Any = buffer.combine(y, output.handle, inputs.topk_weights, wait=not halves)
    returned = buffer.traffic("combine")
    assert buffer.durations_us("combine").traffic == returned
    if halves:
        ending.wait()
        assert buffer.traffic("combine") == returned, "the second half posts nothing"
    assert output.handle.traffic == sent == buffer.traffic("dispatch"), "a combine is no dispatch"
    buffer._communicator.barrier()
    assert buffer.traffic("combine") == returned, "a barrier is no combine"
    return sent, returned


def counted(rank: int, num_ranks: int, case: Case, keeps_order: bool, path: str = "") -> list[list[Pair]]:
    """By way and round."""
    with emulated_nic(NicSettings(keeps_order=keeps_order)):
        found = []
        for way in WAYS:
            options = {"trace": f"{path}-{way}.json"} if path else {}
            with make_buffer(case, **options) as buffer:
                found.append([one_pair(buffer, case, number, way) for number in range(case.rounds)])
        return found


# By arithmetic.


def rows_of(case: Case, number: int) -> torch.Tensor:
    """(EP, M) rows from each rank for each expert."""
    counts = []
    for rank in range(case.config.num_ranks):
        ids = inputs_of(case, rank, number).topk_idx
        counts.append(torch.bincount(ids[ids >= 0].flatten(), minlength=case.config.num_experts))
    return torch.stack(counts)


def up(number: int, unit: int) -> int:
    """The next multiple."""
    return -(-number // unit) * unit


def peers_of(case: Case, rank: int) -> Iterator[tuple[int, int]]:
    """Other ranks, each with its place in `ByReach`."""
    servers = case.config.topology.servers
    for peer in range(case.config.num_ranks):
        if peer != rank:
            yield peer, int(servers[peer] == servers[rank])


def of_blocks(case: Case, number: int, rank: int, keeps_order: bool) -> Pair:
    """One block for each peer, in-server ones too; FLAG2 by itself where messages keep no order."""
    hidden, experts = case.config.hidden, case.config.num_local_experts
    header = up(4 * up(experts + 2, 8), ALIGN)
    row = hidden * (1 if case.quantize else 2)
    more = 2 * UNIT if case.quantize else UNIT  # its stamp, and its scale
    to = rows_of(case, number).view(case.config.num_ranks, case.config.num_ranks, experts).sum(2)

    def expected(rows: torch.Tensor, row: int, more: int) -> Traffic:
        posts, payload, framing = [0, 0], [0, 0], [0, 0]
        for peer, inside in peers_of(case, rank):
            posts[inside] += 1 if keeps_order else 2
            payload[inside] += int(rows[peer]) * row
            framing[inside] += header + int(rows[peer]) * more + UNIT
        return Traffic(ByReach(*posts), ByReach(*payload), ByReach(*framing))

    return expected(to[rank], row, more), expected(to[:, rank], 2 * hidden, 0)


def of_rows(case: Case, number: int, rank: int) -> Pair:
    """A message of the rows for each expert that has any, and one of entries; in combine two for each row.

    Ranks of the own server are written to.
    """
    hidden, experts = case.config.hidden, case.config.num_local_experts
    row = hidden * (1 if case.quantize else 2)
    slot = up(2 * hidden, UNIT) + 2 * UNIT  # stamps have one place, whatever the rows are
    stride = up(slot, ALIGN)
    counts = rows_of(case, number).view(case.config.num_ranks, case.config.num_ranks, experts)
    posts, payload, framing, back = 0, 0, 0, 0
    for peer, inside in peers_of(case, rank):
        if not inside:
            messages = [count for count in counts[rank, peer].tolist() if count]
            posts += len(messages) + 1
            payload += sum(messages) * row
            framing += sum((count - 1) * stride + slot - count * row for count in messages) + experts * UNIT
            back += int(counts[peer, rank].sum())
    sent = Traffic(ByReach(posts, 0), ByReach(payload, 0), ByReach(framing, 0))
    return sent, Traffic(ByReach(2 * back, 0), ByReach(2 * hidden * back, 0), ByReach(UNIT * back, 0))


CASES = {
    "plain": case_of("fullmesh", (3, 1)),
    "int8, some ids -1": case_of("fullmesh", (2, 2), quantize="int8", routing="sparse"),
    "variable BS": case_of("fullmesh", (2, 2), tokens=(4, 0, 1, 3)),
    "nothing": case_of("fullmesh", (1, 1, 2), routing="none"),
}


@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_traffic_of_blocks(ranks: Groups, case: Case, keeps_order: bool) -> None:
    for rank, ways in enumerate(ranks(4).run(counted, case, keeps_order)):
        for way, rounds in zip(WAYS, ways, strict=True):
            for number, found in enumerate(rounds):
                assert found == of_blocks(case, number, rank, keeps_order), (rank, way, number)
                posts = [sum(traffic.posts) for traffic in found if traffic]
                assert posts == [3 if keeps_order else 6] * 2  # EP - 1, or twice that


@pytest.mark.parametrize("changes", [{}, {"quantize": "int8", "routing": "skewed"}], ids=str)
def test_traffic_of_rows(ranks: Groups, changes: dict[str, Any]) -> None:
    case = case_of("fullmesh_v1", (2, 2), **changes)
    for rank, ways in enumerate(ranks(4).run(counted, case, True)):
        for way, rounds in zip(WAYS, ways, strict=True):
            for number, found in enumerate(rounds):
                assert found == of_rows(case, number, rank), (rank, way, number)


def test_a_trace_has_each_call_s_traffic(ranks: Groups, tmp_path: Path) -> None:
    case = case_of("fullmesh", (3, 1))
    ranks(4).run(counted, case, True, str(tmp_path / "trace"))
    events = json.loads((tmp_path / "trace-whole.json").read_text())["traceEvents"]
    for rank in range(4):
        for number in range(ROUNDS):
            for operator, traffic in zip(
                ("dispatch", "combine"), of_blocks(case, number, rank, keeps_order=True), strict=True
            ):
                assert traffic is not None
                name = f"{operator} #{number}"
                (call,) = [e for e in events if e.get("name") == name and e["pid"] == rank]
                for what, numbers in traffic._asdict().items():
                    for where, count in numbers._asdict().items():
                        assert call["args"][f"{what} {where}"] == count, (rank, name, what, where)


# Of calls in rounds: what the same rounds by hand post, and what is said ahead of them.

TOKENS_OF_RANKS, TOKENS_OF_ROUND = (9, 4, 0, 6), 4
PROMISED = {"num_max_tokens_per_rank": 9}
HEADER_WORDS = 8


def added(*parts: Traffic | None) -> Traffic:
    """All of them."""
    sums = [torch.tensor(part).tolist() for part in parts if part is not None]
    return Traffic(*(ByReach(*pair) for pair in torch.tensor(sums).sum(0).tolist()))


def said_ahead(case: Case, rank: int, rings: bool) -> Traffic:
    """Header, counts and entry to each queued rank, and a bell where they need not expect the call."""
    posts, framing = [0, 0], [0, 0]
    for _, inside in peers_of(case, rank):
        if inside and case.config.scheme != "fullmesh":  # which posts to all
            continue
        posts[inside] += 2 + rings
        framing[inside] += up(4 * (HEADER_WORDS + case.config.num_experts), UNIT) + UNIT * (1 + rings)
    return Traffic(ByReach(*posts), ByReach(0, 0), ByReach(*framing))


def in_rounds(
    rank: int, num_ranks: int, case: Case, do_expand: bool, options: list[dict[str, Any]]
) -> list[tuple[Pair, Pair]]:
    """What calls in rounds post, each with options of its own, and what its rounds do by hand."""
    own, found = inputs_of(case, rank, 0), []
    with make_buffer(case) as buffer:

        def pair(first: int, last: int | None, **given: Any) -> Pair:
            parts = (tensor[first:last] for tensor in (own.x, own.topk_idx, own.topk_weights))
            output = buffer.dispatch(*parts, quantize=case.quantize, do_expand=do_expand, **given)
            y = experts_of(case, rank, output.tokens)
            weights = own.topk_weights[first:last] if do_expand else None
            buffer.combine(y, output.handle, weights)
            assert output.handle.traffic == buffer.traffic("dispatch")
            return output.handle.traffic, buffer.traffic("combine")

        for given in options:
            most = max(case.tokens)
            by_hand = [pair(n, n + TOKENS_OF_ROUND) for n in range(0, most, TOKENS_OF_ROUND)]
            dispatches, combines = zip(*by_hand, strict=True)
            found.append((pair(0, None, **given), (added(*dispatches), added(*combines))))
    return found


@pytest.mark.parametrize(
    ("scheme", "do_expand"),
    [*itertools.product(("fullmesh_v1", "fullmesh"), (True, False)), ("hierarchy", True)],
)
def test_traffic_of_rounds(ranks: Groups, scheme: str, do_expand: bool) -> None:
    case = case_of(scheme, (2, 2), tokens=TOKENS_OF_RANKS)
    case = replace(case, config=replace(case.config, num_max_tokens_per_rank=TOKENS_OF_ROUND))
    options: list[dict[str, Any]] = [{}, PROMISED, {}]
    for rank, calls in enumerate(ranks(4).run(in_rounds, case, do_expand, options)):
        for given, (found, by_hand) in zip(options, calls, strict=True):
            rings = not given and TOKENS_OF_RANKS[rank] > TOKENS_OF_ROUND
            expected = added(by_hand[0], said_ahead(case, rank, rings)), by_hand[1]
            assert found == expected, (rank, given)


def test_traffic_of_one_round_with_places(ranks: Groups) -> None:
    case = case_of("fullmesh_v1", (2, 2))
    options = [{"num_recv_tokens": "exact"}] * ROUNDS
    for rank, calls in enumerate(ranks(4).run(in_rounds, case, True, options)):
        for found, by_hand in calls:
            assert found == (added(by_hand[0], said_ahead(case, rank, rings=False)), by_hand[1])


def test_a_group_inside_one_server_posts_nothing(ranks: Groups) -> None:
    for scheme in ("fullmesh_v1", "fullmesh"):
        assert ranks(2).run(posts_nothing, scheme) == [(None, None, None)] * 2


def posts_nothing(rank: int, num_ranks: int, scheme: str) -> tuple[Traffic | None, ...]:
    """What the handle and the buffer say."""
    case = small_case(num_ranks, scheme)
    with make_buffer(case) as buffer:
        output, _ = one_round(buffer, case, inputs_of(case, rank, 0), None)
        return output.handle.traffic, buffer.traffic("dispatch"), buffer.traffic("combine")


def test_the_published_arithmetic() -> None:
    """The example: 16 tokens of 7168 in fp16 to 8 experts on 64 cards, 8 of a server; MiB."""
    token = 16 * 7168 * 2 / 2**20
    assert token * 8 * 63 / 64 == pytest.approx(1.7227, abs=1e-4)  # fullmesh: to all other cards
    assert token * 4 * 7 / 8 == pytest.approx(0.7656, abs=1e-4)  # hierarchy: to 4 of 8 servers
    assert token * 8 * 7 / 8 == pytest.approx(1.53125, abs=1e-5)  # and on to the other cards there
